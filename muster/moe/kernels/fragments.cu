// What the products in CUDA share: weights as they lie (fragments.py) to operands of tensor cores, and the activation.
//
// Constants come from the compiler's command line: FIRST (gate_up and its activation, else down); A8 (tokens are in e4m3,
// and so must weights be); UNIT, GAIN and what says how weights lie, by format: E4M3 with BLOCK_SCALES or ROW_SCALES, or
// SCALE_STEP, SCALE_BASE and SCALE_SHARE of 4-bit codes; LIMIT and ALPHA of the activation where it has them.

typedef unsigned short bf16;

__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
    unsigned d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

// Of sums and of what else a product leaves in a lane, every first two are of row g, every other two of row g + 8.
__device__ __forceinline__ float of_row(float2 both, int i) { return i % 4 < 2 ? both.x : both.y; }

// A lane's share of a unit: 16 columns of rows g and g + 8. `fragment` makes its operand of the j-th product: of bf16, four
// products of two columns of either row, then two more of each; of e4m3 (A8), two products of four and four more.
struct Codes {
    static constexpr int PLANES = E4M3 ? 2 : 1;
    uint4 words[PLANES];  // E4M3: of row g, of row g + 8; else of both rows, in each word or, with A8, in turns
#if BLOCK_SCALES
    float2 scales;
#elif !E4M3
    unsigned scales;  // a byte of row g, one of row g + 8
#endif

    __device__ __forceinline__ unsigned word(int plane, int j) const {
        const uint4 v = words[plane];
        return j < 2 ? (j ? v.y : v.x) : (j == 2 ? v.z : v.w);
    }

#if A8 && E4M3
    __device__ __forceinline__ void fragment(int j, const uint2*, unsigned (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = word(i % 2, 2 * j + i / 2);
    }
#elif A8
    // Three bits of magnitude choose among the eight bytes of a scale's table; signs lie beside them.
    static __device__ __forceinline__ void bytes(unsigned w, uint2 table, unsigned& first, unsigned& second) {
        first = __byte_perm(table.x, table.y, w & 0x7777u) | (w & 0x80808080u);
        second = __byte_perm(table.x, table.y, w >> 16 & 0x7777u) | (w << 4 & 0x80808080u);
    }

    __device__ __forceinline__ void fragment(int j, const uint2* tables, unsigned (&a)[4]) const {
        bytes(word(0, 2 * j), tables[scales & 255u], a[0], a[2]);
        bytes(word(0, 2 * j + 1), tables[scales >> 8], a[1], a[3]);
    }
#elif E4M3
    // Sign, exponent and mantissa bits become bf16's own, the value times 2**-120, which comes off: what is far below
    // one is not safe in the sums.
    static __device__ __forceinline__ void pairs(unsigned w, unsigned& first, unsigned& second) {
        constexpr unsigned SIGN = 0x80008000u, REST = 0x07f007f0u, SCALE = 0x7b807b80u;
        first = times((w & SIGN) | ((w >> 4) & REST), SCALE);
        second = times(((w << 8) & SIGN) | ((w << 4) & REST), SCALE);
    }

    __device__ __forceinline__ void fragment(int j, const uint2*, unsigned (&a)[4]) const {
        pairs(word(0, j), a[0], a[2]);
        pairs(word(1, j), a[1], a[3]);
    }
#else
    // Sign, exponent and mantissa bits become bf16's own, the value times 2**-126; scales, exact in bf16, carry 2**118.
    __device__ __forceinline__ void fragment(int j, const uint2*, unsigned (&a)[4]) const {
        constexpr unsigned SIGN = 0x80008000u, REST = 0x01c001c0u;
        const unsigned scale0 = (scales & 255u) * SCALE_STEP + SCALE_BASE, scale1 = (scales >> 8) * SCALE_STEP + SCALE_BASE;
        const unsigned w = word(0, j);
        a[0] = times(w & (SIGN | REST), scale0);
        a[1] = times((w << 3) & (SIGN | REST), scale1);
        a[2] = times(((w << 6) & REST) | ((w << 2) & SIGN), scale0);
        a[3] = times(((w >> 3) & REST) | ((w << 1) & SIGN), scale1);
    }
#endif
};

// What to multiply the sums of a row by: `row` of `rows`, which for gate_up are those of gate and then those of up.
__device__ __forceinline__ float scale_of(const float* tensor_scales, long long expert, int row, int rows) {
#if ROW_SCALES
    return GAIN * tensor_scales[expert * rows + row];
#else
    return GAIN * tensor_scales[FIRST ? 2 * expert + (row >= rows / 2) : expert];
#endif
}

#if FIRST
__device__ __forceinline__ float activated(float gate, float up) {
#ifdef LIMIT
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : (up < -LIMIT ? -LIMIT : up);
#endif
#ifdef ALPHA
    return gate / (1.0f + __expf(-ALPHA * gate)) * (up + 1.0f);
#else
    return gate / (1.0f + __expf(-gate)) * up;
#endif
}
#endif

