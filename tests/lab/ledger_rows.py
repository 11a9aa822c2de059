"""Rows for tests of the ledger: every field has a value of its own, so that a mix-up shows."""

import math
from dataclasses import replace

from muster.lab.ledger.evidence import Errors, Evidence, Timing, Verdict
from muster.lab.ledger.ledger import new_id

ENVIRONMENT = {"device": "Some GPU", "key": "9.0", "driver": "570.1", "torch": "2.13", "python": "3.11", "judge": "ab"}
SOURCE = "5" * 64
PART = "experts nvfp4 E8 K2 D64 F32 silu f32"


def evidence(**changes) -> Evidence:
    row = Evidence(
        id=new_id(),
        verdict=Verdict.PROVEN,
        role="experts",
        part=PART,
        backend="cpu",
        case='{"tokens": 4}',
        tokens=4,
        pattern="uniform",
        environment=ENVIRONMENT,
        source=SOURCE,
        errors=Errors(1e-7, 2e-7, 0.01, 0.02, 1e-6, 3e-6),
        deterministic=True,
        message="",
        seconds=1.25,
        date="2026-03-04T05:06:07+00:00",
        repeat="muster verify /models/demo --backend cpu --tokens 4",
    )
    return replace(row, **changes)


def timing(row: Evidence, **changes) -> Timing:
    found = Timing(
        id=new_id(),
        evidence=row.id,
        role=row.role,
        part=row.part,
        backend=row.backend,
        tokens=row.tokens,
        environment=row.environment,
        source=row.source,
        median=2e-4,
        low=1.9e-4,
        high=2.2e-4,
        repetitions=40,
        floor=1e-4,
        bytes_read=123456,
        bandwidth=4.5e12,
        layout_bytes=99,
        date=row.date,
    )
    return replace(found, **changes)


def failures() -> tuple[Evidence, ...]:
    """One of each verdict that is a failure, with numbers that JSON has no word for and text that is no UTF-8."""
    not_finite = Errors(math.inf, math.inf, -math.inf, None, 1e-6, 3e-6)
    return tuple(
        evidence(
            verdict=verdict,
            case=f'{{"failure": "{verdict}"}}',
            errors=not_finite if verdict is Verdict.WRONG else None,
            deterministic=None,
            message=f"saw {verdict} \udcff \x1b[31m in café",
        )
        for verdict in Verdict
        if verdict.failed
    )
