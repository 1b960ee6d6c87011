"""Define the graphs of the checks, each with a rule in Python, and the options of ``attend``."""

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
from gnn_attention.verify import oracle
from gnn_attention.verify.measure import Inputs

# With several samples, the largest error depends less on luck.
NUM_HEADS, NUM_KV_HEADS, BATCH_SIZE = 4, 2, 8
# Channels of keys, of values, of the tokens of a layer, and of edges.
DIM, VALUE_DIM, WIDTH, EDGE_DIM = 16, 12, 24, 3
# The relative bias has one scalar for each distance from -3 to 3. Others are clamped to this range.
MAX_DISTANCE = 3
DROPOUT, BIAS_AND_SINKS, EDGE_FEATURES = "dropout", "bias and sinks", "edge features"
EDGE_OPTIONS = (EDGE_FEATURES, *oracle.NORMALISERS)
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
KINDS = ("plain heads", "grouped heads with biases")


@dataclass(frozen=True, eq=False)
class GraphCase:
    """A graph, its definition ``edge(b, h, dst, src) -> bool``, and its edge list if it has one.

    Calls on the graph have ``sizes`` (samples, heads), ``kv_heads`` key/value heads, and ``dims``
    (channels of keys, channels of values). ``layout`` changes the memory layout of q, k and v.
    """

    name: str
    graph: TokenGraph
    edge: Callable[[int, int, int, int], bool]
    edge_list: list[tuple[int, int]] | None = None
    sizes: tuple[int, int] = (BATCH_SIZE, NUM_HEADS)
    kv_heads: int = NUM_KV_HEADS
    dims: tuple[int, int] = (DIM, VALUE_DIM)
    layout: Callable[[Tensor], Tensor] = lambda x: x

    @cached_property
    def mask(self) -> Tensor:
        """The definition, evaluated for each pair: a bool tensor ``[batch, heads, dst, src]``."""
        shape = (*self.sizes, self.graph.num_dst, self.graph.num_src)
        cells = [self.edge(b, h, i + self.graph.dst_offset, j) for b, h, i, j in product(*map(range, shape))]
        return torch.tensor(cells, dtype=torch.bool).reshape(shape)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all inputs of a call or layer, and of the output of a call."""
        (batch, heads), (dim, value_dim) = self.sizes, self.dims
        num_dst, num_src = self.graph.num_dst, self.graph.num_src
        # Edges have two types on listed graphs, and no types on others.
        maps = (2, self.kv_heads, EDGE_DIM) if self.edge_list else (self.kv_heads, EDGE_DIM)
        return {
            "q": (batch, heads, num_dst, dim),
            "k": (batch, self.kv_heads, num_src, dim),
            "v": (batch, self.kv_heads, num_src, value_dim),
            "out": (batch, heads, num_dst, value_dim),
            "x_src": (batch, num_src, WIDTH),
            "x_dst": (batch, num_dst, WIDTH),
            "table": (heads, 2 * MAX_DISTANCE + 1),
            "sink_logits": (heads,),
            "bias": (batch, heads, self.edges().shape[1]),
            "edge_attr": (self.edges().shape[1], EDGE_DIM),
            "edge_key": (*maps, dim),
            "edge_value": (*maps, value_dim),
        }

    def edges(self) -> Tensor:
        """Return (src, dst) ``[2, E]`` in the order of a per-edge bias."""
        edges = self.mask[0, 0].nonzero().T.flip(0)
        return edges if self.edge_list is None else torch.tensor(self.edge_list).T

    def to_pairs(self, values: Tensor) -> Tensor:
        """Return values of edges ``[..., E]`` as a matrix ``[..., dst, src]`` that is 0 at non-edges."""
        (src, dst), shape = self.edges().to(values.device), self.mask.shape[2:]
        zeros = values.new_zeros(*values.shape[:-1], shape.numel())
        return zeros.index_add(-1, dst * shape[1] + src, values).view(*values.shape[:-1], *shape)

    def edge_rows(self, inputs: Inputs, name: str) -> Tensor:
        """Return ``a_e W`` of each edge as ``[heads, D, dst, src]``, where ``name`` is that of the map W."""
        maps = inputs[name].view(-1, *inputs[name].shape[-3:])
        maps = maps.repeat_interleave(self.sizes[1] // self.kv_heads, 1)
        edge_type = torch.arange(len(inputs["edge_attr"])) % len(maps)
        return self.to_pairs(torch.einsum("ef,ehfd->hde", inputs["edge_attr"], maps[edge_type]))

    def indices(self, device: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return indices of samples, heads, receivers and senders that broadcast to the mask."""
        batch, heads, dst, src = (torch.arange(n, device=device) for n in self.mask.shape)
        return batch.view(-1, 1, 1, 1), heads.view(-1, 1, 1), dst.unsqueeze(1) + self.graph.dst_offset, src


