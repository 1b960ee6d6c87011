"""The tables of ``gnn-attention cost``, of at most 100 columns, and what they mean in two sentences."""

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gnn_attention import patterns
from gnn_attention.cost.configs import ModelSizes
from gnn_attention.cost.forms import FormCost, Macs, of_sizes
from gnn_attention.cost.graph_cost import GraphCost, of_graph
from gnn_attention.cost.rate_table import LatentSizes, Sizes, rates
from gnn_attention.graph import TokenGraph

WIDTH, LABEL, COLUMN = 100, 46, 18  # three columns of forms after a label
THOUSANDS = ("", " k", " M", " G", " T", " P", " E")
Compared = tuple[GraphCost, int]  # a graph, and the multiply-accumulates of its edges in one layer
Costs = Mapping[str, FormCost]
Layers = list[tuple[TokenGraph, int]]


def compared(model: ModelSizes, layers: Layers) -> list[Compared]:
    """The graphs of a model's layers and, if square, causal and full ones of the same tokens."""
    graphs = [graph for graph, _ in layers]
    first = graphs[0]
    square = (first.num_dst, first.dst_offset) == (first.num_src, first.src_offset)
    if square and first.batch is first.heads is None:
        others = patterns.causal(first.num_dst), patterns.full(first.num_dst)
        graphs += [other for other in others if all(graph != other for graph in graphs)]
    return [(of_graph(graph), of_sizes(_base(model), model.heads, graph).macs.edges) for graph in graphs]


def report(model: ModelSizes, layers: Layers, costs: Costs, graphs: list[Compared], dtype: str) -> str:
    """All of it: the matrices, the forms, the graphs, what it means."""
    compared = _graphs(graphs, model), _meaning(model, layers, costs, graphs)
    parts = _head(model, layers), _forms(model, layers, costs, dtype), *compared
    return "\n\n".join("\n".join(part) for part in parts)


def _head(model: ModelSizes, layers: Layers) -> list[str]:
    """Whose sizes these are, and the shapes of a layer's matrices in each form (seeds S1.5, S1.12)."""
    several = [f"{graph.name} in {count} of them" for graph, count in layers]
    graphs = ", ".join(several) if len(layers) > 1 else layers[0][0].name
    lines = [f"{model.name}: {model.source}", f"{_plural(model.layers, 'layer')}, over {graphs}"]
    return [line for text in [*lines, *_matrices(model.heads)] for line in _wrapped(text)]


def _matrices(sizes: Sizes | LatentSizes) -> Iterable[str]:
    if isinstance(sizes, LatentSizes):
        return [_latent_matrices(sizes)]
    d, key, value = sizes.width, sizes.head_dim, sizes.value_dim
    one_head = Sizes.of(d, 1, key, value)
    thin, square = (rates(form, one_head).send for form in ("factored", "merged"))
    return [
        f"standard: W_Q {sizes.num_heads} x [{d}, {key}], W_K {sizes.num_kv_heads} x [{d}, {key}], "
        f"W_V {sizes.num_kv_heads} x [{d}, {value}], W_O {sizes.num_heads} x [{value}, {d}]",
        f"factored: the same; a token's message in one head, (x W_V) W_O: {thin:,} multiply-accumulates",
        f"merged: W_P {sizes.num_heads} x [{d}, {d}], W_M {sizes.num_heads} x [{d}, {d}]; that message, x "
        f"W_M: {square:,}",
    ]


def _latent_matrices(sizes: LatentSizes) -> str:
    d, latent, rotary = sizes.width, sizes.latent_dim, sizes.rotary_dim
    source = sizes.query_dim or d
    shared = [f"W_DKV [{d}, {latent}]", f"W_KR [{d}, {rotary}]"]
    shared += [f"W_DQ [{d}, {source}]"] if sizes.query_dim else []
    content, value = sizes.content_dim, sizes.value_dim
    shapes = {"W_UQ": [source, content], "W_QR": [source, rotary], "W_UK": [latent, content]}
    shapes |= {"W_UV": [latent, value], "W_O": [value, d]}
    return ", ".join(shared + [f"{name} {sizes.num_heads} x {shape}" for name, shape in shapes.items()])


def _forms(model: ModelSizes, layers: Layers, costs: Costs, dtype: str) -> list[str]:
    tokens, of_layers = _plural(layers[0][0].num_dst, "token"), _plural(model.layers, "layer")
    base, each = next(iter(costs)), costs.values()
    return [
        f"{'':<{LABEL}}" + "".join(f"{form:>{COLUMN}}" for form in costs),
        f"multiply-accumulates: {tokens} in one pass, {of_layers}",
        *_macs([cost.macs for cost in each], base),
        "multiply-accumulates: the last token alone, the others in the cache",
        *_macs([cost.step for cost in each], base),
        f"memory in {dtype}, {of_layers}",
        *_memory(model, each),
    ]


