"""Graphs derived from a given graph: hops, virtual nodes, time, edge types and shortest paths.

The given graph may be a molecule, a road map, a parse or a program. Two models need no builder. A layer
of GraphGPS (Rampasek et al. 2022, arXiv 2205.12454) adds message passing over the graph ``g`` and attention
over ``full(n)``. These have separate parameters, so use two layers and add their outputs: one layer
over the union would be a layer over ``full(n)``. SAN (Kreuzer et al. 2021, arXiv 2106.03893) has separate
parameters for ``g`` and ``no_self(n) - g``. Use both graphs, or ``no_self(n)`` with :func:`edge_types`.
"""

from collections.abc import Iterable, Sequence

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.algebra import _operands
from gnn_attention.algebra.stacks import copy_offsets
from gnn_attention.algebra.tokens import extend
from gnn_attention.algebra.walks import closure
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.symbols import dst, look_up, src
from gnn_attention.patterns import _data
from gnn_attention.patterns._builder import builder

__all__ = ["edge_types", "k_hop", "shortest_paths", "temporal", "virtual_nodes", "with_self_loops"]

# In the search for shortest paths a tensor has about this many numbers, 16 MiB in float32.
ENTRIES_PER_CHUNK = 2**22


@builder()
def with_self_loops(graph: TokenGraph) -> TokenGraph:
    """Every token attends to its senders in ``graph`` and to itself: ``g(src, dst) or src = dst``.

    Missing self loops come last in the edge list; ``graph - window(n, 1)`` removes all self loops.
    This is the neighbourhood of a graph attention network (Velickovic et al. 2018, arXiv 1710.10903),
    and the default of torch_geometric's ``GATConv``. Raises ValueError unless the graph is square.

    >>> with_self_loops(TokenGraph.from_edges(torch.tensor([[0, 2], [1, 2]]), 3)).edge_index.tolist()
    [[0, 2, 0, 1], [1, 2, 0, 1]]
    """
    _operands.check_square("with_self_loops", graph, "only square graphs have self loops")
    return graph | graph**0


@builder(k=1)
def k_hop(graph: TokenGraph, k: int) -> TokenGraph:
    """A token attends to every token that reaches it by a walk of at most ``k`` hops.

    The mask is ``A^1 or A^2 or ... or A^k``; the graph is ``algebra.closure(graph, k)``, which
    raises the same errors. With self loops it is ``with_self_loops(g) ** k``, as in GenCast, where
    g is a mesh (Price et al. 2023, arXiv 2312.15796).

    >>> chain = TokenGraph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4)
    >>> k_hop(chain, 2).edge_index.tolist()
    [[0, 0, 1, 1, 2], [1, 2, 2, 3, 3]]
    """
    return closure(graph, k)


@builder()
def virtual_nodes(graph: TokenGraph, m: int = 1) -> TokenGraph:
    """All ``n`` tokens attend to ``m`` new nodes, and these attend to all ``n`` tokens.

    The virtual nodes are ``n .. n + m - 1``. The ``2 m n`` new edges come last in the list; virtual nodes
    attend neither to each other nor to themselves. The graph is ``algebra.extend(graph, m, "both", "none")``,
    which raises the same errors. torch_geometric's ``VirtualNode`` transform (Gilmer et al. 2017, arXiv
    1704.01212) is ``m = 1``; Exphormer (Shirzad et al. 2023, arXiv 2303.06147) adds an expander.

    >>> chain = TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3)
    >>> virtual_nodes(chain).edge_index.tolist()
    [[0, 1, 3, 3, 3, 0, 1, 2], [1, 2, 0, 1, 2, 3, 3, 3]]
    """
    return extend(graph, m, "both", "none")


@builder()
def temporal(graph: TokenGraph, times: Tensor | Sequence[int | float], strict: bool = False) -> TokenGraph:
    """Each token attends to those of its senders in ``graph`` that are not later in time.

    The edges are ``g(src, dst) and time(src) <= time(dst)``; ``strict=True`` requires
    ``<``. ``times [n]`` are integers or floats, and a later token may have an earlier time.
    ``temporal(full(n), range(n))`` is ``causal(n)``. An edge list keeps its order. Raises TypeError
    or ValueError unless ``times`` are ``n`` numbers.

    >>> path = TokenGraph.from_edges(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
    >>> temporal(path, [5, 3.5, 5]).edge_index.tolist()
    [[1, 1], [0, 2]]
    """
    _operands.check_square("temporal", graph, "only a square graph has one time for each token")
    values, sizes = _data.expand_axes("times", times, "n")
    if sizes or values.shape[-1] != graph.num_dst:
        raise ValueError(f"times must be {graph.num_dst} numbers, one per token, got {checks.quote(times)}")
    ranks = torch.unique(values[0, 0], return_inverse=True)[1]
    time_graph = TokenGraph.from_rule(look_up(ranks, src) + int(strict) <= look_up(ranks, dst), graph.num_dst)
    return graph & copy_offsets(graph, time_graph)


