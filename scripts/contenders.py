"""Who takes part in a comparison of expert layers: our backends and other engines', each bound to copies of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from layers import copied
from peer import Call
from peers import PEERS
from torch import Tensor

from muster.device import Device, free_memory
from muster.formats.rounding import Rounding
from muster.lab.prove.tolerance import rounding_of
from muster.moe.backend import Routed
from muster.moe.experts import Experts, bind
from muster.moe.problem import MoEProblem
from muster.moe.registry import backends
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace

ROOM = 16 << 30
"""Bytes of memory left for activations and graphs."""


class Bound(Protocol):
    """One copy of the weights in the layout that a contender reads."""

    def call(self, x_TD: Tensor, routed: Routed, out_TD: Tensor) -> Call:
        """The layer on these tokens; the result may lie in `out_TD`."""
        ...


@dataclass(frozen=True)
class OurLayer:
    """A backend's. All its copies share a workspace, as the layers of a model do."""

    experts: Experts
    workspace: Workspace

    def call(self, x_TD: Tensor, routed: Routed, out_TD: Tensor) -> Call:
        def call() -> Tensor:
            self.experts.run(x_TD, routed, out_TD, self.workspace)
            return out_TD

        return call


@dataclass
class Contender:
    """One that takes part.

    Attributes:
        name: what records call it.
        bind: makes its layout of one copy of the weights.
        rounding: where it rounds; the judge follows it.
        peer: it is another engine's.
        graph_safe: its calls may be captured in a CUDA graph.
        max_tokens: the most it is meant for; None: any.
        scratch: holds nothing between two calls.
        layers: one for each copy of the weights.
    """

    name: str
    bind: Callable[[ExpertWeights], Bound]
    rounding: Rounding
    peer: bool = False
    graph_safe: bool = True
    max_tokens: int | None = None
    scratch: Workspace = field(default_factory=Workspace)
    layers: list[Bound] = field(default_factory=list)


def ours(
    problem: MoEProblem, device: Device, names: Sequence[str] | None = None
) -> tuple[list[Contender], Mapping[str, str]]:
    """The backends of those names that can compute it, and why the others cannot; None: all made for such a device."""
    able, declined = [], {}
    for name in made_for(device) if names is None else names:
        entry = backends().get(name)
        answer = entry.supports(problem, device)
        if answer is not None:
            declined[name] = str(answer)
            continue
        facts, scratch = entry.facts, Workspace(device.torch_device)
        binding = partial(_our_layer, name, problem, scratch)
        rounding = rounding_of(name, problem)
        able.append(Contender(name, binding, rounding, False, facts.graph_safe, facts.max_tokens, scratch))
    return able, declined


def made_for(device: Device) -> list[str]:
    """The names of ours that run on such a device, without the reference."""
    return [name for name in backends().names() if name != "torch" and device.key in backends().get(name).facts.devices]


def theirs(
    problem: MoEProblem, counts: Sequence[int], names: Sequence[str] | None = None
) -> tuple[list[Contender], Mapping[str, str]]:
    """The peers of those names (None: all) that are made for the format, and why others of these cannot."""
    able, declined = [], {}
    for peer in PEERS:
        if problem.weights.name not in peer.weights or (names is not None and peer.name not in names):
            continue
        answer = peer.declines(problem)
        if answer is None:
            able.append(Contender(peer.name, partial(peer.bind, problem, counts), peer.rounding, peer=True))
        else:
            declined[peer.name] = str(answer)
    return able, declined


def hold(contenders: Sequence[Contender], weights: ExpertWeights, wanted: int, device: torch.device) -> dict[str, str]:
    """Binds each contender to `wanted` copies of the weights, or to as many as there is memory for, all alike.

    Returns:
        Who could not be bound, with the reason; it holds no copy then.
    """
    failed: dict[str, str] = {}
    _tidy(device)
    before = free_memory(device)
    for number in range(wanted):
        if number and free_memory(device) - ROOM < (before - free_memory(device)) / number + weights.nbytes:
            break
        copy = copied(weights) if number else weights
        for contender in contenders:
            if contender.name in failed:
                continue
            try:
                contender.layers.append(contender.bind(copy))
            except Exception as error:
                failed[contender.name] = reason(error)
                contender.layers.clear()
        _tidy(device)
    return failed


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _tidy(device: torch.device) -> None:
    """What was freed is free for all, and counts as such."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _our_layer(name: str, problem: MoEProblem, scratch: Workspace, weights: ExpertWeights) -> Bound:
    return OurLayer(bind(name, problem, weights), scratch)
