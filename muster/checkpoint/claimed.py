"""What a config's claim says of one module: its format, what happens to its inputs, and the pattern that says so."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from muster.checkpoint.patterns import Patterns
from muster.checkpoint.spec import Activations, QuantClaim
from muster.errors import ConfigError, MusterError


class Claimed(NamedTuple):
    """The claim about one module; `format` is None where it is left alone, `pattern` empty where none names it."""

    format: str | None
    activations: Activations
    pattern: str


class Claims:
    """A claim, its patterns compiled once."""

    def __init__(self, claim: QuantClaim) -> None:
        """Compiles.

        Raises:
            ConfigError: a `re:` pattern that is no regular expression; all of them at once.
        """
        self._claim = claim
        self._layers = dict(claim.layers)
        self._activations = dict(claim.activations)
        compiled = []
        problems: list[MusterError] = []
        for patterns in (claim.ignore, self._layers):
            try:
                compiled.append(Patterns(patterns, claim.source))
            except ConfigError as error:
                problems += error.reasons
        combined = ConfigError.gather(claim.source, problems)
        if combined is not None:
            raise combined
        self._ignored, self._layered = compiled

    def of(self, module: str) -> Claimed:
        """What is claimed of a module."""
        exception = self._ignored.find(module)
        if exception is not None:
            return Claimed(None, "none", exception)
        pattern = self._layered.find(module)
        if pattern is not None:
            return Claimed(self._layers[pattern], self._activations.get(pattern, "none"), pattern)
        if self._claim.algorithm is None:
            return Claimed(None, "none", "")
        return Claimed(self._claim.algorithm, self._activations.get("", "none"), "")

    def mentions(self, module: str) -> bool:
        """Whether an exception stands anywhere in the module's name, the loosest reading (old modelopt, AWQ)."""
        return self._ignored.mentions(module) is not None

    def left_alone(self, module: str) -> str:
        """Why quantisers leave this linear alone though no exception names it; empty if they do not."""
        if self._claim.method in _HEAD_STAYS_PLAIN and module.endswith(("lm_head", "shared_head.head")):
            return f"{self._claim.method} checkpoints leave the output head alone"
        return _LEFT_ALONE.get(module.rpartition(".")[2], "")


_HEAD_STAYS_PLAIN = ("fp8", "gptq", "awq", "auto-round")

_LEFT_ALONE: Mapping[str, str] = MappingProxyType(
    {
        "gate": "quantisers neither quantise nor list routers",
        "router": "quantisers neither quantise nor list routers",
        "shared_expert_gate": "quantisers neither quantise nor list routers",
        "embed_tokens": "embeddings are not linear layers",
        "conv1d": "convolutions are not linear layers",
        "weights_proj": "the indexer's head weights stay unquantised in all releases",
        "fc": "the draft layer's input projection stays unquantised in most releases",
        "eh_proj": "the draft layer's input projection stays unquantised in most releases",
    }
)
"""Why a plain matrix that no exception list names is no surprise, by the last part of its module's name."""
