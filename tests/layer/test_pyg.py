"""The layer works with batches, heterogeneous graphs, explainers and transforms of torch_geometric."""

from functools import partial

import numpy as np
import pytest
import torch
from support import inputs
from support.bounds import assert_exact
from support.inputs import randn, random_edges
from torch_geometric import EdgeIndex, transforms
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer, PGExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import Linear, Sequential, TransformerConv, to_hetero
from torch_geometric.testing import assert_module

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, StandardHeads, algebra, patterns

BACKENDS = ["message_passing", "reference", "auto"]
REGRESSION = {"mode": "regression", "task_level": "node", "return_type": "raw"}

heads = partial(inputs.heads, num_heads=3, num_kv_heads=3, head_dim=4)


def dense(layer, x_src, x_dst, edge_index, bias=None, factors=None):
    """Compute the update by the dense formula; ``factors`` multiply the messages of edges."""
    h = layer.heads
    src, dst = edge_index
    q, k, v = (torch.einsum("nw,hwd->hnd", x, W) for x, W in ((x_dst, h.W_Q), (x_src, h.W_K), (x_src, h.W_V)))
    if h.b_Q is not None:
        q, k, v = q + h.b_Q[:, None], k + h.b_K[:, None], v + h.b_V[:, None]
    logits = torch.full((q.shape[1], k.shape[1]), -torch.inf, dtype=q.dtype).expand(len(q), -1, -1).clone()
    logits[:, dst, src] = (q @ k.mT / h.W_Q.shape[-1] ** 0.5)[:, dst, src] + (0 if bias is None else bias)
    weights = logits.softmax(-1).nan_to_num(0.0)
    if factors is not None:
        weights[:, dst, src] *= factors
    return torch.einsum("hts,hsv,hvw->tw", weights, v, h.W_O) + (0 if h.b_O is None else h.b_O)


