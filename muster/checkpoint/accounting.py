"""The loader's books: which tensors were read, which were asked for and absent, which may stay unread. No torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muster.checkpoint.index import CheckpointIndex
from muster.checkpoint.names import Waiver, grouped
from muster.errors import CheckpointError, MusterError


@dataclass(frozen=True)
class Accounting:
    """Where every tensor of a checkpoint went.

    Attributes:
        consumed: how many tensors were read.
        consumed_bytes: their bytes on disk.
        waived: the tensors left unread, by reason.
    """

    consumed: int
    consumed_bytes: int
    waived: Mapping[str, tuple[str, ...]]


class Books:
    """Collects, while a model loads, everything that `close` will judge."""

    def __init__(self, index: CheckpointIndex, waivers: Iterable[Waiver]) -> None:
        self._index = index
        self._waivers = list(waivers)
        self._consumed: set[str] = set()
        self._absent: dict[str, list[str]] = {}
        self._problems: list[MusterError] = []
        self.consumed_bytes = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong so far."""
        return not self._problems and not self._absent

    def consume(self, names: Iterable[str]) -> None:
        """Notes that these tensors are read; the same tensor may be read twice (a tied embedding)."""
        for name in names:
            if name not in self._consumed:
                self._consumed.add(name)
                self.consumed_bytes += self._index.tensors[name].nbytes

    def absent(self, name: str, expected: str) -> None:
        """Notes a tensor that a layer needs and the files lack."""
        self._absent.setdefault(expected, []).append(name)

    def note(self, problem: MusterError) -> None:
        """Notes anything else that is wrong."""
        self._problems.append(problem)

    def waive(self, waiver: Waiver) -> None:
        """Lets tensors stay unread."""
        self._waivers.append(waiver)

    def close(self) -> Accounting:
        """The account.

        Raises:
            CheckpointError: every tensor neither consumed nor waived, every tensor absent, every other problem noted.
        """
        waived: dict[str, list[str]] = {}
        unread: list[str] = []
        tests = [(re.compile(fnmatch.translate(waiver.pattern)), waiver.reason) for waiver in self._waivers]
        for name in self._index.tensors:
            if name not in self._consumed:
                reason = next((reason for pattern, reason in tests if pattern.match(name)), None)
                (unread if reason is None else waived.setdefault(reason, [])).append(name)
        problems = [
            *self._problems,
            *(
                CheckpointError(group, found="no such tensor", expected=expected)
                for expected, names in self._absent.items()
                for group in grouped(names)
            ),
            *(
                CheckpointError(group, found="it in the files", expected="a use for it, or a waiver by name")
                for group in grouped(unread)
            ),
        ]
        error = CheckpointError.gather(f"checkpoint {self._index.directory}", problems)
        if error is not None:
            raise error
        return Accounting(
            len(self._consumed), self.consumed_bytes, {reason: tuple(names) for reason, names in waived.items()}
        )