def graph_cases() -> Iterator[GraphCase]:
    """Yield graphs, most of them asymmetric; some have isolated receivers or vary by head or sample."""
    # No local variable keeps a graph, so each graph is freed when its user drops it.
    n, p, case, rule = 13, patterns, GraphCase, TokenGraph.from_rule
    parents, ids = [-1, 0, 0, 1, 1, 2, 3, -1, 7, 8, 8, 10, 4], [0] * 5 + [2] + [3] * 7
    yield case("full", p.full(n), lambda b, h, i, j: True)
    yield case("causal", p.causal(n), lambda b, h, i, j: j <= i)
    yield case("strict_causal", p.strict_causal(n), lambda b, h, i, j: j < i)
    yield case("no_self", p.no_self(n), lambda b, h, i, j: j != i)
    yield case("window", p.window(n, 4), lambda b, h, i, j: 0 <= i - j < 4)
    yield case("dilated", p.dilated(n, 3, 2), lambda b, h, i, j: i - j in (0, 2, 4))
    yield case("prefix", p.prefix(n, 5), lambda b, h, i, j: j < 5 or j <= i)
    yield case("documents", p.documents([5, 0, 1, 7]), lambda b, h, i, j: ids[i] == ids[j] and j <= i)
    with_sinks = lambda b, h, i, j: j <= i and (i - j < 3 or j < 2)  # noqa: E731
    yield case("window | sinks", p.window(n, 3) | p.sinks(n, 2), with_sinks)
    hubs = lambda b, h, i, j: j <= i and not {i, j}.isdisjoint({2, 6})  # noqa: E731
    yield case("global_tokens", p.global_tokens(n, [2, 6]), hubs)
    yield case("cross", p.cross(7, n), lambda b, h, i, j: True)
    ancestors: Any = lambda b, h, i, j: i >= 0 and (j == i or ancestors(b, h, parents[i], j))  # noqa: E731
    yield case("tree", p.tree(parents), ancestors)
    yield case("decode rows", p.causal(n).rows(9, n), lambda b, h, i, j: j <= i)
    yield case("rows of a tree", p.tree(parents).rows(5, 8), ancestors)
    yield case("one token", p.causal(1), lambda b, h, i, j: True)
    yield case("no edges", p.window(n, 0), lambda b, h, i, j: False)
    # The list is not sorted, and receivers 0 and 4 are isolated.
    pairs = product(range(n), {*range(10)} - {0, 4})
    edges = [(s, d) for s, d in pairs if (3 * s + 5 * d + s * d) % 3 == 0]
    edges.sort(key=lambda edge: ((edge[0] * 7 + edge[1] * 11) % 17, edge[1], edge[0]))
    listed = partial(case, edge=lambda b, h, i, j: (j, i) in edges, edge_list=edges)
    yield listed("listed", convert.from_edge_index(torch.tensor(edges).t(), 10, n))
    head_rule: Any = lambda b, h, i, j: (j <= i) & (i - j <= h)  # noqa: E731
    yield case("by head", rule(head_rule, n, heads=NUM_HEADS, name="by head"), head_rule)
    sample_rule: Any = lambda b, h, i, j: (j <= i) & (j >= 4 * (b % 3))  # noqa: E731
    yield case("by sample", rule(sample_rule, n, batch=BATCH_SIZE, name="by sample"), sample_rule)
    yield case("causal, 97 tokens", p.causal(97), lambda b, h, i, j: j <= i)
    yield case("window, 97 tokens", p.window(97, 16), lambda b, h, i, j: 0 <= i - j < 16)
    striped: Any = lambda b, h, i, j: (i - j < 100) & (j % 5 != 1)  # noqa: E731
    stripes = partial(case, edge=striped, layout=store_tokens_first)
    yield stripes("4 heads over 1, 13 x 13", rule(striped, 13), sizes=(1, 4), kv_heads=1, dims=(16, 16))
    yield stripes("2 heads over 1, 150 x 150", rule(striped, 150), sizes=(1, 2), kv_heads=1, dims=(20, 8))
    yield stripes("4 heads over 2, 64 x 64", rule(striped, 64), sizes=(2, 4), kv_heads=2, dims=(32, 32))
    both_rule: Any = lambda b, h, i, j: (i + j) % (2 + b + h) != 1  # noqa: E731
    varied_case = partial(case, edge=both_rule, layout=store_tokens_first)
    three_heads = partial(varied_case, sizes=(2, 3), kv_heads=3, dims=(24, 40))
    yield three_heads("3 heads over 3, 5 x 37, varied", rule(both_rule, 5, 37, heads=3, batch=2))
    one_head = partial(varied_case, sizes=(3, 1), kv_heads=1, dims=(64, 64))
    yield one_head("1 head over 1, 1 x 300, varied", rule(both_rule, 1, 300, heads=1, batch=3))


