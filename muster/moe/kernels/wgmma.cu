// One product of an expert layer for many rows per expert, 4-bit or FP8 weights, bf16 activations, Hopper's `wgmma`.
//
// Programs stay, and take one item after another: a block of token rows times TILES tiles of 64 weight rows. A warp of its
// own copies ahead, in bulk, into the next item too: units of weights (fragments.py) and, of 64 columns, the token rows of
// the block, which lie together as `arrange` or gate_up put them. Each warp of the warpgroups that multiply holds 16 of the
// 64 weight rows of a tile and decodes each fragment, the left operand, into registers while the tensor cores still
// multiply the one before; the right operand is the token rows in shared memory, in the 128-byte swizzle.
//
// Constants beside those of fragments.cu: GROUPS warpgroups, MT tiles each, MOST token rows of a block, STAGES of DEPTH
// chunks of 64 columns, RESIDENT programs on a multiprocessor, BIAS, WEIGH (by the routing weight). `multiply<N>` and SIZES
// (to which a block's own count of rows is rounded up) are written by wgmma_layer.py.

constexpr bool MANY = MOST >= 128 && GROUPS == 2;  // sums that need registers which the copying warpgroup gives away
constexpr int WORKERS = GROUPS * 128, THREADS = WORKERS + (MANY ? 128 : 32), TILES = GROUPS * MT;
// A row of 128 bytes is 64 columns of bf16 or, with A8, the 128 columns of a stage in e4m3 under one scale.
constexpr int PER_STAGE = A8 ? 1 : DEPTH, ROW_BYTES = MOST * 128, ROWS_ROOM = STAGES * PER_STAGE * ROW_BYTES;
constexpr int CODES_ROOM = STAGES * DEPTH * TILES * UNIT, SCALES_ROOM = A8 ? STAGES * MOST * 4 : 0;
static_assert(!A8 || DEPTH == 2);
// Results of a warpgroup on their way to memory, SLICE token rows at a time; rows are padded against bank conflicts.
constexpr int SLICE = MOST < 64 ? MOST : 64, OUT = MT * (FIRST ? 32 : 64), OUT_BYTES = OUT * 2 + 16;

struct Sizes {
    int chunks, tiles, width, blocks, together, rows, items;
};

