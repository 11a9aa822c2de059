"""A model over several GPUs: what each one holds, which splits are legal, and what padding would cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from muster.checkpoint.inventory import Inventory, Module
from muster.checkpoint.kinds import Kind
from muster.checkpoint.spec import GatedDelta, GroupedAttention, LatentAttention, ModelSpec, MoESpec
from muster.errors import UsageError

MOST_GPUS = 1024


@dataclass(frozen=True)
class Split:
    """How many ways a model is cut.

    Attributes:
        tensor: ranks that share every attention head set, dense layer and output head.
        expert: groups of ranks that share the experts; with fewer groups than GPUs each expert's inner width is cut
            over the ranks of a group, with more groups than `tensor` the attention is copied (data-parallel).
    """

    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        low, high = sorted((self.tensor, self.expert))
        if low < 1 or high > MOST_GPUS or high % low:
            raise UsageError(
                "--tp and --ep",
                found=f"{self.tensor} and {self.expert}",
                expected=f"whole numbers from 1 to {MOST_GPUS}, one a multiple of the other",
            )

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return max(self.tensor, self.expert)

    @property
    def replicas(self) -> int:
        """Copies of the attention, each with sequences of its own."""
        return self.gpus // self.tensor

    @property
    def expert_cuts(self) -> int:
        """Ranks that one expert's inner width is cut over."""
        return self.gpus // self.expert

    def __str__(self) -> str:
        if self.expert == 1:
            return f"tensor {self.tensor}"
        return f"tensor {self.tensor}, expert {self.expert}"


class Hindrance(NamedTuple):
    """Something that does not divide.

    Attributes:
        reason: what, with the numbers.
        remedy: what would make it fit, empty when only another split does.
        price: bytes that the remedy adds over all GPUs.
        harmless: engines do it by themselves; the split is legal, at this price.
    """

    reason: str
    remedy: str = ""
    price: int = 0
    harmless: bool = False


def hindrances(inventory: Inventory, split: Split) -> tuple[Hindrance, ...]:
    """Everything in a model that a split does not divide evenly, each once."""
    spec = inventory.spec
    found: dict[Hindrance, None] = {}
    for layer in dict.fromkeys(layer.attention for layer in spec.layers):
        found.update(dict.fromkeys(_attention(layer, inventory, split.tensor)))
    found.update(dict.fromkeys(_experts(inventory, split)))
    found.update(dict.fromkeys(_widths(inventory, split)))
    found.update(dict.fromkeys(_vocabulary(inventory, split.tensor)))
    return tuple(found)


def legal(inventory: Inventory, split: Split) -> bool:
    """Whether engines take the split as it is."""
    return all(hindrance.harmless for hindrance in hindrances(inventory, split))


def nearest(inventory: Inventory, split: Split) -> tuple[Split, ...]:
    """Legal splits close to one that is not: the same GPUs with whole experts, then the next fewer and next more."""
    options = [Split(split.tensor, split.gpus), Split(1, split.gpus)]
    fewer = [Split(n, 1) for n in range(split.gpus - 1, 0, -1)]
    more = [Split(n, 1) for n in range(split.gpus + 1, 2 * split.gpus + 1)]
    firsts = (next((one for one in several if legal(inventory, one)), None) for several in (options, fewer, more))
    return tuple(one for one in dict.fromkeys(firsts) if one is not None and one != split)


def share(module: Module, spec: ModelSpec, split: Split) -> Fraction:
    """The part of a module's bytes that the fullest GPU holds.

    What engines copy to every rank counts whole: routers, norms, low-rank inputs of latent attention, indexers, the
    draft layer's join, key-value heads beyond their number. Vision towers and a draft layer's second embedding and
    head are not loaded at all.
    """
    kind, part = module.kind, module.name.rpartition(".")[2]
    if kind is Kind.VISION or (module.draft and kind in (Kind.EMBEDDING, Kind.HEAD)):
        return Fraction(0)
    if kind is Kind.ROUTED:
        return _routed_share(spec, split)
    if kind in (Kind.ROUTER, Kind.NORM, Kind.INDEXER, Kind.JOIN, Kind.OTHER) or part in _COPIED:
        return Fraction(1)
    if kind is Kind.ATTENTION and part in ("k_proj", "v_proj"):
        return Fraction(1, min(split.tensor, _kv_heads(spec)))
    return Fraction(1, split.tensor)


_COPIED = ("q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate")


def _kv_heads(spec: ModelSpec) -> int:
    attention = (layer.attention for layer in spec.layers)
    return max((one.kv_heads for one in attention if isinstance(one, GroupedAttention)), default=1)


