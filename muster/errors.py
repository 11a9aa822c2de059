"""The exception tree: every error names the thing, what was found, what was expected and the next step.

MusterError                    exit 1   the answer is no
├── UnprovenError              exit 1   a backend without the verdict it needs
├── NumericsError              exit 1   NaN or infinite values where numbers must be
├── InputError                 exit 2   bad usage or bad input
│   ├── UsageError             exit 2   a command-line option or an API argument
│   ├── RequestError           exit 2   a prompt or a sampling option of one request
│   ├── ConfigError            exit 2   config.json and its neighbours
│   ├── CheckpointError        exit 2   safetensors files, index, tensor names
│   └── FormatError            exit 2   codes and scales of a quantised tensor
└── EnvironmentLackError       exit 3   a package, a device or memory that is not there
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

INTERRUPTED = 130
"""Exit code of work that the user stopped."""


class MusterError(Exception):
    """One fact that stops the work, or several of the same kind (`reasons`).

    Args:
        thing: what is wrong, by name: a file, a tensor, a config key, an option.
        found: what was there.
        expected: what should have been there.
        hint: what the reader can do next.
        reasons: the single errors, when several were found at once.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        thing: str,
        *,
        found: str = "",
        expected: str = "",
        hint: str = "",
        reasons: Sequence[MusterError] = (),
    ) -> None:
        super().__init__(thing, found, expected, hint)
        self.thing = thing
        self.found = found
        self.expected = expected
        self.hint = hint
        self.reasons = tuple(reasons)

    def __str__(self) -> str:
        text = self.thing
        if self.found:
            text += f": found {self.found}"
        if self.expected:
            text += f"{',' if self.found else ':'} expected {self.expected}"
        lines = [text, *("  - " + str(reason).replace("\n", "\n    ") for reason in self.reasons)]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    @classmethod
    def gather(cls, thing: str, reasons: Sequence[MusterError], *, hint: str = "") -> Self | None:
        """All errors of one look as one error; None when there are none."""
        if not reasons:
            return None
        return cls(thing, found=f"{len(reasons)} problem{'s' if len(reasons) > 1 else ''}", hint=hint, reasons=reasons)

    @classmethod
    def only_or_all(cls, thing: str, reasons: Sequence[MusterError]) -> MusterError | None:
        """As `gather`, where one error alone needs no heading: the only one itself."""
        return reasons[0] if len(reasons) == 1 else cls.gather(thing, reasons)


class UnprovenError(MusterError):
    """A backend was asked for by name and has no evidence that it is right."""


class NumericsError(MusterError):
    """NaN or infinite values where finite numbers must be."""


class InputError(MusterError):
    """What the user gave cannot be used."""

    exit_code = 2
    http_status = 400


class UsageError(InputError):
    """A command-line option or an API argument is wrong."""


class RequestError(InputError):
    """One request cannot be served: its prompt or its sampling options are wrong."""


class ConfigError(InputError):
    """config.json, hf_quant_config.json or generation_config.json is wrong or contradicts itself."""


class CheckpointError(InputError):
    """The files of a checkpoint are missing, cut short, or disagree with each other."""


class FormatError(InputError):
    """Codes or scales of a quantised tensor break the rules of their format."""


class EnvironmentLackError(MusterError):
    """A package, a device, memory or disk space that the work needs is not there."""

    exit_code = 3
    http_status = 503
