"""The workloads: graphs from causal to Barabasi-Albert, with their sizes, their peers and their inputs.

Inputs have a normal distribution and one sample; on a CPU, they are float32 with 8 heads of 64 channels. They have
the layout of projections, ``[1, T, H, D]`` viewed as ``[1, H, T, D]``, so the time of a method includes every copy
that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import networkx
import torch
from torch import Tensor

from gnn_attention import StandardHeads, TokenGraph, patterns

__all__ = ["TWELVE", "WORKLOADS", "Problem", "Workload", "documents", "draw", "select"]

# Two commits are compared on these workloads.
TWELVE = "a2048,b2048,b8192,b131072,c16384,d34,e16384,e65536,f1024,g34,g100000,h2048"

QUICK = 4096  # largest number of tokens in a quick run
CAUSAL, MASKED, FLEX = "SDPA is_causal", "SDPA mask", "FlexAttention"
PYG, SPARSE, EAGER, MHA = "PyG TransformerConv", "torch.sparse", "Hugging Face eager", "nn.MultiheadAttention"


@dataclass(frozen=True)
class Workload:
    """A graph of ``tokens`` tokens, the sizes of its inputs, and the names of its peers.

    With ``layer``, a whole layer is measured and not only its attention. ``kind`` says what bounds the best kernel
    on a GPU: "products" of pairs, or "gathers" of a sender for each edge.
    """

    name: str
    title: str
    tokens: int
    build: Callable[[int], TokenGraph]
    peers: tuple[str, ...]
    layer: bool = False
    kind: str = "products"
    heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.float32

    def graph(self) -> TokenGraph:
        """Build the graph."""
        return self.build(self.tokens)

    def problem(
        self, graph: TokenGraph | None = None, device: torch.device | str = "cpu", seed: int = 0
    ) -> Problem:
        """Draw random inputs for the graph on a device."""
        graph = self.graph() if graph is None else graph
        return draw(graph, self.layer, seed, self.heads, self.dim, self.dtype, device)


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph and its inputs: ``q, k, v`` of an attention call, or ``x`` and the heads of a layer.

    ``grad_out`` is the gradient of the output, and has its shape.
    """

    graph: TokenGraph
    inputs: tuple[Tensor, ...]
    grad_out: Tensor
    layer: StandardHeads | None = None

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self.grad_out.device

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.inputs[0].shape[1] if self.layer is None else self.layer.num_heads

    @property
    def dim(self) -> int:
        """The number of channels of a head."""
        return self.inputs[0].shape[3] if self.layer is None else self.layer.head_dim

    def flops(self, which: str) -> float:
        """Return ``4 E H D`` for "forward", 2.5 times as many for "backward" (it recomputes the logits), or the sum.

        A layer adds ``8 T width^2`` for its four projections forward, and twice as many backward.
        """
        core, projections = {"forward": (1.0, 1.0), "backward": (2.5, 2.0), "both": (3.5, 3.0)}[which]
        width = 0 if self.layer is None else self.layer.width
        edges = 4.0 * self.graph.num_edges * self.heads * self.dim
        return core * edges + projections * 8.0 * self.graph.num_dst * width**2