def store_tokens_first(x: Tensor) -> Tensor:
    """Store ``[B, H, T, D]`` as ``[B, T, H, D]``, like a layer that splits channels into heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


GRAPHS = {case.name: case for case in graph_cases()}


@dataclass(frozen=True, eq=False)
class Feature:
    """An option of ``attend``: its arguments, and its effect on dense float64 attention.

    ``extras`` names the inputs besides q, k and v that are drawn and get gradients: the "table" of a relative
    bias, and tensors for ``attend``. ``score_mod(inputs)`` returns the score_mod. ``modify(inputs, logits,
    sample, head, dst, src)`` applies it to logits ``[B, H, dst, src]``. ``additive`` is True if SDPA with a
    mask computes the option. ``arguments`` are the other arguments of ``attend``.
    """

    extras: tuple[str, ...] = ()
    score_mod: Callable[[Inputs], Any] | None = None
    modify: Callable[[Inputs, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    additive: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, case: GraphCase) -> bool:
        """Return whether a graph fits: values of edges need the same edges in all heads and samples."""
        return {"bias", "edge_attr"}.isdisjoint(self.extras) or not case.graph.varying_axes

    def options(self, inputs: Inputs) -> dict[str, Any]:
        options = {**self.arguments, **{name: inputs[name] for name in self.extras if name != "table"}}
        if "edge_key" in options and options["edge_key"].dim() == 4:
            options["edge_type"] = torch.arange(len(inputs["edge_attr"])).to(inputs["q"].device) % 2
        return options if self.score_mod is None else {**options, "score_mod": self.score_mod(inputs)}

    def oracle_options(self, case: GraphCase, factors: Tensor | None, inputs: Inputs) -> dict[str, Any]:
        """Return the options of the dense formula that ``dense`` does not apply."""
        edge_values = case.edge_rows(inputs, "edge_value") if "edge_value" in self.extras else None
        normaliser = self.arguments.get("normaliser", "softmax")
        return {"factors": factors, "normaliser": normaliser, "edge_values": edge_values}

    def factors(self, case: GraphCase, device: str) -> Tensor | None:
        """Draw the factors of dropout with seed 0: 0 for a dropped weight, else ``1 / (1 - p)``."""
        if DROPOUT not in self.arguments:
            return None
        with torch.random.fork_rng([device] if device.startswith("cuda") else []):
            torch.manual_seed(0)
            key = dropout.draw_seed(torch.device(device)).cpu()
        probability: float = self.arguments[DROPOUT]
        is_kept = dropout.mask(key, *case.indices(), probability).double()
        return (is_kept / (1 - probability)).expand(case.mask.shape).to(device)

    def dense(self, case: GraphCase, inputs: Inputs, logits: Tensor) -> Tensor:
        """Apply edge features, score_mod and bias, but not the sinks, to logits ``[B, H, dst, src]``."""
        if "edge_key" in self.extras:
            keys = case.edge_rows(inputs, "edge_key")
            logits = logits + torch.einsum("bhid,hdij->bhij", inputs["q"], keys) * case.dims[0] ** -0.5
        if self.modify is not None:
            logits = self.modify(inputs, logits, *case.indices(logits.device)).to(logits.dtype)
        return logits + case.to_pairs(inputs["bias"].to(logits.dtype)) if "bias" in self.extras else logits


def _quotient(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """Change a score by every argument, and divide it by 0 where a causal graph has no edge."""
    return (score * (1 + b / 8) + h / 4) / (dst - src + 1).clamp(min=0)


def _relative(inputs: Inputs, x: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return x + inputs["table"][:, (dst - src).clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE]


def _alibi(inputs: Inputs, x: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return x - 2.0 ** (-8.0 * (h + 1).to(x) / NUM_HEADS) * (dst - src).abs()


def _softcap(inputs: Inputs, x: Tensor, *indices: Tensor) -> Tensor:
    return 3.0 * torch.tanh(x / 3.0)


ALIBI, SOFTCAP = score_mods.alibi(score_mods.alibi_slopes(NUM_HEADS)), score_mods.softcap(3.0)
CAPPED_ALIBI = score_mods.chain(ALIBI, SOFTCAP)
COUNTS = score_mods.log_multiplicity(torch.tensor([1.0, 2.0, 3.0, 4.0] * 75))
LEARNED_INPUTS, MIX = ("bias", "sink_logits"), "alibi, softcap, bias, sinks"

FEATURES = {
    "plain": Feature(),
    "scale 0.7": Feature(arguments={"scale": 0.7}),
    "alibi": Feature((), lambda _: ALIBI, _alibi),
    "relative bias": Feature(("table",), lambda x: score_mods.relative_bias(x["table"]), _relative),
    "softcap": Feature((), lambda _: SOFTCAP, _softcap, additive=False),
    "log multiplicity": Feature((), lambda _: COUNTS, lambda _, x, b, h, i, j: x + (1 + j % 4).to(x).log()),
    "edge bias": Feature(("bias",)),
    "sinks": Feature(("sink_logits",)),
    MIX: Feature(
        LEARNED_INPUTS, lambda _: CAPPED_ALIBI, lambda *args: _softcap(args[0], _alibi(*args)), additive=False
    ),
}
OPTIONS = FEATURES | {
    BIAS_AND_SINKS: Feature(LEARNED_INPUTS),
    "share": Feature(
        (), lambda _: _quotient, lambda _, x, b, h, i, j: _quotient(x, b, h, i, j.minimum(i)), additive=False
    ),
    DROPOUT: Feature(additive=False, arguments={DROPOUT: 0.3}),
    EDGE_FEATURES: Feature(("edge_attr", "edge_key", "edge_value"), additive=False),
    **{name: Feature(additive=False, arguments={"normaliser": name}) for name in oracle.NORMALISERS},
}


def draw_heads(kind: str, seed: int) -> StandardHeads:
    """Draw float64 heads: plain ones of default sizes, or grouped ones of other sizes with biases."""
    rng = torch.Generator().manual_seed(seed)
    heads = StandardHeads(WIDTH, NUM_HEADS)
    if kind != KINDS[0]:
        heads = StandardHeads(WIDTH, NUM_HEADS, DIM, VALUE_DIM, NUM_KV_HEADS, bias=True)
    for name, parameter in heads.double().named_parameters():
        std = parameter.shape[-2] ** -0.5 if name.startswith("W_") else 0.5
        parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * std
    return heads
