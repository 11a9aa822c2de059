"""What the engine has done, in numbers. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Stats:
    """Sums since the engine was made, and what made them.

    A step in which every sequence gets exactly one more generated token counts as decode; every other one, with any
    prompt token or any token computed again after a preemption, as prefill.

    Attributes:
        prompt_tokens: tokens of the prompts whose requests have ended.
        cached_tokens: those of them found in the cache.
        prefill_tokens: tokens computed in prefill steps.
        decode_tokens: tokens generated in decode steps.
        generated_tokens: tokens generated in all.
        prefill_seconds, decode_seconds: wall time of the steps, sampling and text included.
        steps: steps of both kinds.
        preemptions: times a request gave its pages back.
        backends: names of the backends that compute the experts.
        weight_bytes_per_token: bytes of weights that one token of one sequence reads.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    backends: tuple[str, ...] = ()
    weight_bytes_per_token: int = 0

    def plus(self, **more: float) -> Stats:
        """The same with these sums raised."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})

    def since(self, earlier: Stats) -> Stats:
        """What was added after `earlier`."""
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in _SUMS})

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of the prefill steps; 0 when there were none."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of the decode steps, over all sequences; 0 when there were none."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Step:
    """What one step computes.

    Attributes:
        number: from 1.
        began: seconds since 1970.
        rows: per request the length of its prompt, and the start and end of its tokens that are computed.
    """

    number: int
    began: float
    rows: tuple[tuple[int, int, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens it computes."""
        return sum(end - start for _, start, end in self.rows)


_SUMS = tuple(field.name for field in fields(Stats) if field.name not in ("backends", "weight_bytes_per_token"))
