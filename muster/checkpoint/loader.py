"""From files to tensors in the form the layers want, with two-sided accounting.

Every tensor of the files is consumed or waived by name, and every parameter that a layer asks for is filled; whatever
breaks that is collected and raised in one error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from muster.checkpoint import experts
from muster.checkpoint.accounting import Accounting, Books
from muster.checkpoint.directory import read_directory
from muster.checkpoint.experts import ExpertTensors, RouterTensors
from muster.checkpoint.index import CheckpointIndex
from muster.checkpoint.names import ExpertNames, Names, Waiver
from muster.checkpoint.quant import Survey, survey
from muster.checkpoint.reader import Reader
from muster.checkpoint.spec import ModelSpec, MoESpec
from muster.errors import CheckpointError
from muster.formats.matrix import QuantMatrix

__all__ = ["Accounting", "ExpertTensors", "Loader", "Progress", "RouterTensors"]

Progress = Callable[[int, int], None]
"""Told the bytes read so far and the bytes of all tensors, after each module and each layer's experts."""


class Loader:
    """Reads a model's parameters, module by module, and keeps the books.

    What is missing or misshapen does not stop the loading: it is noted, NaN of the right shape stands in, and `finish`
    raises everything at once. Nothing need be prepared from tensors once `sound` is false.

    Attributes:
        spec: the model.
        index: its files.
        survey: what is stored how.
        names: its module paths.
    """

    def __init__(
        self,
        spec: ModelSpec,
        index: CheckpointIndex,
        stored: Survey,
        *,
        draft: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.index = index
        self.survey = stored
        self.names = Names(spec)
        self._books = Books(index, self.names.waivers(draft=draft))
        self._reader = Reader(index, stored, self._books)
        self._progress = progress
        self._total = index.nbytes

    @classmethod
    def open(cls, directory: Path, *, draft: bool = False, progress: Progress | None = None) -> Loader:
        """The checkpoint in `directory`, its config and all headers read and checked.

        Args:
            directory: the checkpoint.
            draft: draft (MTP) layers will be run; without it their tensors are waived.
            progress: told how many bytes have been read.

        Raises:
            InputError: everything that is wrong with config, files and index, as `read_directory`; then matrices that
                fit no dialect, as `survey`.
        """
        directory = Path(directory)
        reading, index = read_directory(directory)
        return cls(reading.spec, index, survey(index, reading.spec), draft=draft, progress=progress)

    @property
    def sound(self) -> bool:
        """Whether everything asked for so far was there and right."""
        return self._books.clean

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantMatrix:
        """The weight `[N, K]` of a module in its stored format, mapped from the file, not copied."""
        matrix = self._reader.matrix(module, shape)
        self._report()
        return matrix

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in its stored dtype, mapped from the file, not copied: a norm, a bias, an embedding."""
        return self._reader.tensor(name, shape)

    def optional_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """`tensor`, or None where the files have none of that name."""
        return self.tensor(name, shape) if name in self.index.tensors else None

    def embedding(self) -> Tensor:
        """The token embedding `[V, D]`."""
        return self.tensor(f"{self.names.embed}.weight", (self.spec.vocab, self.spec.hidden))

    def head(self) -> QuantMatrix:
        """The output projection `[V, D]`: the embedding where the config ties them."""
        if self.spec.tied_embeddings:
            self._check_tie()
        module = self.names.embed if self.spec.tied_embeddings else self.names.head
        return self.matrix(module, (self.spec.vocab, self.spec.hidden))

    def experts(self, layer: int, moe: MoESpec) -> ExpertTensors:
        """The routed experts of a layer, stacked, whatever their layout on disk."""
        root, paths = self.expert_layer(layer)
        tensors = experts.read_experts(self._reader, root, paths, moe, self.spec.hidden)
        self._report()
        return tensors

    def router(self, layer: int, moe: MoESpec) -> RouterTensors:
        """The gate of an expert layer, in its stored dtypes."""
        root, paths = self.expert_layer(layer)
        return experts.read_router(self._reader, root, paths, moe, self.spec.hidden)

    def waive(self, pattern: str, reason: str) -> None:
        """Lets tensors stay unread whose names match the glob `pattern`."""
        self._books.waive(Waiver(pattern, reason))

    def finish(self) -> Accounting:
        """Closes the books.

        Raises:
            CheckpointError: every tensor neither consumed nor waived, every tensor asked for and absent, every wrong
                shape and every bad scale.
        """
        return self._books.close()

    def expert_layer(self, layer: int) -> tuple[str, ExpertNames]:
        """A layer's root and how its expert layer is named: the first way of the family that finds a router."""
        root, ways = self.names.layer(layer), self.names.family.experts
        return root, next((way for way in ways if f"{root}.{way.router}.weight" in self.index.tensors), ways[0])

    def _check_tie(self) -> None:
        embed, head = f"{self.names.embed}.weight", f"{self.names.head}.weight"
        if embed in self.index.tensors and head in self.index.tensors:
            one, other = self.index.read(embed), self.index.read(head)
            if one.shape != other.shape or not torch.equal(one, other):
                self._books.note(
                    CheckpointError(
                        head,
                        found=f"values other than {embed}",
                        expected="the same values: config.json says tie_word_embeddings",
                        hint="set tie_word_embeddings to false if the head is meant to differ",
                    )
                )

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._books.consumed_bytes, self._total)
