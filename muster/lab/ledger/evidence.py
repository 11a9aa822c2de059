"""What has been found out about a backend: verdicts with all that is needed to repeat them, and times.

Both are rows of the ledger. Failures are evidence too; a time rests on the evidence that its backend is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What came of a backend on a case."""

    PROVEN = "proven"
    WRONG = "wrong"
    NAN = "nan"
    PARTIAL_WRITE = "partial-write"
    OUT_OF_BOUNDS = "out-of-bounds"
    CRASH = "crash"
    HANG = "hang"
    OUT_OF_MEMORY = "out-of-memory"
    DECLINED = "declined"
    MISSING = "missing"
    NOT_TRIED = "not-tried"

    @property
    def failed(self) -> bool:
        """Whether the backend ran, or tried to, and did not pass."""
        return self not in (Verdict.PROVEN, Verdict.DECLINED, Verdict.MISSING, Verdict.NOT_TRIED)


@dataclass(frozen=True)
class Errors:
    """Relative RMS distances; None where there was nothing to compare.

    Attributes:
        whole: of the whole output from the reference with the backend's declared rounding.
        worst_token: of the token where it is worst, from the same.
        ideal_whole: of the whole output from the unrounded reference.
        ideal_worst_token: of the worst token from that.
        limit_whole, limit_worst_token: what the first two were held against.
    """

    whole: float | None
    worst_token: float | None
    ideal_whole: float | None
    ideal_worst_token: float | None
    limit_whole: float
    limit_worst_token: float


@dataclass(frozen=True)
class Evidence:
    """One verdict.

    Attributes:
        id: short, unique in a ledger; what `muster ledger show` takes.
        verdict: the verdict.
        role: "experts", "draft" or "linears".
        part: key of what was computed (`Part.key`): shapes, format, activation, dtype.
        backend: its name.
        case: the case as JSON (`Case.to_json`): with the backend, all that is needed to run it again.
        tokens: T of the case.
        pattern: name of the case's routing pattern.
        environment: what the evidence depends on by name: device, driver, cuda, torch, triton, packages, muster, ...
        source: hash of the backend's own source and of the modules it is built from.
        errors: the distances, None when there was no output to judge.
        deterministic: whether two runs gave the same bits; None when it did not run twice.
        message: one line on what was seen: the reasons of a decline, the signal, the end of stderr.
        seconds: how long the candidate took, start of its process included.
        date: when it ended, ISO 8601 in UTC.
        repeat: the command that repeats it.
        origin: "" for this machine, else the name of the ledger it was imported from.
    """

    id: str
    verdict: Verdict
    role: str
    part: str
    backend: str
    case: str
    tokens: int
    pattern: str
    environment: Mapping[str, str]
    source: str
    errors: Errors | None
    deterministic: bool | None
    message: str
    seconds: float
    date: str
    repeat: str
    origin: str = ""


@dataclass(frozen=True)
class Timing:
    """How long a proven backend takes for one call of one part.

    Attributes:
        id: short, unique in a ledger.
        evidence: id of the evidence that the backend is right there.
        role, part, backend, tokens, environment, source, date, origin: as in `Evidence`.
        median, low, high: seconds per call: the median, and the quartiles of the repetitions.
        repetitions: how many calls were timed.
        floor: seconds the hardware allows at least; `bytes_read` over the measured bandwidth, or operations over the
            measured rate, whichever is longer.
        bytes_read: distinct weight bytes touched, plus inputs and outputs.
        bandwidth: bytes per second this device was measured to read.
        layout_bytes: bytes the backend's layout keeps beside the stored weights, for one such part.
    """

    id: str
    evidence: str
    role: str
    part: str
    backend: str
    tokens: int
    environment: Mapping[str, str]
    source: str
    median: float
    low: float
    high: float
    repetitions: int
    floor: float
    bytes_read: int
    bandwidth: float
    layout_bytes: int
    date: str
    origin: str = ""
