"""Features and types of edges, and normalisers other than softmax, equal the dense formula."""

from itertools import product

import pytest
import torch
from support.bounds import assert_exact
from support.covering import thin
from support.inputs import qkv, randn
from support.pair_formula import WEIGHTS, pair_attention
from torch_geometric.nn import TransformerConv, to_hetero

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, StandardHeads, patterns
from gnn_attention.backends import BACKENDS

N, M, F, TYPES = 9, 7, 3, 3
EDGE_BACKENDS = ("rows", "reference", "message_passing", "auto")


def irregular():
    rng = torch.Generator().manual_seed(1)
    edges = (torch.rand(N, M, generator=rng) < 0.5).nonzero().T.flip(0)
    return ga.TokenGraph.from_edges(edges[:, torch.randperm(edges.shape[1], generator=rng)], N, M)


GRAPH = irregular()
E = GRAPH.num_edges
EDGE_TYPES = torch.randint(TYPES, (E,), generator=torch.Generator().manual_seed(3))
ATTR = randn(E, F, seed=1)
# Maps of keys (8 channels) and values (6 channels) of two key/value heads.
MAPS = {
    "features": (randn(2, F, 8, seed=2), randn(2, F, 6, seed=3)),
    "typed features": (randn(TYPES, 2, F, 8, seed=2), randn(TYPES, 2, F, 6, seed=3)),
    "types": (randn(TYPES, 2, 8, 8, seed=2), randn(TYPES, 2, 6, 6, seed=3)),
    "nothing": (),
}


def arguments(kind):
    """Return leaves for attr and maps, the options of attend and those of the formula."""
    maps = [x.clone().requires_grad_() for x in MAPS[kind]]
    attr = ATTR.clone().requires_grad_() if "features" in kind else None
    types = EDGE_TYPES if "type" in kind else None
    names = dict(zip(("edge_key", "edge_value"), maps, strict=False))
    leaves = [*maps, *([] if attr is None else [attr])]
    return (
        leaves,
        {**names, "edge_attr": attr, "edge_type": types},
        {"attr": attr, "maps": maps, "types": types},
    )


def tanh(s):
    return s.tanh()


CASES = [
    (backend, normaliser, kind, with_bias)
    for backend, normaliser, kind, with_bias in product(
        (*EDGE_BACKENDS, "tiles", "dense"), (*WEIGHTS, tanh), MAPS, (False, True)
    )
    if backend in EDGE_BACKENDS or ("features" not in kind and normaliser not in ("sparsemax", tanh))
]


@pytest.mark.parametrize(("backend", "normaliser", "kind", "with_bias"), thin(CASES))
def test_output_weights_and_gradients_are_those_of_the_formula(backend, normaliser, kind, with_bias):
    leaves, options, expected_options = arguments(kind)
    inputs = [*qkv(N, M), *leaves]
    if with_bias:
        bias = randn(1, 4, E, seed=5).requires_grad_()
        inputs.append(bias)
        options["bias"] = expected_options["bias"] = bias
    out, info = ga.attend(
        *inputs[:3], GRAPH, normaliser=normaliser, backend=backend, return_info=True, **options
    )
    expected, weights = pair_attention(*inputs[:3], GRAPH, normaliser, **expected_options)
    assert_exact(out, expected)
    assert_exact(info.weights(), weights)
    assert_exact(info.weights(torch.tensor([4, 0])), weights[..., [4, 0]])
    if kind != "types":
        src, dst = GRAPH.edge_index
        assert_exact(info.weight_matrix()[:, :, dst, src], weights)
    # Squares of logits are large numbers, whose sines would have few correct digits.
    scale = expected.detach().abs().max()
    assert_exact(*(torch.autograd.grad((y / scale).sin().sum(), inputs) for y in (out, expected)))


@pytest.mark.parametrize("kind", MAPS)
def test_gradients_of_every_kind_pass_through_features(kind):
    leaves, _, _ = arguments(kind)
    inputs = [x[:1].detach().requires_grad_() for x in qkv(N, M)] + leaves

    def run(q, k, v, *leaves):
        maps = dict(zip(("edge_key", "edge_value"), leaves, strict=False))
        types = EDGE_TYPES if "type" in kind else None
        attr = leaves[2] if "features" in kind else None
        return ga.attend(q, k, v, GRAPH, backend="rows", edge_attr=attr, edge_type=types, **maps)

    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_groups_of_query_heads_share_the_maps_of_a_head(kv_heads):
    """Plain calls on the same graph, before and after, are not affected."""
    graph, (q, k, v) = irregular(), (x.detach() for x in qkv(N, M, kv_heads=kv_heads))
    key, value = (w[:1].expand(kv_heads, -1, -1) for w in MAPS["features"])
    for attr in (None, ATTR, None):
        options = {} if attr is None else {"edge_attr": attr, "edge_key": key, "edge_value": value}
        expected, _ = pair_attention(q, k, v, graph, attr=attr, maps=[key, value] if options else ())
        assert_exact(ga.attend(q, k, v, graph, backend="rows", **options), expected)


