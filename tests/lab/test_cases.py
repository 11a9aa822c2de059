"""Parts are what a run builds; cases are the same everywhere; patterns are what their names say."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from muster.checkpoint.loader import Loader
from muster.device import cpu
from muster.errors import CheckpointError, UsageError
from muster.formats.codec import decode, encode
from muster.formats.dialects import Dialect, write
from muster.formats.matrix import Meaning
from muster.formats.spec import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NVFP4, int4
from muster.gemm.linear import Linear
from muster.gemm.problem import LinearProblem
from muster.lab.prove.cases import Case, ExpertInputs, Part, Role, build, cases, decline, parts, reference
from muster.lab.prove.patterns import PATTERNS, SENTINELS, TILE_EDGES
from muster.model.choosing import unproven
from muster.model.families import load
from muster.moe.experts import Experts
from muster.moe.problem import Activation, MoEProblem, RoutingRule

CPU = torch.device("cpu")
D, F, E, V, LAYERS = 128, 64, 4, 96, 3
QKV = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
PLAIN, NV, NV_CT = (Dialect.PLAIN, BF16), (Dialect.MODELOPT_NVFP4, NVFP4), (Dialect.CT_NVFP4, NVFP4)
FP8, BLOCK, GPTQ = (Dialect.CT_FP8, FP8_CHANNEL), (Dialect.FP8_BLOCK, FP8_BLOCK), (Dialect.GPTQ, int4(32))
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": D,
    "intermediate_size": 2 * F,
    "moe_intermediate_size": F,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def save(directory: Path, stored: dict[str, tuple], orders: dict[str, int] | None = None) -> Path:
    """A Qwen3-MoE checkpoint whose second layer is dense; `stored`: how, by part of a module's name."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.norm.weight": torch.ones(D)}

    def put(module: str, rows: int, columns: int) -> None:
        dialect, format = next((kind for key, kind in stored.items() if key in module), PLAIN)
        meaning = Meaning.DIVIDES if dialect is Dialect.CT_NVFP4 else Meaning.MULTIPLIES
        matrix = encode(torch.randn(rows, columns, generator=generator), format, tensor_scale=meaning)
        for key, seed in (orders or {}).items():
            if key in module:
                groups = torch.arange(columns, dtype=torch.int32) // 32
                matrix = replace(
                    matrix, order=groups[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
                )
        tensors.update({dialect.tensor_name(module, part): value for part, value in write(matrix, dialect).items()})

    for layer in range(LAYERS):
        root = f"model.layers.{layer}"
        for norm, width in (
            ("input_layernorm", D),
            ("post_attention_layernorm", D),
            ("self_attn.q_norm", 16),
            ("self_attn.k_norm", 16),
        ):
            tensors[f"{root}.{norm}.weight"] = torch.ones(width)
        for name, rows in (*QKV.items(), ("o_proj", D)):
            put(f"{root}.self_attn.{name}", rows, D)
            tensors[f"{root}.self_attn.{name}.bias"] = torch.randn(rows, generator=generator)
        if layer == 1:
            for name, shape in (("gate_proj", (2 * F, D)), ("up_proj", (2 * F, D)), ("down_proj", (D, 2 * F))):
                put(f"{root}.mlp.{name}", *shape)
            continue
        put(f"{root}.mlp.gate", E, D)
        for expert in range(E):
            for name, shape in (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))):
                put(f"{root}.mlp.experts.{expert}.{name}", *shape)
    put("model.embed_tokens", V, D)
    put("lm_head", V, D)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