def draw(
    graph: TokenGraph,
    layer: bool = False,
    seed: int = 0,
    heads: int = 8,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Problem:
    """Draw normal inputs from a seed; a layer has width ``heads * dim`` and runs on the CPU."""
    rng = torch.Generator(device).manual_seed(seed)
    if layer:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            parameters = StandardHeads(heads * dim, heads)
        x, grad_out = (torch.randn(1, graph.num_dst, heads * dim, generator=rng) for _ in range(2))
        return Problem(graph, (x,), grad_out, parameters)
    sizes = (graph.num_dst, graph.num_src, graph.num_src, graph.num_dst)
    tensors = (torch.randn(1, n, heads, dim, generator=rng, device=device, dtype=dtype) for n in sizes)
    q, k, v, grad_out = (x.transpose(1, 2) for x in tensors)
    return Problem(graph, (q, k, v), grad_out)


def select(names: Sequence[str] | None = None, quick: bool = False) -> list[Workload]:
    """Return the workloads with these names or first letters, or all; with ``quick``, only small ones.

    Raises ValueError for an unknown name.

    >>> [workload.name for workload in select(["f", "b8192"])]
    ['b8192', 'f64', 'f256', 'f1024']
    """
    letters = "".join(dict.fromkeys(name[0] for name in WORKLOADS))
    for name in names or ():
        if name not in WORKLOADS and name not in letters:
            raise ValueError(
                f"there is no workload {name!r}; give letters ({letters}) or names: {', '.join(WORKLOADS)}"
            )
    selection = (w for w in WORKLOADS.values() if not names or w.name in names or w.name[0] in names)
    return [w for w in selection if w.tokens <= QUICK or not quick]


def _window(n: int) -> TokenGraph:
    return patterns.window(n, 256)


def _random_senders(n: int, degree: int = 32) -> TokenGraph:
    return patterns.random_senders(n, degree, causal=False)


def _bigbird(n: int) -> TokenGraph:
    """Build BigBird with blocks of 64: a block attends to itself, its neighbours, a global and three random ones."""
    return patterns.bigbird_etc(n - 64, 64, 64, num_random=3)


def documents(total: int, number: int) -> TokenGraph:
    """Pack causal documents whose lengths are log-normal (sigma 1) and add up to ``total``."""
    lengths = torch.randn(min(number, max(1, total // 8)), generator=torch.Generator().manual_seed(0)).exp()
    ends = (lengths.cumsum(0) / lengths.sum() * total).round().long()
    return patterns.documents(ends.diff(prepend=ends.new_zeros(1)).tolist())


def _tree(n: int) -> TokenGraph:
    """Build a deep tree, as drafts of tokens are: the parent of a node is one of the eight nodes before it."""
    rng = torch.Generator().manual_seed(0)
    jumps = [int(torch.randint(1, min(i, 8) + 1, (1,), generator=rng)) for i in range(1, n)]
    return patterns.tree([-1, *(i - jump for i, jump in enumerate(jumps, 1))])


def _undirected(graph: networkx.Graph) -> TokenGraph:
    """Build a graph with every edge in both directions, and self loops."""
    loops = torch.arange(graph.number_of_nodes()).repeat(2, 1)
    edges = torch.tensor(list(graph.edges()), dtype=torch.int64).T
    all_edges = torch.cat([edges, edges.flip(0), loops], dim=1)
    return TokenGraph.from_edges(all_edges, graph.number_of_nodes(), coalesce=True)


def _table() -> Iterator[Workload]:
    dense = (CAUSAL, MASKED, FLEX, EAGER)
    tiled = (MASKED, FLEX)
    edges = (MASKED, PYG, SPARSE)
    long = (MASKED, FLEX, PYG, SPARSE)
    short = (*long, EAGER)
    for n in (512, 2048, 8192):
        yield Workload(f"a{n}", f"causal, T={n}", n, patterns.causal, dense)
    for n, peers in ((2048, short), (8192, long), (32768, long), (131072, long)):
        yield Workload(f"b{n}", f"window 256, T={n}", n, _window, peers)
    yield Workload("c4096", "BigBird, T=4096", 4096, _bigbird, short)
    yield Workload("c16384", "BigBird, T=16384", 16384, _bigbird, (*tiled, PYG))
    yield Workload("d34", "34 packed documents, T=16384", 16384, partial(documents, number=34), tiled)
    short_documents = lambda n: patterns.documents([16] * (n // 16))  # noqa: E731
    yield Workload("d1024", "1024 documents of 16", 16384, short_documents, (FLEX, PYG, SPARSE))
    for n in (4096, 16384, 65536):
        yield Workload(f"e{n}", f"random in-degree 32, T={n}", n, _random_senders, edges)
    for degree in (8, 128):
        build = partial(_random_senders, degree=degree)
        title = f"random in-degree {degree}, T=16384"
        yield Workload(f"e16384x{degree}", title, 16384, build, (PYG, SPARSE))
    for n in (64, 256, 1024):
        yield Workload(f"f{n}", f"tree of {n}", n, _tree, (*edges, EAGER))
    karate = lambda n: _undirected(networkx.karate_club_graph())  # noqa: E731
    scale_free = lambda n: _undirected(networkx.barabasi_albert_graph(n, 8, seed=0))  # noqa: E731
    yield Workload("g34", "karate club", 34, karate, (*edges, EAGER))
    yield Workload("g100000", "Barabasi-Albert 100k, m=8", 100_000, scale_free, edges)
    yield Workload("h2048", "layer, window 256, T=2048", 2048, _window, (MHA, MASKED, PYG), layer=True)
    hubs = lambda n: _window(n) | patterns.sinks(n, 4) | patterns.global_tokens(n, [n // 4, n // 2])  # noqa: E731
    yield Workload("i-global", "window | sinks | global, T=16384", 16384, hubs, (FLEX, SPARSE))
    mixed = lambda n: _window(n) | patterns.random_senders(n, 4)  # noqa: E731
    yield Workload("i-random", "window | 4 random edges, T=16384", 16384, mixed, (SPARSE,))


WORKLOADS = {workload.name: workload for workload in _table()}