PARTS = {
    "receive: queries or patterns": "receive",
    "send: keys and values, or messages": "send",
    "logits": "logits",
    "weighting": "weighting",
    "collect: the output matrices": "collect",
    "in all": "total",
}


def _macs(parts: list[Macs], base: str) -> list[str]:
    rows = [_row(label, [_number(getattr(macs, name)) for macs in parts]) for label, name in PARTS.items()]
    least = max(parts[0].total, 1)
    return [*rows, _row(f"times the {base} form", [f"{macs.total / least:.2f}" for macs in parts])]


def _memory(model: ModelSizes, costs: Collection[FormCost]) -> Iterator[str]:
    yield _row("parameters of one layer", [f"{cost.parameters // model.layers:,}" for cost in costs])
    yield _row("parameters", [_bytes(cost.parameter_bytes) for cost in costs])
    yield _row("activations of the pass", [_bytes(cost.activations) for cost in costs])
    yield _row("weights of all edges, if written out", [_bytes(cost.weights) for cost in costs])
    caches = {"one token": [cost.cache_per_token for cost in costs]}
    caches["at its largest"] = [cost.cache for cost in costs]
    for when, sizes in caches.items():
        for way in dict.fromkeys(way for cost in costs for way in cost.cache):
            yield _row(f"cache, {when}: {way}", [_bytes(of[way]) if way in of else "-" for of in sizes])


def _row(label: str, cells: Iterable[str]) -> str:
    return f"  {label:<{LABEL - 2}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)


def _graphs(graphs: list[Compared], model: ModelSizes) -> list[str]:
    columns = f"{'edges':>20}{'of causal':>12}{'of full':>10}{'cached':>10}{'fill':>8}{'edge MACs':>12}"
    lines = [f"{'graph':<28}{columns}"]
    for each, macs in graphs:
        shares = f"{_percent(each.of_causal):>12}{_percent(each.of_full):>10}"
        shares += f"{each.cached:>10}{_percent(each.fill):>8}"
        name = textwrap.shorten(each.name, 80, placeholder=" ...")
        row = f"{each.edges:>20,}{shares}{_number(macs):>12}"
        lines += [f"{name:<28}{row}"] if len(name) < 28 else [name, f"{'':<28}{row}"]
    block, cached = graphs[0][0].block, "cached: the most senders in the cache while decoding"
    fill = f"fill: the share of edges in {block} x {block} tiles that hold any"
    of_edges = f"edge MACs: logits and weighting of one layer in the {_base(model)} form"
    return lines + _wrapped(f"{cached}; {fill}; {of_edges}")


def _meaning(model: ModelSizes, layers: Layers, costs: Costs, graphs: list[Compared]) -> list[str]:
    lines = [*_wrapped(_of_forms(costs)), *_wrapped(_of_graph(layers, costs, graphs))]
    if isinstance(model.heads, Sizes) and not model.mergeable:
        reason = "This model rotates or norms queries and keys: its patterns differ and cannot be cached"
        lines += _wrapped(f"{reason}. The last two columns are what the equations would cost without that.")
    return lines


def _of_forms(costs: Costs) -> str:
    base, *_, last = costs.values()
    times = last.step.total / max(base.step.total, 1)
    share = next(iter(last.cache_per_token.values())) / next(iter(base.cache_per_token.values()))
    cached = f"{share:.3g} times its cache" if share >= 1 else f"1/{1 / share:.3g} of its cache"
    names = f"({next(iter(last.cache_per_token))} for {next(iter(base.cache_per_token))})"
    more = f"{times:.3g} times the multiply-accumulates of the {base.form} form, and {cached}"
    return f"One token more costs the {last.form} form {more} {names}."


def _of_graph(layers: Layers, costs: Costs, graphs: list[Compared]) -> str:
    first, base = graphs[0][0], next(iter(costs.values()))
    name = first.name if len(layers) == 1 else f"{first.name}, in {layers[0][1]} of the layers,"
    share = base.macs.edges / max(base.macs.total, 1)
    cached = f"decoding caches {first.cached:,} of {first.num_src:,} senders"
    if first.edges == first.causal:
        of_edges = f"its edges take {_percent(share)} of the {base.form} form's pass"
        pairs = f"{name} has {_percent(first.of_full)} of all pairs and {cached}"
        return f"{pairs}; {of_edges}, a share that grows with the tokens."
    less = _percent(first.of_causal)
    edges = f"{name} has {less} of the edges of the causal graph"
    return f"{edges}, so logits and weighting cost {less} of what they cost there; {cached}."


def _base(model: ModelSizes) -> str:
    return "standard" if isinstance(model.heads, Sizes) else "expanded"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _number(value: float, base: int = 1000, units: Sequence[str] = THOUSANDS) -> str:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.4g}{units[power]}"


def _bytes(value: float) -> str:
    return _number(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _wrapped(text: str) -> list[str]:
    text = re.sub(r" (?=%|\d+\])", "\u00a0", text)
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]
