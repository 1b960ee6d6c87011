"""Backends with known faults, which ``verify`` and the tests must find."""

from __future__ import annotations

from dataclasses import replace

import torch

from gnn_attention import convert, patterns
from gnn_attention.backends import dense, reference

__all__ = ["WRONG_BACKENDS"]


def _tiled_groups(call):
    group = call.q.shape[1] // call.k.shape[1]
    return dense.run(replace(call, k=call.k.repeat(1, group, 1, 1), v=call.v.repeat(1, group, 1, 1)))


def _from_the_left(call):
    """Run a later part of a graph as if its first receiver were token 0."""
    graph = call.graph
    if graph.dst_offset and call.bias is None:
        graph = convert.from_mask(graph.mask().roll(-graph.dst_offset, -1))
    return dense.run(replace(call, graph=graph))


def _isolated_receive_one(call):
    out, lse = dense.run(call)
    return torch.where(call.has_in_edges.unsqueeze(-1), out, out + 1), lse


def _all_pairs(call):
    graph = call.graph
    if call.bias is None:
        graph = patterns.cross(graph.num_dst, graph.num_src)
    return dense.run(replace(call, graph=graph))


def _off_by(relative):
    """Return a ``run`` whose outputs have the relative error that ``relative`` gives for their dtype."""

    def run(call):
        out, lse = reference.run(call)
        return out * (1 + relative.get(out.dtype, 0)), lse

    return run


WRONG_BACKENDS = {
    "scale dropped": lambda call: dense.run(replace(call, scale=1.0)),
    "groups tiled": _tiled_groups,
    "graph ignored": _all_pairs,
    "rows from the left": _from_the_left,
    "isolated receive": _isolated_receive_one,
    "mod ignored": lambda call: dense.run(replace(call, score_mod=None)),
    "bias ignored": lambda call: dense.run(replace(call, bias=None)),
    "bias reversed": lambda call: dense.run(
        replace(call, bias=None if call.bias is None else call.bias.flip(-1))
    ),
    "sinks ignored": lambda call: dense.run(replace(call, sink_logits=None)),
    "half sums": lambda call: tuple(x.bfloat16().to(x.dtype) for x in reference.run(call)),
    "gradient of k lost": lambda call: dense.run(replace(call, k=call.k.detach())),
    "off by 1e-9 in float64": _off_by({torch.float64: 1e-9}),
    "off by 1e-4 in float32": _off_by({torch.float32: 1e-4}),
}
