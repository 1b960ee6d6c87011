"""Graphs over real structure: k hops of a given graph, virtual nodes, time.

Edge types and shortest paths as numbers on edges. These take a graph that is there already: a molecule, a
road map, a parse, a program. Two things need no builder. A layer of GraphGPS (Rampasek et al. 2022, arXiv
2205.12454) is message passing over the graph *plus* attention over ``full(n)``, each with its own weights:
two layers whose results are added, and never their union, which is ``full(n)`` alone. SAN (Kreuzer et al.
2021, arXiv 2106.03893) has real edges ``g`` and virtual ones ``no_self(n) - g`` with their own weights: two
graphs, or ``no_self(n)`` with :func:`edge_types`.
"""

from collections.abc import Iterable, Sequence

import torch

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.algebra import _operands
from gnn_attention.algebra.stacks import at_positions_of
from gnn_attention.algebra.tokens import extend
from gnn_attention.algebra.walks import closure
from gnn_attention.graph import TokenGraph
from gnn_attention.graph.symbols import dst, look_up, src
from gnn_attention.patterns import _data
from gnn_attention.patterns._builder import builder

__all__ = ["edge_types", "k_hop", "shortest_paths", "temporal", "virtual_nodes", "with_self_loops"]

# of the search for shortest paths, 16 MB
NUMBERS_AT_ONCE = 2**22


@builder()
def with_self_loops(graph: TokenGraph) -> TokenGraph:
    """The graph in which every token attends to itself too: ``g(src, dst) or src = dst``.

    Missing loops come last in the list. The neighbourhood of a graph attention network: Velickovic et al.
    2018 (arXiv 1710.10903) attend over the first-order neighbours of a node, itself included;
    torch_geometric's ``GATConv(add_self_loops=True)`` does so by default. ``graph - window(n, 1)`` takes them
    away. ValueError unless the graph is square.

    >>> with_self_loops(TokenGraph.from_edges(torch.tensor([[0, 2], [1, 2]]), 3)).edge_index.tolist()
    [[0, 2, 0, 1], [1, 2, 0, 1]]
    """
    _operands.square("with_self_loops", graph, "only these have loops")
    return graph | graph**0


@builder(k=1)
def k_hop(graph: TokenGraph, k: int) -> TokenGraph:
    """Each token attends to all within ``k`` hops.

    ``A^1 or A^2 or ... or A^k``, the edges of paths of 1 to ``k`` edges: ``algebra.closure(graph, k)``, with
    its errors. ``with_self_loops(g) ** k`` is the same with self loops, and is GenCast's mask over its mesh
    (Price et al. 2023, arXiv 2312.15796).

    >>> chain = TokenGraph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4)
    >>> k_hop(chain, 2).edge_index.tolist()
    [[0, 0, 1, 1, 2], [1, 2, 2, 3, 3]]
    """
    return closure(graph, k)


@builder()
def virtual_nodes(graph: TokenGraph, m: int = 1) -> TokenGraph:
    """``m`` further nodes, ``n .. n + m - 1``, that attend to all ``n`` tokens and are attended to by them.

    The edges of the graph, and ``2 m n`` after them in the list; none among the virtual nodes, no self loops:
    ``algebra.extend(graph, m, "both", "none")``, with its errors. torch_geometric's ``VirtualNode`` transform
    (Gilmer et al. 2017, arXiv 1704.01212) is ``m = 1``; Exphormer (Shirzad et al. 2023, arXiv 2303.06147)
    unites it with an expander.

    >>> chain = TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3)
    >>> virtual_nodes(chain).edge_index.tolist()
    [[0, 1, 3, 3, 3, 0, 1, 2], [1, 2, 0, 1, 2, 3, 3, 3]]
    """
    return extend(graph, m, "both", "none")


@builder()
def temporal(graph: TokenGraph, times: Tensor | Sequence[int | float], strict: bool = False) -> TokenGraph:
    """The edges that do not run back in time: ``g(src, dst) and time(src) <= time(dst)``.

    ``strict=True``: ``<``. ``times [n]`` are compared as integers or as float64; the order of the tokens does
    not matter. ``temporal(full(n), range(n))`` is ``causal(n)``. An edge list keeps its order. TypeError or
    ValueError for times that are no ``n`` numbers.

    >>> path = TokenGraph.from_edges(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
    >>> temporal(path, [5, 3.5, 5]).edge_index.tolist()
    [[1, 1], [0, 2]]
    """
    _operands.square("temporal", graph, "only these have one time for a token")
    values, sizes = _data.all_axes("times", times, "n")
    if sizes or values.shape[-1] != graph.num_dst:
        raise ValueError(f"times must be {graph.num_dst} numbers, one for each token, got {quote(times)}")
    ranks = torch.unique(values[0, 0], return_inverse=True)[1]
    order = TokenGraph.from_rule(look_up(ranks, src) + int(strict) <= look_up(ranks, dst), graph.num_dst)
    return graph & at_positions_of(graph, order)