def edge_types(graph: TokenGraph, parts: Sequence[TokenGraph]) -> Bool[Tensor, "types edges"]:
    """Return to which of several relations each edge belongs, as bool ``[types, E]``.

    The edges are in the order of ``graph.edge_index``. Typed edges of text or code (syntax,
    coreference, data flow) can bias attention over the union of relations or over all pairs:
    ``bias = weight.T @ edge_types(g, parts).float()`` with ``weight [types, heads]`` adds up the weights
    of an edge's types. Source: Hellendoorn et al. 2020 (ICLR, "Global Relational Models of Source Code",
    GREAT), who bias full attention. Raises ValueError if a part has other tokens, heads or a batch.

    >>> chain = TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3)
    >>> edge_types(chain | chain.T, [chain, chain.T]).int().tolist()
    [[1, 1, 0, 0], [0, 0, 1, 1]]
    """
    checks.instance("graph", graph, TokenGraph)
    checks.check_order("parts", parts)
    if not isinstance(parts, Iterable):
        raise TypeError(f"parts must be a list of graphs, one for each type, got {checks.quote(parts)}")
    src, dst = graph.edge_index
    zero = torch.zeros_like(src)
    masks = []
    for part in parts:
        if not isinstance(part, TokenGraph) or part.frame[:4] != (graph.num_dst, graph.num_src, None, None):
            raise ValueError(
                f"each entry of parts must be a graph over the tokens of {graph!r}, the same for all heads "
                f"and samples, got {part!r}"
            )
        masks.append(part.edges.contains(zero, zero, dst, src).expand(len(src)))
    return torch.stack(masks) if masks else torch.zeros(0, len(src), dtype=torch.bool, device=src.device)


def shortest_paths(graph: TokenGraph, structure: TokenGraph) -> Int[Tensor, " edges"]:
    """Return, for each edge, the distance between its two tokens in another graph, as int64 ``[E]``.

    The distance is the number of hops from src to dst in ``structure``: 0 for a self loop, -1 without a path.
    The edges are in the order of ``graph.edge_index``. ``table[:, shortest_paths(full(n), g).clamp(max=d)]``
    with ``table [heads, d + 2]`` is Graphormer's spatial encoding, a bias on the full graph; the
    last column is for pairs without a path (Ying et al. 2021, arXiv 2106.05234, section 3.1.2).
    Raises ValueError unless ``structure`` is square and has the tokens of ``graph``.

    >>> ring = TokenGraph.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    >>> every_pair = ring | ~ring
    >>> shortest_paths(every_pair, ring).view(4, 4).tolist()
    [[0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]]
    """
    checks.instance("graph", graph, TokenGraph)
    _operands.check_square("shortest_paths", structure, "only square graphs have paths")
    if (graph.num_dst, graph.num_src) != (structure.num_dst, structure.num_src):
        raise ValueError(f"structure must be a graph over the tokens of {graph!r}, got {structure!r}")
    src, dst = graph.edge_index
    edges, n = structure.edge_index, structure.num_dst
    edge_distances = torch.full_like(src, -1)
    roots_per_chunk = max(1, ENTRIES_PER_CHUNK // max(1, n, edges.shape[1]))
    for start in range(0, n, roots_per_chunk):
        roots = torch.arange(start, min(start + roots_per_chunk, n), device="cpu")
        # The loop searches breadth-first from all roots of the chunk at once.
        distances = torch.full((len(roots), n), -1, device="cpu")
        frontier, depth = torch.arange(n, device="cpu") == roots[:, None], 0
        while frontier.any():
            distances[frontier] = depth
            arrivals = torch.zeros(len(roots), n, dtype=torch.float32, device="cpu")
            arrivals.index_add_(1, edges[1], frontier[:, edges[0]].float())
            frontier, depth = (arrivals > 0) & (distances < 0), depth + 1
        is_root = (src >= start) & (src < start + roots_per_chunk)
        edge_distances[is_root] = distances[src[is_root] - start, dst[is_root]]
    return edge_distances
