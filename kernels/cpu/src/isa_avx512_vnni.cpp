// Products with weights in blocks, and decoding over int8 keys and values, for x86-64 with AVX-512 VNNI (Cascade Lake,
// Zen 4 and later): the rest is isa_avx512.cpp's.

#include "system_headers.h"

#if defined(__x86_64__) || defined(WINDLASS_PORTABLE)
#if !defined(WINDLASS_PORTABLE)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif
#define WINDLASS_ISA avx512_vnni
#define WINDLASS_LANES 16
#define WINDLASS_VNNI
#include "attention_decode_entry.h"
#include "attention_prefill_entry.h"
#include "block_linear.h"
#endif
