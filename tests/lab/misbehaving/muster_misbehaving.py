"""Backends that compute the right answer and then do what none may do; tests prove that each is found out."""

import os
import signal
import sys
import time
from dataclasses import dataclass, replace

import misdeeds
import torch

from muster.contract import Package
from muster.formats.codec import decode
from muster.moe.backend import Facts, FusedFunc
from muster.moe.problem import MoEProblem
from muster.moe.reference import activate, expert_layer
from muster.moe.registry import register_fused_func
from muster.moe.weights import ExpertWeights

FACTS = Facts(
    devices=frozenset({"cpu"}),
    weights=frozenset({"bf16"}),
    dtypes=frozenset({"f32"}),
    activations=frozenset({"silu"}),
    zero_tokens=True,
    sentinel_ids=True,
)


@dataclass(frozen=True, eq=False)
class Held:
    problem: MoEProblem
    weights: ExpertWeights
    nbytes: int = 0


class Right(FusedFunc[Held]):
    """The reference itself; `misbehave` comes after it."""

    facts = FACTS

    def prepare(self, problem, weights):
        return Held(problem, weights)

    def run(self, prepared, x_TD, routed, out_TD, workspace):
        out_TD.copy_(expert_layer(prepared.problem, prepared.weights, x_TD, routed))
        self.misbehave(x_TD, out_TD, workspace)

    def misbehave(self, x_TD, out_TD, workspace):
        pass


def register(name, facts=FACTS):
    """Registers a function of (x_TD, out_TD, workspace) as what the right answer is spoilt by."""

    def decorate(function):
        methods = {"facts": facts, "misbehave": lambda self, *given: function(*given)}
        register_fused_func(name)(type(name, (Right,), methods))
        return function

    return decorate


def register_misdeed(name, misdeed):
    register(name)(lambda x_TD, out_TD, workspace: misdeed({"mark": os.environ.get("MISBEHAVING_MARK")}, None))


register_misdeed("obedient", misdeeds.nothing)
register_misdeed("segfault", misdeeds.segfault)
register_misdeed("abort", misdeeds.abort)
register_misdeed("exit", misdeeds.exit_quietly)
register_misdeed("raiser", misdeeds.raise_garbage)
register_misdeed("noisy", misdeeds.print_garbage)
register_misdeed("forker", misdeeds.leave_grandchild)


@register("endless")
def endless(x_TD, out_TD, workspace):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


@register("greedy")
def greedy(x_TD, out_TD, workspace):
    torch.ones(1 << 40)


def beside(out_TD, distance):
    """Three elements that far from the output's first."""
    return out_TD.as_strided((3,), (1,), out_TD.storage_offset() + distance)


@register("overrun")
def overrun(x_TD, out_TD, workspace):
    beside(out_TD, out_TD.numel()).zero_()


@register("underrun")
def underrun(x_TD, out_TD, workspace):
    beside(out_TD, -3).zero_()


@register("vandal")
def vandal(x_TD, out_TD, workspace):
    x_TD[0, 0] += 1


@register("nan")
def nan(x_TD, out_TD, workspace):
    out_TD[0, 0] = torch.nan


@register("wrong")
def wrong(x_TD, out_TD, workspace):
    out_TD *= 1.02


@register("stale")
def stale(x_TD, out_TD, workspace):
    """Right in a fresh workspace only."""
    sizes = [buffer.numel() for buffer in workspace.buffers]
    total = workspace.take("total", tuple(out_TD.shape), out_TD.dtype)
    if not sizes:
        total.zero_()
    out_TD += total


def shaken(x_TD, out_TD, workspace):
    out_TD *= 1 + 1e-7 * torch.randn(
        out_TD.shape, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
    )


register("fickle")(shaken)
register("perjurer", replace(FACTS, deterministic=True))(shaken)
register("picky", replace(FACTS, devices=frozenset({"9.0"})))(shaken)
register("absent", replace(FACTS, packages=(Package("no-such-package-as-this"),)))(shaken)


@register("moody")
def moody(x_TD, out_TD, workspace):
    """Dies on three tokens."""
    if len(x_TD) == 3:
        misdeeds.segfault({}, None)


@register("saboteur")
def saboteur(x_TD, out_TD, workspace):
    """Dies at a moment when nothing of it should be running: when the next case begins."""

    def hook(event, arguments):
        if event == "open" and str(arguments[0]).endswith(".ask"):
            os.kill(os.getpid(), signal.SIGSEGV)

    sys.addaudithook(hook)


@register_fused_func("partial")
class Partial(Right):
    """Forgets the end of the last row."""

    def run(self, prepared, x_TD, routed, out_TD, workspace):
        out_TD[:-1] = (y_TD := expert_layer(prepared.problem, prepared.weights, x_TD, routed))[:-1]
        out_TD[-1, :-3] = y_TD[-1, :-3]


@register_fused_func("importer")
class Importer(Right):
    """Needs a library that it has not declared."""

    def prepare(self, problem, weights):
        import no_such_library_as_this  # noqa: F401


CUDA = replace(FACTS, devices=frozenset({"8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0"}), graph_safe=True)


@register_fused_func("graphed")
class Graphed(Right):
    """Every expert on every token: nothing depends on what the tensors hold, so that a graph may be replayed."""

    facts = CUDA

    def run(self, prepared, x_TD, routed, out_TD, workspace):
        out_TD.zero_()
        gate_up, down = decode(prepared.weights.gate_up), decode(prepared.weights.down)
        for expert in range(prepared.problem.experts):
            weight_T = torch.where(routed.ids_TK == expert, routed.weights_TK, 0.0).sum(-1)
            out_TD += (
                activate(prepared.problem.activation, x_TD @ gate_up[expert].T) @ down[expert].T * weight_T[:, None]
            )
        self.misbehave(x_TD, out_TD, workspace)


def register_graphed(name):
    def decorate(function):
        register_fused_func(name)(type(name, (Graphed,), {"misbehave": lambda self, *given: function(*given)}))
        return function

    return decorate


first_answers = {}


@register_graphed("baked")
def baked(x_TD, out_TD, workspace):
    """Remembers what it once computed, by the address of its tokens."""
    out_TD.copy_(first_answers.setdefault(x_TD.data_ptr(), out_TD.clone()))


@register_graphed("synchronous")
def synchronous(x_TD, out_TD, workspace):
    out_TD *= float(x_TD[0, 0] * 0 + 1)


@register_graphed("astray")
def astray(x_TD, out_TD, workspace):
    """Makes the driver end every kernel of this process."""
    out_TD += x_TD[torch.full((1,), 1 << 40, device=x_TD.device)]


@register_graphed("hog")
def hog(x_TD, out_TD, workspace):
    torch.ones(1 << 40, device=x_TD.device)


@register_graphed("tiled")
def tiled(x_TD, out_TD, workspace):
    """Stores whole tiles of 64 rows."""
    rows = 64 - len(x_TD)
    out_TD.as_strided((rows, out_TD.shape[1]), out_TD.stride(), out_TD.storage_offset() + out_TD.numel()).zero_()