def test_dropout_drops_the_value_and_the_features_of_an_edge():
    (key, value), (q, k, v) = MAPS["features"], (x.detach() for x in qkv(N, M))
    outputs = []
    for backend in ("rows", "message_passing"):
        torch.manual_seed(0)
        options = {"edge_attr": ATTR, "edge_key": key, "edge_value": value, "dropout": 0.5}
        outputs.append(ga.attend(q, k, v, GRAPH, backend=backend, **options))
    assert_exact(*outputs)
    assert (outputs[0] != ga.attend(q, k, v, GRAPH, **(options | {"dropout": 0.0}))).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_features_are_computed_in_float32(dtype):
    """The only errors are roundings of the inputs and of the output."""
    inputs = [x.detach().to(dtype) for x in qkv(N, M)]
    maps = [w.to(dtype) for w in MAPS["features"]]
    attr = ATTR.to(dtype)
    options = {"edge_attr": attr, "edge_key": maps[0], "edge_value": maps[1]}
    out = ga.attend(*inputs, GRAPH, **options)
    exact, _ = pair_attention(
        *(x.double() for x in inputs), GRAPH, attr=attr.double(), maps=[x.double() for x in maps]
    )
    assert out.dtype == dtype
    assert float((out - exact).abs().max()) <= 2 * torch.finfo(dtype).eps * float(exact.abs().max())


def test_types_are_sorted_again_after_a_change():
    types = EDGE_TYPES.clone()
    inputs = [x.detach() for x in qkv(N, M)]
    for _ in range(2):
        for kind in ("types", "typed features"):
            maps = dict(zip(("edge_key", "edge_value"), MAPS[kind], strict=True))
            attr = ATTR if kind == "typed features" else None
            out = ga.attend(*inputs, GRAPH, backend="rows", edge_type=types, edge_attr=attr, **maps)
            expected, _ = pair_attention(*inputs, GRAPH, attr=attr, maps=MAPS[kind], types=types)
            assert_exact(out, expected)
        types[:] = (types + 1) % TYPES


def test_score_mods_and_dropout_see_the_sender_of_a_typed_edge():
    inputs, (key, value) = [x.detach() for x in qkv(N, M)], MAPS["types"]
    options = {"edge_key": key, "edge_value": value, "edge_type": EDGE_TYPES}
    out = ga.attend(*inputs, GRAPH, score_mod=lambda s, b, h, dst, src: s + src.to(s.dtype) / 4, **options)
    bias = GRAPH.edge_index[0].double() / 4
    assert_exact(out, pair_attention(*inputs, GRAPH, bias=bias, maps=MAPS["types"], types=EDGE_TYPES)[0])


@pytest.mark.parametrize(("num_dst", "num_src"), [(0, 3), (3, 3), (3, 0)])
@pytest.mark.parametrize("backend", EDGE_BACKENDS)
def test_graphs_without_edges(backend, num_dst, num_src):
    graph = ga.TokenGraph.from_edges(torch.zeros(2, 0, dtype=torch.int64), num_dst, num_src)
    for kind, normaliser in product(MAPS, ("softmax", "sparsemax", "sigmoid")):
        options = dict(zip(("edge_key", "edge_value"), MAPS[kind], strict=False))
        options["edge_attr"] = ATTR[:0] if "features" in kind else None
        options["edge_type"] = EDGE_TYPES[:0] if "type" in kind else None
        q, k, v = qkv(num_dst, num_src)
        out = ga.attend(q, k, v, graph, normaliser=normaliser, backend=backend, **options)
        assert not out.any()
        assert not torch.autograd.grad(out.sum(), v)[0].any()


def test_parallel_edges_have_their_own_features():
    edges = torch.tensor([[0, 0, 1], [0, 0, 0]])
    graph = ga.TokenGraph.from_edges(edges, 1, 2, parallel="keep")
    q, k, v = (x.detach() for x in qkv(1, 2))
    attr, (key, value) = randn(3, F), MAPS["features"]
    outputs = [
        ga.attend(q, k, v, graph, backend=name, edge_attr=attr, edge_key=key, edge_value=value)
        for name in ("rows", "reference", "message_passing")
    ]
    rows = [x[:, :, edges[0]] for x in (k, v)]
    expanded = [
        x.repeat_interleave(2, 1) + torch.einsum("ef,hfd->hed", attr, w.repeat_interleave(2, 0))
        for x, w in zip(rows, (key, value), strict=True)
    ]
    weights = (torch.einsum("bhid,bhed->bhie", q, expanded[0]) * 8**-0.5).softmax(-1)
    for output in outputs:
        assert_exact(output, weights @ expanded[1])


