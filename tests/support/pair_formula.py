"""Dense attention with a key and a value for each pair of tokens, in plain torch, for any normaliser."""

import torch

WEIGHTS = {
    "softmax": lambda s, mask: s.masked_fill(~mask, -1e300).softmax(-1),
    "sigmoid": lambda s, mask: 1 / (1 + (-s).exp()),
    "relu": lambda s, mask: s.clamp(min=0),
    "relu2": lambda s, mask: s.clamp(min=0) ** 2,
    "silu": lambda s, mask: s / (1 + (-s).exp()),
    "gelu": lambda s, mask: s * (1 + (s / 2**0.5).erf()) / 2,
    "identity": lambda s, mask: s,
    "sparsemax": lambda s, mask: sparsemax(s.masked_fill(~mask, -1e9)),
}


def sparsemax(z):
    """Return the point of the simplex nearest to each row: the largest entries minus a threshold."""
    values = z.sort(-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    size = (1 + rank * values > values.cumsum(-1)).sum(-1, keepdim=True)
    return (z - (values.cumsum(-1).gather(-1, size - 1) - 1) / size).clamp(min=0)


def per_head(x, heads, dim):
    return x.repeat_interleave(heads // x.shape[dim], dim)


def pair_attention(q, k, v, graph, normaliser="softmax", bias=None, attr=None, maps=(), types=None):
    """Return the output and the weights of all edges of a graph that has an edge list.

    ``maps`` are those of keys and values, for each type if there are ``types``. Without ``attr`` they map the
    sender's key and value; with it they map the features, which are added.
    """
    heads, (src, dst) = q.shape[1], graph.edge_index
    k, v = per_head(k, heads, 1), per_head(v, heads, 1)
    rows = [x[:, :, src] for x in (k, v)]
    if maps:
        maps = [per_head(w, heads, -3) for w in maps]
        maps = [w.expand(len(src), *w.shape) if types is None else w[types] for w in maps]
        if attr is None:
            rows = [torch.einsum("bhed,ehdc->bhec", x, w) for x, w in zip(rows, maps, strict=True)]
        else:
            rows = [x + torch.einsum("ef,ehfd->hed", attr, w) for x, w in zip(rows, maps, strict=True)]
    # A key and a value of every pair, 0 at non-edges.
    keys, values = (x.new_zeros(*x.shape[:2], *q.shape[2:3], k.shape[2], x.shape[3]) for x in rows)
    keys, values = (
        table.index_put((slice_of(0, table), slice_of(1, table), dst, src), x)
        for table, x in ((keys, rows[0]), (values, rows[1]))
    )
    logits = torch.einsum("bhid,bhijd->bhij", q, keys) * q.shape[3] ** -0.5
    if bias is not None:
        table = torch.zeros_like(logits)
        logits = logits + table.index_put(
            (slice_of(0, table), slice_of(1, table), dst, src), bias.expand(*logits.shape[:2], -1)
        )
    mask = graph.mask()
    weights = WEIGHTS.get(normaliser, normaliser)
    weights = weights(logits, mask) if normaliser in WEIGHTS else normaliser(logits)
    weights = torch.where(mask, weights, 0.0)
    return torch.einsum("bhij,bhijv->bhiv", weights, values), weights[:, :, dst, src]


def slice_of(axis, table):
    """Return indices of all entries along the first or second axis that broadcast with indices of edges."""
    return torch.arange(table.shape[axis]).view([-1, 1, 1] if axis == 0 else [-1, 1])
