"""What a roofline asks of a machine: sequences, context, cache, drafting."""

from __future__ import annotations

from dataclasses import dataclass

from muster.errors import UsageError
from muster.lab.explain.cache import CacheFormat
from muster.lab.explain.traffic import Step

MOST_DRAFTS = 16


@dataclass(frozen=True)
class Workload:
    """What is asked of a machine.

    Attributes:
        batch: sequences that are decoded together.
        context: tokens that each holds; the prompt of the prefill.
        cache: format of keys, values and latents.
        drafts: tokens to draft per step; None: the first few are shown where there is a draft layer.
        acceptance: probability that a draft is accepted, given those before it; None: not known.
    """

    batch: int
    context: int
    cache: CacheFormat
    drafts: int | None
    acceptance: float | None

    @property
    def decode(self) -> Step:
        """One more token for each sequence."""
        return Step(sequences=self.batch, past=self.context, cache=self.cache)

    @property
    def prefill(self) -> Step:
        """The prompt of one sequence in one pass."""
        return Step(tokens=self.context, cache=self.cache)


def workload(batch: int, context: int, cache: str, drafts: int | None, acceptance: float | None) -> Workload:
    """The workload of command-line options.

    Raises:
        UsageError: those that make no sense, all of them.
    """
    checks = {
        "--batch": (batch, 1 <= batch <= 1 << 20, "from 1 to 1,048,576"),
        "--context": (context, 0 <= context <= 1 << 30, "from 0 to 1,073,741,824"),
        "--cache": (cache, cache in ("bf16", "fp8"), "bf16 or fp8"),
        "--mtp": (drafts, drafts is None or 1 <= drafts <= MOST_DRAFTS, f"from 1 to {MOST_DRAFTS}"),
        "--acceptance": (acceptance, acceptance is None or 0 <= acceptance <= 1, "from 0 to 1"),
    }
    problems = [
        UsageError(name, found=str(value), expected=expected)
        for name, (value, sound, expected) in checks.items()
        if not sound
    ]
    error = UsageError.only_or_all("options", problems)
    if error is not None:
        raise error
    return Workload(batch, context, "fp8" if cache == "fp8" else "bf16", drafts, acceptance)
