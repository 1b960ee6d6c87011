"""Kernels for GPUs, in Triton: one module for each storage form, imported only when a call needs it."""
