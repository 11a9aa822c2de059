// Tokens in e4m3: 128 columns of a token under their largest magnitude over 448, or under 1 where all are nought. A warp
// makes one such group, a lane four neighbouring columns.
//
// Columns are in the order in which the products meet them (fragments.py): of a chunk of 64 columns the product j has for
// its columns 4 t to 4 t + 3 the chunk's columns 16 t + 8 j to 16 t + 8 j + 3, for its columns 16 + 4 t to 16 + 4 t + 3 the
// four after those; and of four in a word the third, the first, the fourth and the second.

__device__ __forceinline__ float widened(unsigned bits) { return __uint_as_float(bits << 16); }

extern "C" __global__ void __launch_bounds__(256) quantise(
    const uint2* __restrict__ x, unsigned* __restrict__ codes, float* __restrict__ scales, int groups) {
    const int group = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (group >= groups) return;
    const uint2 four = x[(long long)group * 32 + lane];
    const float v[4] = {widened(four.x & 0xffffu), widened(four.x >> 16), widened(four.y & 0xffffu), widened(four.y >> 16)};
    float largest = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
    float scale = __fdiv_rn(largest, 448.0f);
    if (!(scale > 0.0f)) scale = 1.0f;
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(__fdiv_rn(v[0], scale)), "f"(__fdiv_rn(v[2], scale)));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(__fdiv_rn(v[1], scale)), "f"(__fdiv_rn(v[3], scale)));
    const int chunk = lane / 16, t = lane % 16 / 4, product = lane % 4 / 2, half = lane % 2;
    codes[(long long)group * 32 + chunk * 16 + product * 8 + half * 4 + t] = low | (unsigned)high << 16;
    if (lane == 0) scales[group] = scale;
}
