// The token rows of each block, 64 columns at a time, as the products read them: `[columns / 64, blocks * MOST, 128 bytes]`.
//
// Columns are in the order in which the products of a fragment meet them (fragments.py): the product j of a chunk has for
// its columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 the chunk's columns 16 t + 4 j to 16 t + 4 j + 3. The eight 16-byte units
// of a row are swizzled by the row. A program takes 512 columns of a block, a thread one unit of a row at a time.
// `taken` counts the items of the two products that follow.

extern "C" __global__ void __launch_bounds__(256) arrange(
    const unsigned* __restrict__ x, const int* __restrict__ slots, const int* __restrict__ experts, uint4* __restrict__ out,
    int* __restrict__ taken, int most, int top_k, int chunks, int rows) {
    const int block = blockIdx.y, unit = threadIdx.x % 8, chunk = blockIdx.x * 8 + threadIdx.x / 8 % 8;
    if (block == 0 && blockIdx.x == 0 && threadIdx.x < 2) taken[threadIdx.x] = 0;
    if (experts[block] < 0 || chunk >= chunks) return;
    // Four rows at a time: none waits for another's slot or words.
    for (int first = threadIdx.x / 64; first < most; first += 16) {
        int slot[4];
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) slot[i] = first + 4 * i < most ? slots[(long long)block * most + first + 4 * i] : -1;
        if (slot[0] < 0) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (slot[i] < 0) continue;
            const unsigned* words = x + ((long long)(slot[i] / top_k) * chunks + chunk) * 32 + unit;
            v[i] = make_uint4(words[0], words[8], words[16], words[24]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first + 4 * i;
            if (slot[i] >= 0) out[((long long)chunk * rows + block * most + row) * 8 + (unit ^ row % 8)] = v[i];
        }
    }
}
