"""The whole command line on a GPU, from no evidence to an answer, on small random checkpoints; nothing stops it.

    python scripts/gpu_story.py results/h200-story.jsonl [--device cuda] [--budget SECONDS]

It writes a record per command: exit code, seconds, the end of what it printed. All failures are told at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from setting import setting

from muster.device import here

CONFIG = {
    "vocab_size": 260,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
ROUTER_GAIN = 3.0
"""Router logits this far apart: no token's answer hangs on which of two equal experts comes last."""
COUNTS = "1,8,512"
TAIL = 12
"""Lines of each stream that are shown and kept."""


@dataclass(frozen=True)
class Command:
    """What is typed.

    Attributes:
        words: after `muster`.
        most: seconds it may take.
    """

    words: tuple[str, ...]
    most: float = 90.0


@dataclass
class Story:
    """The commands so far.

    Attributes:
        home: MUSTER_HOME.
        device: MUSTER_DEVICE.
        end: when the time is up, by the monotonic clock.
        failures: of which command, and how.
    """

    home: Path
    device: str
    end: float
    failures: list[str] = field(default_factory=list)

    def tell(self, command: Command) -> dict[str, object]:
        """Runs a command and gives its record."""
        title = f"muster {' '.join(command.words)}".replace(str(self.home), "HOME")
        left = min(command.most, self.end - time.monotonic())
        if left <= 0:
            self.failures.append(f"{title}: no time left")
            return {"command": title, "exit_code": None, "seconds": 0.0, "stdout": [], "stderr": []}
        environment = {**os.environ, "MUSTER_HOME": str(self.home / "muster"), "MUSTER_DEVICE": self.device}
        start = time.perf_counter()
        code, out, err = _run([sys.executable, "-m", "muster.cli", *command.words], environment, left)
        seconds = round(time.perf_counter() - start, 1)
        problems = [] if code == 0 else [f"took longer than {left:.0f} s" if code is None else f"exit code {code}"]
        problems += [line for line in (*out.splitlines(), *err.splitlines()) if _wrong(line)]
        if problems:
            self.failures.append(f"{title}: " + "\n    ".join(problems))
        tails = {name: _tail(text.replace(str(self.home), "HOME")) for name, text in (("stdout", out), ("stderr", err))}
        print(f"\n$ {title}\n[{seconds} s, exit code {code}]", *tails["stdout"], *tails["stderr"], sep="\n", flush=True)
        return {"command": title, "exit_code": code, "seconds": seconds, **tails}


def commands(home: Path) -> Iterator[Command]:
    """From quantising to tuning, the most telling first."""
    plain, nvfp4 = home / "bf16", home / "nvfp4"
    yield Command(("quantize", str(plain), "--format", "nvfp4", "-o", str(nvfp4)))
    yield Command(("inspect", str(nvfp4), "--gpu", "here"))
    yield Command(("backends", str(nvfp4)))
    yield Command(("verify", str(nvfp4), "--tokens", COUNTS), 120.0)
    yield Command(("bench", str(nvfp4), "--tokens", COUNTS))
    yield Command(("plan", str(nvfp4), "--tokens", COUNTS))
    yield Command(("run", str(nvfp4), "-p", "Say hello.", "--max-tokens", "32"))
    yield Command(("run", str(nvfp4), "-p", "Say hello.", "--temperature", "1", "--seed", "1", "--json"))
    yield Command(("bench", str(nvfp4), "--tune", "--tokens", "8", "--role", "experts"))
    # A bf16 checkpoint without a plan: proven in seconds before it answers; linears of quantised attention too.
    yield Command(("run", str(plain), "-p", "Say hello.", "--max-tokens", "16"))
    for format in ("mxfp4", "fp8-block"):
        yield Command(("quantize", str(plain), "--format", format, "--linears", "-o", str(home / format)))
        yield Command(("verify", str(home / format), "--tokens", "8,100"))
    yield Command(("ledger", "list", "--verdict", "wrong"))


def write_model(directory: Path) -> None:
    """A random Qwen3-MoE with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                gain = ROUTER_GAIN if name.endswith("gate.weight") else 1.0
                weight.normal_(0.0, gain * weight.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    """Tells the story; exit code 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=240.0, help="Seconds for all of it.")
    given = parser.parse_args()
    end = time.monotonic() + given.budget
    with tempfile.TemporaryDirectory(prefix="muster-story-") as folder, given.records.open("w") as records:
        story = Story(Path(folder), given.device, end)
        write_model(story.home / "bf16")
        about = {**setting(), "device": here().name}
        for command in commands(story.home):
            records.write(json.dumps({**story.tell(command), **about}) + "\n")
            records.flush()
    print(f"\n{len(story.failures)} commands failed", *story.failures, sep="\n")
    raise SystemExit(bool(story.failures))


def _run(words: list[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str, str]:
    """Exit code (None: it was ended for taking too long) and both streams."""
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # As a user does it: what it has begun is tidied up.
        with suppress(ProcessLookupError):
            process.send_signal(2)
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        return None, out, err
    return process.returncode, out, err


def _wrong(line: str) -> bool:
    """Whether a line tells of something that must not be: a crash, or a verdict that is none of the good ones."""
    bad = ("Traceback", "Error:", ": wrong, ", ": nan, ", ": crash, ", ": hang, ", ": out-of-", ": partial-write, ")
    return any(word in line for word in bad) or ": not-tried, " in line


def _tail(text: str) -> list[str]:
    return [line[:300] for line in text.splitlines()[-TAIL:]]


if __name__ == "__main__":
    main()
