"""What is left for the post-mortem when the engine fails: one JSON file in MUSTER_HOME/crashes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster import __version__
from muster.engine.engine import Engine
from muster.llm import LLM
from muster.server.plan_document import plan_document


def write_report(home: Path, failure: BaseException, llm: LLM | None) -> Path:
    """Writes the report and answers where it is. Of requests it holds lengths, never their text.

    Args:
        home: MUSTER_HOME.
        failure: what ended the engine.
        llm: the model, None if it was never loaded.

    Raises:
        OSError: it cannot be written.
    """
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    path = home / "crashes" / f"{stamp}-{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "time": stamp,
        "muster": __version__,
        "failure": f"{type(failure).__name__}: {failure}",
        "traceback": traceback.format_exception(failure),
        "threads": _threads(),
    }
    if llm is not None:
        spec = llm.decoder.spec
        report |= {
            "plan": plan_document(llm.decoder.plan),
            "shapes": {"layers": len(spec.layers), "hidden": spec.hidden, "vocab": spec.vocab, "context": spec.context},
            "last_step": _last_step(llm.engine),
            "stats": asdict(llm.engine.stats),
        }
    path.write_text(json.dumps(report, indent=2, default=str) + "\n")
    return path


def _last_step(engine: Engine) -> dict[str, Any] | None:
    step = engine.last_step
    if step is None:
        return None
    rows = [{"prompt_tokens": prompt, "start": start, "end": end} for prompt, start, end in step.rows]
    pages = {"all": engine.pages, "free": engine.free_pages}
    return {"number": step.number, "began": step.began, "tokens": step.tokens, "requests": rows, "pages": pages}


def _threads() -> dict[str, list[str]]:
    """Where every thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return {names.get(ident) or str(ident): traceback.format_stack(frame) for ident, frame in frames}