__device__ __forceinline__ unsigned packed(float low, float high) {
    unsigned d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Shared memory as `wgmma` reads it: rows of 128 bytes, whose eight 16-byte units are swizzled by the row. The upper half
// of such a description is the same for all: it stands in `multiply`.
__device__ __forceinline__ unsigned described(unsigned at) { return (at >> 4) + (1u << 16); }

// The compiler would rather compute an address anew at every use than keep it.
__device__ __forceinline__ unsigned kept(unsigned at) {
    asm volatile("" : "+r"(at));
    return at;
}

// One value for the whole warp, as the compiler then knows.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

__device__ __forceinline__ void arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void settle() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void make_barrier(unsigned at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void expect(unsigned at, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void release(unsigned at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void wait(unsigned at, unsigned parity) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\nbra again;\ndone: }" ::"r"(at), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Down starts early: what gate_up writes is read after this.
__device__ __forceinline__ void await() {
#if !FIRST
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void group_meets() {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + (int)threadIdx.x / 128) : "memory");
}
__device__ __forceinline__ uint4 shared16(unsigned at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ float2 shared8(unsigned at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ unsigned shared2(unsigned at) {
    bf16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

struct Item {
    int expert, tile, row, count;  // expert: -1 after the last item; row: the block's first among all
    float scales[2];               // to multiply by where all rows have one: of gate and of up, or twice of down
    int slots[MOST];
    float weights[MOST];
};

struct Shared {
    Item items[2];  // the one at work and the next
    unsigned long long full[STAGES], empty[STAGES], ready[2], done[2];
};

__device__ __forceinline__ unsigned place(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// The copying warp's next item: what of it must be fetched is fetched an item ahead.
struct Next {
    int expert, block, tile, slots[(MOST + 31) / 32];
    bool more;  // items may follow

    __device__ __forceinline__ void fetch(int item, const Sizes& sizes, const int* slots_of, const int* experts) {
        expert = -1;
        more = item < sizes.items;
        if (!more) return;
        // Neighbouring blocks, often of one expert, share a tile of weights while it is in the second cache.
        const int per_group = sizes.together * ((sizes.tiles + TILES - 1) / TILES);
        const int first = item / per_group * sizes.together, size = min(sizes.blocks - first, sizes.together);
        block = first + item % per_group % size;
        tile = item % per_group / size * TILES;
        expert = experts[block];
#pragma unroll
        for (int i = 0; i < (MOST + 31) / 32; ++i) {
            const int at = i * 32 + threadIdx.x % 32;
            slots[i] = at < MOST ? slots_of[(long long)block * MOST + at] : -1;
        }
    }
};

// The copying lane: the stages of an item, each as soon as all warpgroups are done with its place.
struct Supplier {
    Shared& shared;
    const unsigned memory;
    int stage = 0, phase = 1;  // an empty place that nothing was in yet is as if the phase before had ended

    __device__ __forceinline__ void supply(const char* units, const char* rows, const float* token_scales, int tile, int count,
                                           const Sizes& sizes) {
        const char* from[TILES];
#pragma unroll
        for (int m = 0; m < TILES; ++m) from[m] = units + (long long)min(tile + m, sizes.tiles - 1) * (sizes.chunks * UNIT);
        const long long step = (long long)sizes.rows * 128;
        for (int left = sizes.chunks; left > 0; left -= DEPTH) {
            const int chunks = min(left, DEPTH);
            const unsigned full = place(shared.full) + stage * 8;
            wait(place(shared.empty) + stage * 8, phase);
            const int scales = A8 ? (count + 3) / 4 * 16 : 0;
            expect(full, chunks * TILES * UNIT + (A8 ? 1 : chunks) * count * 128 + scales);
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                copy(memory + ROWS_ROOM + (stage * TILES + m) * (DEPTH * UNIT), from[m], chunks * UNIT, full);
                from[m] += DEPTH * UNIT;
            }
            await();  // the weights need not wait for the kernel before
#pragma unroll
            for (int d = 0; d < PER_STAGE; ++d) {
                if (d < chunks) copy(memory + (stage * PER_STAGE + d) * ROW_BYTES, rows, count * 128, full);
                rows += step;
            }
            if constexpr (A8) {
                copy(memory + ROWS_ROOM + CODES_ROOM + stage * MOST * 4, token_scales, scales, full);
                token_scales += sizes.rows;
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
};

// The copying warp: of each item what it is, and its stages. After its first item a program takes what none has taken.
__device__ __forceinline__ void supply(Shared& shared, unsigned memory, const char* x, const float* token_scales,
                                       const int* slots, const int* experts, const char* units,
                                       const float* tensor_scales, const float* routing_weights, int* taken,
                                       const Sizes& sizes) {
    const int lane = threadIdx.x % 32;
    auto take = [&] {
        int item = 0;
        if (lane == 0) item = gridDim.x + atomicAdd(taken, 1);
        return __shfl_sync(~0u, item, 0);
    };
    Supplier supplier = {shared, memory};
    Next next;
    next.fetch(blockIdx.x, sizes, slots, experts);
    for (int n = 0;; ++n) {
        while (next.expert < 0 && next.more) next.fetch(take(), sizes, slots, experts);
        Item& now = shared.items[n % 2];
        if (n >= 2) wait(place(&shared.done[n % 2]), (n / 2 + 1) % 2);
        int count = 0;
#pragma unroll
        for (int i = 0; i < (MOST + 31) / 32; ++i) {
            const int at = i * 32 + lane;
            if (at < MOST) {
                now.slots[at] = next.slots[i];
                now.weights[at] = WEIGH && next.expert >= 0 && next.slots[i] >= 0 ? routing_weights[next.slots[i]] : 0.0f;
            }
            count += __popc(__ballot_sync(~0u, at < MOST && next.slots[i] >= 0));
        }
        const int expert = next.expert, tile = next.tile, row = next.block * MOST;
        if (lane == 0) now.expert = expert, now.tile = tile, now.row = row, now.count = count;
        if (!ROW_SCALES && lane < 2 && expert >= 0) now.scales[lane] = scale_of(tensor_scales, expert, lane, 2);
        __syncwarp();
        if (lane == 0) release(place(&shared.ready[n % 2]));
        if (expert < 0) return;
        next.fetch(take(), sizes, slots, experts);
        // Not earlier: programs of `down` that found room here would only wait, and take turns from these.
        if (!next.more) asm volatile("griddepcontrol.launch_dependents;");
        const char* weights = units + (long long)expert * sizes.tiles * sizes.chunks * UNIT;
        if (lane == 0) supplier.supply(weights, x + (long long)row * 128, token_scales + row, tile, count, sizes);
        __syncwarp();
    }
}

// Where a warpgroup is in the stages; addresses of its first in shared memory.
struct Cursor {
    int stage, phase;
    unsigned rows, codes, scales, token_scales, full, empty;

    __device__ __forceinline__ Cursor(Shared& shared, unsigned memory) : stage(0), phase(0) {
        const int mine = threadIdx.x % 128;
        rows = kept(described(memory));
        const unsigned unit = memory + ROWS_ROOM + threadIdx.x / 128 * (MT * DEPTH * UNIT);
        codes = kept(unit + mine * 16);
#if BLOCK_SCALES
        scales = kept(unit + 4096);
#elif !E4M3
        scales = kept(unit + 2048 + mine / SCALE_SHARE * 2);
#endif
        token_scales = memory + ROWS_ROOM + CODES_ROOM;
        full = kept(place(shared.full));
        empty = kept(place(shared.empty));
    }

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }

    __device__ __forceinline__ void release_stage(int which) const {
        if (threadIdx.x % 128 == 0) release(empty + which * 8);
    }
};

// A warp's share of a stage.
struct Words {
    Codes codes[DEPTH][MT];

    __device__ __forceinline__ void load(const Cursor& at) {
        wait(at.full + at.stage * 8, at.phase);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const int unit = ((at.stage * TILES + m) * DEPTH + d) * UNIT;
#pragma unroll
                for (int plane = 0; plane < Codes::PLANES; ++plane)
                    codes[d][m].words[plane] = shared16(at.codes + unit + plane * 2048);
#if BLOCK_SCALES
                if (d == 0) codes[d][m].scales = shared8(at.scales + unit);
#elif !E4M3
                codes[d][m].scales = shared2(at.scales + unit);
#endif
            }
    }
};

// The products are over: before this the compiler must not read their sums.
template <int N>
__device__ __forceinline__ void over(float (&sums)[MT][MOST / 2]) {
    settle<0>();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(sums[m][i])::"memory");
}

#if BLOCK_SCALES && !A8
// A stage is within one block of columns. Sums of all stages so far stand for so many times the scales of the last, and
// are put in terms of the next: one multiplication, and no registers for sums of a stage.
static_assert(DEPTH <= 2);

template <int N>
__device__ __forceinline__ void rescale(float (&sums)[MT][MOST / 2], const float2 (&by)[MT]) {
    over<N>(sums);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums[m][i] *= of_row(by[m], i);
}
#endif

#if A8
// Tensor cores keep 14 bits of a sum of FP8 products: a stage's sums begin at nought, and are multiplied by the scales of
// its columns, of tokens and of blocks of weights, as they are added to the others. While a warpgroup does that another
// multiplies.
template <int N>
__device__ __forceinline__ void sum(float (&sums)[MT][MOST / 2], Cursor& at, int chunks, const uint2* tables) {
    constexpr int TOGETHER = 4;  // scales are read so many at a time: there are no registers for all
    float stage_sums[MT][MOST / 2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums[m][i] = 0.0f;
    for (int start = 0; start < chunks; start += DEPTH) {
        const unsigned rows = uniform(at.rows + at.stage * (ROW_BYTES / 16));
        Words words;
        words.load(at);
        unsigned a[DEPTH][2][MT][4];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int m = 0; m < MT; ++m) words.codes[d][m].fragment(j, tables, a[d][j][m]);
        arrive();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int m = 0; m < MT; ++m)
                    multiply<N>(stage_sums[m], a[d][j][m], rows + d * 4 + j * 2, d + j > 0);
        commit();
        over<N>(stage_sums);
        const unsigned scales_at = at.token_scales + at.stage * (MOST * 4) + threadIdx.x % 4 * 8;
#pragma unroll
        for (int from = 0; from < N / 8; from += TOGETHER) {
            float2 scales[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (from + i < N / 8) scales[i] = shared8(scales_at + (from + i) * 32);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        if (from + i >= N / 8) break;
                        float scale = k % 2 ? scales[i].y : scales[i].x;
#if BLOCK_SCALES
                        scale *= of_row(words.codes[0][m].scales, k);
#endif
                        sums[m][(from + i) * 4 + k] += stage_sums[m][(from + i) * 4 + k] * scale;
                    }
        }
        at.release_stage(at.stage);
        at.advance();
    }
}
#else
// Sums of a block: N token rows times this warp's 16 rows of each of its warpgroup's tiles.
template <int N>
__device__ __forceinline__ void sum(float (&sums)[MT][MOST / 2], Cursor& at, int chunks, const uint2* tables) {
    unsigned a[2][2][MT][4];
    Words words;
    words.load(at);
#if BLOCK_SCALES
    float2 scales[MT] = {};  // of the stage whose products may still run
#endif
    for (int start = 0; start < chunks; start += DEPTH) {
        const unsigned rows = uniform(at.rows + at.stage * (DEPTH * ROW_BYTES / 16));
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (start + d >= chunks) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int m = 0; m < MT; ++m) words.codes[d][m].fragment(half * 2 + j, tables, a[half][j][m]);
#if BLOCK_SCALES
                if (d == 0 && half == 0) {
                    float2 ratios[MT];
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        const float2 now = words.codes[0][m].scales;
                        ratios[m] = make_float2(__fdividef(scales[m].x, now.x), __fdividef(scales[m].y, now.y));
                        scales[m] = now;
                    }
                    if (start > 0) rescale<N>(sums, ratios);
                }
#endif
                // What the next stage holds comes while this one's last products run.
                if (d == DEPTH - 1 && half == 1 && start + DEPTH < chunks) {
                    at.advance();
                    words.load(at);
                }
                arrive();
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int m = 0; m < MT; ++m)
                        multiply<N>(sums[m], a[half][j][m], rows + d * (ROW_BYTES / 16) + half * 4 + j * 2,
                                    half + j > 0 || start + d > 0);
                commit();
                settle<1>();
                // The last products of the stage before are over: its place may be filled.
                if (d == 0 && half == 0 && start > 0) at.release_stage(at.stage == 0 ? STAGES - 1 : at.stage - 1);
            }
        }
    }
