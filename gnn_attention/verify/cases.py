"""What is checked: graphs with a definition in plain Python, and what can be added to their edges."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from gnn_attention import convert, patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import dropout
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads

HEADS, KV_HEADS, BATCH = 4, 2, 8  # many samples, so that the worst error of a draw is not a matter of luck
DIM, VALUE_DIM = 16, 12  # channels of keys and of values
WIDTH = 24  # channels of the tokens of a layer
REACH = 3  # of the relative bias
DROPOUT, BIAS_AND_SINKS = "dropout", "bias and sinks"

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}

KINDS = ("plain heads", "grouped heads with biases")

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class GraphCase:
    """A graph, ``edge(b, h, dst, src) -> bool`` in plain Python, and its edge list if it was made of one.

    Calls on it have ``sizes`` (samples, heads), ``kv_heads`` and ``dims`` (channels of keys and of values);
    ``layout`` puts q, k and v in their places in memory.
    """

    name: str
    graph: TokenGraph
    edge: Callable[[int, int, int, int], bool]
    listed: list[tuple[int, int]] | None = None
    sizes: tuple[int, int] = (BATCH, HEADS)
    kv_heads: int = KV_HEADS
    dims: tuple[int, int] = (DIM, VALUE_DIM)
    layout: Callable[[Tensor], Tensor] = lambda x: x

    @cached_property
    def mask(self) -> Tensor:
        """Bool ``[batch, heads, dst, src]``, pair by pair from the definition."""
        shape = (*self.sizes, self.graph.num_dst, self.graph.num_src)
        cells = [self.edge(b, h, i + self.graph.dst_offset, j) for b, h, i, j in product(*map(range, shape))]
        return torch.tensor(cells, dtype=torch.bool).reshape(shape)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that a call, or a layer, may be given, and of the output of a call."""
        (batch, heads), (dim, value_dim) = self.sizes, self.dims
        num_dst, num_src = self.graph.num_dst, self.graph.num_src
        return {
            "q": (batch, heads, num_dst, dim),
            "k": (batch, self.kv_heads, num_src, dim),
            "v": (batch, self.kv_heads, num_src, value_dim),
            "out": (batch, heads, num_dst, value_dim),
            "x_src": (batch, num_src, WIDTH),
            "x_dst": (batch, num_dst, WIDTH),
            "table": (heads, 2 * REACH + 1),
            "sink_logits": (heads,),
            "bias": (batch, heads, self.edges().shape[1]),
        }

    def edges(self) -> Tensor:
        """(src, dst) ``[2, E]`` in the order of a per-edge bias: as listed, else by receiver, then sender."""
        if self.listed is not None:
            return torch.tensor(self.listed).T
        return self.mask[0, 0].nonzero().T.flip(0)

    def places(self, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Samples, heads, absolute receivers and senders, which broadcast to ``[B, H, dst, src]``."""
        batch, heads, dst, src = (torch.arange(n, device=device) for n in self.mask.shape)
        return batch.view(-1, 1, 1, 1), heads.view(-1, 1, 1), dst.unsqueeze(1) + self.graph.dst_offset, src


def graph_cases() -> Iterator[GraphCase]:
    """Most are asymmetric, some have receivers without in-edges, some differ by head or sample.

    The last five have other heads, samples, widths and lengths.
    """
    # graphs get no names here: each is freed once its user drops it
    n, p, case, rule = 13, patterns, GraphCase, TokenGraph.from_rule
    parents = [-1, 0, 0, 1, 1, 2, 3, -1, 7, 8, 8, 10, 4]
    owner = [0] * 5 + [2] + [3] * 7
    yield case("full", p.full(n), lambda b, h, i, j: True)
    yield case("causal", p.causal(n), lambda b, h, i, j: j <= i)
    yield case("strict_causal", p.strict_causal(n), lambda b, h, i, j: j < i)
    yield case("no_self", p.no_self(n), lambda b, h, i, j: j != i)
    yield case("window", p.window(n, 4), lambda b, h, i, j: 0 <= i - j < 4)
    yield case("dilated", p.dilated(n, 3, 2), lambda b, h, i, j: i - j in (0, 2, 4))
    yield case("prefix", p.prefix(n, 5), lambda b, h, i, j: j < 5 or j <= i)
    yield case("documents", p.documents([5, 0, 1, 7]), lambda b, h, i, j: owner[i] == owner[j] and j <= i)
    with_sinks = lambda b, h, i, j: j <= i and (i - j < 3 or j < 2)  # noqa: E731
    yield case("window | sinks", p.window(n, 3) | p.sinks(n, 2), with_sinks)
    hubs = lambda b, h, i, j: j <= i and not {i, j}.isdisjoint({2, 6})  # noqa: E731
    yield case("global_tokens", p.global_tokens(n, [2, 6]), hubs)
    yield case("cross", p.cross(7, n), lambda b, h, i, j: True)
    above = lambda b, h, i, j: j in _ancestors(parents, i)  # noqa: E731
    yield case("tree", p.tree(parents), above)
    yield case("decode rows", p.causal(n).rows(9, n), lambda b, h, i, j: j <= i)
    yield case("rows of a tree", p.tree(parents).rows(5, 8), above)
    yield case("one token", p.causal(1), lambda b, h, i, j: True)
    yield case("no edges", p.window(n, 0), lambda b, h, i, j: False)
    yield _listed_case(10, n)
    near: Any = lambda b, h, i, j: (j <= i) & (i - j <= h)  # noqa: E731
    yield case("by head", rule(near, n, heads=HEADS, name="by head"), near)
    late: Any = lambda b, h, i, j: (j <= i) & (j >= 4 * (b % 3))  # noqa: E731
    yield case("by sample", rule(late, n, batch=BATCH, name="by sample"), late)
    yield case("causal, 97 tokens", p.causal(97), lambda b, h, i, j: j <= i)
    yield case("window, 97 tokens", p.window(97, 16), lambda b, h, i, j: 0 <= i - j < 16)
    far: Any = lambda b, h, i, j: (i - j < 100) & (j % 5 != 1)  # noqa: E731
    mixed: Any = lambda b, h, i, j: (i + j) % (2 + b + h) != 1  # noqa: E731
    same, varied = (partial(case, edge=edge, layout=tokens_first) for edge in (far, mixed))
    yield same("4 heads over 1, 13 x 13", rule(far, 13), sizes=(1, 4), kv_heads=1, dims=(16, 16))
    yield same("2 heads over 1, 150 x 150", rule(far, 150), sizes=(1, 2), kv_heads=1, dims=(20, 8))
    yield same("4 heads over 2, 64 x 64", rule(far, 64), sizes=(2, 4), kv_heads=2, dims=(32, 32))
    varied = partial(varied, sizes=(2, 3), kv_heads=3, dims=(24, 40))
    yield varied("3 heads over 3, 5 x 37, varied", rule(mixed, 5, 37, heads=3, batch=2))
    varied = partial(varied, sizes=(3, 1), kv_heads=1, dims=(64, 64))
    yield varied("1 head over 1, 1 x 300, varied", rule(mixed, 1, 300, heads=1, batch=3))


def tokens_first(x: Tensor) -> Tensor:
    """``[B, T, H, D]`` in memory, as of a layer that splits its channels into heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _ancestors(parents: list[int], node: int) -> list[int]:
    return [node, *(_ancestors(parents, parents[node]) if parents[node] >= 0 else [])]


def _listed_case(num_dst: int, num_src: int) -> GraphCase:
    """An irregular bipartite list in no particular order; receivers 0 and 4 are isolated."""
    everything = product(range(num_src), set(range(num_dst)) - {0, 4})
    pairs = [(s, d) for s, d in everything if (3 * s + 5 * d + s * d) % 3 == 0]
    pairs.sort(key=lambda pair: ((pair[0] * 7 + pair[1] * 11) % 17, pair[1], pair[0]))
    graph = convert.from_edge_index(torch.tensor(pairs).t(), num_dst, num_src)
    return GraphCase("listed", graph, lambda b, h, i, j: (j, i) in pairs, listed=pairs)


GRAPHS = {case.name: case for case in graph_cases()}


@dataclass(frozen=True, eq=False)
class Feature:
    """Something added to the logits: the arguments of ``attend``, and the same on dense float64 logits.

    ``learns`` names the inputs that are drawn and get gradients: the "table" of a relative bias, "bias" and
    "sink_logits". ``score_mod`` makes that argument of the inputs; ``modify(inputs, logits, sample, head,
    dst, src)`` does the same to logits ``[B, H, dst, src]``. ``additive`` says that it is a plain sum, which
    SDPA can be given as a mask. ``arguments`` are further ones.
    """

    learns: tuple[str, ...] = ()
    score_mod: Callable[[Inputs], Any] | None = None
    modify: Callable[[Inputs, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    additive: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, case: GraphCase) -> bool:
        """Whether it can be on a graph: a bias for each edge needs an order of edges."""
        return "bias" not in self.learns or not case.graph.varying_axes

    def options(self, inputs: Inputs) -> dict[str, Any]:
        mod = {} if self.score_mod is None else {"score_mod": self.score_mod(inputs)}
        return {**self.arguments, **mod, **{name: inputs[name] for name in self.learns if name != "table"}}

    def factors(self, case: GraphCase, device: str) -> Tensor | None:
        """Those of dropout, drawn with the seed 0: 0, or ``1 / (1 - p)`` where a weight stays."""
        if DROPOUT not in self.arguments:
            return None
        probability: float = self.arguments[DROPOUT]
        with torch.random.fork_rng([device] if device.startswith("cuda") else []):
            torch.manual_seed(0)
            key = dropout.draw_seed(torch.device(device)).cpu()
        b, h, dst, src = case.places()
        stays = dropout.mask(key, b, h, dst, src, probability).double()
        return (stays / (1 - probability)).expand(case.mask.shape).to(device)

    def dense(self, case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
        """Logits ``[B, H, dst, src]`` with everything added but the sinks."""
        places = case.places(logits.device)
        if self.modify is not None:
            logits = self.modify(inputs, logits, *places).to(logits.dtype)
        if "bias" not in self.learns:
            return logits
        (src, dst), (b, h) = case.edges().to(logits.device), (place.squeeze(-1) for place in places[:2])
        bias = inputs["bias"].to(logits.dtype)
        return logits + torch.zeros_like(logits).index_put((b, h, dst, src), bias)


def _share(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Uses every argument, and divides by 0 where a causal graph has no edge."""
    return (score * (1 + b / 8) + h / 4) / (dst - src + 1).clamp(min=0)


def _finite_share(inputs: Inputs, x: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return _share(x, b, h, dst, torch.minimum(src, dst))


def _relative(inputs: Inputs, x: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return x + inputs["table"][:, (dst - src).clamp(-REACH, REACH) + REACH]


def _alibi(inputs: Inputs, x: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return x - 2.0 ** (-8.0 * (h + 1).to(x) / HEADS) * (dst - src).abs()


def _softcap(inputs: Inputs, x: Tensor, *places: Tensor) -> Tensor:
    return 3.0 * torch.tanh(x / 3.0)


def _capped_alibi(inputs: Inputs, x: Tensor, *places: Tensor) -> Tensor:
    return _softcap(inputs, _alibi(inputs, x, *places))


ALIBI, CAP = score_mods.alibi(score_mods.alibi_slopes(HEADS)), score_mods.softcap(3.0)
CAPPED_ALIBI = score_mods.chain(ALIBI, CAP)
COUNTS = score_mods.log_multiplicity(torch.tensor([1.0, 2.0, 3.0, 4.0] * 75))
LEARNED = ("bias", "sink_logits")
EVERY = "alibi, softcap, bias, sinks"

FEATURES = {
    "plain": Feature(),
    "scale 0.7": Feature(arguments={"scale": 0.7}),
    "alibi": Feature((), lambda _: ALIBI, _alibi),
    "relative bias": Feature(("table",), lambda x: score_mods.relative_bias(x["table"]), _relative),
    "softcap": Feature((), lambda _: CAP, _softcap, additive=False),
    "log multiplicity": Feature((), lambda _: COUNTS, lambda _, x, b, h, i, j: x + (1 + j % 4).to(x).log()),
    "edge bias": Feature(("bias",)),
    "sinks": Feature(("sink_logits",)),
    EVERY: Feature(LEARNED, lambda _: CAPPED_ALIBI, _capped_alibi, additive=False),
}
# what the rules, and the checks of dropout, add to that
OPTIONS = FEATURES | {
    BIAS_AND_SINKS: Feature(LEARNED),
    "share": Feature((), lambda _: _share, _finite_share, additive=False),
    DROPOUT: Feature(arguments={DROPOUT: 0.3}),
}


def drawn_heads(kind: str, seed: int) -> StandardHeads:
    """Float64 heads: plain, or grouped with odd sizes and biases, which are drawn."""
    rng = torch.Generator().manual_seed(seed)
    heads = StandardHeads(WIDTH, HEADS)
    if kind != KINDS[0]:
        heads = StandardHeads(WIDTH, HEADS, DIM, VALUE_DIM, num_kv_heads=KV_HEADS, bias=True)
    for name, parameter in heads.double().named_parameters():
        spread = parameter.shape[-2] ** -0.5 if name.startswith("W_") else 0.5
        parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * spread
    return heads
