"""`muster run` and `muster chat`: a model at the terminal. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muster.engine.request import RequestOutput, SamplingParams
from muster.engine.stats import Stats
from muster.errors import NumericsError, UsageError
from muster.llm import LLM, Delta


def run(
    model: Path,
    *,
    prompt: str,
    sampling: dict[str, Any],
    system: str | None,
    raw: bool,
    moe_backend: str | None,
    unproven: bool,
    max_context: int | None,
    json: bool,
) -> None:
    """Answers one prompt and says how fast and with what."""
    if raw and system is not None:
        raise UsageError("--system", found="it and --raw", expected="one of them", hint="put the text into --prompt")
    params = SamplingParams(**sampling)
    llm = _load(model, moe_backend, unproven, max_context)
    templated = not raw and llm.tokenizer.has_chat_template
    if system is not None and not templated:
        raise UsageError("--system", found="a checkpoint without a chat template", expected="one that has it")
    deltas = llm.stream_chat(_opening(system, prompt), params) if templated else llm.stream(prompt, params)
    output = _print_answer(deltas, quiet=json)
    if output.error is not None:
        raise NumericsError("the answer", found=output.error)
    if json:
        sys.stdout.write(jsonlib.dumps(_document(output, llm), ensure_ascii=False) + "\n")
    else:
        _say(_mark(llm, _closing_line(output, llm.stats)))
        _say(llm.decoder.plan.describe())


def chat(
    model: Path,
    *,
    sampling: dict[str, Any],
    system: str | None,
    moe_backend: str | None,
    unproven: bool,
    max_context: int | None,
) -> None:
    """Talks until the input ends; an interrupted answer stays in the conversation as far as it came."""
    params = SamplingParams(**sampling)
    llm = _load(model, moe_backend, unproven, max_context)
    messages = [{"role": "system", "content": system}] if system is not None else []
    while (line := _ask()) is not None:
        if not line.strip():
            continue
        before = llm.stats
        heard: list[str] = []
        messages.append({"role": "user", "content": line})
        try:
            output = _print_answer(llm.stream_chat(messages, params), heard=heard)
            _say(output.error or _mark(llm, _closing_line(output, llm.stats.since(before))))
        except KeyboardInterrupt:
            _say("\n(stopped)")
        messages.append({"role": "assistant", "content": "".join(heard)})


def _ask() -> str | None:
    """The next line, None when the input has ended or the asker gives up."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    if not line and sys.stdin.isatty():
        sys.stderr.write("\n")
    return line.rstrip("\n") if line else None


def _load(model: Path, moe_backend: str | None, unproven: bool, max_context: int | None) -> LLM:
    with _progress(f"loading {model}") as progress:
        return LLM(model, moe_backend=moe_backend, unproven=unproven, max_context=max_context, progress=progress)


def _mark(llm: LLM, text: str) -> str:
    return text if llm.decoder.plan.proven else f"UNPROVEN: {text}"


@contextmanager
def _progress(text: str) -> Iterator[Any]:
    """A bar on a terminal, from the first report on; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(text, total=None)

    def report(done: int, total: int) -> None:
        # Not before: proving draws on the terminal until the loading begins.
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


def _print_answer(deltas: Iterator[Delta], *, quiet: bool = False, heard: list[str] | None = None) -> RequestOutput:
    """Writes the pieces as they come and returns the whole; `heard` collects what was written."""
    for delta in deltas:
        if heard is not None:
            heard.append(delta.text)
        if not quiet:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        if delta.output is not None:
            if not quiet:
                sys.stdout.write("\n")
                sys.stdout.flush()
            return delta.output
    raise AssertionError("a stream ends with its output")


def _opening(system: str | None, prompt: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _closing_line(output: RequestOutput, stats: Stats) -> str:
    count = output.usage.completion_tokens
    parts = [
        f"{count} tokens at {stats.decode_rate:.1f} tok/s" if count > 1 else f"{count} token",
        f"prompt of {output.usage.prompt_tokens} at {stats.prefill_rate:.0f} tok/s",
        f"{stats.weight_bytes_per_token / 1e6:.1f} MB of weights read per token",
    ]
    if output.finish_reason == "length":
        parts.append("cut at --max-tokens or the context")
    return ", ".join(parts)


def _document(output: RequestOutput, llm: LLM) -> dict[str, Any]:
    stats = llm.stats
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": output.usage.completion_tokens,
        "decode_tokens_per_second": stats.decode_rate,
        "prefill_tokens_per_second": stats.prefill_rate,
        "weight_bytes_per_token": stats.weight_bytes_per_token,
        "moe_backends": stats.backends,
        "proven": llm.decoder.plan.proven,
    }


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
