"""A checkpoint directory: its config and its headers, read together so that one report names all that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from muster.checkpoint.config import Reading, read_config
from muster.checkpoint.index import CheckpointIndex
from muster.errors import CheckpointError, InputError

T = TypeVar("T")


def read_directory(directory: Path) -> tuple[Reading, CheckpointIndex]:
    """The config and the headers of a checkpoint.

    Raises:
        InputError: everything that is wrong with config, index and files: a ConfigError or a CheckpointError where
            one of them is wrong, a CheckpointError of both where both are.
    """
    problems: list[InputError] = []
    reading = _try(read_config, directory, problems)
    index = _try(CheckpointIndex.open, directory, problems)
    if reading is not None and index is not None:
        return reading, index
    if len(problems) == 1:
        raise problems[0]
    raise CheckpointError(f"checkpoint {directory}", found="problems in its config and its files", reasons=problems)


def _try(read: Callable[[Path], T], directory: Path, problems: list[InputError]) -> T | None:
    try:
        return read(directory)
    except InputError as error:
        problems.append(error)
        return None
