// All kernels for one instruction set. The including file defines WINDLASS_ISA, WINDLASS_LANES and WINDLASS_REGISTERS.

#include "names.h"

namespace {
#include "simd.h"
#include "tiles.h"
#include "linear.h"
#include "byte_products.h"
#include "rounding.h"
#include "quantized.h"
#include "pack.h"
#include "pointwise.h"
#include "sampling.h"
#include "logprobs.h"
#include "rotary.h"
#include "int8_pages.h"
#include "rotary_int8.h"
#include "attention.h"
#include "attention_int8.h"
#include "attention_int8_floats.h"
#include "attention_rows.h"
#include "attention_prefill.h"
#include "attention_prefill_int8_tiles.h"
#include "attention_prefill_int8.h"
#include "attention_prefill_rows.h"
#include "repeat.h"
}  // namespace
