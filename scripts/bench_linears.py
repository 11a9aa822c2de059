"""Proves and times the linears, the router and the rows on this GPU, and the model beside transformers.

    python scripts/bench_linears.py results/h200-linears.jsonl [routing] [rows] [model] [products]

One JSON line per measurement. Times are medians of graph replays over several copies of the weights, so that none is
found in the cache; the floor is the bytes over the read bandwidth measured in the same run, or the operations over the
measured rate of bf16 products, whichever is longer.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from muster.device import cuda, last_level_cache
from muster.formats.spec import FORMATS
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.lab import peaks as measured_peaks
from muster.lab.ledger.evidence import Verdict
from muster.lab.measure.floor import floor
from muster.lab.measure.timing import copies, measure
from muster.lab.prove.candidate import Candidate
from muster.lab.prove.cases import Case, Part, Role, build
from muster.lab.prove.tolerance import judge
from muster.moe.backend import Routed, RowLayout
from muster.moe.dispatchers.triton import TritonDispatcher
from muster.moe.kernels import triton_route
from muster.moe.problem import MoEProblem, RoutingRule
from muster.moe.routing import route
from muster.workspace import Workspace

GPU = torch.device("cuda")
SHAPES = {"Qwen3-30B qkv": (5120, 2048), "8192 square": (8192, 8192)}
FAMILIES = ("bf16", "fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "mxfp4")
TOKENS = (1, 4, 16, 64, 256, 2048)
RULES = {
    "Qwen3, 128 experts": (128, RoutingRule(8)),
    "Qwen3.5-397B, 512 experts": (512, RoutingRule(10)),
    "gpt-oss, 128 experts": (128, RoutingRule(4, softmax_after_top_k=True)),
    "DeepSeek-V3, 256 experts": (
        256,
        RoutingRule(8, "sigmoid", selection_bias=True, groups=8, groups_kept=4, scaling_factor=2.5, epsilon=1e-20),
    ),
}


def main(path: Path, only: tuple[str, ...]) -> None:
    """Everything, or only the steps of those names."""
    start = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as sink, torch.inference_mode():

        def note(**fields: object) -> None:
            sink.write(json.dumps(fields) + "\n")
            sink.flush()
            print(" ".join(f"{name}={_short(value)}" for name, value in fields.items()), flush=True)

        peaks = measured_peaks.measured(GPU, 0.3)
        note(kind="device", name=cuda().name, torch=torch.__version__, read_bandwidth=peaks.read_bandwidth)
        steps = {"routing": routing, "rows": rows, "model": model, "products": partial(products, peaks=peaks)}
        for name, step in steps.items():
            if only and name not in only:
                continue
            try:
                step(note)
            except Exception as error:
                note(kind="failed", step=name, error=f"{type(error).__name__}: {error}"[:600])
        note(kind="done", seconds=time.perf_counter() - start)


def products(note, peaks) -> None:  # type: ignore[no-untyped-def]
    """Each family, shape and token count: verdict, time, floor, ratio."""
    for shape, (n, k) in SHAPES.items():
        for family in FAMILIES:
            problem = LinearProblem(n, k, FORMATS[family], "bf16")
            part = Part(Role.LINEARS, problem, "none", 1)
            names = [name for name in linears().names() if linears().get(name).supports(problem, cuda()) is None]
            cases = {tokens: Case(part, tokens, "dense", 0) for tokens in TOKENS}
            all_inputs = build(cases[max(TOKENS)], GPU)
            bound = {name: rotation(part, name, all_inputs) for name in names}
            for tokens in TOKENS:
                inputs = replace(all_inputs, x_TK=all_inputs.x_TK[:tokens].contiguous())
                several = {name: [one.on(inputs) for one in found] for name, found in bound.items()}
                verdicts = {name: verdict(found[0], cases[tokens], inputs, name) for name, found in several.items()}
                safe = {name for name in names if name != "torch" or family == "bf16"}
                shared = {name: (found[0].out_like(tokens), Workspace(GPU)) for name, found in several.items()}
                calls = {name: [partial(one.run, *shared[name]) for one in found] for name, found in several.items()}
                samples = measure(calls, device=GPU, graph_safe=safe, seconds=0.02)
                least = floor(problem, tokens, None, peaks)
                for name in names:
                    seconds = samples[name].median
                    note(
                        kind="linear",
                        shape=shape,
                        n=n,
                        k=k,
                        family=family,
                        tokens=tokens,
                        backend=name,
                        verdict=verdicts[name][0],
                        error=verdicts[name][1],
                        microseconds=seconds * 1e6,
                        floor_microseconds=least.seconds * 1e6,
                        share=least.seconds / seconds,
                        graph=name in safe,
                    )


def rotation(part, name, inputs):  # type: ignore[no-untyped-def]
    """The backend bound to as many copies of the weights as fill the cache."""
    matrix = inputs.matrix
    clones = [inputs]
    for _ in range(copies(matrix.nbytes, last_level_cache(GPU)) - 1):
        tensors = {key: value.clone() for key, value in matrix.tensors.items()}
        clones.append(replace(inputs, matrix=matrix.with_tensors(tensors, matrix.shape)))
    return [Candidate.bind(part, name, each) for each in clones]


def verdict(candidate, case, inputs, name) -> tuple[str, float]:  # type: ignore[no-untyped-def]
    """Twice into NaN; the same bits; judged."""
    outs = [candidate.out_like(case.tokens) for _ in range(2)]
    workspace = Workspace(GPU)
    for out in outs:
        candidate.run(out, workspace)
        for buffer in workspace.buffers:
            buffer.fill_(float("nan"))
    found, errors = judge(outs[0], case, inputs, name)
    if found is Verdict.PROVEN and not torch.equal(*outs):
        return "not-deterministic", errors.whole
    return found.value, errors.whole


def routing(note) -> None:  # type: ignore[no-untyped-def]
    """The router against the reference, and its time."""
    generator = torch.Generator(device=GPU).manual_seed(0)
    for name, (experts, rule) in RULES.items():
        bias = 0.1 * torch.randn(experts, device=GPU, generator=generator) if rule.selection_bias else None
        for tokens in (1, 64, 4096):
            logits = 2 * torch.randn(tokens, experts, device=GPU, generator=generator)
            got, wanted = triton_route.route(logits, rule, bias), route(logits, rule, bias)
            different = int((got.ids_TK != wanted.ids_TK).any(-1).sum())
            same = (got.ids_TK == wanted.ids_TK).all(-1)
            error = ((got.weights_TK - wanted.weights_TK).abs() / wanted.weights_TK)[same].max()
            calls = {
                "triton": [partial(triton_route.route, logits, rule, bias)],
                "reference": [partial(route, logits, rule, bias)],
            }
            samples = measure(calls, device=GPU, graph_safe=("triton",), seconds=0.02)
            note(
                kind="route",
                rule=name,
                tokens=tokens,
                tokens_with_other_ids=different,
                weight_error=float(error),
                microseconds=samples["triton"].median * 1e6,
                reference_microseconds=samples["reference"].median * 1e6,
            )


def rows(note) -> None:  # type: ignore[no-untyped-def]
    """Rows out and home by graph replay, their values checked, and the time beside that of moving the bytes."""
    generator = torch.Generator(device=GPU).manual_seed(1)
    for experts, top_k, width in ((128, 8, 2048), (512, 10, 4096)):
        dispatcher = TritonDispatcher(MoEProblem(width, 768, experts, RoutingRule(top_k), experts))
        for tokens in (1, 64, 2048):
            x = torch.randn(tokens, width, device=GPU, generator=generator).bfloat16()
            ids = torch.rand(tokens, experts, device=GPU, generator=generator).argsort(-1)[:, :top_k].contiguous()
            weights = torch.rand(tokens, top_k, device=GPU, generator=generator)
            routed, out, workspace = Routed(ids, weights), torch.full_like(x, float("nan")), Workspace(GPU)

            def there_and_back(x=x, routed=routed, out=out, workspace=workspace, dispatcher=dispatcher) -> None:
                sent = dispatcher.dispatch(x, routed, RowLayout.PADDED, 64, workspace)
                dispatcher.combine(sent.rows.x_RD, sent, out, workspace)

            sample = measure({"rows": [there_and_back]}, device=GPU, graph_safe=("rows",), seconds=0.05)["rows"]
            truth = x.double() * weights.sum(-1, keepdim=True)
            error = float((out.double() - truth).norm() / truth.norm())
            moved = tokens * width * 2 * (2 + 2 * top_k)
            note(
                kind="rows",
                experts=experts,
                top_k=top_k,
                width=width,
                tokens=tokens,
                error=error,
                microseconds=sample.median * 1e6,
                bytes=moved,
            )


def model(note) -> None:  # type: ignore[no-untyped-def]
    """Random models of three families on the GPU: logits beside transformers in float32 and in bf16."""
    sys.path.insert(0, "tests")
    from model import oracle  # type: ignore[import-not-found]

    from muster.llm import LLM
    from muster.model.families import load

    ids = oracle.tokens(60)
    for family in oracle.FAMILY_SHAPE:
        with torch.inference_mode(mode=False), tempfile.TemporaryDirectory() as folder:
            whole = oracle.make(family, stored=torch.bfloat16)
            directory = oracle.save(whole, Path(folder), torch.bfloat16)
            truth = oracle.truth(whole, ids)
            rounded = whole.to(GPU, torch.bfloat16)
            with torch.no_grad():
                theirs = rounded(torch.tensor([ids], device=GPU)).logits[0].float().cpu()
            decoder = load(directory, device=cuda())
            ours = oracle.chunked(decoder, ids, (1, 30, 7, 1, 1, 20)).cpu()
            answer = LLM(directory, unproven=True).generate([ids[:9]])[0]
            note(
                kind="model",
                family=family,
                plan={role: decoder.plan.backends(role) for role in Role if decoder.plan.backends(role)},
                error=oracle.error(ours, truth),
                transformers_bf16_error=oracle.error(theirs, truth),
                median_error=median_error(ours, truth),
                transformers_bf16_median_error=median_error(theirs, truth),
                generated=len(answer.token_ids),
            )


def median_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative RMS of the median position: near ties of the router make a few positions choose other experts."""
    return float(((found - truth).norm(dim=-1) / truth.norm(dim=-1)).median())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]))
