"""From a graph to the pieces that kernels run."""
