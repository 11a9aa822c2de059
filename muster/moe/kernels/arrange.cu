// The token rows of each block, 64 columns at a time, as the products read them: `[columns / 64, blocks * MOST, 128 bytes]`.
//
// Columns are in the order in which the products of a fragment meet them (fragments.py): the product j of a chunk has for
// its columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 the chunk's columns 16 t + 4 j to 16 t + 4 j + 3. The eight 16-byte units
// of a row are swizzled by the row. A program takes 512 columns of a block, a thread one unit of a row at a time.
// With A8 a chunk is 128 columns in e4m3, which are in order already, and each row brings its scale of each.
//
// `taken` counts the items of the two products that follow.

extern "C" __global__ void __launch_bounds__(256) arrange(
    const uint4* __restrict__ x, const float* __restrict__ scales, const int* __restrict__ slots,
    const int* __restrict__ experts, uint4* __restrict__ out, float* __restrict__ row_scales, int* __restrict__ taken,
    int most, int top_k, int chunks, int rows) {
    constexpr int TOGETHER = 4;  // rows of a thread: none waits for another's slot or words
    // Of each warp and row four chunks; padded, so that words eight apart are in banks of their own.
    __shared__ uint4 staged[8][TOGETHER][4][10];
    const int block = blockIdx.y, unit = threadIdx.x % 8, chunk = blockIdx.x * 8 + threadIdx.x / 8 % 8;
    if (block == 0 && blockIdx.x == 0 && threadIdx.x < 2) taken[threadIdx.x] = 0;
    if (experts[block] < 0) return;
    auto& mine = staged[threadIdx.x / 32];
    const int place = threadIdx.x / 8 % 4;
    for (int first = threadIdx.x / 64; first < most; first += 4 * TOGETHER) {
        int slot[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int row = first + 4 * i;
            slot[i] = row < most ? slots[(long long)block * most + row] : -1;
        }
        if (slot[0] < 0) return;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (slot[i] >= 0 && chunk < chunks)
                mine[i][place][unit] = x[((long long)(slot[i] / top_k) * chunks + chunk) * 8 + unit];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const unsigned* words = reinterpret_cast<const unsigned*>(mine[i][place]) + unit;
            const int row = first + 4 * i;
            if (slot[i] < 0 || chunk >= chunks) continue;
            const long long at = (long long)chunk * rows + block * most + row;
            out[at * 8 + (unit ^ row % 8)] = A8 ? mine[i][place][unit] : make_uint4(words[0], words[8], words[16], words[24]);
            if (A8 && unit == 0) row_scales[at] = scales[(long long)(slot[i] / top_k) * chunks + chunk];
        }
        __syncwarp();
    }
}
