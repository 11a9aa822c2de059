"""GPUs as a user names them, `8xRTX-PRO-6000` or `here`, and how a model is split over them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from muster.errors import UsageError
from muster.lab.explain.gpus import Gpu, gpu
from muster.lab.explain.split import Split

HERE = "here"

COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs that machines are sold with."""

_COUNTED = re.compile(r"(\d{1,4})\s*[x*×]\s*(.+)")  # noqa: RUF001


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, and the split over them.

    Attributes:
        gpu: one of them; `bandwidth` is the figure to divide by.
        split: how the model is cut.
        measured: the bandwidth was measured, not published.
        here: it is this machine.
    """

    gpu: Gpu
    split: Split
    measured: bool = False
    here: bool = False

    def __str__(self) -> str:
        count = self.split.gpus
        return self.gpu.name if count == 1 else f"{count}x {self.gpu.name}"


def machines(names: str, *, tensor: int | None, expert: int | None, measured: bool = False) -> tuple[Machine, ...]:
    """The machines of a comma-separated list.

    A count before a name is the tensor-parallel degree where none is given.

    Raises:
        UsageError: names that are not known, a count that contradicts the split; all of them.
    """
    found: list[Machine] = []
    problems: list[UsageError] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            found.append(_machine(name, tensor, expert, measured))
        except UsageError as problem:
            problems.append(problem)
    if not found and not problems:
        problems.append(UsageError("--gpu", found="nothing", expected="the name of a GPU, or here"))
    error = UsageError.only_or_all("--gpu", problems)
    if error is not None:
        raise error
    return tuple(found)


def _machine(text: str, tensor: int | None, expert: int | None, measured: bool) -> Machine:
    counted = _COUNTED.fullmatch(text)
    name = counted[2] if counted else text
    split = Split(tensor or (int(counted[1]) if counted else 1), expert or 1)
    if counted and split.gpus != int(counted[1]):
        raise UsageError(
            f"--gpu {text}", found=f"{counted[1]} GPUs, and {split.gpus} by --tp and --ep", expected="one number"
        )
    if name.lower() == HERE:
        from muster.lab.explain.gpus import this_machine

        return Machine(this_machine(), split, measured=True, here=True)
    kind = gpu(name)
    if measured and kind.measured_bandwidth is not None:
        return Machine(replace(kind, bandwidth=kind.measured_bandwidth), split, measured=True)
    return Machine(kind, split)
