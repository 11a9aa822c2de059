"""The parts of a checkpoint as it is stored, module by module, from an inventory: no weights and no files are needed.

`parts` of `muster.lab.prove.parts` says what a run would build, for families that run; this says it for every family
that can be read, without fusing what stands side by side. The two agree on experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Literal

from muster.checkpoint.inventory import Inventory, Module
from muster.checkpoint.kinds import Kind
from muster.checkpoint.spec import MoESpec
from muster.device import Device
from muster.formats.spec import FORMATS, MXFP4, Format
from muster.gemm.problem import LinearProblem
from muster.lab.prove.parts import Part, Problem, Role
from muster.model.problem import moe_problem
from muster.moe.problem import Activation, MoEProblem, RoutingRule

_LINEARS = (Kind.SHARED, Kind.DENSE, Kind.ATTENTION, Kind.DELTA, Kind.INDEXER, Kind.JOIN, Kind.HEAD)


def stored_parts(inventory: Inventory, device: Device) -> tuple[Part, ...]:
    """The distinct problems of all modules that hold a matrix to multiply by, in the order of the inventory.

    Column orders of int4 matrices (`g_idx`) are contents, not headers, and taken for the usual one; the router is
    computed in float32 by torch and is not among them.
    """
    found: dict[tuple[Role, Problem], Part] = {}
    for role, problem, module, uses in _all(inventory, device):
        known = found.get((role, problem))
        found[role, problem] = replace(known, uses=known.uses + uses) if known else Part(role, problem, module, uses)
    return tuple(found.values())


def _all(inventory: Inventory, device: Device) -> Iterator[tuple[Role, Problem, str, int]]:
    layers: set[tuple[int, str]] = set()
    for module in inventory.modules.values():
        if module.format is None:
            continue
        if module.kind is Kind.ROUTED and module.layer is not None:
            if not module.name.endswith("_bias") and (module.layer, module.stored) not in layers:
                layers.add((module.layer, module.stored))
                yield from _experts(inventory, module, module.format, device)
        elif _multiplied(inventory, module):
            yield Role.LINEARS, _linear(module, module.format, device), module.name, module.count


def _experts(
    inventory: Inventory, module: Module, weights: Format, device: Device
) -> Iterator[tuple[Role, Problem, str, int]]:
    layers = inventory.spec.layers
    moe = layers[min(module.layer or 0, len(layers) - 1)].feed_forward
    if isinstance(moe, MoESpec):
        problem = moe_problem(moe, inventory.spec.hidden, weights, device)
        yield Role.DRAFT if module.draft else Role.EXPERTS, problem, module.name, 1


def _multiplied(inventory: Inventory, module: Module) -> bool:
    head = module.kind is Kind.EMBEDDING and inventory.spec.tied_embeddings
    return len(module.shape) == 2 and (module.kind in _LINEARS or head)


def _linear(module: Module, weights: Format, device: Device) -> LinearProblem:
    rows, columns = module.shape
    return LinearProblem(
        rows,
        columns,
        weights,
        dtype=device.activations,
        bias=module.parameters > module.count * prod(module.shape),
    )


_RULE = RoutingRule(top_k=8)
_EXPERTS = MoEProblem(hidden=4096, inner=1024, experts=128, routing=_RULE, local_experts=128)
_GPT_OSS = replace(
    _EXPERTS,
    weights=MXFP4,
    activation=Activation("swiglu-oai", limit=7.0),
    bias=True,
    routing=replace(_RULE, softmax_after_top_k=True),
)


def plain_parts(device: Device) -> tuple[Part, ...]:
    """A layer of every format with nothing special about it, for a table that is about no model in particular.

    Experts with silu, softmax routing, no biases, all on one rank, widths that suit every kernel; in MXFP4 those of
    gpt-oss too. Draft experts are the same, unquantised. Linears without a bias.
    """
    experts = [Part(Role.EXPERTS, _plain(format, device), format.name, 1) for format in FORMATS.values()]
    gpt_oss = Part(Role.EXPERTS, replace(_GPT_OSS, dtype=_dtype(MXFP4, device)), "mxfp4 (gpt-oss)", 1)
    draft = Part(Role.DRAFT, _plain(FORMATS["bf16"], device), "bf16", 1)
    linears = [
        Part(Role.LINEARS, LinearProblem(4096, 4096, format, _dtype(format, device)), format.name, 1)
        for format in FORMATS.values()
    ]
    return (*experts, gpt_oss, draft, *linears)


def _plain(format: Format, device: Device) -> MoEProblem:
    return replace(_EXPERTS, weights=format, dtype=_dtype(format, device))


def _dtype(format: Format, device: Device) -> Literal["bf16", "f16", "f32"]:
    if device.key == "cpu" or format.name == "f32":
        return "f32"
    return "f16" if format.name == "f16" else "bf16"
