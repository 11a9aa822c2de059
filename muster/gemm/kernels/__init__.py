"""Kernels of linear backends."""
