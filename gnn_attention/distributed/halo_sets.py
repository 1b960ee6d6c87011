"""The halo of a rank: exactly the senders of other ranks to which its receivers attend.

In a graph that varies by head or sample, a sender belongs to the halo if any head of any sample
attends to it, because all heads of a token are sent together.
"""

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.distributed.partition import Partition, resolve_partition
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.liveness import last_edges
from gnn_attention.graph.regions.quadtree import Boxes, split_evenly

# A rule is first evaluated on boxes of at most this many receivers and senders.
MAX_BOX_SIDE = 2**13


def halo(graph: TokenGraph, partition: Partition, rank: int) -> tuple[Int[Tensor, " senders"], ...]:
    """Return the senders of each other rank to which the receivers of ``rank`` attend, sorted.

    The entry of ``rank`` itself is empty. An all-to-all receives the senders in the order of the
    entries. Raises ValueError if the partition does not fit the graph, and IndexError for a rank
    out of range.

    >>> from gnn_attention import patterns
    >>> from gnn_attention.distributed.partition import contiguous
    >>> graph = patterns.window(9, 3)
    >>> [senders.tolist() for senders in halo(graph, contiguous(graph, 3), 1)]
    [[1, 2], [], []]
    """
    senders = remote_senders(graph, resolve_partition(graph, partition), rank).nonzero().flatten()
    owner = partition.src.owner[senders]
    counts = torch.bincount(owner, minlength=partition.world_size).tolist()
    return torch.split(senders[owner.argsort(stable=True)], counts)


def halo_sizes(graph: TokenGraph, partition: Partition) -> Int[Tensor, "ranks ranks"]:
    """Count the senders of each rank (column) to which the receivers of each rank (row) attend."""
    ranks = range(resolve_partition(graph, partition).world_size)
    owners = (partition.src.owner[remote_senders(graph, partition, rank)] for rank in ranks)
    return torch.stack([torch.bincount(owner, minlength=len(ranks)) for owner in owners])


def remote_senders(graph: TokenGraph, partition: Partition, rank: int) -> Bool[Tensor, " src"]:
    """Return a mask of the senders of other ranks to which the receivers of a rank attend."""
    is_sender = torch.zeros(graph.num_src, dtype=torch.bool, device="cpu")
    if graph.edges.listed() is not None:
        src, dst = graph.edge_index
        is_sender[src[partition.dst.owner[dst] == rank]] = True
    else:
        # There is a box for each sample, head and range of receivers, and it spans all senders.
        ranges = torch.tensor(partition.dst.ranges(rank), dtype=torch.int64, device="cpu").view(-1, 2)
        sizes = (graph.batch or 1, graph.heads or 1, len(ranges))
        b, h, range_index = torch.ones(sizes, device="cpu").nonzero(as_tuple=True)
        start, stop = ranges[range_index].unbind(1)
        zeros = torch.zeros_like(range_index)
        boxes = Boxes(zeros, b, h, start, zeros, stop - start, zeros + graph.num_src)
        for src, _ in last_edges(graph.edges, split_evenly(boxes, MAX_BOX_SIDE)):
            is_sender[src] = True
    return is_sender & (partition.src.owner != rank)
