"""The kernel over rows of edges, in Triton; importing a module of this package loads Triton."""