#if BLOCK_SCALES
    rescale<N>(sums, scales);
#else
    over<N>(sums);
#endif
    at.release_stage(at.stage);
    at.advance();
}
#endif

__device__ __forceinline__ void transposed(unsigned at, unsigned a, unsigned b) {
    if constexpr (MOST == 8)
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(at), "r"(a) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

// To memory, `from` and the SLICE - 1 token rows after it: gate_up's as `down` will read them, down's slot by slot.
__device__ __forceinline__ void write(const Item& item, const Sizes& sizes, int from, char* __restrict__ out,
                                      const char* staged) {
    constexpr int UNITS = OUT / 8;
    const int first = (item.tile + (int)threadIdx.x / 128 * MT) * (FIRST ? 32 : 64);
    for (int i = threadIdx.x % 128; i < min(item.count - from, SLICE) * UNITS; i += 128) {
        const int token = from + i / UNITS, column = first + i % UNITS * 8;
        if (column >= sizes.width) continue;
        const uint4 v = *reinterpret_cast<const uint4*>(staged + (token - from) * OUT_BYTES + i % UNITS * 16);
#if FIRST
        char* to = out + ((long long)(column / 64) * sizes.rows + item.row + token) * 128 + ((column / 8 ^ token) % 8 << 4);
#else
        char* to = out + ((long long)item.slots[token] * sizes.width + column) * 2;
#endif
        *reinterpret_cast<uint4*>(to) = v;
    }
}

// Scales, bias, activation, routing weight; to memory by way of shared memory, where tokens become rows.
__device__ __forceinline__ void finish(const float (&sums)[MT][MOST / 2], const Item& item, const Sizes& sizes,
                                       const float* __restrict__ tensor_scales, const float* __restrict__ bias, char* out,
                                       const char* staged) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    const unsigned row_at = place(staged) + ((lane / 8 & 1) * 8 + lane % 8) * OUT_BYTES;
#pragma unroll
    for (int from = 0; from < MOST; from += SLICE) {
        if (from >= item.count) break;
        group_meets();
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const int last = sizes.tiles - 1, tile = min(item.tile + warp / 4 * MT + m, last) * 4 + warp % 4;
#if FIRST
            // A warp's eight rows are a 16-byte unit of a chunk in the order of the fragments.
            const int row0 = tile / 8 * 64 + lane / 8 * 16 + tile % 8 * 2 + lane / 4 % 2, row1 = row0 + sizes.width;
            const int rows = 2 * sizes.width;
#else
            const int row0 = tile * 16 + lane / 4, row1 = row0 + 8, rows = sizes.width;
#endif
            const float* expert_bias = bias + (long long)item.expert * rows;
            const float bias0 = BIAS ? expert_bias[row0] : 0.0f, bias1 = BIAS ? expert_bias[row1] : 0.0f;
            const float scale0 = ROW_SCALES ? scale_of(tensor_scales, item.expert, row0, rows) : item.scales[0];
            const float scale1 = ROW_SCALES ? scale_of(tensor_scales, item.expert, row1, rows) : item.scales[1];
#pragma unroll
            for (int i = from / 8; i < (from + SLICE < MOST ? from + SLICE : MOST) / 8; i += 2) {
                if (i * 8 >= item.count) break;
                unsigned both[2][2] = {};
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    if (i + k >= MOST / 8) break;
                    const float* c = sums[m] + (i + k) * 4;
                    const int token = (i + k) * 8 + 2 * t;
                    const float w0 = WEIGH ? item.weights[token] : 1.0f, w1 = WEIGH ? item.weights[token + 1] : 1.0f;
#if FIRST
                    both[k][0] = packed(activated(c[0] * scale0 * w0 + bias0, c[2] * scale1 * w0 + bias1),
                                        activated(c[1] * scale0 * w1 + bias0, c[3] * scale1 * w1 + bias1));
#else
                    both[k][0] = packed((c[0] * scale0 + bias0) * w0, (c[1] * scale0 + bias0) * w1);
                    both[k][1] = packed((c[2] * scale1 + bias1) * w0, (c[3] * scale1 + bias1) * w1);
#endif
                }
                const unsigned at = row_at + (i * 8 - from) * OUT_BYTES + (m * 4 + warp % 4) * (FIRST ? 16 : 32);
                transposed(at, both[0][0], both[1][0]);
#if !FIRST
                transposed(at + 16, both[0][1], both[1][1]);
#endif
            }
        }
        group_meets();
        write(item, sizes, from, out, staged);
    }
}

