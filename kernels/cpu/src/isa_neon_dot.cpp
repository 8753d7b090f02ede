// Products with weights in blocks, and decoding over int8 keys and values, for 64-bit ARM with sdot (optional from
// ARMv8.2, so Neoverse N1, Apple M1 and later): the rest is isa_neon.cpp's.

#include "system_headers.h"

#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#define WINDLASS_ISA neon_dot
#define WINDLASS_LANES 4
#define WINDLASS_NEON
#define WINDLASS_DOT
#include "attention_decode_entry.h"
#include "block_linear.h"
#endif
