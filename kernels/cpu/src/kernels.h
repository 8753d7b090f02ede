// All kernels for one instruction set. The including file defines WINDLASS_ISA, WINDLASS_LANES and WINDLASS_REGISTERS, and
// includes the system's headers before it names its instructions.

#pragma once

#include "attention_prefill_rows.h"
#include "attention_rows.h"
#include "block_linear.h"
#include "block_pack.h"
#include "block_repack.h"
#include "block_widen.h"
#include "delta_rule.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "logprobs.h"
#include "low_rank.h"
#include "panels.h"
#include "panels_convert.h"
#include "pointwise.h"
#include "ranks.h"
#include "repeat.h"
#include "rotary.h"
#include "rotary_int8.h"
#include "rotary_rows.h"
#include "sampling.h"
#include "short_convolution.h"
#include "state_space.h"
#include "step_rows.h"
