"""`muster backends`: every cell has an answer, a refusal has reasons, and the command says no with its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from muster.checkpoint.inventory import Inventory
from muster.checkpoint.loader import Loader
from muster.contract import FUSED_FUNC, LINEAR, RUNNER_CORE
from muster.device import COMPUTE_CAPABILITIES, Device, cpu, elsewhere
from muster.errors import UsageError
from muster.formats.spec import FORMATS
from muster.lab.explain import backend_page, backends
from muster.lab.explain.cells import Cell, cells
from muster.lab.explain.gpus import gpu
from muster.lab.explain.offers import offers
from muster.lab.explain.seen import verdicts
from muster.lab.explain.stored_parts import plain_parts, stored_parts
from muster.lab.ledger.environment import current, source_hash
from muster.lab.ledger.evidence import Evidence, Verdict
from muster.lab.ledger.ledger import Ledger, new_id
from muster.lab.prove.parts import Part, Role, parts
from muster.moe.problem import MoEProblem

ROOT = Path(__file__).parents[2]
EVERYWHERE = tuple(elsewhere(key) for key in COMPUTE_CAPABILITIES)


@pytest.fixture(scope="module")
def matrix() -> tuple[Cell, ...]:
    return cells(None, EVERYWHERE)


def muster(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "muster.cli", "backends", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"MUSTER_HOME": str(home), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
    )


def test_the_matrix_has_a_cell_for_every_capability_and_format(matrix: tuple[Cell, ...]) -> None:
    for role in (Role.EXPERTS, Role.LINEARS):
        found = {(cell.device.key, cell.part.problem.weights.name) for cell in matrix if cell.part.role is role}
        assert found == {(key, name) for key in COMPUTE_CAPABILITIES for name in FORMATS}
    assert {cell.device.key for cell in matrix if cell.part.role is Role.DRAFT} == set(COMPUTE_CAPABILITIES)


def test_every_cell_answers_for_every_backend_and_every_refusal_has_a_reason(matrix: tuple[Cell, ...]) -> None:
    names = {role: {offer.backend for offer in cell.offers} for cell in matrix for role in [cell.part.role]}
    for cell in matrix:
        assert {offer.backend for offer in cell.offers} == names[cell.part.role]
        assert len(cell.offers) == len(names[cell.part.role])
        assert {*cell.possible, *cell.refused} == set(cell.offers)
        assert all(offer.reasons and all(offer.reasons) and not offer.scheme for offer in cell.refused)
        assert all(offer.scheme for offer in cell.possible)


def test_only_backends_with_an_adapter_run(matrix: tuple[Cell, ...]) -> None:
    runs = {offer.backend for cell in matrix for offer in cell.offers if offer.runs}
    assert "torch" in runs
    assert not {"marlin", "flashinfer_cutlass", "flashinfer_trtllm"} & runs
    assert {offer.kind for cell in matrix for offer in cell.offers} == {RUNNER_CORE, FUSED_FUNC, LINEAR}


def test_the_same_nvfp4_layer_is_w4a16_on_hopper_and_w4a4_on_blackwell() -> None:
    def schemes(key: str) -> dict[str, str]:
        (part,) = [p for p in plain_parts(elsewhere(key)) if p.role is Role.EXPERTS and p.module == "nvfp4"]
        return {offer.backend: offer.scheme for offer in offers(part, elsewhere(key)) if offer.possible}

    assert schemes("9.0")["marlin"] == "W4A16"
    assert "flashinfer_cutlass" not in schemes("9.0")
    assert schemes("12.0")["flashinfer_cutlass"] == "W4A4"
    assert schemes("12.0")["marlin"] == "W4A16"
    assert schemes("10.0")["flashinfer_trtllm"] == "W4A4"


def test_a_gpu_of_the_table_is_a_device_for_backends() -> None:
    device = gpu("mi300x").elsewhere()
    (part,) = [p for p in plain_parts(device) if p.role is Role.EXPERTS and p.module == "fp8-block"]
    able = {offer.backend for offer in offers(part, device) if offer.possible}
    assert "aiter" in able
    assert not {"marlin", "deep_gemm", "torch", "triton"} & able


def test_a_released_checkpoint_is_asked_about_by_name() -> None:
    (device,) = (elsewhere("12.0"),)
    found = cells("qwen3.5-397b-a17b-nvfp4", (device,))
    (experts,) = [cell for cell in found if cell.part.role is Role.EXPERTS]
    (draft,) = [cell for cell in found if cell.part.role is Role.DRAFT]
    assert experts.part.problem.weights.name == "nvfp4"
    assert experts.part.uses == 60
    assert draft.part.problem.weights.name == "bf16"
    assert {"flashinfer_cutlass", "marlin"} <= {offer.backend for offer in experts.possible}
    assert "marlin" not in {offer.backend for offer in draft.possible}


def test_biases_of_gpt_oss_experts_are_part_of_the_problem_and_no_part_of_their_own() -> None:
    (experts,) = cells("gpt-oss-20b", (elsewhere("9.0"),), (Role.EXPERTS,))
    assert isinstance(experts.part.problem, MoEProblem)
    assert experts.part.problem.bias
    assert experts.part.problem.activation.name == "swiglu-oai"
    assert experts.part.uses == 24
    # 2880 is no multiple of 128.
    reasons = {offer.backend: offer.reasons for offer in experts.refused}
    assert any("hidden % 128" in reason for reason in reasons["marlin"])


def test_experts_as_stored_are_those_that_a_run_builds(tmp_path: Path) -> None:
    directory = _checkpoint(tmp_path)
    for device in (cpu(), elsewhere("9.0")):
        stored = {p.key for p in stored_parts(Inventory.of(str(directory)), device) if p.role is not Role.LINEARS}
        built = {p.key for p in parts(Loader.open(directory, draft=True), device) if p.role is not Role.LINEARS}
        assert stored == built


def _checkpoint(directory: Path) -> Path:
    """A one-layer Mixtral of ones, written by hand."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 50,
        "tie_word_embeddings": False,
    }
    layer = "model.layers.0"
    shapes = {"model.embed_tokens": (50, 64), "lm_head": (50, 64), "model.norm": (64,)}
    shapes |= {
        f"{layer}.self_attn.{name}_proj": (rows, 64) for name, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items()
    }
    shapes |= {f"{layer}.{name}_layernorm": (64,) for name in ("input", "post_attention")}
    shapes[f"{layer}.block_sparse_moe.gate"] = (4, 64)
    for expert in range(4):
        root = f"{layer}.block_sparse_moe.experts.{expert}"
        shapes |= {f"{root}.w1": (32, 64), f"{root}.w2": (64, 32), f"{root}.w3": (32, 64)}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_the_last_verdict_is_the_failure_and_without_a_ledger_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    here = cpu()
    part = next(part for part in plain_parts(here) if part.module == "nvfp4")
    cell = Cell(part, here, offers(part, here))
    assert verdicts([cell]) == {}
    assert not (tmp_path / "home").exists()
    with Ledger.open(tmp_path / "home") as ledger:
        for number, verdict in enumerate((Verdict.PROVEN, Verdict.WRONG, Verdict.PROVEN)):
            ledger.add(_evidence(part, here, f"case {number}", verdict, f"2026-01-0{number + 1}T00:00:00+00:00"))
    found = verdicts([cell])
    assert found[part.key, "torch"].verdict is Verdict.WRONG
    assert found[part.key, "torch"].cases == 3
    assert (part.key, "cpu") not in found
    assert verdicts([Cell(part, elsewhere("9.0"), ())]) == {}


