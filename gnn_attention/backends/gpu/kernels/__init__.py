"""The Triton kernels over rows of edges. Importing a module of this package loads Triton."""
