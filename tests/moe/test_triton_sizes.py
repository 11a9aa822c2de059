"""Every size that Triton's expert kernels are launched with compiles for each GPU they are declared for, without one.

One activation, and the shape of a 30B model with 128 experts: other constants change no tile. gate_up holds as many
sums as down and has the longer epilogue, so down is compiled for 9.0 only.
"""

import pytest

pytest.importorskip("triton")

from test_triton_compiles import SHARED_MEMORY, compiled, pytestmark, stack  # noqa: F401

from muster.formats.spec import BF16, FP8_BLOCK, FP8_CHANNEL, MXFP4, NVFP4, int4
from muster.moe.kernels import triton_layer
from muster.moe.kernels.triton_matrix import pair_distance
from muster.moe.kernels.triton_tiles import E4M3_TOKENS, TOKENS, Target
from muster.moe.kernels.tuning import configurations

HIDDEN, INNER, TOP_K = 2048, 768, 8
PARKED = 32
"""Bytes of a thread's stack that are no spill: the assembler may park a few values ahead of a loop."""
FORMATS = (BF16, NVFP4, MXFP4, FP8_CHANNEL, FP8_BLOCK, int4(32), int4(128))
CASES = {format.name: (format, False) for format in FORMATS}
CASES |= {f"{format.name}, e4m3 tokens": (format, True) for format in (FP8_CHANNEL, FP8_BLOCK)}


def target(format, e4m3, capability):
    """A GPU of that compute capability."""
    kernels = E4M3_TOKENS if e4m3 else TOKENS
    return Target(kernels, format, f"{capability / 10:.1f}", SHARED_MEMORY[capability])


def arguments(format, e4m3, sizes, *, down):
    """Types and constants of one product, as a layer launches it."""
    rows, columns = (HIDDEN, INNER) if down else (2 * INNER, HIDDEN)
    tile = sizes.second if down else sizes.first
    group = format.block[1] if format.block else 0
    paired = format.element.bits == 4
    half = pair_distance(columns, group if format.family == "int4" else 1) if paired else tile.half
    constants = {
        "D": HIDDEN,
        "F": INNER,
        "W_BYTES": rows * columns // format.codes_per_byte,
        "S_COUNT": rows * columns // (group or 1),
        "R_COUNT": {"nvfp4": 1 if down else 2, "fp8-channel": rows}.get(format.name, 0),
        "FORMAT": triton_layer.FORMATS[format.family],
        "GROUP": group,
        "ZEROS": True,
        "BIAS": True,
        "WEIGH": down,
        "BLOCK_M": sizes.rows,
        "BLOCK_N": tile.columns,
        "HALF": half,
        "GROUP_M": sizes.group,
        "ASM": True,
    }
    constants |= {} if down else {"TOP_K": TOP_K, "ACTIVATION": "silu", "LIMITED": True, "A8": e4m3}
    scales = {"nvfp4": "*u8", "mxfp4": "*u8", "int4": "*bf16"}.get(format.family, "*fp32")
    types = dict.fromkeys(("weights_ptr", "xs_ptr", "r_ptr", "bias_ptr"), "*fp32")
    types |= {"slots_ptr": "*i32", "experts_ptr": "*i32", "blocks": "i32", "limit": "fp32", "alpha": "fp32"}
    types |= {"w_ptr": "*bf16" if format is BF16 else "*u8", "s_ptr": scales, "z_ptr": "*u8", "y_ptr": "*bf16"}
    types |= {"x_ptr": "*u8" if e4m3 else "*bf16", "inner_ptr": "*bf16"}
    return types, constants, tile


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("case", CASES)
def test_every_shipped_size_fits_into_shared_memory_and_registers(case, capability, tmp_path):
    format, e4m3 = CASES[case]
    if e4m3 and capability < 89:
        pytest.skip("not declared: no FP8 tensor cores")
    from muster.moe.kernels import triton_experts as kernels

    wanted = [
        (kernel, sizes)
        for sizes in configurations(target(format, e4m3, capability))
        for kernel in (kernels.gate_up_kernel, kernels.down_kernel)[: 2 if capability == 90 else 1]
    ]

    def made(kernel, sizes):
        types, constants, tile = arguments(format, e4m3, sizes, down=kernel is kernels.down_kernel)
        return compiled(kernel, types, constants, capability, tile.warps, tile.stages)

    found = [made(kernel, sizes) for kernel, sizes in wanted]
    used = [
        (sizes.rows, k.metadata.shared, stack(k, tmp_path / "k")) for (_, sizes), k in zip(wanted, found, strict=True)
    ]
    assert all(shared <= SHARED_MEMORY[capability] and parked <= PARKED for _, shared, parked in used), used


@pytest.mark.parametrize("capability", [capability for capability in SHARED_MEMORY if capability >= 89])
def test_quantising_fits_into_registers(capability, tmp_path):
    from muster.moe.kernels import triton_experts as kernels

    types = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32"}
    constants = {"K": HIDDEN, "SPANS": triton_layer._SPANS, "ASM": True}
    made = compiled(kernels.quantise_kernel, types, constants, capability, 4, 3)
    assert stack(made, tmp_path / "k") == 0


def test_no_group_of_integers_begins_or_ends_within_the_columns_of_one_product():
    for group in (16, 32, 48, 64, 96, 128):
        for columns in (group * count for count in range(1, 9) if group * count % 32 == 0):
            half = pair_distance(columns, group)
            for start in range(0, columns, half):
                assert start // group == (start + half - 1) // group, (group, columns, half)
            assert columns % (2 * half) == 0
