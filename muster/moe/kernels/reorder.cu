// The tokens with their columns in the order in which the products of a fragment meet them (fragments.py): the product j of
// a chunk of 64 has for its columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 the chunk's columns 16 t + 4 j to 16 t + 4 j + 3. A
// thread makes one of a chunk's eight 16-byte units. `taken` counts the items of the two products that follow.

extern "C" __global__ void __launch_bounds__(256) reorder(
    const unsigned* __restrict__ x, uint4* __restrict__ out, int* __restrict__ taken, int units) {
    const int at = blockIdx.x * 256 + threadIdx.x;
    if (at < 2) taken[at] = 0;
    if (at >= units) return;
    const unsigned* words = x + at / 8 * 32 + at % 8;
    out[at] = make_uint4(words[0], words[8], words[16], words[24]);
}
