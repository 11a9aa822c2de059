"""What part of a model a tensor belongs to, told from its name."""

from __future__ import annotations

import fnmatch
import re
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from muster.checkpoint.names import Names


class Kind(StrEnum):
    """Parts of a model that are counted together."""

    ROUTED = "routed experts"
    SHARED = "shared experts"
    DENSE = "dense feed-forward"
    ATTENTION = "attention"
    DELTA = "linear attention"
    INDEXER = "indexer"
    ROUTER = "router"
    NORM = "norms"
    EMBEDDING = "embedding"
    HEAD = "output head"
    JOIN = "draft join"
    VISION = "vision"
    OTHER = "other"


class Place(NamedTuple):
    """Where a tensor belongs.

    Attributes:
        kind: the part.
        layer: the decoder layer; draft layers count on from the decoder's depth; None outside layers.
        draft: whether it belongs to the draft (MTP) part.
    """

    kind: Kind
    layer: int | None = None
    draft: bool = False


_NORM_PARTS = re.compile(r"(\w*norm\w*|shared_head\.norm)(\.\w+)?")
_JOINS = ("fc", "eh_proj")


class Places:
    """The places of one model's tensors."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._depth = len(names.spec.layers)

    def of(self, tensor: str) -> Place:
        """The place of a tensor (or module), by its full name."""
        names = self._names
        if self._vision is not None and self._vision.match(tensor):
            return Place(Kind.VISION)
        for module, kind in ((names.embed, Kind.EMBEDDING), (names.head, Kind.HEAD), (names.norm, Kind.NORM)):
            if tensor == module or tensor.startswith(f"{module}."):
                return Place(kind)
        inside = self._layer.match(tensor)
        if inside is not None:
            layer = int(inside["layer"]) + (self._depth if inside["draft"] else 0)
            return Place(self._part(tensor[inside.end() :]), layer, layer >= self._depth)
        if tensor.startswith("mtp."):
            return Place(self._part(tensor.removeprefix("mtp.")), self._depth, True)
        return Place(Kind.OTHER)

    @cached_property
    def _vision(self) -> re.Pattern[str] | None:
        waived = [waiver.pattern for waiver in self._names.family.waived]
        return re.compile("|".join(map(fnmatch.translate, waived))) if waived else None

    @cached_property
    def _layer(self) -> re.Pattern[str]:
        main = re.escape(f"{self._names.spec.prefix}layers.")
        return re.compile(rf"(?:(?P<draft>mtp\.layers\.)|{main})(?P<layer>[0-9]{{1,5}})\.")

    def _part(self, tail: str) -> Kind:
        """The kind of a tensor by its name inside its layer."""
        for way in self._names.family.experts:
            if tail.startswith(f"{way.experts}."):
                return Kind.ROUTED
            if tail.startswith((f"{way.shared}.", f"{way.shared_gate}.")) or tail == way.shared_gate:
                return Kind.SHARED
            if tail == way.router or tail.startswith(f"{way.router}.") or tail == way.selection_bias:
                return Kind.ROUTER
        head, _, rest = tail.partition(".")
        if rest.startswith("indexer."):
            return Kind.INDEXER
        if _NORM_PARTS.fullmatch(rest if head in ("self_attn", "linear_attn") else tail):
            return Kind.NORM
        if tail.startswith(("embed_tokens", "shared_head.head")):
            return Kind.EMBEDDING if head == "embed_tokens" else Kind.HEAD
        return _BY_HEAD.get(head, Kind.JOIN if head in _JOINS else Kind.OTHER)


_BY_HEAD = {"self_attn": Kind.ATTENTION, "linear_attn": Kind.DELTA, "mlp": Kind.DENSE}
