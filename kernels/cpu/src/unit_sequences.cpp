// Recurrences, sampling, and collectives of ranks.

#include "isa.h"

#include "collectives.h"
#include "gated_delta_rule.h"
#include "logprobs.h"
#include "sampling.h"
#include "short_convolution.h"
#include "state_space.h"
