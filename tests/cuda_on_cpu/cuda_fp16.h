// float16, as far as the kernels use it: rounded to nearest, ties to even, with subnormals.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct __half {
    uint16_t bits;
};

inline float __half2float(__half x) {
    const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                  : exponent     ? std::ldexp(float(1024 + fraction), exponent - 25)
                                 : std::ldexp(float(fraction), -24);
    return x.bits >> 15 ? -value : value;
}

inline __half __float2half_rn(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    if (x != x) return {0x7fff};
    if (size == 0) return {sign};
    if (size >= 65520.0f) return {uint16_t(sign | 0x7c00)};
    int exponent = 0;
    std::frexp(size, &exponent);  // size < 2^exponent
    if (exponent < -13) exponent = -13;
    const auto steps = uint16_t(std::nearbyint(std::ldexp(size, 11 - exponent)));  // 1024 to 2048, or fewer: subnormal
    return {uint16_t(sign | (((exponent + 13) << 10) + steps))};
}
