// What the products in CUDA share: weights as they lie (fragments.py) to operands of tensor cores, and the activation.
//
// Constants come from the compiler's command line: FIRST (gate_up and its activation, else down); UNIT, GAIN and what says
// how weights lie, by format: E4M3 with BLOCK_SCALES or ROW_SCALES, or SCALE_STEP, SCALE_BASE and SCALE_SHARE of 4-bit
// codes; LIMIT and ALPHA of the activation where it has them.

typedef unsigned short bf16;

__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
    unsigned d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

#if A8
// A lane's share of a unit, 16 columns of rows g and g + 8, as operands of two products of e4m3, 32 columns each: of row g
// and of row g + 8 four columns, then four more of each.
#if E4M3
constexpr int PLANES = 2;
struct Codes {
    uint4 words[PLANES];  // of row g, of row g + 8
#if BLOCK_SCALES
    float2 scales;
#endif
    __device__ __forceinline__ void fragment(int j, const uint2*, unsigned (&a)[4]) const {
        a[0] = j ? words[0].z : words[0].x;
        a[1] = j ? words[1].z : words[1].x;
        a[2] = j ? words[0].w : words[0].y;
        a[3] = j ? words[1].w : words[1].y;
    }
};
#else
constexpr int PLANES = 1;
struct Codes {
    uint4 words[PLANES];  // of row g and of row g + 8 eight columns, then eight more of each
    unsigned scales;      // a byte of row g, one of row g + 8

    // Three bits of magnitude choose among the eight bytes of a scale's table; signs lie beside them.
    static __device__ __forceinline__ void bytes(unsigned w, uint2 table, unsigned& first, unsigned& second) {
        first = __byte_perm(table.x, table.y, w & 0x7777u) | (w & 0x80808080u);
        second = __byte_perm(table.x, table.y, w >> 16 & 0x7777u) | (w << 4 & 0x80808080u);
    }

    __device__ __forceinline__ void fragment(int j, const uint2* tables, unsigned (&a)[4]) const {
        bytes(j ? words[0].z : words[0].x, tables[scales & 255u], a[0], a[2]);
        bytes(j ? words[0].w : words[0].y, tables[scales >> 8], a[1], a[3]);
    }
};
#endif
#else
// A lane's share of a unit: 16 columns of rows g and g + 8. `fragment` makes its operand of the j-th product of four: of
// row g and of row g + 8 two columns, then two more of each.
#if E4M3
constexpr int PLANES = 2;
struct Codes {
    uint4 words[PLANES];  // of row g, of row g + 8
#if BLOCK_SCALES
    float2 scales;

    // Sums of a unit, which its scales multiply.
    __device__ __forceinline__ float scale(int i) const { return i % 4 < 2 ? scales.x : scales.y; }
#endif

    // Sign, exponent and mantissa bits become bf16's own, the value times 2**-120, which comes off: what is far below
    // one is not safe in the sums.
    static __device__ __forceinline__ void pairs(unsigned w, unsigned& first, unsigned& second) {
        constexpr unsigned SIGN = 0x80008000u, REST = 0x07f007f0u, SCALE = 0x7b807b80u;
        first = times((w & SIGN) | ((w >> 4) & REST), SCALE);
        second = times(((w << 8) & SIGN) | ((w << 4) & REST), SCALE);
    }

    __device__ __forceinline__ void fragment(int j, unsigned (&a)[4]) const {
        const unsigned rows[2] = {j < 2 ? (j ? words[0].y : words[0].x) : (j == 2 ? words[0].z : words[0].w),
                                  j < 2 ? (j ? words[1].y : words[1].x) : (j == 2 ? words[1].z : words[1].w)};
        pairs(rows[0], a[0], a[2]);
        pairs(rows[1], a[1], a[3]);
    }
};
#else
constexpr int PLANES = 1;
struct Codes {
    uint4 words[PLANES];
    unsigned scales;  // a byte of row g, one of row g + 8

    // Sign, exponent and mantissa bits become bf16's own, the value times 2**-126; scales, exact in bf16, carry 2**118.
    __device__ __forceinline__ void fragment(int j, unsigned (&a)[4]) const {
        constexpr unsigned SIGN = 0x80008000u, REST = 0x01c001c0u;
        const unsigned scale0 = (scales & 255u) * SCALE_STEP + SCALE_BASE, scale1 = (scales >> 8) * SCALE_STEP + SCALE_BASE;
        const unsigned w = j < 2 ? (j ? words[0].y : words[0].x) : (j == 2 ? words[0].z : words[0].w);
        a[0] = times(w & (SIGN | REST), scale0);
        a[1] = times((w << 3) & (SIGN | REST), scale1);
        a[2] = times(((w << 6) & REST) | ((w << 2) & SIGN), scale0);
        a[3] = times(((w >> 3) & REST) | ((w << 1) & SIGN), scale1);
    }
};
#endif

#endif

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