// Of each scale of 4-bit codes the e4m3 codes of an eighth of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times that scale.
__device__ __forceinline__ void make_tables(uint2* tables) {
    for (int i = threadIdx.x; i < 256; i += THREADS) {
        const float scale = i == 0 ? 0.0f : __uint_as_float((i / 8 - 10 + 127) << 23 | i % 8 << 20) * 0.125f;
        unsigned words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float at[2][4] = {{0.0f, 0.5f, 1.0f, 1.5f}, {2.0f, 3.0f, 4.0f, 6.0f}};
            bf16 low, high;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(at[half][1] * scale), "f"(at[half][0] * scale));
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(at[half][3] * scale), "f"(at[half][2] * scale));
            words[half] = low | (unsigned)high << 16;
        }
        tables[i] = make_uint2(words[0], words[1]);
    }
}

// The smallest size that holds the block's rows.
template <int N, int... LARGER>
__device__ __forceinline__ void fit(float (&sums)[MT][MOST / 2], int count, Cursor& at, int chunks, const uint2* tables) {
    if constexpr (sizeof...(LARGER) > 0) {
        if (count > N) return fit<LARGER...>(sums, count, at, chunks, tables);
    }
    sum<N>(sums, at, chunks, tables);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) expert_product(
    const char* __restrict__ x, const float* __restrict__ token_scales, const int* __restrict__ slots,
    const int* __restrict__ experts, const char* __restrict__ units,
    const float* __restrict__ tensor_scales, const float* __restrict__ bias, const float* __restrict__ weights,
    char* __restrict__ out, int* __restrict__ taken, Sizes sizes) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ Shared shared;
