"""Verdicts and times as traces of flashinfer-bench: definition, workload, solution, evaluation, one JSON object each.

Its schema decides which fields a status has: only PASSED carries a time, and it must; PASSED and INCORRECT_NUMERICAL
carry distances, and nothing else does. So a proven case that nobody timed has no trace, nor has a decline.
Facts: github.com/flashinfer-ai/flashinfer-bench, flashinfer_bench/data/{trace,workload}.py, April 2026.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from muster.lab.ledger.evidence import Evidence, Timing, Verdict
from muster.lab.ledger.records import plain, to_json

_STATUS: Mapping[Verdict, str] = MappingProxyType(
    {
        Verdict.PROVEN: "PASSED",
        Verdict.WRONG: "INCORRECT_NUMERICAL",
        Verdict.NAN: "INCORRECT_NUMERICAL",
        Verdict.PARTIAL_WRITE: "INCORRECT_NUMERICAL",
        Verdict.OUT_OF_BOUNDS: "RUNTIME_ERROR",
        Verdict.CRASH: "RUNTIME_ERROR",
        Verdict.OUT_OF_MEMORY: "RUNTIME_ERROR",
        Verdict.HANG: "TIMEOUT",
    }
)
_UNKNOWN = "NaN"
"""For a number that is not known: the schema's default, 0, would say that there was no error."""


def trace(evidence: Evidence, timing: Timing | None) -> dict[str, Any] | None:
    """The trace of a verdict and the time that rests on it; None when the schema has no place for it."""
    status = _STATUS.get(evidence.verdict)
    if status is None or (status == "PASSED" and timing is None):
        return None
    evaluation = {
        "status": status,
        "environment": _environment(evidence),
        "timestamp": evidence.date,
        "log": f"{evidence.verdict}: {evidence.message}" if evidence.message else str(evidence.verdict),
        "correctness": None if status in ("RUNTIME_ERROR", "TIMEOUT") else _correctness(evidence),
        "performance": {"latency_ms": timing.median * 1e3} if status == "PASSED" and timing else None,
    }
    return {
        "definition": _slug(evidence.part),
        "workload": {
            "axes": {"num_tokens": evidence.tokens},
            "inputs": {"hidden_states": {"type": "random"}},
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, evidence.case)),
        },
        "solution": _slug(f"muster {evidence.backend} {evidence.source[:12]}"),
        "evaluation": evaluation,
    }


def _environment(evidence: Evidence) -> dict[str, Any]:
    environment = evidence.environment
    libraries = {name.removeprefix("package "): version for name, version in environment.items() if name != "device"}
    return {"hardware": environment.get("device") or "unknown", "libs": libraries}


def _correctness(evidence: Evidence) -> dict[str, Any]:
    """Ours are relative RMS distances, of which the worst token's stands in for the largest relative error."""
    errors = evidence.errors
    worst = _UNKNOWN if errors is None or errors.worst_token is None else plain(errors.worst_token)
    return {
        "max_relative_error": worst,
        "max_absolute_error": _UNKNOWN,
        "extra": {
            "measure": "relative RMS against float64 with the backend's declared rounding; max_relative_error is "
            "that of the worst token",
            "relative_rms": None if errors is None else to_json(errors),
            "verdict": str(evidence.verdict),
            "pattern": evidence.pattern,
            "case": evidence.case,
            "repeat": evidence.repeat,
        },
    }


def _slug(text: str) -> str:
    """Lower case words joined by underscores, as the schema's names are used in file names."""
    return re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")
