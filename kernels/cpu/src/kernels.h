// All kernels for one instruction set. The including file defines WINDLASS_ISA, WINDLASS_LANES and WINDLASS_REGISTERS, and
// includes the system's headers before it names its instructions.

#pragma once

#include "attention_decode_entry.h"
#include "attention_prefill_entry.h"
#include "block_dequantize.h"
#include "block_linear.h"
#include "block_quantize.h"
#include "block_repack.h"
#include "collectives.h"
#include "experts.h"
#include "gated_delta_rule.h"
#include "latent.h"
#include "linear.h"
#include "logprobs.h"
#include "low_rank.h"
#include "panels.h"
#include "panels_convert.h"
#include "pointwise.h"
#include "recorded_calls.h"
#include "rotary.h"
#include "rotary_int8.h"
#include "rotary_latent.h"
#include "sampling.h"
#include "short_convolution.h"
#include "state_space.h"
#include "step_buffers.h"
