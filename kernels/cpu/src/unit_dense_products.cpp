// Products with rows, latent attention, LoRA and mixtures of experts.

#include "isa.h"

#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "low_rank.h"
