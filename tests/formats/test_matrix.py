"""Joining matrices keeps every piece's own scales."""

import pytest
import torch

from muster.errors import FormatError
from muster.formats.codec import decode, encode
from muster.formats.matrix import Meaning, QuantMatrix, concat_rows, stack
from muster.formats.spec import BF16, FORMATS, FP8_BLOCK, FP8_TENSOR, NVFP4, int4


def weights(*shape: int, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(size)


@pytest.mark.parametrize("meaning", Meaning)
def test_gate_and_up_keep_their_own_tensor_scale_through_fusing_and_stacking(meaning):
    gates = [encode(weights(32, 64, seed=e), NVFP4, tensor_scale=meaning) for e in range(3)]
    ups = [encode(weights(32, 64, seed=9 + e, size=37.0), NVFP4, tensor_scale=meaning) for e in range(3)]
    fused = stack([concat_rows([gate, up]) for gate, up in zip(gates, ups, strict=True)])
    assert fused.shape == (3, 64, 64)
    assert fused.global_scale.value.shape == (3, 2)
    for expert in range(3):
        expected = torch.cat((decode(gates[expert]), decode(ups[expert])))
        assert torch.equal(decode(fused)[expert], expected)
        assert torch.equal(decode(fused[expert]), expected)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_stacking_then_fusing_is_fusing_then_stacking(format):
    first, second = (weights(3, 128, 256, seed=seed) for seed in (1, 2))
    by_expert = stack([concat_rows([encode(a, format), encode(b, format)]) for a, b in zip(first, second, strict=True)])
    at_once = concat_rows([encode(first, format), encode(second, format)])
    assert torch.equal(decode(by_expert), decode(at_once))
    assert by_expert.nbytes == at_once.nbytes == 3 * format.bytes(256, 256, pieces=2) + (format is FP8_TENSOR) * 3 * 4


@pytest.mark.parametrize("format", [NVFP4, FP8_TENSOR], ids=str)
def test_pieces_of_unequal_height_repeat_their_tensor_scale(format):
    pieces = [weights(64, 32, size=1.0), weights(16, 32, seed=1, size=9.0), weights(16, 32, seed=2, size=0.1)]
    encoded = [encode(piece, format) for piece in pieces]
    fused = concat_rows(encoded)
    scale = fused.global_scale or fused.scale
    assert scale.value.numel() == 6
    assert torch.equal(decode(fused), torch.cat([decode(piece) for piece in encoded]))


def test_an_fp8_block_piece_may_end_in_a_partial_block_only_at_the_end():
    whole, partial = encode(weights(256, 64), FP8_BLOCK), encode(weights(576, 64, seed=1), FP8_BLOCK)
    assert torch.equal(decode(concat_rows([whole, partial])), torch.cat((decode(whole), decode(partial))))
    with pytest.raises(FormatError, match=r"\[576, 256\] rows.*128-row block"):
        concat_rows([partial, whole])


def test_unlike_matrices_are_refused_with_every_difference():
    nvfp4 = encode(weights(32, 64), NVFP4)
    other = encode(weights(32, 128), NVFP4, tensor_scale=Meaning.DIVIDES)
    with pytest.raises(FormatError) as caught:
        stack([nvfp4, other])
    assert [reason.thing for reason in caught.value.reasons] == ["shape", "scales"]
    with pytest.raises(FormatError, match="format"):
        concat_rows([nvfp4, encode(weights(32, 64), BF16)])


def test_pieces_with_different_act_order_are_refused():
    a, b = (encode(weights(32, 64), int4(32)) for _ in range(2))
    orders = torch.arange(64).int() // 32, torch.arange(64).int() % 2
    a, b = (m.with_tensors({**m.tensors, "order": order}, m.shape) for m, order in zip((a, b), orders, strict=True))
    a, b = (
        QuantMatrix(m.format, m.shape, m.codes, m.scale, zero=m.zero, order=order)
        for m, order in zip((a, b), orders, strict=True)
    )
    with pytest.raises(FormatError, match="g_idx"):
        concat_rows([a, b])
    twice = concat_rows([b, b])
    assert torch.equal(decode(twice), torch.cat((decode(b), decode(b))))


def test_an_expert_is_a_view_and_a_single_matrix_has_none():
    stacked = encode(weights(4, 32, 64), NVFP4)
    assert stacked[1].codes.data_ptr() == stacked.codes[1].data_ptr()
    assert sum(stacked[e].nbytes for e in range(4)) == stacked.nbytes
    with pytest.raises(IndexError):
        stacked[0][0]
