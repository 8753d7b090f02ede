// Products of bfloat16 numbers, for x86-64 with AVX-512 BF16 (Cooper Lake, Zen 4 and later): the rest is isa_avx512_vnni.cpp's.

#include "system_headers.h"

#if defined(__x86_64__) || defined(WINDLASS_PORTABLE)
#if !defined(WINDLASS_PORTABLE)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#endif
#define WINDLASS_ISA avx512_bf16
#define WINDLASS_LANES 16
#define WINDLASS_VNNI
#define WINDLASS_BF16
#include "attention_prefill_entry.h"
#include "panels.h"
#endif
