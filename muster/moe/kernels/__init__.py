"""Kernels that the backends launch."""
