"""What is measured: graphs from causal to Barabasi-Albert, their sizes, their peers, and the inputs.

Inputs are normal, on a CPU float32, batch 1, 8 heads of 64, in the layout in which projections leave them:
``[1, T, H, D]`` seen as ``[1, H, T, D]``. Every copy that a method needs is inside its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from gnn_attention import algebra, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads

if TYPE_CHECKING:
    import networkx

__all__ = ["DIM", "FAMILIES", "HEADS", "WORKLOADS", "Problem", "Workload", "select", "small"]

HEADS, DIM = 8, 64
TINY_TOKENS, TINY_HEADS, TINY_DIM = 96, 2, 16
DENSITIES = (64, 32, 16, 8, 4, 2, 1)  # one edge in so many pairs
CROSSOVER_TOKENS = 2048

FAMILIES = {
    "a": "causal",
    "b": "window of 256",
    "c": "BigBird",
    "d": "packed documents",
    "e": "random in-degree",
    "f": "speculative tree",
    "g": "networkx graph",
    "h": "whole layer, window of 256",
    "i": "structured mix",
    "j": "rules at 16384 tokens",
    "x": "density at 2048 tokens",
}

CAUSAL, MASKED, FLEX = "SDPA is_causal", "SDPA mask", "FlexAttention"
PYG, SPARSE, EAGER, MHA = "PyG TransformerConv", "torch.sparse", "Hugging Face eager", "nn.MultiheadAttention"


@dataclass(frozen=True)
class Workload:
    """A graph of so many tokens, the sizes of its inputs and the names of its peers; ``layer``: the whole
    layer, not its core.

    ``quick``: part of the short run of the suite ``attention``. ``kind`` says what bounds the best kernel of
    a GPU: "products" of its pairs, or "gathers" of a sender for each edge.
    """

    name: str
    title: str
    tokens: int
    build: Callable[[int], TokenGraph]
    peers: tuple[str, ...]
    quick: bool = False
    layer: bool = False
    kind: str = "products"
    heads: int = HEADS
    dim: int = DIM
    batch: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def family(self) -> str:
        """The letter of the README and of ``--workloads``: the first of the name."""
        return self.name[0]

    def tiny(self) -> Workload:
        """The same structure in some tens of tokens."""
        return replace(
            self, tokens=min(self.tokens, TINY_TOKENS), heads=min(self.heads, TINY_HEADS), dim=TINY_DIM
        )

    def graph(self, tokens: int | None = None) -> TokenGraph:
        """The graph, or a smaller one like it."""
        return self.build(min(self.tokens, tokens or self.tokens))

    def problem(
        self, graph: TokenGraph | None = None, device: torch.device | str = "cpu", seed: int = 0
    ) -> Problem:
        """The graph with random inputs on a device."""
        graph = self.graph() if graph is None else graph
        return Problem.draw(graph, self.layer, seed, self.heads, self.dim, self.batch, self.dtype, device)


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph and its inputs: ``q, k, v`` of a core, or ``x`` and the heads of a whole layer; ``grad_out`` is
    like the output.
    """

    graph: TokenGraph
    inputs: tuple[Tensor, ...]
    grad_out: Tensor
    layer: StandardHeads | None = None

    @classmethod
    def draw(
        cls,
        graph: TokenGraph,
        layer: bool = False,
        seed: int = 0,
        heads: int = HEADS,
        dim: int = DIM,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Problem:
        """Normal inputs from a seed; a layer is ``heads * dim`` wide and on a CPU."""
        rng = torch.Generator(device).manual_seed(seed)
        if layer:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                made = StandardHeads(heads * dim, heads)
            x, grad_out = (torch.randn(1, graph.num_dst, heads * dim, generator=rng) for _ in range(2))
            return cls(graph, (x,), grad_out, made)
        sizes = (graph.num_dst, graph.num_src, graph.num_src, graph.num_dst)
        drawn = (torch.randn(batch, n, heads, dim, generator=rng, device=device, dtype=dtype) for n in sizes)
        q, k, v, grad_out = (x.transpose(1, 2) for x in drawn)
        return cls(graph, (q, k, v), grad_out)

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return self.grad_out.device

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.inputs[0].shape[1] if self.layer is None else self.layer.num_heads

    @property
    def dim(self) -> int:
        """Channels of a head."""
        return self.inputs[0].shape[3] if self.layer is None else self.layer.head_dim

    @property
    def shape(self) -> tuple[int, int]:
        """Of the mask."""
        return self.graph.num_dst, self.graph.num_src

    @property
    def cells(self) -> int:
        """Pairs of a receiver and a sender, edges or not."""
        return self.graph.num_dst * self.graph.num_src

    def flops(self, which: str) -> float:
        """``4 B E H D`` forward; 2.5 times that backward, which computes the logits again; "both" is their
        sum.

        A layer adds its four projections, ``8 T width^2``, of which a backward pass has twice as many.
        """
        core, projections = {"forward": (1.0, 1.0), "backward": (2.5, 2.0), "both": (3.5, 3.0)}[which]
        width = 0 if self.layer is None else self.layer.width
        edges = 4.0 * len(self.grad_out) * self.graph.num_edges * self.heads * self.dim
        return core * edges + projections * 8.0 * self.graph.num_dst * width**2


def small(layer: bool) -> Problem:
    """A little problem to warm up on: what is loaded or set up once must not count."""
    return Problem.draw(patterns.window(128, 16), layer)


def select(
    table: Mapping[str, Workload], wanted: Sequence[str] | None = None, quick: bool = False
) -> list[Workload]:
    """The workloads of these names or letters, all without; ``quick`` takes the small ones and those named in
    full.

    ValueError for an unknown name.

    >>> [workload.name for workload in select(WORKLOADS, ["f", "b8192"])]
    ['b8192', 'f64', 'f256', 'f1024']
    """
    letters = FAMILIES if table is WORKLOADS else {}
    for name in wanted or ():
        if name not in table and name not in letters:
            known = f"letters ({', '.join(letters)}) or names" if letters else "some of"
            raise ValueError(f"there is no workload {name!r}; give {known}: {', '.join(table)}")
    chosen = [w for w in table.values() if not wanted or w.name in wanted or (letters and w.family in wanted)]
    return [w for w in chosen if w.quick or not quick or w.name in (wanted or ())]


def _window(n: int) -> TokenGraph:
    return patterns.window(n, 256)


def _random_senders(n: int, degree: int) -> TokenGraph:
    return patterns.random_senders(n, degree, causal=False)


def _bigbird(n: int) -> TokenGraph:
    """Blocks of 64: the block itself and both neighbours, one global block, three random ones."""
    return patterns.bigbird_etc(n - 64, 64, 64, num_random=3)


def _short_documents(n: int) -> TokenGraph:
    return patterns.documents([16] * (n // 16))


def _documents(total: int, number: int) -> TokenGraph:
    """Documents whose lengths are log-normal (sigma 1) and add up to ``total``."""
    drawn = torch.randn(number, generator=torch.Generator().manual_seed(0)).exp()
    ends = (drawn.cumsum(0) / drawn.sum() * total).round().long()
    lengths = ends.diff(prepend=ends.new_zeros(1))
    return patterns.documents([int(n) for n in lengths])


def _tree(n: int) -> TokenGraph:
    """Every node continues one of the eight before it: a deep tree, as drafts of tokens are."""
    rng = torch.Generator().manual_seed(0)
    jumps = [int(torch.randint(1, min(i, 8) + 1, (1,), generator=rng)) for i in range(1, n)]
    return patterns.tree([-1, *(i - jump for i, jump in enumerate(jumps, 1))])


def _both_ways(graph: networkx.Graph, name: str) -> TokenGraph:
    """Every edge in both directions, and self loops."""
    loops = torch.arange(graph.number_of_nodes()).repeat(2, 1)
    edges = torch.tensor(list(graph.edges()), dtype=torch.int64).T
    every = torch.cat([edges, edges.flip(0), loops], dim=1)
    return TokenGraph.from_edges(every, graph.number_of_nodes(), coalesce=True, name=name)


def _karate(n: int) -> TokenGraph:
    import networkx

    return _both_ways(networkx.karate_club_graph(), "karate club")


def _barabasi_albert(n: int) -> TokenGraph:
    import networkx

    return _both_ways(networkx.barabasi_albert_graph(n, 8, seed=0), f"barabasi_albert({n}, 8)")


def _mixed_with_global(n: int) -> TokenGraph:
    return patterns.window(n, 256) | patterns.sinks(n, 4) | patterns.global_tokens(n, [n // 4, n // 2])


def _mixed_with_random(n: int) -> TokenGraph:
    return patterns.window(n, 256) | patterns.random_senders(n, 4)


def _random_tiles(n: int, one_in: int, block: int = 64) -> TokenGraph:
    """Random tiles, equally many in every row of tiles: one in ``one_in``."""
    tiles = n // block
    return algebra.blow_up(patterns.random_senders(tiles, tiles // one_in, causal=False), block)


def _random_edges(n: int, one_in: int) -> TokenGraph:
    """Random senders, equally many for every receiver: one in ``one_in``; listed."""
    drawn = torch.rand(n, n, generator=torch.Generator().manual_seed(0)).topk(n // one_in, dim=1).indices
    edges = torch.stack([drawn.sort(1).values.flatten(), torch.arange(n).repeat_interleave(n // one_in)])
    return TokenGraph.from_edges(edges, n, name=f"{n // one_in} random senders each")


def _image(n: int) -> tuple[int, int]:
    """The sides of an image of about n tokens, multiples of 8."""
    side = max(8, round(n**0.5) // 8 * 8)
    return side, side


def _volume(n: int) -> tuple[int, int, int]:
    side = max(5, round((n / 4) ** (1 / 3)))
    return 2 * side, 2 * side, side


RULES: dict[str, Callable[[int], TokenGraph]] = {
    "natten": lambda n: patterns.natten(_image(n), 7),
    "natten3d": lambda n: patterns.natten(_volume(n), 5),
    "swin": lambda n: patterns.swin(_image(n), 8, 4),
    "longnet": lambda n: patterns.longnet(n, [256, 1024, 4096], [1, 4, 16]),
    "sliding_tile": lambda n: patterns.sliding_tile(_image(max(n, 24**2)), 8, 3),
    "butterfly": patterns.butterfly,
    "hypercube": lambda n: patterns.hypercube(n.bit_length() - 1),
}


def _table() -> list[Workload]:
    dense, tiled = (CAUSAL, MASKED, FLEX, EAGER), (MASKED, FLEX)
    every, edges = (MASKED, FLEX, PYG, SPARSE, EAGER), (MASKED, PYG, SPARSE)
    sizes = ((4096, 32), (16384, 32), (65536, 32), (16384, 8), (16384, 128))
    degrees = {f"e{n}" + (f"x{degree}" if degree != 32 else ""): (n, degree) for n, degree in sizes}
    return [
        *(
            Workload(f"a{n}", f"causal, T={n}", n, patterns.causal, dense, n < 8192)
            for n in (512, 2048, 8192)
        ),
        Workload("b2048", "window 256, T=2048", 2048, _window, every, True),
        *(
            Workload(f"b{n}", f"window 256, T={n}", n, _window, (*tiled, PYG, SPARSE), n == 8192)
            for n in (8192, 32768, 131072)
        ),
        Workload("c4096", "BigBird, T=4096", 4096, _bigbird, every, True),
        Workload("c16384", "BigBird, T=16384", 16384, _bigbird, (*tiled, PYG)),
        Workload("d34", "34 packed documents, T=16384", 16384, partial(_documents, number=34), tiled),
        Workload("d1024", "1024 documents of 16", 16384, _short_documents, (FLEX, PYG, SPARSE), True),
        *(
            Workload(
                name,
                f"random in-degree {degree}, T={n}",
                n,
                partial(_random_senders, degree=degree),
                edges if degree == 32 else edges[1:],
                n == 4096,
            )
            for name, (n, degree) in degrees.items()
        ),
        *(Workload(f"f{n}", f"tree of {n}", n, _tree, (*edges, EAGER), True) for n in (64, 256, 1024)),
        Workload("g34", "karate club", 34, _karate, (*edges, EAGER), True),
        Workload("g100000", "Barabasi-Albert 100k, m=8", 100_000, _barabasi_albert, edges),
        Workload("h2048", "layer, window 256, T=2048", 2048, _window, (MHA, MASKED, PYG), True, True),
        Workload("i-global", "window | sinks | global, T=16384", 16384, _mixed_with_global, (FLEX, SPARSE)),
        Workload("i-random", "window | 4 random edges, T=16384", 16384, _mixed_with_random, (SPARSE,)),
        *(Workload(f"j-{name}", f"{name}, T=16384", 16384, build, ()) for name, build in RULES.items()),
        *_crossover(),
    ]


def _crossover() -> list[Workload]:
    n = CROSSOVER_TOKENS
    return [
        Workload(
            f"x-{kind}-{each}",
            f"one in {each} {kind}",
            n,
            partial(build, one_in=each),
            (MASKED,),
            each in (32, 8, 2),
        )
        for kind, build in (("tiles", _random_tiles), ("edges", _random_edges))
        for each in DENSITIES
        if kind == "edges" or each <= n // 64
    ]


WORKLOADS = {workload.name: workload for workload in _table()}