def edge_types(graph: TokenGraph, parts: Sequence[TokenGraph]) -> Bool[Tensor, "types edges"]:
    """Which of several relations each edge belongs to.

    Bool ``[types, E]`` in the order of ``graph.edge_index``. For typed edges over text or code (syntax,
    coreference, data flow): unite the relations, or attend to all, and give each type a number per head;
    ``bias = weight.T @ edge_types(g, parts).float()`` with ``weight [types, heads]`` adds them where an edge
    has several types. Hellendoorn et al. 2020 (ICLR, "Global Relational Models of Source Code", GREAT) bias
    full attention by typed edges. ValueError for relations over other tokens or that differ by head.

    >>> chain = TokenGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3)
    >>> edge_types(chain | chain.T, [chain, chain.T]).int().tolist()
    [[1, 1, 0, 0], [0, 0, 1, 1]]
    """
    checks.instance("graph", graph, TokenGraph)
    checks.check_order("parts", parts)
    if not isinstance(parts, Iterable):
        raise TypeError(f"parts must be a list of graphs, one for each type of edge, got {quote(parts)}")
    src, dst = graph.edge_index
    nowhere = torch.zeros_like(src)
    frame = (graph.num_dst, graph.num_src, None, None)
    for part in parts:
        if not isinstance(part, TokenGraph) or (part.num_dst, part.num_src, part.heads, part.batch) != frame:
            wanted = f"a graph over the tokens of {graph!r}, the same for all heads"
            raise ValueError(f"each of parts must be {wanted}, got {part!r}")
    rows = [part.edges.contains(nowhere, nowhere, dst, src).expand(len(src)) for part in parts]
    return torch.stack([nowhere > 0, *rows])[1:]


def shortest_paths(graph: TokenGraph, structure: TokenGraph) -> Int[Tensor, " edges"]:
    """How far apart the ends of each edge are in another graph.

    Hops from src to dst in ``structure``, -1 if there is no path. int64 ``[E]`` in the order of
    ``graph.edge_index``; 0 for self loops. ``table[:, shortest_paths(full(n), g).clamp(max=d)]`` with
    ``table [heads, d + 2]`` is Graphormer's spatial encoding, a bias of the full graph (Ying et al. 2021,
    arXiv 2106.05234, section 3.1.2); -1 takes the last column. ValueError unless ``structure`` is over the
    same tokens and square.

    >>> ring = TokenGraph.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    >>> every_pair = ring | ~ring
    >>> shortest_paths(every_pair, ring).view(4, 4).tolist()
    [[0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]]
    """
    checks.instance("graph", graph, TokenGraph)
    _operands.square("shortest_paths", structure, "only these have paths")
    if (graph.num_dst, graph.num_src) != (structure.num_dst, structure.num_src):
        raise ValueError(f"structure must be a graph over the tokens of {graph!r}, got {structure!r}")
    (src, dst), edges, n = graph.edge_index, structure.edge_index, structure.num_dst
    hops = torch.full_like(src, -1)
    step = max(1, NUMBERS_AT_ONCE // max(1, n, edges.shape[1]))
    for start in range(0, n, step):
        roots = torch.arange(start, min(start + step, n), device="cpu")
        # All roots step together, along the edges.
        away, distance = torch.full((len(roots), n), -1, device="cpu"), 0
        frontier = torch.arange(n, device="cpu") == roots[:, None]
        while frontier.any():
            away[frontier] = distance
            arrived = torch.zeros(len(roots), n, device="cpu")
            arrived.index_add_(1, edges[1], frontier[:, edges[0]].float())
            frontier, distance = (arrived > 0) & (away < 0), distance + 1
        of_roots = (src >= start) & (src < start + step)
        hops[of_roots] = away[src[of_roots] - start, dst[of_roots]]
    return hops
