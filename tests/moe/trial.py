"""One backend on one case, run with poisoned outputs, guard bands and a poisoned workspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from muster import device
from muster.contract import Decline
from muster.lab.prove.tolerance import rounding_of
from muster.moe.backend import Routed
from muster.moe.experts import Experts, bind
from muster.moe.reference import expert_layer
from muster.moe.registry import backends
from muster.workspace import Workspace

from .cases import Case, Inputs, build, nothing_here, sentinels

POISON = {torch.float32: 0x7FC0DEAD, torch.bfloat16: 0x7FDE, torch.float16: 0x7FDE}
"""NaNs with payloads that no computation returns."""
GUARD = 1024


@dataclass(frozen=True, eq=False)
class Trial:
    """What a backend did on a case.

    Attributes:
        inputs: the case's tensors.
        truth_TD: the float64 reference, rounded where the backend says it rounds.
        outs: results of three runs: a fresh workspace, the same one warm, the same one poisoned.
        unwritten: elements of the outputs still poisoned.
        guards_hurt: elements written outside the outputs.
        inputs_changed: names of the inputs that were modified.
        grown: workspace buffers that are new or larger after the warm runs.
        experts: the backend, bound to the weights.
    """

    inputs: Inputs
    truth_TD: Tensor
    outs: tuple[Tensor, ...]
    unwritten: int
    guards_hurt: int
    inputs_changed: tuple[str, ...]
    grown: int
    experts: Experts


def decline(backend: str, case: Case) -> Decline | None:
    """Why the backend does not run the case: what it answers itself, or a token trait it does not declare."""
    entry = backends().get(backend)
    answer = entry.supports(case.problem, device.cpu())
    if answer is not None:
        return answer
    return Decline.when(
        {
            "needs at least one token": case.tokens == 0 and not entry.facts.zero_tokens,
            "takes no sentinel ids": case.pattern in (sentinels, nothing_here) and not entry.facts.sentinel_ids,
        }
    )


@cache
def run(backend: str, case: Case) -> Trial:
    """Three runs of the case."""
    facts = backends().get(backend).facts
    inputs = build(case, min(case.tokens, facts.max_tokens or case.tokens))
    before = {name: tensor.clone() for name, tensor in _tensors(inputs).items()}
    rounding = rounding_of(backend, case.problem)
    truth_TD = expert_layer(case.problem, inputs.weights, inputs.x_TD, inputs.routed, rounding=rounding)
    experts = bind(backend, case.problem, inputs.weights)
    workspace = Workspace()
    outs, unwritten, hurt = [], 0, 0
    sizes: dict[int, int] = {}
    for attempt in range(3):
        if attempt == 2:
            _poison(workspace)
        out_TD, whole = _guarded(inputs.x_TD)
        poison, mine = POISON[out_TD.dtype], slice(GUARD, GUARD + out_TD.numel())
        experts.run(inputs.x_TD, inputs.routed, out_TD, workspace)
        outs.append(out_TD)
        unwritten += int((whole[mine] == poison).sum())
        hurt += int((whole[: mine.start] != poison).sum() + (whole[mine.stop :] != poison).sum())
        sizes = sizes or {buffer.data_ptr(): buffer.nbytes for buffer in workspace.buffers}
    grown = sum(sizes.get(buffer.data_ptr()) != buffer.nbytes for buffer in workspace.buffers)
    changed = tuple(n for n, tensor in _tensors(inputs).items() if not torch.equal(_bits(tensor), _bits(before[n])))
    return Trial(inputs, truth_TD, tuple(outs), unwritten, hurt, changed, grown, experts)


def alone(trial: Trial, token: int) -> Tensor:
    """The result `[1, D]` of one of the trial's tokens without the others."""
    one = slice(token, token + 1)
    routed = Routed(trial.inputs.routed.ids_TK[one], trial.inputs.routed.weights_TK[one])
    x_TD = trial.inputs.x_TD[one]
    out_TD, _ = _guarded(x_TD)
    trial.experts.run(x_TD, routed, out_TD, Workspace())
    return out_TD


def _guarded(like_TD: Tensor) -> tuple[Tensor, Tensor]:
    """A poisoned output of that shape and dtype, and the whole poisoned buffer it lies in, as integers."""
    integer = torch.int32 if like_TD.dtype is torch.float32 else torch.int16
    whole = torch.full((GUARD + like_TD.numel() + GUARD,), POISON[like_TD.dtype], dtype=integer)
    return whole[GUARD : GUARD + like_TD.numel()].view(like_TD.dtype).view(like_TD.shape), whole


def _poison(workspace: Workspace) -> None:
    for buffer in workspace.buffers:
        buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    weights = inputs.weights
    named = {
        **{f"gate_up.{name}": tensor for name, tensor in weights.gate_up.tensors.items()},
        **{f"down.{name}": tensor for name, tensor in weights.down.tensors.items()},
        "gate_up_bias": weights.gate_up_bias,
        "down_bias": weights.down_bias,
        "x": inputs.x_TD,
        "ids": inputs.routed.ids_TK,
        "weights": inputs.routed.weights_TK,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
