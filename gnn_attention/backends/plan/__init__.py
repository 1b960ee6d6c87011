"""Plans, which cut a graph into the pieces that kernels run."""
