// Functions that exist once in the library: which instruction sets this processor supports, which were compiled, and the fields and
// sizes of structs shared with Python.

#include "attention_call.h"
#include "shared_structs.h"
#include "system_headers.h"
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

#if !defined(WINDLASS_SOURCES) || !defined(WINDLASS_ISAS)
#error "kernels/cpu/build.py passes -DWINDLASS_SOURCES and -DWINDLASS_ISAS"
#endif

#if defined(__aarch64__)
static bool has_dot_products() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
    return false;
#endif
}
#endif

#if defined(__x86_64__)
// Whether the processor has AMX for int8 and bfloat16 and the system lets this process use it.
static bool has_matrix_unit() {
#if defined(__linux__)
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;
    constexpr long REQUEST_STATE = 0x1023, TILE_DATA = 18;  // of arch_prctl
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE | INT8)) != (BF16 | TILE | INT8)) return false;
    return syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

// Whether this processor supports an instruction set. level: as in isa.h.
EXPORT int windlass_can_run(int level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (level == 1) return avx2;
    if (level == 2) return avx2 && __builtin_cpu_supports("avxvnni");
    if (level == 3) return avx512;
    const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (level == 4) return avx512_vnni;
    const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
    if (level == 5) return avx512_bf16;
    if (level == 6) return avx512_bf16 && has_matrix_unit();
#elif defined(__aarch64__)
    if (level == 7) return true;
    if (level == 8) return has_dot_products();
#endif
    return level == 0;
}

// Fingerprint of the compiled sources, and the compiled instruction sets, separated by commas (kernels/cpu/build.py).
EXPORT const char *windlass_sources() { return "windlass sources " WINDLASS_SOURCES; }
EXPORT const char *windlass_isas() { return "windlass isas " WINDLASS_ISAS; }

// Type letters of Python's struct module.
template <class T> struct TypeLetter;
template <class T> struct TypeLetter<T *> { static constexpr char value = 'P'; };
template <> struct TypeLetter<long> { static constexpr char value = 'l'; };
template <> struct TypeLetter<int> { static constexpr char value = 'i'; };
template <> struct TypeLetter<float> { static constexpr char value = 'f'; };

struct ArgumentField {
    const char *name;
    long offset;
    char type;
};

// The fields of AttentionArguments in order. The last entry has no name; its offset is the size of the struct.
EXPORT const ArgumentField *windlass_attention_fields() {
#define WINDLASS_FIELD(type, name) {#name, offsetof(AttentionArguments, name), TypeLetter<type>::value},
    static const ArgumentField fields[] = {
        WINDLASS_ATTENTION_FIELDS(WINDLASS_FIELD)
        {nullptr, sizeof(AttentionArguments), 0},
    };
#undef WINDLASS_FIELD
    return fields;
}

// Size in bytes of a struct that Python declares too (kernels/cpu/library.py); -1 for an unknown name.
EXPORT long windlass_struct_size(const char *name) {
#define SIZE(type) if (!std::strcmp(name, #type)) return sizeof(type)
    SIZE(SamplingRow);
    SIZE(RecordedCall);
    SIZE(LowRankPart);
    SIZE(LowRankUpdate);
    SIZE(ExpertPart);
    SIZE(ExpertProducts);
    SIZE(RankGroup);
#undef SIZE
    return -1;
}
