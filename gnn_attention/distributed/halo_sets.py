"""The halo: for each rank, the senders of other ranks that its receivers attend to, exactly.

In a graph that differs by head or sample a sender counts if any head of any sample attends to it, for all
heads of a token travel together.
"""

import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.distributed.partition import Partition, partition_of
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.liveness import last_edges
from gnn_attention.graph.regions.quadtree import Boxes, split_evenly

SIDE = 2**13  # of the boxes of receivers and senders of which a rule is asked first whether they have an edge


def halo(graph: TokenGraph, partition: Partition, rank: int) -> tuple[Int[Tensor, " senders"], ...]:
    """For each other rank, its senders that the receivers of ``rank`` attend to, sorted; none of ``rank``.

    ``torch.cat`` of them is what arrives, in the order of an all-to-all. ValueError for a partition of other
    tokens, IndexError for a rank out of range.

    >>> from gnn_attention import patterns
    >>> from gnn_attention.distributed.partition import contiguous
    >>> graph = patterns.window(9, 3)
    >>> [senders.tolist() for senders in halo(graph, contiguous(graph, 3), 1)]
    [[1, 2], [], []]
    """
    senders = remote_senders(graph, partition_of(graph, partition), rank).nonzero().flatten()
    owner = partition.src.owner[senders]
    counts = torch.bincount(owner, minlength=partition.world_size).tolist()
    return torch.split(senders[owner.argsort(stable=True)], counts)


def halo_sizes(graph: TokenGraph, partition: Partition) -> Int[Tensor, "ranks ranks"]:
    """How many senders of each rank (column) the receivers of each rank (row) attend to."""
    world = range(partition_of(graph, partition).world_size)
    owners = (partition.src.owner[remote_senders(graph, partition, rank)] for rank in world)
    return torch.stack([torch.bincount(owner, minlength=len(world)) for owner in owners])


def remote_senders(graph: TokenGraph, partition: Partition, rank: int) -> Bool[Tensor, " src"]:
    """Which senders of other ranks the receivers of a rank attend to."""
    attended = torch.zeros(graph.num_src, dtype=torch.bool, device="cpu")
    if graph.edges.listed() is not None:
        src, dst = graph.edge_index
        attended[src[partition.dst.owner[dst] == rank]] = True
    else:
        # boxes of the own receivers and all senders, of every sample and head
        ranges = torch.tensor(partition.dst.ranges(rank), dtype=torch.int64, device="cpu").view(-1, 2)
        sizes = (graph.batch or 1, graph.heads or 1, len(ranges))
        b, h, i = torch.ones(sizes, device="cpu").nonzero(as_tuple=True)
        (start, stop), zero = ranges[i].unbind(1), torch.zeros_like(i)
        boxes = Boxes(zero, b, h, start, zero, stop - start, zero + graph.num_src)
        for src, _ in last_edges(graph.edges, split_evenly(boxes, SIDE)):
            attended[src] = True
    return attended & (partition.src.owner != rank)