def _routed_share(spec: ModelSpec, split: Split) -> Fraction:
    experts = next(iter(_moe_sizes(spec)), (1, 1))[0]
    return Fraction(-(-experts // split.expert), experts * split.expert_cuts)


def _moe_sizes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Experts and inner width of the expert layers, each pair once."""
    layers = (layer.feed_forward for layer in spec.layers)
    return tuple(dict.fromkeys((layer.experts, layer.inner) for layer in layers if isinstance(layer, MoESpec)))


def _attention(
    attention: GroupedAttention | LatentAttention | GatedDelta, inventory: Inventory, ranks: int
) -> Iterator[Hindrance]:
    if isinstance(attention, GatedDelta):
        if attention.key_heads % ranks:
            yield Hindrance(f"{attention.key_heads} linear-attention key heads over {ranks} ranks")
        return
    if attention.heads % ranks:
        yield Hindrance(f"{attention.heads} attention heads over {ranks} ranks")
    if not isinstance(attention, GroupedAttention):
        return
    kv = attention.kv_heads
    if ranks > kv and ranks % kv == 0:
        modules = _modules(inventory, Kind.ATTENTION, ("k_proj", "v_proj"))
        price = sum(module.nbytes for module in modules) * (ranks // kv - 1)
        yield Hindrance(f"{kv} key-value heads over {ranks} ranks", f"{ranks // kv} copies of each", price, True)
    elif kv % ranks:
        yield Hindrance(f"{kv} key-value heads over {ranks} ranks")


def _experts(inventory: Inventory, split: Split) -> Iterator[Hindrance]:
    for experts, _ in _moe_sizes(inventory.spec):
        if experts % split.expert:
            per_group = -(-experts // split.expert)
            routed = sum(module.nbytes for module in _modules(inventory, Kind.ROUTED))
            price = routed * (per_group * split.expert - experts) // experts
            remedy = f"{per_group} places in each, {per_group * split.expert - experts} empty"
            yield Hindrance(f"{experts} experts over {split.expert} groups", remedy, price)


_GATED = {Kind.ROUTED: "expert", Kind.SHARED: "shared expert", Kind.DENSE: "dense layer"}


def _widths(inventory: Inventory, split: Split) -> Iterator[Hindrance]:
    """Inner widths that a cut would tear across scale blocks."""
    for kind, noun in _GATED.items():
        cuts = split.expert_cuts if kind is Kind.ROUTED else split.tensor
        modules = [module for module in _modules(inventory, kind) if module.name.rpartition(".")[2] not in _COPIED]
        for inner, alike in _by_inner(modules, inventory.spec.hidden).items():
            block = _block(alike, inner)
            if inner % (cuts * block) == 0 or cuts == 1:
                continue
            padded = -(-inner // (cuts * block)) * cuts * block
            unit = f" in blocks of {block}" if block > 1 else ""
            stored = " and ".join(sorted({module.stored for module in alike}))
            each = f"{inner / cuts:g}" if inner % cuts else str(inner // cuts)
            yield Hindrance(
                f"{noun} width {inner:,} ({stored}) over {cuts} ranks{unit}: {each} each",
                f"pad it to {padded:,}, {padded // cuts} each",
                sum(module.nbytes for module in alike) * (padded - inner) // inner,
            )


def _by_inner(modules: Iterable[Module], hidden: int) -> dict[int, list[Module]]:
    """Feed-forward modules by their inner width, the side of the matrix that is not the model's."""
    widths: dict[int, list[Module]] = {}
    for module in modules:
        *_, rows, columns = module.shape if len(module.shape) > 1 else (1, *module.shape)
        inner = columns if _is_down(module) else rows // 2 if "gate_up" in module.name else rows
        if module.format is not None and hidden == (rows if _is_down(module) else columns):
            widths.setdefault(inner, []).append(module)
    return widths


def _is_down(module: Module) -> bool:
    """Whether the inner width is a matrix's columns."""
    return module.name.rpartition(".")[2] in ("down_proj", "w2")


def _block(modules: Iterable[Module], inner: int) -> int:
    """The number that a rank's inner width must be a multiple of, for whole scale blocks in all matrices."""
    blocks = [1]
    for module in modules:
        if module.format is None or module.format.block is None:
            continue
        rows, columns = module.format.block
        across = columns if _is_down(module) else rows
        blocks.append(across if across and across < inner else 1)
    return lcm(*blocks)


def _vocabulary(inventory: Inventory, ranks: int) -> Iterator[Hindrance]:
    vocab = inventory.spec.vocab
    if vocab % ranks:
        padded = -(-vocab // (64 * ranks)) * 64 * ranks
        tables = [module for module in inventory.modules.values() if module.kind in (Kind.EMBEDDING, Kind.HEAD)]
        price = sum(module.nbytes for module in tables if not module.draft) * (padded - vocab) // vocab
        yield Hindrance(f"{vocab:,} tokens over {ranks} ranks", f"pad to {padded:,}", price, True)


def _modules(inventory: Inventory, kind: Kind, parts: tuple[str, ...] = ()) -> list[Module]:
    return [
        module
        for module in inventory.modules.values()
        if module.kind is kind and (not parts or module.name.rpartition(".")[2] in parts)
    ]
