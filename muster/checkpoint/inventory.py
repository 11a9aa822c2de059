"""What a checkpoint is made of, module by module: from its headers, from a lone config, or from a released name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from muster.checkpoint import presets
from muster.checkpoint.config import CONFIG, Reading, read_config
from muster.checkpoint.directory import read_directory
from muster.checkpoint.index import CheckpointIndex, collector_at_rest
from muster.checkpoint.kinds import Kind
from muster.checkpoint.modules import Module, claimed_modules, stored_modules, unscaled_inputs
from muster.checkpoint.quant import survey
from muster.checkpoint.spec import ModelSpec
from muster.checkpoint.storage import Layout
from muster.errors import CheckpointError, UsageError

__all__ = ["Group", "Inventory", "Kind", "Module"]


class Group(NamedTuple):
    """Modules of one kind that are stored alike."""

    kind: Kind
    draft: bool
    stored: str
    scheme: str
    modules: int
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Inventory:
    """The modules of a checkpoint.

    Attributes:
        name: what was asked for.
        source: where the tensors are known from: headers of files, a lone config, or a released name.
        spec: the model.
        modules: every module by name.
        disagreements: where the config says otherwise than the files, which win.
        notes: how it was read, and what is assumed.
        index: the files, None without them.
    """

    name: str
    source: Literal["files", "config", "preset"]
    spec: ModelSpec
    modules: Mapping[str, Module]
    disagreements: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    index: CheckpointIndex | None = None

    @classmethod
    def of(cls, model: str) -> Inventory:
        """The inventory of a directory, a config.json, or a released checkpoint by its name.

        Raises:
            UsageError: no such file and no such name.
            InputError: everything that is wrong with the files, at once.
        """
        try:
            path = Path(model).expanduser()
            if path.is_dir():
                return cls.from_directory(path)
            if path.exists() or path.suffix == ".json":
                return cls.from_config(path)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"MODEL {model}", found=str(error), expected="a path that can be read") from error
        if model in presets.names():
            return cls.from_preset(model)
        raise UsageError(
            f"MODEL {model}",
            found="no such directory, file or released checkpoint",
            expected="a checkpoint directory, a config.json, or a name",
            hint=presets.suggestion(model),
        )

    @classmethod
    def from_preset(cls, name: str) -> Inventory:
        """A released checkpoint by its name; errors as `presets.preset`."""
        preset = presets.preset(name)
        return cls(name, "preset", preset.spec, claimed_modules(preset.spec, preset.layout), notes=preset.notes)

    @classmethod
    def from_config(cls, path: Path) -> Inventory:
        """A lone config.json, with the hf_quant_config.json beside it; errors as `read_config`."""
        return cls._from_reading(str(path), read_config(path))

    @classmethod
    def from_directory(cls, directory: Path) -> Inventory:
        """A checkpoint, from its headers; a directory that holds a config and no weights counts as a lone config.

        Raises:
            InputError: everything that is wrong with config, index and files.
        """
        if _holds_no_weights(directory):
            return cls._from_reading(str(directory), read_config(directory))
        with collector_at_rest():
            reading, index = read_directory(directory)
            found = survey(index, reading.spec)
            modules = stored_modules(found, reading.spec)
        notes = (*reading.notes, *found.notes, *unscaled_inputs(found, reading.spec))
        return cls(str(directory), "files", reading.spec, modules, found.disagreements, notes, index)

    @classmethod
    def _from_reading(cls, name: str, reading: Reading) -> Inventory:
        spec = reading.spec
        notes = ["no weights were read: what is stored how is what the config claims", *reading.notes]
        if spec.family == "minimax_m2" and spec.draft_layers:
            notes.append(f"{spec.draft_layers} draft layers are declared and not counted: their tensors are not known")
        return cls(name, "config", spec, claimed_modules(spec, Layout.usual(spec)), notes=tuple(notes))

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return sum(module.tensors for module in self.modules.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(module.nbytes for module in self.modules.values())

    @property
    def parameters(self) -> int:
        """Weights and biases, scales left out."""
        return sum(module.parameters for module in self.modules.values())

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Modules of one kind stored alike: those of the decoder, then the draft's, the largest first."""
        sums: dict[tuple[Kind, bool, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for module in self.modules.values():
            total = sums[module.kind, module.draft, module.stored, module.scheme]
            for place, value in enumerate((module.count, module.tensors, module.parameters, module.nbytes)):
                total[place] += value
        groups = [Group(*key, *total) for key, total in sums.items()]
        return tuple(sorted(groups, key=lambda group: (group.draft, -group.nbytes)))

    def layer(self, number: int) -> tuple[Module, ...]:
        """The modules of a layer; draft layers count on from the decoder's depth."""
        return self._by_layer.get(number, ())

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """The draft layers that are there; `spec.draft_layers` is how many the config declares."""
        depth = len(self.spec.layers)
        return tuple(sorted(number for number in self._by_layer if number >= depth))

    @cached_property
    def _by_layer(self) -> Mapping[int, tuple[Module, ...]]:
        layers: dict[int, list[Module]] = defaultdict(list)
        for module in self.modules.values():
            if module.layer is not None:
                layers[module.layer].append(module)
        return {number: tuple(modules) for number, modules in layers.items()}


def _holds_no_weights(directory: Path) -> bool:
    """Whether a config is all there is."""
    try:
        files = {entry.name for entry in directory.iterdir()}
    except OSError as error:
        found = error.strerror or str(error)
        raise CheckpointError(str(directory), found=found, expected="a directory that can be read") from error
    return CONFIG in files and not any(".safetensors" in name for name in files)
