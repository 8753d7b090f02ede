// Rotation of queries and keys, and recorded steps, which advance its angles.

#include "isa.h"

#include "recorded_calls.h"
#include "rotary.h"
#include "rotary_int8.h"
#include "rotary_latent.h"
#include "step_buffers.h"
