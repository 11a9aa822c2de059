// One product of an expert layer for few rows per expert, 4-bit or FP8 weights, bf16 activations, tensor cores.
//
// A warp multiplies R tiles of 16 weight rows by 8 * NT token rows; WK warps share the columns, WR the rows of a program.
// Weights lie in the order of the A fragments of mma.m16n8k16 (fragments.py): per tile and chunk of 64 columns each lane
// reads 16 or 32 bytes, four fragments. Activations need no staging: a lane's columns are 32 contiguous bytes of one token.
//
// Constants beside those of fragments.cu: K_CHUNKS, TILES, TOP_K, WIDTH (columns of the output), WK, WR, R, NT, AHEAD
// (chunks in flight per warp), BIAS, WEIGH (by the routing weight), SLOTS (0: blocks are listed; else each slot finds its
// own block, and there are so many slots at most, a multiple of 32), FIRST_EXPERT and LOCAL of this rank.

constexpr int COLUMNS = K_CHUNKS * 64;
constexpr int THREADS = WK * WR * 32, ROWS = 8 * NT;

__device__ __forceinline__ uint4 stream(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ unsigned stream(const bf16* at) {
    bf16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

// What an earlier kernel of the chain writes is read so: the compiler moves no such read in front of `await`, as it may
// with a plain one through a const __restrict__ pointer.
__device__ __forceinline__ uint4 read(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ unsigned read(const unsigned* at) {
    unsigned v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ bf16 rounded(float v) {
    bf16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
    return d;
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of R tiles that follow each other; they are of one unit: R divides four.
__device__ __forceinline__ void fetch(Codes (&codes)[R], const char* unit, int place, int chunk) {
    if (chunk >= K_CHUNKS) return;
    unit += chunk * UNIT;
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int plane = 0; plane < Codes::PLANES; ++plane)
            codes[r].words[plane] = stream(reinterpret_cast<const uint4*>(unit) + plane * 128 + r * 32 + place);
#if BLOCK_SCALES
        codes[r].scales = __ldg(reinterpret_cast<const float2*>(unit + 4096));
#elif !E4M3
        codes[r].scales = stream(reinterpret_cast<const bf16*>(unit + 2048) + r * (32 / SCALE_SHARE) + place / SCALE_SHARE);
#endif
    }
}

// Later kernels of a chain are launched early: what an earlier one writes is read after `await`.
__device__ __forceinline__ void announce() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void await() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if SLOTS
// Slot `slot` heads a block if it is every ROWS-th of its expert; each warp finds the block's slots for itself. All warps
// write the same list, and each reads it after its own writes.
__device__ __forceinline__ int list_members(const long long* ids, int slot, long long expert, int lane, int* members) {
    unsigned same[SLOTS / 32];
    int before = 0, all = 0;
#pragma unroll
    for (int i = 0; i < SLOTS / 32; ++i) {
        const int other = i * 32 + lane;
        same[i] = __ballot_sync(~0u, other < gridDim.y && ids[other < gridDim.y ? other : 0] - FIRST_EXPERT == expert);
        const int left = slot - i * 32;
        before += __popc(left <= 0 ? 0 : left >= 32 ? same[i] : same[i] & ((1u << left) - 1));
        all += __popc(same[i]);
    }
    if (before % ROWS) return 0;
    int rank = -before;
#pragma unroll
    for (int i = 0; i < SLOTS / 32; ++i) {
        const int mine = rank + __popc(same[i] & ((1u << lane) - 1));
        if ((same[i] >> lane & 1) && mine >= 0 && mine < ROWS) members[mine] = i * 32 + lane;
        rank += __popc(same[i]);
    }
    __syncwarp();
    return min(all - before, ROWS);
}
#endif

__device__ __forceinline__ int member_slot(const int* slots, int member, int count) {
#if SLOTS
    return member < count ? slots[member] : -1;
#else
    return read(reinterpret_cast<const unsigned*>(slots + member));
#endif
}

// Programs that must fit on a multiprocessor: few where a thread holds much; 0 is the compiler's choice.
constexpr int RESIDENT = E4M3;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) expert_product(
    const bf16* __restrict__ x, const long long* __restrict__ ids, const int* __restrict__ slots,
    const int* __restrict__ experts, const char* __restrict__ units,
    const float* __restrict__ tensor_scales, const float* __restrict__ bias, const float* __restrict__ weights,
    bf16* __restrict__ out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#if SLOTS
    announce();
    __shared__ int members[ROWS];
    const long long expert = ids[blockIdx.y] - FIRST_EXPERT;
    if (expert < 0 || expert >= LOCAL) return;
    const int count = list_members(ids, blockIdx.y, expert, lane, members);
    if (count == 0) return;
    slots = members;
#else
#if FIRST
    await();
#endif
    announce();  // not before the lists are complete, which `down` reads without waiting
    const int expert = read(reinterpret_cast<const unsigned*>(experts + blockIdx.y)), count = ROWS;
    if (expert < 0) return;
    slots += blockIdx.y * ROWS;
#endif
    const int part = warp % WK, first_tile = (blockIdx.x * WR + warp / WK) * R;

    const bf16* rows[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int slot = member_slot(slots, n * 8 + g, count);
        rows[n] = slot < 0 ? nullptr : x + (long long)(slot / TOP_K) * COLUMNS + 16 * t;
    }

    float sums[R][NT][4] = {};
    if (first_tile < TILES) {
        units += ((long long)expert * (TILES / 4) + first_tile / 4) * K_CHUNKS * UNIT;
        const int place = first_tile % 4 * 32 + lane;
        Codes pending[AHEAD][R];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) fetch(pending[u], units, place, part + u * WK);
#if !FIRST
        await();
#endif
        for (int start = part; start < K_CHUNKS; start += AHEAD * WK) {
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const int chunk = start + u * WK;
                if (chunk >= K_CHUNKS) break;
                uint4 b[NT][2];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    b[n][0] = b[n][1] = make_uint4(0, 0, 0, 0);
                    if (rows[n]) {
                        const uint4* at = reinterpret_cast<const uint4*>(rows[n] + chunk * 64);
                        b[n][0] = read(at);
                        b[n][1] = read(at + 1);
                    }
                }
                Codes now[R];
#pragma unroll
                for (int r = 0; r < R; ++r) now[r] = pending[u][r];
                fetch(pending[u], units, place, chunk + AHEAD * WK);
#pragma unroll
                for (int r = 0; r < R; ++r) {
#if BLOCK_SCALES
                    float unit_sums[NT][4] = {};
#else
                    float(&unit_sums)[NT][4] = sums[r];
#endif
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        unsigned a[4];
                        now[r].fragment(j, nullptr, a);
#pragma unroll
                        for (int n = 0; n < NT; ++n) {
                            const uint4 pair = b[n][j / 2];
                            multiply(unit_sums[n], a, j % 2 ? pair.z : pair.x, j % 2 ? pair.w : pair.y);
                        }
                    }
#if BLOCK_SCALES
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[r][n][i] += unit_sums[n][i] * of_row(now[r].scales, i);
#endif
                }
            }
        }
    }

    __shared__ float4 shared[WK][WR][R][NT][32];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int n = 0; n < NT; ++n)
            shared[part][warp / WK][r][n][lane] =
                make_float4(sums[r][n][0], sums[r][n][1], sums[r][n][2], sums[r][n][3]);
    __syncthreads();

    for (int item = threadIdx.x; item < WR * R * NT * 32; item += THREADS) {
        const float4* mine = &shared[0][0][0][0][0] + item;
        float4 sum = *mine;
#pragma unroll
        for (int k = 1; k < WK; ++k) {
            const float4 more = mine[k * WR * R * NT * 32];
            sum.x += more.x; sum.y += more.y; sum.z += more.z; sum.w += more.w;
        }
        const int at = item % 32, row = at / 4, n = item / 32 % NT;
        const int tile = blockIdx.x * WR * R + item / 32 / NT;
        if (tile >= TILES) continue;
        const float2 both[2] = {make_float2(sum.x, sum.z), make_float2(sum.y, sum.w)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int slot = member_slot(slots, n * 8 + at % 4 * 2 + i, count);
            if (slot < 0) continue;
#if FIRST
            const int f = tile / 8 * 64 + row / 2 * 16 + tile % 8 * 2 + row % 2;
            float gate = both[i].x * scale_of(tensor_scales, expert, f, 2 * WIDTH);
            float up = both[i].y * scale_of(tensor_scales, expert, WIDTH + f, 2 * WIDTH);
#if WEIGH
            gate *= weights[slot];
            up *= weights[slot];
#endif
#if BIAS
            gate += bias[(long long)expert * 2 * WIDTH + f];
            up += bias[(long long)expert * 2 * WIDTH + WIDTH + f];
#endif
            out[(long long)slot * WIDTH + f] = rounded(activated(gate, up));
#else
            float y[2] = {both[i].x, both[i].y};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int d = tile * 16 + half * 8 + row;
                float v = y[half] * scale_of(tensor_scales, expert, d, WIDTH);
#if BIAS
                v += bias[(long long)expert * WIDTH + d];
#endif
#if WEIGH
                v *= weights[slot];
#endif
                out[(long long)slot * WIDTH + d] = rounded(v);
            }
#endif
        }
    }
}

#if !FIRST
// out[token] = the sum of its slots in slot order; slots of no local expert were never written.
extern "C" __global__ void __launch_bounds__(128) combine(
    const bf16* __restrict__ y, const long long* __restrict__ ids, bf16* __restrict__ out) {
    const int column = (blockIdx.x * 128 + threadIdx.x) * 2, token = blockIdx.y;
    if (column >= WIDTH) return;
    unsigned here = 0;
#pragma unroll
    for (int k = 0; k < SUMMED; ++k) {
        const long long expert = ids[token * SUMMED + k] - FIRST_EXPERT;
        here |= (expert >= 0 && expert < LOCAL) << k;
    }
    await();
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int k = 0; k < SUMMED; ++k) {
        if (!(here >> k & 1)) continue;
        const unsigned both = read(reinterpret_cast<const unsigned*>(y + ((long long)token * SUMMED + k) * WIDTH + column));
        low += __uint_as_float(both << 16);
        high += __uint_as_float(both & 0xffff0000u);
    }
    *reinterpret_cast<unsigned*>(out + (long long)token * WIDTH + column) =
        (unsigned)rounded(low) | (unsigned)rounded(high) << 16;
}
#endif