def test_the_layer_is_transformer_conv():
    """With one map for keys and values the layer has the numbers of PyG's layer, its weights too."""
    width, heads = 8, 2
    edges, attr, x = torch.randint(0, N, (2, 30)), randn(30, F), randn(N, width)
    conv = TransformerConv(width, width // heads, heads, edge_dim=F, root_weight=False).double()
    layer = MessagePassingAttention(StandardHeads(width, heads, bias=True), edge_dim=F).double()

    def by_head(linear):
        return linear.weight.view(heads, width // heads, -1).mT

    with torch.no_grad():
        for letter, linear in zip("QKV", (conv.lin_query, conv.lin_key, conv.lin_value), strict=True):
            getattr(layer.heads, f"W_{letter}").copy_(by_head(linear))
            getattr(layer.heads, f"b_{letter}").copy_(linear.bias.view(heads, -1))
        layer.heads.W_O.copy_(torch.eye(width).view(heads, width // heads, width))
        layer.edge_key.copy_(by_head(conv.lin_edge))
        layer.edge_value.copy_(by_head(conv.lin_edge))
    expected, (_, weights) = conv(x, edges, attr, return_attention_weights=True)
    for layer.backend, g in product(("auto", "rows", "message_passing"), (edges, None)):
        g = ga.TokenGraph.from_edges(edges, N, N, parallel="keep") if g is None else g
        out, (_, layer_weights) = layer(x, g, edge_attr=attr, return_attention_weights=True)
        assert_exact(out, expected)
        assert_exact(layer_weights, weights)


class OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = MessagePassingAttention(StandardHeads(8, 2), edge_dim=F)

    def forward(self, x, edge_index, edge_attr):
        return self.layer(x, edge_index, edge_attr=edge_attr)


def test_to_hetero_gives_each_relation_its_own_map():
    relations = [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")]
    x = {"paper": randn(5, 8), "author": randn(4, 8, seed=1)}
    edges = {key: torch.randint(4, (2, 6)) for key in relations}
    attr = {key: randn(6, F, seed=i) for i, key in enumerate(relations)}
    model = to_hetero(OneLayer(), (list(x), relations), aggr="sum").double()
    layers = model.layer
    out = model(x, edges, attr)["paper"]
    parts = [
        layers["__".join(key)]((x[key[0]], x["paper"]), edges[key], edge_attr=attr[key])
        for key in relations[:2]
    ]
    assert_exact(out, sum(parts))


@pytest.mark.parametrize("normaliser", ["softmax", "sigmoid", "sparsemax", tanh])
@pytest.mark.parametrize("sizes", [(None, TYPES), (F, None), (F, TYPES)])
def test_the_two_paths_of_a_layer_agree(normaliser, sizes):
    edge_dim, num_types = sizes
    options = {"edge_dim": edge_dim, "num_edge_types": num_types, "normaliser": normaliser}
    layer = MessagePassingAttention(StandardHeads(8, 4, num_kv_heads=2), **options).double()
    graph = ga.convert.from_mask(torch.ones(5, 5).tril().bool())
    edges = {"edge_attr": None if edge_dim is None else randn(15, F)}
    edges["edge_type"] = None if num_types is None else torch.arange(15) % TYPES
    x = randn(2, 5, 8)
    outputs = []
    for layer.backend, g in product(("rows", "message_passing"), (graph, graph.edge_index)):
        outputs.append(layer(x, g, **edges))
        assert_exact(layer(x[0], g, **edges), outputs[-1][0])
    assert_exact(outputs[1:], [outputs[0]] * 3)
    grads = torch.autograd.grad(outputs[0].sum(), (layer.edge_key, layer.edge_value))
    assert all(grad.any() for grad in grads)
    assert layer.load_state_dict(layer.state_dict()) is not None


def test_a_compiled_layer_takes_features():
    layer = MessagePassingAttention(StandardHeads(8, 2), edge_dim=F, num_edge_types=TYPES).double()
    x, graph = randn(N, 8), patterns.window(N, 3)
    attr = randn(graph.num_edges, F)
    types = torch.arange(graph.num_edges) % TYPES
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for g in (graph, graph.edge_index):
        assert_exact(
            compiled(x, g, edge_attr=attr, edge_type=types), layer(x, g, edge_attr=attr, edge_type=types)
        )


def test_normalisers_have_no_lse_and_no_sinks():
    inputs = qkv(N, M)
    _, info = ga.attend(*inputs, GRAPH, normaliser="relu", return_info=True)
    with pytest.raises(NotImplementedError, match="the normaliser 'relu' has no lse"):
        _ = info.lse
    with pytest.raises(ValueError, match="sink_logits need normaliser='softmax', got 'relu'"):
        ga.attend(*inputs, GRAPH, normaliser="relu", sink_logits=torch.zeros(4))


def test_a_function_gets_logits_in_the_order_of_the_graph():
    inputs, orders = qkv(N, M), []
    _, info = ga.attend(*inputs, GRAPH, return_info=True)
    for backend in ("rows", "reference", "message_passing"):
        ga.attend(*inputs, GRAPH, normaliser=lambda s: orders.append(s) or s, backend=backend)
    assert_exact(orders, [info.logits()] * 3)


def test_unsupported_calls_are_refused_by_name():
    inputs, (key, value) = qkv(N, M), MAPS["features"]
    features = {"edge_attr": ATTR, "edge_key": key, "edge_value": value}
    with pytest.raises(NotImplementedError, match=r"'tiles' does not support .*: it has no edge_attr"):
        ga.attend(*inputs, GRAPH, backend="tiles", **features)
    with pytest.raises(
        NotImplementedError, match=r"'dense' .*: it has no normaliser 'sparsemax'; use backend='rows'"
    ):
        ga.attend(*inputs, GRAPH, backend="dense", normaliser="sparsemax")
    assert BACKENDS["mixed"].capabilities.normalisers == "softmax"


KEY, VALUE = MAPS["features"]
WRONG = {
    r"edge_attr must be \[E, F\] with E = ": {"edge_attr": ATTR[1:], "edge_key": KEY},
    r"edge_key must be \[Hkv, F, D\].*, here \[2, 3, 8\], got \[2, 2, 8\]": {
        "edge_attr": ATTR,
        "edge_key": KEY[:, 1:],
    },
    r"edge_value must be .*, here \[2, 3, 6\], got \[2, 3, 8\]": {"edge_attr": ATTR, "edge_value": KEY},
    "edge_attr needs edge_key, edge_value or both, got neither": {"edge_attr": ATTR},
    "edge_type needs edge_key, edge_value or both, got neither": {"edge_type": EDGE_TYPES},
    "edge_key and edge_value need edge_attr or edge_type, got neither": {"edge_key": KEY},
    r"edge_type must be an int64 tensor \[E\]": {"edge_type": EDGE_TYPES[1:], "edge_key": MAPS["types"][0]},
    r"with edge_type, maps must be \[types, Hkv, F, D\], got \[2, 3, 8\]": {
        "edge_type": EDGE_TYPES,
        "edge_key": KEY,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        ga.attend(*qkv(N, M), GRAPH, **WRONG[message])


def test_wrong_types_and_layers_are_named():
    with pytest.raises(IndexError, match=r"edge_type must be in 0 .. 2, got 2 .. 3"):
        ga.attend(*qkv(N, M), GRAPH, edge_type=EDGE_TYPES.clamp(min=1) + 1, edge_key=MAPS["types"][0])
    layer = MessagePassingAttention(StandardHeads(8, 2), edge_dim=F)
    with pytest.raises(ValueError, match="a layer with edge_dim=3 needs edge_attr, got None"):
        layer(torch.zeros(N, 8), patterns.causal(N))
    with pytest.raises(ValueError, match="a layer with edge_dim=None takes no edge_attr: pass edge_dim"):
        MessagePassingAttention(StandardHeads(8, 2))(torch.zeros(N, 8), patterns.causal(N), edge_attr=ATTR)
    with pytest.raises(NotImplementedError, match=r"decode supports no .*map of edges"):
        layer.decode(torch.zeros(1, 1, 8), None)


def test_nothing_of_the_size_of_edges_times_channels_is_made():
    """The rows backend stores values and features of edges, and rows of tokens."""
    n, degree, dim, num_features = 2000, 16, 64, 4
    dst = torch.arange(n).repeat_interleave(degree)
    src = (dst + torch.arange(degree).repeat(n)) % n
    graph = ga.TokenGraph.from_edges(torch.stack([src, dst]), n)
    q, k, v = (
        x.detach().float().requires_grad_() for x in qkv(n, heads=2, kv_heads=2, dim=dim, value_dim=dim)
    )
    attr = torch.randn(n * degree, num_features, requires_grad=True)
    key, value = (torch.randn(2, num_features, dim, requires_grad=True) for _ in range(2))
    with torch.profiler.profile(profile_memory=True) as profiler:
        out = ga.attend(q, k, v, graph, backend="rows", edge_attr=attr, edge_key=key, edge_value=value)
        torch.autograd.grad(out.sum(), (q, k, v, attr, key, value))
    largest = max(event.cpu_memory_usage for event in profiler.events())
    assert largest < 4 * n * degree * dim * 2