#if FIRST
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) make_barrier(place(&shared.full[s]), 1), make_barrier(place(&shared.empty[s]), GROUPS);
        for (int i = 0; i < 2; ++i) make_barrier(place(&shared.ready[i]), 1), make_barrier(place(&shared.done[i]), GROUPS);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __shared__ uint2 tables[A8 && !E4M3 ? 256 : 1];
    if constexpr (A8 && !E4M3) make_tables(tables);
    __syncthreads();
    // What one gives the others take: of 168 registers for each at the start. Were it less, they would wait for ever.
    static_assert(!MANY || 64 * 128 + 216 * WORKERS <= 168 * THREADS);
    if (threadIdx.x >= WORKERS) {
        if constexpr (MANY) asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (threadIdx.x < WORKERS + 32)
            supply(shared, place(memory), x, token_scales, slots, experts, units, tensor_scales, weights, taken, sizes);
    } else {
        if constexpr (MANY) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        const char* staged = memory + ROWS_ROOM + CODES_ROOM + SCALES_ROOM + threadIdx.x / 128 * (SLICE * OUT_BYTES);
        Cursor at(shared, place(memory));
        for (int n = 0;; ++n) {
            wait(place(&shared.ready[n % 2]), n / 2 % 2);
            const Item& item = shared.items[n % 2];
            if (uniform(item.expert) < 0) break;
            float sums[MT][MOST / 2];
            fit<SIZES>(sums, uniform(item.count), at, sizes.chunks, tables);
            finish(sums, item, sizes, tensor_scales, bias, out, staged);
            group_meets();  // all have read the item
            if (threadIdx.x % 128 == 0) release(place(&shared.done[n % 2]));
        }
    }
}
