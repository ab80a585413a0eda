// bfloat16, as far as the kernels use it: the upper half of a float32, rounded to nearest, ties to even.
#pragma once
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    if (x != x) return {0x7fff};
    return {uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}
