"""The functions of docs/guide/primitives.md, and their gradients, equal dense formulas in float64.

Each function of CASES draws the arguments of the page's function with its name, and computes the result.
"""

import doctest
import math
from pathlib import Path
from types import FunctionType

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import randn, random_graph

import gnn_attention as ga
from gnn_attention import patterns

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "primitives.md"
EXAMPLES = doctest.DocTestParser().get_examples(PAGE.read_text(encoding="utf-8"))
BATCH, HEADS, DIM = 2, 3, 4
# The last two are unsorted lists with isolated receivers.
GRAPHS = [patterns.causal(7), patterns.window(9, 3), random_graph(9, 9, 20, 1), random_graph(6, 9, 12, 2)]


@pytest.fixture(scope="module")
def page():
    """Run the code of the page, and return its names."""
    names = {}
    with torch.random.fork_rng():
        for example in EXAMPLES:
            exec(example.source, names)
    return names


def draw(*shapes):
    return [randn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def draw_rows(graph, *shapes):
    """Return q, k and v, then tensors of other shapes."""
    dst, src = ((BATCH, HEADS, size, DIM) for size in (graph.num_dst, graph.num_src))
    return draw(dst, src, src, *shapes)


def softmax(logits, graph):
    mass = logits.exp() * graph.mask()
    total = mass.sum(-1, keepdim=True)
    return mass / (total + (total == 0))


def scores(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


def table(values, graph):
    """Return the values of edges as ``[dst, src, ...]``."""
    src, dst = graph.edge_index
    zeros = values.new_zeros(graph.num_dst, graph.num_src, *values.shape[1:])
    return zeros.index_put((dst, src), values)


def layer(graph):
    x, *maps = draw((BATCH, graph.num_src, 5), *3 * [(HEADS, 5, DIM)], (HEADS, DIM, 5))
    heads = zip(*maps, strict=True)
    outs = [softmax(scores(x @ W_Q, x @ W_K), graph) @ x @ W_V @ W_O for W_Q, W_K, W_V, W_O in heads]
    return [x, *maps], sum(outs)


def attention(graph):
    q, k, v = rows = draw_rows(graph)
    return rows, softmax(scores(q, k), graph) @ v


def gat(graph):
    h_dst, h_src, _, a_dst, a_src = draw_rows(graph, *2 * [(HEADS, DIM)])
    sums = (h_dst @ a_dst.unsqueeze(2)) + (h_src @ a_src.unsqueeze(2)).mT
    return [h_dst, h_src, a_dst, a_src], softmax(torch.where(sums > 0, sums, 0.2 * sums), graph) @ h_src


def additive(graph, function=torch.tanh):
    q, k, v, a = rows = draw_rows(graph, (HEADS, DIM))
    logits = torch.einsum("bhijd,hd->bhij", function(q.unsqueeze(3) + k.unsqueeze(2)), a)
    return [*rows, function], softmax(logits, graph) @ v


def additive_gatv2(graph):
    return additive(graph, torch.nn.LeakyReLU(0.2))


def rbf(graph):
    q, k, v = rows = draw_rows(graph)
    logits = -0.3 * (q.unsqueeze(3) - k.unsqueeze(2)).square().sum(-1)
    return [*rows, 0.3], softmax(logits, graph) @ v


def forgetting(graph):
    q, k, v = draw_rows(graph)
    log_f = -randn(BATCH, HEADS, graph.num_src, seed=4).abs().requires_grad_()
    dst, src, between = torch.meshgrid(*3 * [torch.arange(graph.num_src)], indexing="ij")
    # For an edge from a later sender, the sum of c_dst - c_src is negative.
    sign = ((src < between) & (between <= dst)).double() - ((dst < between) & (between <= src)).double()
    decay = torch.einsum("ijl,bhl->bhij", sign, log_f)
    return [q, k, v, log_f], softmax(scores(q, k) + decay, graph) @ v


def edge_features(graph):
    q, k, v, a, W_K, W_V = rows = draw_rows(graph, (graph.num_edges, 2), *2 * [(HEADS, 2, DIM)])
    keys, values = (torch.einsum("ijf,hfd->hijd", table(a, graph), W) for W in (W_K, W_V))
    logits = torch.einsum("bhid,bhijd->bhij", q, k.unsqueeze(2) + keys) / math.sqrt(DIM)
    values = v.unsqueeze(2) + values
    return rows, torch.einsum("bhij,bhijd->bhid", softmax(logits, graph), values)


def typed(graph):
    q, k, v, A, M = rows = draw_rows(graph, *2 * [(3, HEADS, DIM, DIM)])
    edge_type = torch.arange(graph.num_edges) % 3
    is_type = table(torch.nn.functional.one_hot(edge_type, 3).double(), graph)
    logits = torch.einsum("bhid,thed,bhje,ijt->bhij", q, A, k, is_type) / math.sqrt(DIM)
    weights = softmax(logits, graph)
    return [*rows, edge_type], torch.einsum("bhij,ijt,bhje,thed->bhid", weights, is_type, v, M)


def sigmoid(graph):
    q, k, v = rows = draw_rows(graph)
    mass = scores(q, k).exp() / graph.num_src
    return rows, mass / (1 + mass) * graph.mask() @ v


def silu(graph):
    q, k, v = rows = draw_rows(graph)
    logits = q @ k.mT
    return rows, logits / (1 + (-logits).exp()) * graph.mask() @ v / graph.num_src


def sparsemax(graph):
    q, k, v = rows = draw_rows(graph)
    logits = scores(q, k).masked_fill(~graph.mask(), -1e3)
    values = logits.sort(-1, descending=True).values
    thresholds = (values.cumsum(-1) - 1) / torch.arange(1, graph.num_src + 1)
    # The threshold is the largest one among all sizes of the support.
    return rows, (logits - thresholds.amax(-1, keepdim=True)).clamp(min=0) * graph.mask() @ v


def stick_breaking(graph):
    q, k, v = rows = draw_rows(graph)
    shares, rest, out = scores(q, k).sigmoid() * graph.mask(), 1.0, 0.0
    for src in reversed(range(graph.num_src)):
        share = shares[..., src : src + 1]
        out = out + rest * share * v[:, :, src : src + 1]
        rest = rest * (1 - share)
    return rows, out


def talking_heads(graph):
    q, k, v, W = rows = draw_rows(graph, (HEADS, HEADS))
    return rows, torch.einsum("gh,bhij,bgjd->bgid", W, softmax(scores(q, k), graph), v)


def differential(graph):
    q_1, k_1, v, q_2 = draw_rows(graph, (BATCH, HEADS, graph.num_dst, DIM))
    weights = softmax(scores(q_1, k_1), graph) - 0.7 * softmax(scores(q_2, v), graph)
    return [q_1, k_1, q_2, v, v, 0.7], weights @ v


def gated(graph):
    q, k, v, gate = rows = draw_rows(graph, (BATCH, HEADS, graph.num_dst, DIM))
    return rows, softmax(scores(q, k), graph) @ v / (1 + (-gate).exp())


def rounds(graph):
    q, k, v = rows = draw_rows(graph)
    step, z = 0.85 * softmax(scores(q, k), graph), v
    for _ in range(4):
        z = step @ z + 0.15 * v
    return rows, z


def hypergraph(graph):
    q_edges, k, v, q, W_K = draw_rows(graph, (BATCH, HEADS, graph.num_src, DIM), (HEADS, DIM, DIM))
    states = softmax(scores(q_edges, k), graph) @ v
    return [q, k, v, q_edges, W_K], softmax(scores(q, states @ W_K), graph.T) @ states


def depth(graph):
    y, w = rows = draw((graph.num_src, 5, DIM), (graph.num_dst, DIM))
    keys = y / y.square().mean(-1, keepdim=True).sqrt()
    return rows, torch.einsum("nij,jnd->ind", softmax(torch.einsum("id,jnd->nij", w, keys), graph), y)


CASES = [layer, attention, gat, additive, additive_gatv2, rbf, forgetting, edge_features, typed]
CASES += [sigmoid, silu, sparsemax, stick_breaking, talking_heads, differential, gated]
CASES += [rounds, hypergraph, depth]
ONE_SEQUENCE = (layer, forgetting, rounds, depth)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("graph", GRAPHS, ids=["causal", "window", "random", "bipartite"])
def test_function_equals_its_formula(case, graph, page):
    if case in ONE_SEQUENCE and graph.num_src != graph.num_dst:
        pytest.skip("the receivers of this function are its senders")
    arguments, expected = case(graph)
    out = page[case.__name__.removesuffix("_gatv2")](*arguments, graph)
    assert_exact(out, expected)
    inputs = {id(x): x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad}.values()
    gradients = (torch.autograd.grad(y, list(inputs), randn(*y.shape, seed=9)) for y in (out, expected))
    assert_exact(*gradients)


def test_every_function_of_the_page_is_short_and_tested(page):
    functions = {name for name, value in page.items() if isinstance(value, FunctionType)} - {"checkpoint"}
    assert functions == {case.__name__ for case in CASES} - {"additive_gatv2"} | {"pair_sums"}
    for example in EXAMPLES:
        assert example.source.count("\n") <= (15 if example.source.startswith("class ") else 8)


def test_strict_message_passing_is_attention(page):
    """On 100 random graphs, some of which have isolated receivers or no edges."""
    for seed in range(100):
        num_dst, num_src = 1 + seed % 7, 1 + seed % 11
        graph = random_graph(num_dst, num_src, seed % (num_dst * num_src + 1), seed)
        q, k, v = (x.detach() for x in draw_rows(graph))
        out = page["StrictAttention"]()(q, k, v, graph.edge_index)
        assert_exact(out, ga.attend(q, k, v, graph))
