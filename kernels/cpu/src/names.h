// How functions are named and exported: windlass_<function>_<instruction set>.

#pragma once

#define WINDLASS_JOIN_(name, isa) windlass_##name##_##isa
#define WINDLASS_JOIN(name, isa) WINDLASS_JOIN_(name, isa)
#define WINDLASS_NAME(name) WINDLASS_JOIN(name, WINDLASS_ISA)
#define EXPORT extern "C" __attribute__((visibility("default")))
#define NOINLINE __attribute__((noinline))
#define INLINE_MEMBER inline __attribute__((always_inline))