def ragged_graphs():
    """Return graphs of 4, 1, 6 and 3 nodes; one has an isolated receiver, one no edge, one all edges."""
    empty = torch.zeros(2, 0, dtype=torch.int64)
    graphs = [random_edges(4, 4, 5), empty, patterns.full(6).edge_index, random_edges(3, 3, 4)]
    sizes = [4, 1, 6, 3]
    return [Data(x=randn(n, 12, seed=n), edge_index=edges) for n, edges in zip(sizes, graphs, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_ragged_graphs_is_each_graph_alone(backend):
    """A batch is a disjoint union, so no message crosses from one graph to another."""
    layer, data = MessagePassingAttention(heads(), backend=backend), ragged_graphs()
    batch = Batch.from_data_list(data)
    y, (_, weights) = layer(batch.x, batch.edge_index, return_attention_weights=True)
    results = [layer(graph.x, graph.edge_index, return_attention_weights=True) for graph in data]
    assert_exact(y, torch.cat([a for a, _ in results]))
    assert_exact(weights, torch.cat([w for _, (_, w) in results]))
    assert_exact(y, dense(layer, batch.x, batch.x, batch.edge_index))


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_src", [7, 10])
def test_assert_module_of_torch_geometric(backend, num_src):
    """The layer passes PyG's checks, which permute edges and use edge_index and every sparse layout."""
    layer = MessagePassingAttention(heads(source_width=8), backend=backend)
    x = (randn(num_src, 8), randn(7, 12))
    edges = random_edges(7, num_src, 23)
    y = assert_module(layer, x, edges, expected_size=(7, 12), atol=1e-12)
    assert_exact(y, dense(layer, *x, edges))


def test_a_graph_is_passed_once_under_either_name():
    """The graph may be passed as ``g`` or, as tools of PyG do, as ``edge_index``, but not as both."""
    layer, x, edges = MessagePassingAttention(heads()), randn(9, 12), random_edges(9, 9, 30)
    assert torch.equal(layer(x, edge_index=edges), layer(x, g=edges))
    for options, answer in (({}, "neither"), ({"g": edges, "edge_index": edges}, "both")):
        with pytest.raises(TypeError, match=rf"pass either g \(.*\) or edge_index, got {answer}"):
            layer(x, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_equals_a_transformer_conv(backend):
    """TransformerConv without its skip connection is our layer without W_O, weight for weight."""
    torch.manual_seed(0)
    conv = TransformerConv(12, 5, heads=3, root_weight=False).double()
    arrays = [(lin.weight, lin.bias) for lin in (conv.lin_query, conv.lin_key, conv.lin_value)]
    (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = arrays
    copy = StandardHeads.from_arrays(W_Q, W_K, W_V, b_Q=b_Q, b_K=b_K, b_V=b_V, layout="column", num_heads=3)
    x, edges = randn(9, 12), random_edges(9, 9, 30)
    expected, (_, expected_weights) = conv(x, edges, return_attention_weights=True)
    y, (_, weights) = MessagePassingAttention(copy, backend=backend)(x, edges, return_attention_weights=True)
    assert_exact(y, expected)
    assert_exact(weights, expected_weights)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["row", "col"])
def test_a_sorted_edge_index(backend, order):
    """An EdgeIndex may be sorted by either side, with its caches filled; a wrong size is refused."""
    layer, x, edges = MessagePassingAttention(heads(), backend=backend), randn(9, 12), random_edges(9, 9, 30)
    g = EdgeIndex(edges, sparse_size=(9, 9)).sort_by(order)[0].fill_cache_()
    y, (same_edges, weights) = layer(x, g, return_attention_weights=True)
    assert same_edges is g
    assert_exact(y, dense(layer, x, x, edges))
    expected_update, (_, expected) = layer(x, g.as_tensor(), return_attention_weights=True)
    assert torch.equal(y, expected_update)
    assert torch.equal(weights, expected)
    wrong_graph = EdgeIndex(edges, sparse_size=(9, 10))
    with pytest.raises(ValueError, match="contradicts"):
        layer(x, wrong_graph)


def test_transforms_make_our_graphs():
    """Transforms that add self loops, reversed edges, two-hop edges or a virtual node give our graphs."""
    edges = random_edges(9, 9, 18)
    data = Data(x=randn(9, 12), edge_index=edges[:, edges[0] != edges[1]])
    g = ga.convert.from_pyg(data)
    undirected, loops = transforms.ToUndirected(), transforms.AddSelfLoops()
    composition = transforms.Compose([undirected, transforms.TwoHop(), loops])
    for transform, expected in (
        (composition, algebra.walks.closure(g | g.T, 2, reflexive=True)),
        (transforms.VirtualNode(), algebra.tokens.extend(g, 1, "both", "none")),
    ):
        assert ga.convert.from_pyg(transform(data.clone())) == expected, transform
    sparse = transforms.ToSparseTensor(layout=torch.sparse_csr)(data.clone())
    layer = MessagePassingAttention(heads())
    assert_exact(layer(data.x, sparse.adj_t), layer(data.x, g))


WIDTHS = {"paper": 12, "author": 8, "venue": 6}
SIZES = {"paper": 7, "author": 5, "venue": 2}
RELATIONS = {
    ("paper", "cites", "paper"): 15,
    ("author", "writes", "paper"): 11,
    ("paper", "written_by", "author"): 9,
    ("paper", "in", "venue"): 4,
}


def library():
    """Return data with three types of nodes and four types of edges."""
    data = HeteroData()
    for kind, size in SIZES.items():
        data[kind].x = randn(size, WIDTHS[kind], seed=size)
    for number, ((src, name, dst), count) in enumerate(RELATIONS.items()):
        data[src, name, dst].edge_index = random_edges(SIZES[dst], SIZES[src], count, seed=number)
    return data


class Network(torch.nn.Module):
    """Two layers after an input layer that infers its width."""

    def __init__(self, backend=None):
        super().__init__()
        self.embed = Linear(-1, 12)
        self.first = MessagePassingAttention(StandardHeads(12, 3, bias=True), backend=backend)
        self.second = MessagePassingAttention(StandardHeads(12, 3, bias=True), backend=backend)

    def forward(self, x, edge_index, edge_bias):
        """Return the states after both layers."""
        x = self.embed(x)
        x = x + self.first(x, edge_index, edge_bias)
        return x + self.second(x.relu(), edge_index)


@pytest.mark.parametrize("backend", BACKENDS)
def test_to_hetero(backend):
    """``to_hetero`` turns a model of one type of nodes into a model of several."""
    data = library()
    torch.manual_seed(0)
    model = to_hetero(Network(backend), data.metadata(), aggr="sum").double()
    bias = {key: randn(3, count) for key, count in RELATIONS.items()}
    output = model(data.x_dict, data.edge_index_dict, bias)

    def updates(layers, x, bias):
        result = dict.fromkeys(SIZES, 0)
        for key in RELATIONS:
            (src, _, dst), edges = key, data.edge_index_dict[key]
            result[dst] = result[dst] + dense(layers["__".join(key)], x[src], x[dst], edges, bias.get(key))
        return result

    x = {kind: model.embed[kind](data.x_dict[kind]) for kind in SIZES}
    update = updates(model.first, x, bias)
    x = {kind: x[kind] + update[kind] for kind in SIZES}
    update = updates(model.second, {kind: state.relu() for kind, state in x.items()}, {})
    for kind in SIZES:
        assert_exact(output[kind], x[kind] + update[kind])
    queries = [layer.heads.W_Q for layer in model.first.values()]
    assert not any(torch.equal(queries[0], matrix) for matrix in queries[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(9, 12), (2, 9, 12)])
def test_a_mask_on_the_messages(backend, shape):
    """Explainers of PyG multiply messages by a mask, which leaves the softmax unchanged."""
    layer, x, edges = MessagePassingAttention(heads(), backend=backend), randn(*shape), random_edges(9, 9, 30)
    initial_output, factors = layer(x, edges), randn(30).sigmoid()
    set_masks(layer, factors, edges, apply_sigmoid=False)
    output = layer(x, edges)
    expected = [dense(layer, sample, sample, edges, factors=factors) for sample in x.view(-1, 9, 12)]
    assert_exact(output.view(-1, 9, 12), torch.stack(expected))
    assert (output - initial_output).abs().max() > 1e-3
    clear_masks(layer)
    assert torch.equal(layer(x, edges), initial_output)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_explainer_reads_the_weights(backend):
    """The edge mask of AttentionExplainer is the largest weight over heads and layers."""
    first, second = (MessagePassingAttention(heads(seed=seed), backend=backend) for seed in (0, 1))
    model = Sequential(
        "x, edge_index", [(first, "x, edge_index -> x"), torch.nn.ReLU(), (second, "x, edge_index -> x")]
    )
    x, edges = randn(9, 12), random_edges(9, 9, 30)
    options = {"explanation_type": "model", "edge_mask_type": "object", "model_config": REGRESSION}
    explainer = Explainer(model, AttentionExplainer(), **options)
    y, (_, weights) = first(x, edges, return_attention_weights=True)
    _, (_, second_weights) = second(y.relu(), edges, return_attention_weights=True)
    expected = torch.cat([weights, second_weights], dim=1).amax(1)
    assert_exact(explainer(x, edges).edge_mask, expected.detach())


def star_with_message():
    """Return a layer and a star of five senders, of which only sender 3 has a message."""
    torch.manual_seed(0)
    layer = MessagePassingAttention(StandardHeads(4, 2))
    with torch.no_grad():
        # A message depends on channel 0 alone.
        layer.heads.W_V[:, 1:] = 0.0
    x = torch.randn(6, 4)
    x[:, 0] = 0.0
    x[3, 0] = 5.0
    return layer, x, torch.stack([torch.arange(1, 6), torch.zeros(5, dtype=torch.int64)])


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [lambda: GNNExplainer(epochs=30), lambda: PGExplainer(epochs=3)])
def test_explainers_find_the_edge_with_a_message(backend, make):
    """The explainers run and leave the layer unchanged; GNNExplainer marks the only edge with a message."""
    layer, x, edges = star_with_message()
    layer.backend = backend
    output, algorithm = layer(x, edges), make()
    kind = "model" if isinstance(algorithm, GNNExplainer) else "phenomenon"
    options = {"explanation_type": kind, "edge_mask_type": "object", "model_config": REGRESSION}
    explainer = Explainer(layer, algorithm, **options)
    torch.manual_seed(0)
    if kind == "phenomenon":
        for epoch in range(3):
            algorithm.train(epoch, layer, x, edges, target=output.detach(), index=0)
        mask = explainer(x, edges, target=output.detach(), index=0).edge_mask
        assert mask.shape == (5,)
    else:
        mask = explainer(x, edges, index=0).edge_mask
        # Edge 2 comes from sender 3; no gradient ever reaches the other edges.
        assert int(mask.argmax()) == 2
        assert (mask[[0, 1, 3, 4]] == 0).all()
    assert not layer.explain
    assert torch.equal(layer(x, edges), output)


def test_a_program_names_wrong_edges():
    """A compiled program, of which edges are an input, checks them when it runs."""
    torch.compiler.reset()
    layer = MessagePassingAttention(heads())
    for run in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
        with pytest.raises(IndexError, match=r"edge_index\[1, 0\] = 9 is not a receiver"):
            run(randn(9, 12), torch.tensor([[0, 1], [9, 2]]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_and_gradients_of_samples(backend):
    """``torch.vmap`` over samples equals the batch axis, and so do the gradients of each sample."""
    layer = MessagePassingAttention(heads(), backend=backend)
    x, graph = randn(4, 9, 12), patterns.window(9, 3)
    assert_exact(torch.vmap(lambda sample: layer(sample, graph))(x), layer(x, graph))
    parameters = {name: value.detach() for name, value in layer.named_parameters()}

    def loss(parameters, sample):
        return torch.func.functional_call(layer, parameters, (sample, graph)).square().sum()

    gradients = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for number, sample in enumerate(x):
        expected = torch.autograd.grad(layer(sample, graph).square().sum(), list(layer.parameters()))
        assert_exact([gradients[name][number] for name, _ in layer.named_parameters()], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_size_is_that_of_the_states(backend):
    """PyG's bipartite calls pass ``size=(senders, receivers)``, which must be the numbers of x."""
    layer = MessagePassingAttention(heads(source_width=8), backend=backend)
    x, edges = (randn(10, 8), randn(7, 12)), random_edges(7, 10, 23)
    for g in (edges, EdgeIndex(edges, sparse_size=(10, 7)), ga.convert.from_edge_index(edges, 7, 10)):
        for size in ((10, 7), [10, 7], torch.Size([10, 7]), None):
            assert_exact(layer(x, g, size=size), dense(layer, *x, edges))
        for size in ((7, 10), (10, 8), (10,)):
            with pytest.raises(ValueError, match=r"size must be \(senders, receivers\) = \(10, 7\), got"):
                layer(x, g, size=size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_receivers_without_features_have_states_of_zero(backend):
    """With PyG's ``(x_src, None)`` a query is its bias, and without a bias all weights are equal."""
    layer = MessagePassingAttention(heads(source_width=8), backend=backend)
    x, edges = randn(10, 8), random_edges(7, 10, 23)
    expected = dense(layer, x, torch.zeros(7, 12, dtype=torch.float64), edges)
    assert_exact(layer((x, None), edges, size=(10, 7)), expected)
    assert_exact(layer((x, None), ga.convert.from_edge_index(edges, 7, 10)), expected)
    with torch.no_grad():
        layer.heads.b_Q.zero_()
    _, (_, weights) = layer((x, None), edges, size=(10, 7), return_attention_weights=True)
    assert_exact(weights, (1.0 / edges[1].bincount()[edges[1]].double()).unsqueeze(1).expand(-1, 3))
    with pytest.raises(ValueError, match=r"with an edge_index needs size=\(senders, receivers"):
        layer((x, None), edges)
    graph = ga.convert.from_edge_index(edges, 7, 10)
    adj_t = ga.convert.to_pyg(graph, "adj_t")
    layer = MessagePassingAttention(layer.heads, backend=backend)
    expected = layer((x, torch.zeros(7, 12).double()), graph)
    for g in (graph, EdgeIndex(edges, sparse_size=(10, 7)), adj_t, adj_t.to_sparse_csr()):
        assert_exact(layer((x, None), g), expected)
        assert_exact(layer((x, None), edge_index=g), expected)
    assert_exact(layer((x, None), edges, size=np.array([10, 7])), expected)


SIZES_OF_NONE = [
    (5, TypeError, r"size must be a list of sizes, got 5"),
    ((10,), ValueError, r"size must be \(senders, receivers\) = \(10, 10\), got \(10,\)"),
    ((10, None), TypeError, "each entry of size must be an integer, got None"),
    ((10, -1), ValueError, "each entry of size must be at least 0, got -1"),
]


@pytest.mark.parametrize(("size", "error", "message"), SIZES_OF_NONE)
def test_a_malformed_size_is_named(size, error, message):
    """With (x_src, None) only the size tells the number of receivers."""
    layer, edges = MessagePassingAttention(heads()), random_edges(7, 10, 23)
    with pytest.raises(error, match=message):
        layer((randn(10, 12), None), edges, size=size)


CHANNELS = [
    (heads(), 12, 12),
    (heads(source_width=8), (8, 12), 12),
    (StandardHeads.from_arrays(torch.zeros(3, 6, 4), torch.zeros(3, 8, 4), torch.zeros(3, 8, 5)), (8, 6), 15),
    (ga.MergedHeads.of(heads(source_width=8)), (8, 12), 12),
    (ga.LatentHeads(width=16, num_heads=4, content_dim=4, rotary_dim=2, latent_dim=6), 16, 16),
]


@pytest.mark.parametrize(("layer_heads", "in_channels", "out_channels"), CHANNELS)
def test_channels_are_those_of_states_and_updates(layer_heads, in_channels, out_channels):
    """``in_channels`` is a pair for two widths, that of senders first; updates have ``out_channels``."""
    layer = MessagePassingAttention(layer_heads)
    assert (layer.in_channels, layer.out_channels) == (in_channels, out_channels)
    widths = in_channels if isinstance(in_channels, tuple) else (in_channels, in_channels)
    x = tuple(torch.zeros(4, width, dtype=next(layer_heads.parameters()).dtype) for width in widths)
    assert layer(x, patterns.full(4)).shape == (4, out_channels)
