"""Inputs that tests share: random numbers, q, k and v, heads, and edges."""

import torch

import gnn_attention as ga


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return numbers drawn from N(0, 1)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(
    num_dst=9, num_src=None, heads=4, kv_heads=2, dim=8, value_dim=6, dtype=torch.float64, batch=2, seed=0
):
    """Return q, k and v that need gradients, stored token by token as projections return them."""
    rng = torch.Generator().manual_seed(seed)
    num_src = num_dst if num_src is None else num_src
    shapes = (num_dst, heads, dim), (num_src, kv_heads, dim), (num_src, kv_heads, value_dim)
    tensors = [torch.randn(batch, *shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in tensors]


def heads(width=12, num_heads=4, seed=0, **options):
    """Return float64 heads with random biases, by default in two groups and with unequal widths."""
    torch.manual_seed(seed)
    options = {"head_dim": 6, "num_kv_heads": 2, "value_dim": 5, "bias": True} | options
    module = ga.StandardHeads(width, num_heads, **options).double()
    for name, parameter in module.named_parameters():
        if name.startswith("b_"):
            torch.nn.init.normal_(parameter)
    return module


def random_edges(num_dst, num_src, count, seed=0):
    """Return ``count`` different edges ``[2, count]`` in random order."""
    cells = torch.randperm(num_dst * num_src, generator=torch.Generator().manual_seed(seed))[:count]
    return torch.stack([cells % max(num_src, 1), cells // max(num_src, 1)])


def random_graph(num_dst, num_src, count, seed=0):
    """Return the graph of :func:`random_edges`."""
    return ga.TokenGraph.from_edges(random_edges(num_dst, num_src, count, seed), num_dst, num_src)
