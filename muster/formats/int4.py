"""Repacking of the int4 dialects' 32-bit words into our nibble order and back, without loss.

A word holds eight 4-bit codes, the first in its lowest bits. Our bytes hold two, so a word's little-endian bytes are
already in our order; what differs is the axis that a dialect packs along and, for AWQ, the order inside a word.
Sources: the checkpoint layouts of AutoGPTQ / GPTQModel, AutoAWQ (`gemm`) and compressed-tensors `pack-quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from muster.formats.dialects import CODES_PER_WORD, Dialect
from muster.formats.elements import pack_nibbles, unpack_nibbles

SYMMETRIC_ZERO = 8
"""The code that stands for nought where a dialect stores no zero points."""

_AWQ_ELEMENT_AT = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_POSITION_OF = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(dialect: Dialect, fields: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The codes `[..., N, K/2]`, scale and zero `[..., N, G]` and order `[..., K]` of a QuantMatrix of N = `rows`.

    A g_idx that only counts the groups up (no act-order) is dropped; without zero points, 8 stands for nought.
    """
    ours: dict[str, Tensor] = {}
    if dialect is Dialect.CT_INT4:
        ours["codes"], ours["scale"] = _words_to_bytes(fields["codes"]), fields["scale"]
        if "zero" in fields:
            ours["zero"] = _unpack_words(fields["zero"].mT).mT[..., :rows, :].contiguous()
        else:
            ours["zero"] = torch.full_like(ours["scale"], SYMMETRIC_ZERO, dtype=torch.uint8)
    else:
        ours["scale"] = fields["scale"].mT.contiguous()
        if dialect is Dialect.AWQ:
            ours["codes"] = pack_nibbles(_unpack_awq(fields["codes"]).mT)
            ours["zero"] = _unpack_awq(fields["zero"]).mT.contiguous()
        else:
            ours["codes"] = _words_to_bytes(fields["codes"].mT)
            ours["zero"] = _unpack_words(fields["zero"]).mT.contiguous() + _offset(dialect) & 15
    if "order" in fields and not torch.equal(fields["order"], _count_up(ours)):
        ours["order"] = fields["order"]
    return ours


def pack(dialect: Dialect, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The dialect's fields; the inverse of `unpack`."""
    if dialect is Dialect.CT_INT4:
        fields = {"codes": _bytes_to_words(ours["codes"]), "scale": ours["scale"]}
        if bool((ours["zero"] != SYMMETRIC_ZERO).any()):
            padding = (0, -ours["zero"].shape[-2] % CODES_PER_WORD)
            fields["zero"] = _pack_words(torch.nn.functional.pad(ours["zero"].mT, padding)).mT
        return fields | ({"order": ours["order"]} if "order" in ours else {})
    scale = ours["scale"].mT
    if dialect is Dialect.AWQ:
        codes = _pack_awq(unpack_nibbles(ours["codes"]).mT)
        return {"codes": codes, "scale": scale, "zero": _pack_awq(ours["zero"].mT)}
    zero = _pack_words(ours["zero"].mT - _offset(dialect) & 15)
    return {
        "codes": _bytes_to_words(ours["codes"]).mT,
        "scale": scale,
        "zero": zero,
        "order": ours.get("order", _count_up(ours)),
    }


def _offset(dialect: Dialect) -> int:
    """What GPTQ's first version takes off each zero point, modulo 16."""
    return 1 if dialect is Dialect.GPTQ else 0


def _count_up(ours: Mapping[str, Tensor]) -> Tensor:
    """The g_idx of columns in their natural order, int32 `[..., K]`."""
    *lead, columns = (*ours["codes"].shape[:-2], 2 * ours["codes"].shape[-1])
    group = columns // ours["scale"].shape[-1]
    counted = torch.arange(columns, dtype=torch.int32, device=ours["codes"].device) // group
    return counted.expand(*lead, columns)


def _words_to_bytes(words: Tensor) -> Tensor:
    """I32 words `[..., W]` as bytes `[..., 4 W]`, two codes each, in our order."""
    return words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)


def _bytes_to_words(packed: Tensor) -> Tensor:
    return packed.flatten().view(torch.int32).view(*packed.shape[:-1], -1)


def _unpack_words(words: Tensor) -> Tensor:
    """I32 words `[..., W]` as codes `[..., 8 W]`, uint8 0..15."""
    return unpack_nibbles(_words_to_bytes(words))


def _pack_words(codes: Tensor) -> Tensor:
    return _bytes_to_words(pack_nibbles(codes))


def _unpack_awq(words: Tensor) -> Tensor:
    """AWQ words `[..., W]` as codes `[..., 8 W]`, in the order of the output rows they belong to."""
    return torch.unflatten(_unpack_words(words), -1, (-1, CODES_PER_WORD))[..., _AWQ_POSITION_OF].flatten(-2)


def _pack_awq(codes: Tensor) -> Tensor:
    return _pack_words(torch.unflatten(codes, -1, (-1, CODES_PER_WORD))[..., _AWQ_ELEMENT_AT].flatten(-2))
