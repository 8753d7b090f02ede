// Adapters of kernels for recorded calls, which have all arguments in memory.

#pragma once

#include "simd.h"

namespace {

template <class T> struct Argument {  // integers and addresses
    static INLINE_MEMBER T from(const char *at) {
        int64_t value;
        __builtin_memcpy(&value, at, 8);
        return (T)value;
    }
};
template <> struct Argument<float> {
    static INLINE_MEMBER float from(const char *at) {
        double value;
        __builtin_memcpy(&value, at, 8);
        return float(value);
    }
};

template <class... A, size_t... I> INLINE int call_with(int (*function)(A...), const char *arguments, std::index_sequence<I...>) {
    return function(Argument<A>::from(arguments + 8 * I)...);
}
template <class... A> INLINE int call_with(int (*function)(A...), const char *arguments) {
    return call_with(function, arguments, std::index_sequence_for<A...>());
}

}  // namespace

// Exports an adapter of this function, which has been defined before. Its arguments must depend on shapes and addresses only,
// never on contents.
#define RECORDABLE(name) \
    EXPORT int WINDLASS_NAME(recorded_##name)(const char *arguments) { return call_with(WINDLASS_NAME(name), arguments); }
