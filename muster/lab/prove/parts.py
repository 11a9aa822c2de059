"""The parts of a checkpoint that need a proof: every distinct problem that a run builds, from the headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from muster.checkpoint.loader import Loader
from muster.checkpoint.quant import Stored
from muster.checkpoint.spec import DenseSpec, GroupedAttention, LayerSpec, MoESpec
from muster.device import Device
from muster.errors import CheckpointError, UsageError
from muster.formats.spec import Format
from muster.gemm.problem import LinearProblem
from muster.model.problem import moe_problem
from muster.moe.problem import Activation, MoEProblem, RoutingRule
from muster.plan import Role as Role

Problem = MoEProblem | LinearProblem


@dataclass(frozen=True)
class Part:
    """A problem of a checkpoint.

    Attributes:
        role: what it does there.
        problem: what must be computed.
        module: the first module of the checkpoint that has this problem; of a fused linear the first of its modules.
        uses: how many layers or linears have it.
    """

    role: Role
    problem: Problem
    module: str
    uses: int

    @property
    def key(self) -> str:
        """What is proven: equal for equal roles and problems, different for different ones."""
        words = _expert_words if isinstance(self.problem, MoEProblem) else _linear_words
        return " ".join((self.role.value, *words(self.problem)))  # type: ignore[arg-type]


def _expert_words(p: MoEProblem) -> Iterator[str]:
    yield from (p.weights.name, f"E{p.experts}")
    if p.local_experts != p.experts:
        yield f"L{p.local_experts}@{p.first_expert}"
    yield from (f"K{p.routing.top_k}", f"D{p.hidden}", f"F{p.inner}", _activation_word(p.activation), p.dtype)
    flags = {"bias": p.bias, "act-order": p.act_order, "weight-on-input": p.router_weight_on_input}
    yield from (flag for flag, holds in flags.items() if holds)
    yield from _routing_words(p.routing)


def _activation_word(activation: Activation) -> str:
    standard = Activation(activation.name)
    limit = "" if activation.limit is None else f"<{activation.limit:g}"
    return activation.name + limit + ("" if activation.alpha == standard.alpha else f"*{activation.alpha:g}")


def _routing_words(rule: RoutingRule) -> Iterator[str]:
    """What a rule has beyond softmax over all experts, renormalised."""
    standard = RoutingRule(rule.top_k)
    if rule.scoring != standard.scoring:
        yield rule.scoring
    if rule.groups != 1 or rule.groups_kept != 1:
        yield f"groups={rule.groups_kept}/{rule.groups}"
    flags = {
        "softmax-after": rule.softmax_after_top_k,
        "selection-bias": rule.selection_bias,
        "as-scored": not rule.renormalise,
    }
    yield from (flag for flag, holds in flags.items() if holds)
    if rule.scaling_factor != standard.scaling_factor:
        yield f"scaled={rule.scaling_factor:g}"
    if rule.epsilon != standard.epsilon:
        yield f"epsilon={rule.epsilon:g}"


def _linear_words(p: LinearProblem) -> Iterator[str]:
    yield from (p.weights.name, f"N{p.rows}", f"K{p.columns}", p.dtype)
    flags = {"bias": p.bias, "act-order": p.act_order}
    yield from (flag for flag, holds in flags.items() if holds)


@dataclass(frozen=True)
class Product:
    """Modules over the same columns that the model multiplies by together where their formats allow it.

    Attributes:
        modules: their names, with the rows that each has.
        columns: K.
        bias: each has a bias.
    """

    modules: Mapping[str, int]
    columns: int
    bias: bool = False


def parts(loader: Loader, device: Device, tp: int = 1, ep: int = 1, rank: int = 0) -> tuple[Part, ...]:
    """The distinct problems that a run of this checkpoint on `device` builds, in the order of the layers.

    Draft layers that the files hold are among them. Linears are those of grouped-query attention, of dense
    feed-forward layers and of the head, which are never split over ranks; the router is computed in float32 by torch.

    Args:
        loader: the opened checkpoint; only headers and column orders (`g_idx`) are read.
        device: decides the dtype of activations.
        tp: ranks that each expert's inner width is split over.
        ep: ranks that the experts are split over.
        rank: whose experts, in [0, ep).

    Raises:
        CheckpointError: matrices that the files lack, or experts in more than one format; all of them.
        UsageError: a split that does not divide the experts or their width.
    """
    found: dict[tuple[Role, Problem], Part] = {}
    problems: list[CheckpointError] = []
    for role, problem, module in _all(loader, device, (tp, ep, rank), problems):
        known = found.get((role, problem))
        found[role, problem] = replace(known, uses=known.uses + 1) if known else Part(role, problem, module, 1)
    error = CheckpointError.gather(f"checkpoint {loader.index.directory}", problems)
    if error is not None:
        raise error
    return tuple(found.values())


def _all(
    loader: Loader, device: Device, ranks: tuple[int, int, int], problems: list[CheckpointError]
) -> Iterator[tuple[Role, Problem, str]]:
    for role, layer, moe in expert_layers(loader):
        problem = _expert_problem(loader, device, layer, moe, problems)
        if problem is not None:
            yield role, on_rank(problem, *ranks), expert_module(loader, layer)
    for product in products(loader):
        missing = [module for module in product.modules if module not in loader.survey.modules]
        problems += [CheckpointError(f"{module}.weight", found="no such tensor") for module in missing]
        if not missing:
            yield from ((Role.LINEARS, *linear) for linear in _linears(loader, device, product))


def on_rank(problem: MoEProblem, tp: int, ep: int, rank: int) -> MoEProblem:
    """The problem of one rank: a slice of every expert's inner width, and the experts that lie there.

    Raises:
        UsageError: a split that leaves a rest, all of them.
    """
    unit = (problem.weights.block or (1, 1))[1] or 1
    checks = {
        ("tensor-parallel ranks", f"{tp} for an inner width of {problem.inner}", "a divisor of it"): (
            tp < 1 or problem.inner % tp
        ),
        ("inner width per rank", f"{problem.inner}/{tp}", f"a multiple of {unit} for {problem.weights.name}"): (
            tp > 1 and problem.inner % (tp * unit)
        ),
        ("expert-parallel ranks", f"{ep} for {problem.experts} experts", "a divisor of it"): (
            ep < 1 or problem.experts % ep
        ),
        ("expert-parallel rank", str(rank), f"0 to {ep - 1}"): not 0 <= rank < ep,
    }
    wrong = [UsageError(thing, found=f, expected=e) for (thing, f, e), breaks in checks.items() if breaks]
    error = UsageError.gather("split over ranks", wrong)
    if error is not None:
        raise error
    local = problem.experts // ep
    return replace(
        problem, inner=problem.inner // tp, local_experts=local, first_expert=problem.first_expert + rank * local
    )


def expert_layers(loader: Loader) -> Iterator[tuple[Role, int, MoESpec]]:
    """Every expert layer by number: those of the decoder, then the draft layers whose experts the files hold."""
    layers: tuple[LayerSpec, ...] = loader.spec.layers
    for number, layer in enumerate(layers):
        if isinstance(layer.feed_forward, MoESpec):
            yield Role.EXPERTS, number, layer.feed_forward
    last = layers[-1].feed_forward
    if isinstance(last, MoESpec):
        for number in range(len(layers), len(layers) + loader.spec.draft_layers):
            if all(module in loader.survey.modules for module in expert_matrices(loader, number, last)):
                yield Role.DRAFT, number, last


def expert_module(loader: Loader, layer: int) -> str:
    """The module that holds the experts of a layer."""
    root, paths = loader.expert_layer(layer)
    return f"{root}.{paths.experts}"


def expert_matrices(loader: Loader, layer: int, moe: MoESpec) -> tuple[str, ...]:
    """The modules of the first expert's matrices, down last, or of all experts' where they are stacked."""
    _, paths = loader.expert_layer(layer)
    experts = expert_module(loader, layer)
    stacked = (f"{experts}.{paths.gate_up_stacked}", f"{experts}.{paths.down_stacked}")
    if loader.survey.modules.keys() & set(stacked):
        return stacked
    names = (paths.gate, paths.up, paths.down) if moe.activation != "relu2" else (paths.up, paths.down)
    return tuple(f"{experts}.0.{name}" for name in names)


def _expert_problem(
    loader: Loader, device: Device, layer: int, moe: MoESpec, problems: list[CheckpointError]
) -> MoEProblem | None:
    modules = expert_matrices(loader, layer, moe)
    missing = [module for module in modules if module not in loader.survey.modules]
    problems += [CheckpointError(f"{module}.weight", found="no such tensor") for module in missing]
    if missing:
        return None
    formats = dict.fromkeys(loader.survey.modules[module].format.name for module in modules)
    if len(formats) > 1:
        problems.append(
            CheckpointError(expert_module(loader, layer), found=" and ".join(formats), expected="one format")
        )
        return None
    act_order = any(
        _order(loader, stored) is not None
        for expert in range(moe.experts)
        for module in modules
        if (stored := loader.survey.modules.get(module.replace(".0.", f".{expert}.") if expert else module))
    )
    return moe_problem(moe, loader.spec.hidden, loader.survey.modules[modules[0]].format, device, act_order)


def products(loader: Loader) -> Iterator[Product]:
    """Every product of the decoder that is a dense linear, in the order in which the model is built."""
    spec = loader.spec
    for number, layer in enumerate(spec.layers):
        root = loader.names.layer(number)
        if isinstance(layer.attention, GroupedAttention):
            yield from _attention(f"{root}.self_attn", layer.attention, spec.hidden)
        if isinstance(layer.feed_forward, DenseSpec):
            block, inner = f"{root}.mlp", layer.feed_forward.inner
            yield Product({f"{block}.gate_proj": inner, f"{block}.up_proj": inner}, spec.hidden)
            yield Product({f"{block}.down_proj": spec.hidden}, inner)
    head = loader.names.embed if spec.tied_embeddings else loader.names.head
    yield Product({head: spec.vocab}, spec.hidden)


def _attention(block: str, spec: GroupedAttention, hidden: int) -> Iterator[Product]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = {f"{block}.q_proj": queries, f"{block}.k_proj": keys, f"{block}.v_proj": keys}
    yield Product(qkv, hidden, spec.qkv_bias)
    yield Product({f"{block}.o_proj": hidden}, queries, spec.output_bias)


def _linears(loader: Loader, device: Device, product: Product) -> Iterator[tuple[LinearProblem, str]]:
    """The problem of a product, or one for each of its modules where they cannot be one matrix."""
    modules = tuple(product.modules)
    groups = [modules] if fuses(loader, product) else [(module,) for module in modules]
    for group in groups:
        first = loader.survey.modules[group[0]]
        rows = sum(product.modules[module] for module in group)
        act_order = _order(loader, first) is not None
        yield LinearProblem(rows, product.columns, first.format, device.activations, product.bias, act_order), group[0]


def fuses(loader: Loader, product: Product) -> bool:
    """Whether `concat_rows` makes one matrix of the product's modules, decided from headers and column orders."""
    stored = [loader.survey.modules[module] for module in product.modules]
    block: tuple[int, int] = stored[0].format.block or (1, 1)
    whole_blocks = not block[0] or all(rows % block[0] == 0 for rows in list(product.modules.values())[:-1])
    return whole_blocks and len({_kind(loader, module) for module in stored}) == 1


def _kind(loader: Loader, stored: Stored) -> tuple[Format, frozenset[tuple[str, str, bool]], tuple[int, ...] | None]:
    """What must agree for matrices to be fused: format, kinds of scales, column order."""
    present = [part for part in stored.dialect.parts if part.name in stored.parts and part.is_scale]
    dtypes = {part.name: loader.index.entry(stored.parts[part.name]).dtype for part in present}
    # Both spellings of an e8m0 scale are read as bytes.
    scales = {(part.holds, dtypes[part.name].replace("F8_E8M0", "U8"), part.divides) for part in present}
    return stored.format, frozenset(scales), _order(loader, stored)


def _order(loader: Loader, stored: Stored) -> tuple[int, ...] | None:
    """The scale group of each column where a matrix has them in another order than counting up."""
    part = next((part for part in stored.dialect.parts if part.holds == "order" and part.name in stored.parts), None)
    if part is None or stored.format.block is None:
        return None
    order: list[int] = loader.index.read(stored.parts[part.name]).flatten().tolist()
    columns, group = stored.shape[-1], stored.format.block[1]
    return None if order == [column % columns // group for column in range(len(order))] else tuple(order)
