"""Kernels for the processor this runs on: a small typed emitter over LLVM, format decoders, torch's thread team."""

from muster.contract import Package, missing_packages

REQUIREMENT = Package("llvmlite", ">=0.45")
"""What compiles the kernels."""


def available() -> bool:
    """Whether kernels can be compiled here."""
    return not missing_packages((REQUIREMENT,))