def _evidence(part: Part, device: Device, case: str, verdict: Verdict, date: str) -> Evidence:
    return Evidence(
        id=new_id(),
        verdict=verdict,
        role=part.role.value,
        part=part.key,
        backend="torch",
        case=case,
        tokens=1,
        pattern="uniform",
        environment=current(device, part.role.value, "torch"),
        source=source_hash(part.role.value, "torch"),
        errors=None,
        deterministic=True,
        message="",
        seconds=1.0,
        date=date,
        repeat="muster verify",
    )


def test_json_is_one_document_with_every_reason(tmp_path: Path) -> None:
    result = muster("--cc", "all", "--json", home=tmp_path)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["devices"] == list(COMPUTE_CAPABILITIES)
    known = {(entry["computes"], entry["name"]) for entry in document["backends"]}
    for cell in document["cells"]:
        computes = "linears" if cell["role"] == "linears" else "experts"
        answers = [*cell["possible"], *cell["refused"]]
        assert {answer["backend"] for answer in answers} == {name for of, name in known if of == computes}
        assert all(answer["reasons"] for answer in answers if not answer["runs"])
    assert any(entry.get("traps") for entry in document["backends"])
    assert not any(tmp_path.iterdir())


def test_one_capability_shows_all_reasons_in_text(tmp_path: Path) -> None:
    result = muster("glm-5-nvfp4", "--cc", "12.0", "--role", "experts", home=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("  ")}
    assert "runs on 10.0, 10.3, this is 12.0" in lines["flashinfer_trtllm"]
    assert "no adapter yet" in lines["flashinfer_b12x"]
    assert "CUDA 13" in lines["flashinfer_b12x"]
    assert "W4A4" in lines["flashinfer_b12x"]
    assert "yes" in lines["torch"]


def test_a_model_with_a_part_that_nothing_runs_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "elsewhere", lambda _: gpu("mi300x").elsewhere())
    with pytest.raises(SystemExit) as ended:
        backends.command("glm-5-nvfp4", cc="9.0", role="linears", json=False)
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cc", "7.5"), "8.0, 8.6"),
        (("--role", "router"), "experts, draft, linears"),
        (("no-such-model",), "no-such-model"),
        (("olmoe-1b-7b", "--cc", "9.0", "--role", "draft"), "draft"),
    ],
)
def test_options_that_cannot_be_used_end_with_2_and_the_choices(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = muster(*arguments, home=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_the_page_in_the_docs_is_what_the_command_writes(matrix: tuple[Cell, ...]) -> None:
    stored = (ROOT / "docs" / "backends.md").read_text()
    assert stored == backend_page.page(matrix), "run: muster backends --cc all --markdown > docs/backends.md"


def test_a_role_that_a_model_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="draft"):
        cells("mixtral-8x7b", (elsewhere("9.0"),), (Role.DRAFT,))
