"""Graph formats, kernels and memory estimates for a GPU."""