CHECKPOINTS = {
    "plain": ({}, None),
    "experts nvfp4": ({"experts": NV}, None),
    "layers stored differently": ({"layers.2.mlp.experts": FP8, "layers.0.self_attn": NV}, None),
    "v stored differently": ({"v_proj": FP8, "self_attn": NV}, None),
    "k's tensor scale divides": ({"k_proj": NV_CT, "self_attn": NV}, None),
    "blocks straddle k and v": ({"self_attn": BLOCK, "mlp.gate_proj": BLOCK, "mlp.up_proj": BLOCK}, None),
    "gptq in order": ({"self_attn": GPTQ, "experts": GPTQ}, None),
    "gptq, one order": ({"self_attn": GPTQ}, {"self_attn": 1}),
    "gptq, orders of their own": ({"self_attn": GPTQ}, {"q_proj": 1, "k_proj": 2, "v_proj": 3}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_parts_are_the_problems_that_loading_builds(name, tmp_path):
    stored, orders = CHECKPOINTS[name]
    directory = save(tmp_path / "checkpoint", stored, orders)
    found = parts(Loader.open(directory), cpu())
    built = Counter(_problems(load(directory, choose=unproven(cpu(), "torch"))))
    assert {part.problem: part.uses for part in found} == built
    assert {part.role for part in found} == {Role.EXPERTS, Role.LINEARS}
    for part in found:
        case = Case(part, 3, "uniform" if part.role is Role.EXPERTS else "dense", 0, str(directory))
        assert reference(case, build(case, CPU)).isfinite().all()


def _problems(model):
    """The problems of all linears and expert layers below an object."""
    seen, left = set(), [model]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Linear):
            yield thing.problem
        elif isinstance(thing, Experts):
            yield thing._dispatcher.problem
        elif isinstance(thing, tuple | list):
            left += thing
        elif isinstance(thing, dict):
            left += thing.values()
        elif type(thing).__module__.startswith("muster.") and hasattr(thing, "__dict__"):
            left += vars(thing).values()


def test_real_weights_are_those_of_the_first_layer_that_has_the_problem(tmp_path):
    directory = save(tmp_path / "checkpoint", {"experts": NV})
    loader = Loader.open(directory)
    for part in parts(loader, cpu()):
        case = Case(part, 1, "uniform" if part.role is Role.EXPERTS else "dense", 0, str(directory))
        inputs = build(case, CPU)
        if part.role is Role.EXPERTS:
            stored = loader.experts(0, loader.spec.layers[0].feed_forward)
            assert part.module == "model.layers.0.mlp.experts"
            assert torch.equal(decode(inputs.weights.gate_up), decode(stored.gate_up))
            assert torch.equal(decode(inputs.weights.down), decode(stored.down))
        elif part.module.endswith("q_proj"):
            rows = [decode(loader.matrix(f"model.layers.0.self_attn.{name}", (n, D))) for name, n in QKV.items()]
            assert torch.equal(decode(inputs.matrix), torch.cat(rows))
            assert inputs.bias.shape == (256,)


@pytest.mark.parametrize("ranks", [(2, 1, 0), (1, 2, 1), (2, 2, 1)])
@pytest.mark.parametrize("kind", [PLAIN, NV, FP8, (Dialect.CT_MXFP4, MXFP4)], ids=lambda kind: kind[1].name)
def test_a_rank_has_a_slice_of_the_width_of_its_own_experts(kind, ranks, tmp_path):
    directory = save(tmp_path / "checkpoint", {"experts": kind})
    tp, ep, rank = ranks
    whole, share = (parts(Loader.open(directory), cpu(), *r)[0] for r in ((1, 1, 0), ranks))
    assert (share.problem.inner, share.problem.local_experts) == (F // tp, E // ep)
    assert share.problem.first_expert == rank * (E // ep)
    every, mine = (build(Case(part, 1, "uniform", 0, str(directory)), CPU).weights for part in (whole, share))
    local = slice(rank * (E // ep), (rank + 1) * (E // ep))
    gate, up = decode(every.gate_up)[local].chunk(2, 1)
    assert torch.equal(decode(mine.gate_up), torch.cat((gate[:, : F // tp], up[:, : F // tp]), 1))
    assert torch.equal(decode(mine.down), decode(every.down)[local][..., : F // tp])


def test_a_split_that_leaves_a_rest_is_refused_with_every_reason(tmp_path):
    directory = save(tmp_path / "checkpoint", {"experts": NV})
    with pytest.raises(UsageError) as caught:
        parts(Loader.open(directory), cpu(), 3, 3, 5)
    assert all(word in str(caught.value) for word in ("3 for an inner width of 64", "3 for 4 experts", "found 5"))


def test_missing_matrices_are_named_together(tmp_path):
    directory = save(tmp_path / "checkpoint", {})
    loader = Loader.open(directory)
    gone = ("model.layers.0.self_attn.k_proj", "model.layers.2.mlp.experts.0.up_proj")
    modules = {name: stored for name, stored in loader.survey.modules.items() if name not in gone}
    loader.survey = replace(loader.survey, modules=modules)
    with pytest.raises(CheckpointError) as caught:
        parts(loader, cpu())
    assert all(name in str(caught.value) for name in gone)


FORMAT = st.sampled_from([BF16, NVFP4, int4(32), int4(64)])
EXPERT_PROBLEMS = st.builds(
    MoEProblem,
    hidden=st.sampled_from([64, 128]),
    inner=st.sampled_from([64, 128]),
    experts=st.sampled_from([8, 16]),
    routing=st.builds(
        RoutingRule,
        top_k=st.sampled_from([1, 2]),
        scoring=st.sampled_from(["softmax", "sigmoid"]),
        softmax_after_top_k=st.booleans(),
        selection_bias=st.booleans(),
        groups=st.sampled_from([1, 4]),
        groups_kept=st.sampled_from([1, 2]),
        renormalise=st.booleans(),
        scaling_factor=st.sampled_from([1.0, 2.5]),
        epsilon=st.sampled_from([0.0, 1e-20]),
    ),
    local_experts=st.sampled_from([4, 8]),
    first_expert=st.sampled_from([0, 4]),
    weights=FORMAT,
    act_order=st.booleans(),
    dtype=st.sampled_from(["bf16", "f32"]),
    activation=st.builds(
        Activation,
        st.sampled_from(["silu", "swiglu-oai"]),
        st.sampled_from([None, 7.0, 10.0]),
        st.sampled_from([1.702, 1.0]),
    ),
    bias=st.booleans(),
    router_weight_on_input=st.booleans(),
)
LINEAR_PROBLEMS = st.builds(
    LinearProblem,
    st.sampled_from([64, 128]),
    st.sampled_from([64, 128]),
    FORMAT,
    st.sampled_from(["bf16", "f32"]),
    st.booleans(),
    st.booleans(),
)
PARTS = st.builds(
    Part, st.sampled_from([Role.EXPERTS, Role.DRAFT]), EXPERT_PROBLEMS, st.just("m"), st.just(1)
) | st.builds(Part, st.just(Role.LINEARS), LINEAR_PROBLEMS, st.just("m"), st.just(2))


@settings(max_examples=300, deadline=None)
@given(PARTS, PARTS)
def test_keys_are_equal_exactly_when_role_and_problem_are(one, other):
    # Beside its first expert, a rank that has all experts has no share to name.
    one, other = (replace(p, problem=_placed(p.problem)) for p in (one, other))
    assert (one.key == other.key) == ((one.role, one.problem) == (other.role, other.problem))


def _placed(problem):
    whole = isinstance(problem, MoEProblem) and problem.local_experts == problem.experts
    return replace(problem, first_expert=0) if whole else problem


@settings(max_examples=100, deadline=None)
@given(PARTS, st.integers(0, 9), st.sampled_from(["uniform", "dense"]), st.sampled_from([None, "/a b/ü"]))
def test_a_case_survives_json(part, tokens, pattern, directory):
    case = Case(part, tokens, pattern, 7, directory)
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"part": 3}', '{"part": {"role": "experts", "problem": {}}}'])
def test_what_is_no_case_is_refused(text):
    with pytest.raises(UsageError, match=r"Case\.to_json"):
        Case.from_json(text)


def experts(top_k=2, **changes) -> Part:
    problem = MoEProblem(64, 64, 16, RoutingRule(top_k, scaling_factor=2.5), 16, weights=NVFP4, dtype="f32")
    return Part(Role.EXPERTS, replace(problem, **changes), "", 1)


def test_a_case_is_the_same_in_another_process():
    case = Case(experts(), 17, "skewed", 3)
    script = (
        "import sys, torch; from muster.lab.prove.cases import *;"
        "i = build(Case.from_json(sys.argv[1]), torch.device('cpu'));"
        "print(float(i.x_TD.double().sum()), int(i.routed.ids_TK.sum()), int(i.weights.gate_up.codes.long().sum()))"
    )
    there = subprocess.run([sys.executable, "-c", script, case.to_json()], capture_output=True, text=True, check=True)
    i = build(case, CPU)
    here = (float(i.x_TD.double().sum()), int(i.routed.ids_TK.sum()), int(i.weights.gate_up.codes.long().sum()))
    assert there.stdout.split() == [str(value) for value in here]


def routed(pattern, tokens, part=None, seed=0):
    inputs = build(Case(part or experts(), tokens, pattern, seed), CPU)
    assert isinstance(inputs, ExpertInputs)
    return inputs


@pytest.mark.parametrize("pattern", [name for name, p in PATTERNS.items() if not p.sentinels])
@pytest.mark.parametrize("part", [experts(), experts(1), experts(8)], ids=lambda part: part.key)
def test_every_token_has_k_different_experts_whose_weights_sum_to_the_factor(pattern, part):
    inputs, top_k = routed(pattern, 33, part), part.problem.routing.top_k
    ids = inputs.routed.ids_TK.sort(-1).values
    assert ids.shape == (33, top_k)
    assert (ids[:, 1:] > ids[:, :-1]).all()
    assert ids.min() >= 0
    assert ids.max() < 16
    torch.testing.assert_close(inputs.routed.weights_TK.sum(-1), torch.full((33,), 2.5))


def counts(inputs):
    ids = inputs.routed.ids_TK
    return torch.bincount(ids[(ids >= 0) & (ids < 16)], minlength=16).sort(descending=True).values.tolist()


def test_patterns_are_what_their_names_say():
    assert counts(routed("same", 40))[:3] == [40, 40, 0]
    assert counts(routed("half", 200)).count(0) == 8
    assert counts(routed("half", 200))[7] > 0
    skewed, uniform = counts(routed("skewed", 500)), counts(routed("uniform", 500))
    assert skewed[0] > 3 * uniform[0] / 2
    assert skewed[-1] < uniform[-1] / 2
    assert len(set(counts(routed("edges", 256))) & set(TILE_EDGES)) >= 8
    assert counts(routed("elsewhere", 9)) == [0] * 16
    ids = routed("sentinels", 60).routed.ids_TK
    assert set(ids.unique().tolist()) >= {16, *SENTINELS}
    blank = routed("blank", 9).x_TD
    assert (blank == 0).all(-1).tolist() == [True, False, False] * 2 + [True, False, False]


@pytest.mark.parametrize("pattern", [name for name in PATTERNS if name != "elsewhere"])
@pytest.mark.parametrize("first", [0, 14])
def test_a_rank_with_few_experts_gets_something_to_do(pattern, first):
    part = experts(local_experts=2, first_expert=first)
    for seed in range(8):
        case = Case(part, 2, pattern, seed)
        assert reference(case, build(case, CPU)).any(), seed


def test_all_patterns_that_make_sense_are_asked_for_and_no_other():
    assert {case.pattern for case in cases(experts(), (1,), None)} == {"uniform", "half", "elsewhere"}
    assert {case.pattern for case in cases(experts(), (64,), None)} == set(PATTERNS)
    everywhere = {case.pattern for case in cases(experts(16), (64,), None)}
    assert everywhere == {"uniform", "sentinels", "elsewhere", "blank"}
    assert {case.tokens for case in cases(experts(), (1, 64), None)} == {0, 1, 64}
    linear = Part(Role.LINEARS, LinearProblem(64, 64, BF16), "", 1)
    assert [case.pattern for case in cases(linear, (1, 4), None)] == ["dense", "dense", "blank"]
    for part in (experts(), linear):
        quick = cases(part, (1, 64), None, quick=True)
        assert {case.tokens for case in quick} == {1, 64}
        assert set(quick) < set(cases(part, (1, 64), None))


def test_drawn_scales_differ_and_the_dialect_alternates():
    for format in (NVFP4, FP8_TENSOR):
        weights = build(Case(experts(weights=format), 1, "uniform", 0), CPU).weights
        scale = weights.gate_up.global_scale or weights.gate_up.scale
        gate, up = scale.value.view(16, 2).unbind(-1)
        assert (up > 1.2 * gate).sum() > 8
        assert (up != gate).all()
        assert gate.max() > 1.2 * gate.min()
    meanings = {build(Case(experts(), 1, "uniform", s), CPU).weights.gate_up.global_scale.meaning for s in (0, 1)}
    assert meanings == set(Meaning)


def test_a_case_beyond_what_a_backend_is_meant_for_is_declined():
    assert "512" in str(decline("cpu", Case(experts(), 513, "uniform", 0), cpu()))
    assert decline("torch", Case(experts(), 513, "uniform", 0), cpu()) is None
    assert decline("cpu", Case(experts(), 512, "sentinels", 0), cpu()) is None
