// Products with weights in blocks, and attention over int8 keys and values, for x86-64 with AVX-VNNI (Alder Lake and
// later): the rest is isa_avx2.cpp's.

#include "system_headers.h"

#if defined(__x86_64__) || defined(WINDLASS_PORTABLE)
#if !defined(WINDLASS_PORTABLE)
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#define WINDLASS_ISA avx2_vnni
#define WINDLASS_LANES 8
#define WINDLASS_VNNI
#include "attention_decode_entry.h"
#include "attention_prefill_entry.h"
#include "block_linear.h"
#endif
