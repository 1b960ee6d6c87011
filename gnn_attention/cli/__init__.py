"""The commands of ``gnn-attention``, one module each."""
