"""Muster runs Mixture-of-Experts language models on kernels that have passed muster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.engine.request import SamplingParams
    from muster.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """LLM and SamplingParams, imported when first used: `import muster` alone does not import torch."""
    if name == "LLM":
        from muster.llm import LLM

        return LLM
    if name == "SamplingParams":
        from muster.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
