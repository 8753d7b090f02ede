// All kernels for one instruction set. The including file defines WINDLASS_ISA, WINDLASS_LANES and WINDLASS_REGISTERS.

#define WINDLASS_JOIN_(name, isa) windlass_##name##_##isa
#define WINDLASS_JOIN(name, isa) WINDLASS_JOIN_(name, isa)
#define WINDLASS_NAME(name) WINDLASS_JOIN(name, WINDLASS_ISA)
#define EXPORT extern "C" __attribute__((visibility("default")))
#define NOINLINE __attribute__((noinline))
#define INLINE_MEMBER inline __attribute__((always_inline))

namespace {
#include "simd.h"
#include "linear.h"
#include "pointwise.h"
#include "rotary.h"
#include "rotary_int8.h"
#include "attention.h"
#include "attention_rows.h"
#include "attention_prefill.h"
}  // namespace
