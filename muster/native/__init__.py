"""Kernels for the processor this runs on: a small typed emitter over LLVM, format decoders, torch's thread team."""
