"""Formats, kernels and estimates for a GPU."""
