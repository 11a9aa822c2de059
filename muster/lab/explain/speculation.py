"""What drafting with a model's own MTP head is worth: tokens per step against what drafts and verification cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.checkpoint.inventory import Inventory
from muster.lab.explain.gpus import Gpu
from muster.lab.explain.limit import limit
from muster.lab.explain.split import Split
from muster.lab.explain.traffic import Step


@dataclass(frozen=True)
class Speculation:
    """Drafting `drafts` tokens before each step of the model, at the hardware's limit.

    Attributes:
        drafts: N, tokens drafted one after the other.
        decode: seconds of a step without drafting.
        draft: seconds of one draft.
        verify: seconds of a step over N + 1 tokens of each sequence.
    """

    drafts: int
    decode: float
    draft: float
    verify: float

    def tokens(self, acceptance: float) -> float:
        """Tokens per step and sequence when each draft is accepted with this probability, given those before it."""
        return sum(acceptance**number for number in range(self.drafts + 1))

    def speedup(self, acceptance: float) -> float:
        """How much faster than without drafting."""
        return self.tokens(acceptance) * self.decode / (self.verify + self.drafts * self.draft)

    @property
    def break_even(self) -> float | None:
        """The acceptance from which on drafting pays; None when it never does."""
        if self.speedup(1.0) < 1:
            return None
        low, high = 0.0, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle) >= 1 else (middle, high)
        return high


def speculation(inventory: Inventory, split: Split, step: Step, gpu: Gpu, drafts: int) -> Speculation:
    """The costs at the limit of that GPU.

    A verification reads weights and cache once, and more experts, as it routes more tokens; states are read and
    written once, as if rejected tokens were replayed for nothing.
    """
    return Speculation(
        drafts=drafts,
        decode=limit(inventory, split, step, gpu).seconds,
        draft=limit(inventory, split, replace(step, draft=True), gpu).seconds,
        verify=limit(inventory, split, replace(step, tokens=drafts + 1, answers=drafts + 1), gpu).seconds,
    )
