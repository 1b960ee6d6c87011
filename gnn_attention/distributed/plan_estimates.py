"""What three ways of exchanging keys and values cost on every rank: bytes exactly, seconds by the rates of a setting.

``halo``: each rank receives the senders that its receivers hear, while it computes on its own; two results are merged.
``ring``: the blocks of all ranks go round, one step at a time, while each rank computes on the one it holds.
``gather``: the same with all senders of all ranks, in blocks as large as the largest.

A byte is counted where a row of a key or of a value leaves the rank that owns it for another one, in the forward pass: a sender
travels with all its key/value heads, in all samples. The gradients of the backward pass take the same way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.distributed.partition import Partition
from gnn_attention.distributed.plan_devices import Link, Rates

__all__ = ["EXCHANGES", "Estimate", "Setting", "Traffic", "estimate"]

EXCHANGES = ("halo", "gather", "ring")


@dataclass(frozen=True)
class Setting:
    """Heads, samples and numbers, and the machine: what the cost of an edge and of a sender follow from."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    batch: int
    dtype: torch.dtype
    rates: Rates
    link: Link

    @property
    def row_bytes(self) -> int:
        """Bytes of a sender: its key and its value, for all key/value heads and samples."""
        return self.batch * self.kv_heads * (self.dim + self.value_dim) * self.dtype.itemsize

    @property
    def edge_flops(self) -> int:
        """Floating point operations on an edge of one head: its logit and its share of the weighted sum."""
        return 2 * (self.dim + self.value_dim)

    @property
    def result_bytes(self) -> int:
        """Bytes of what a receiver has heard, as it is merged: in float32, with the log-sum-exp."""
        return self.batch * self.heads * (self.value_dim + 1) * 4

    def seconds(self, edges: int) -> float:
        """For so many edges in one call, none where there are none."""
        return edges * self.edge_flops / self.rates.flops + bool(edges) * self.rates.launch


class Traffic(NamedTuple):
    """What is between the ranks: edges over all heads and samples, and senders heard; by receiving rank, then sending rank."""

    edges: Int[Tensor, "ranks ranks"]
    heard: Int[Tensor, "ranks ranks"]
    partition: Partition


class Estimate(NamedTuple):
    """Of one way of exchanging, for each rank: bytes received, sent and held beside its own, and seconds.

    ``communication``: of the exchange alone; ``seconds``: of it and the computation, as far as they do not overlap.
    """

    name: str
    received: Int[Tensor, " ranks"]
    sent: Int[Tensor, " ranks"]
    held: Int[Tensor, " ranks"]
    communication: Float[Tensor, " ranks"]
    seconds: Float[Tensor, " ranks"]

    @property
    def slowest(self) -> float:
        """Seconds until the last rank is done."""
        return float(self.seconds.max())


def estimate(name: str, traffic: Traffic, setting: Setting) -> Estimate:
    """The estimate for "halo", "gather" or "ring"."""
    return _ESTIMATES[name](traffic, setting)


def _halo(traffic: Traffic, setting: Setting) -> Estimate:
    received, sent = (traffic.heard.sum(axis) * setting.row_bytes for axis in (1, 0))
    packing = 2 * sent.double() / setting.rates.copy
    return _at_once("halo", traffic, setting, received, sent, packing)


def _gather(traffic: Traffic, setting: Setting) -> Estimate:
    sizes = traffic.partition.src.sizes
    others = torch.full((len(sizes),), max(sizes) * (len(sizes) - 1) * setting.row_bytes, dtype=torch.int64, device="cpu")
    return _at_once("gather", traffic, setting, others, others, torch.zeros(len(sizes), device="cpu"))


def _at_once(name: str, traffic: Traffic, setting: Setting, received: Tensor, sent: Tensor, packing: Tensor) -> Estimate:
    """One journey, hidden behind the computation on the rank's own senders; then the others, and both results merged."""
    busy = ((received > 0) | (sent > 0)).double()
    communication = busy * setting.link.latency + torch.maximum(received, sent).double() / setting.link.bandwidth + packing
    own = _seconds(traffic.edges.diagonal(), setting)
    others = traffic.edges.sum(1) - traffic.edges.diagonal()
    merging = (others > 0) * _merging(traffic, setting)
    seconds = torch.maximum(own, communication) + _seconds(others, setting) + merging
    return Estimate(name, received, sent, received, communication, seconds)


def _ring(traffic: Traffic, setting: Setting) -> Estimate:
    """Block ``r - t`` is with rank r at step t. All but its own come to rank r, from the rank before it."""
    own = torch.tensor(traffic.partition.src.sizes, device="cpu") * setting.row_bytes
    ranks = len(own)
    place = torch.arange(ranks, device="cpu")
    others = own.sum() - own
    step = setting.link.latency + float(own.max()) / setting.link.bandwidth if ranks > 1 else 0.0
    turned = traffic.edges[place.view(-1, 1), (place.view(-1, 1) - place) % ranks]  # [rank, step]
    compute = _seconds(turned, setting).amax(0)
    merging = (ranks - 1) * _merging(traffic, setting)
    waiting = torch.cat([compute[:-1].clamp(min=step), compute[-1:]]).sum()
    communication = torch.full((ranks,), step * (ranks - 1), dtype=torch.float64, device="cpu")
    held = torch.full_like(own, 2 * int(own.max()) if ranks > 1 else 0)
    return Estimate("ring", others, others.roll(-1), held, communication, waiting + merging)


_ESTIMATES: dict[str, Callable[[Traffic, Setting], Estimate]] = {"halo": _halo, "gather": _gather, "ring": _ring}


def _seconds(edges: Tensor, setting: Setting) -> Tensor:
    """Seconds for so many edges in one call, none where there are none."""
    return edges.double() * setting.edge_flops / setting.rates.flops + (edges > 0).double() * setting.rates.launch


def _merging(traffic: Traffic, setting: Setting) -> Tensor:
    """Seconds to merge two results of a rank's receivers: both read, one written."""
    receivers = torch.tensor(traffic.partition.dst.sizes, dtype=torch.float64, device="cpu")
    return 3 * receivers * setting.result_bytes / setting.rates.copy
