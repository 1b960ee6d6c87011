"""Malformed input, one call for each check: a named error that says which argument, what came, what to do."""

import networkx as nx
import pytest
import torch
from torch import nn

from gnn_attention import (
    Backend,
    FactoredHeads,
    MessagePassingAttention,
    StandardHeads,
    TokenGraph,
    algebra,
    attend,
    convert,
    patterns,
    score_mods,
)
from gnn_attention import edge_softmax as edges
from gnn_attention.backends import RefusalError
from gnn_attention.cache import KeyValueCache, PatternMessageCache
from gnn_attention.convert import expressions, files
from gnn_attention.explorer import page
from gnn_attention.interpret import trace
from gnn_attention.interpret.audit import audit
from gnn_attention.model import Config, LanguageModel
from gnn_attention.patterns import causal, window

Q, K, V = torch.ones(2, 4, 5, 3), torch.ones(2, 2, 5, 3), torch.ones(2, 2, 5, 6)
WINDOW, SQUARE, EDGES = window(5, 2), torch.ones(2, 2).bool(), torch.tensor([[0, 0, 1], [0, 1, 1]])
HEADS, X, CROSS = StandardHeads(8, 2), torch.ones(5, 8), patterns.cross(2, 3)
LAYER = MessagePassingAttention(HEADS)
MODEL = LanguageModel(Config(11, width=8, num_layers=1, num_heads=2, head_dim=4, mlp_width=8))
BY_HEAD = TokenGraph.from_rule(lambda b, h, dst, src: src + h <= dst, 5, heads=3)


def call(q=Q, k=K, v=V, graph=WINDOW, **options):
    return attend(q, k, v, graph, **options)


def rule(function, *sizes, **options):
    return TokenGraph.from_rule(function, *(sizes or (3,)), **options)


def listed(edge_index, n=2):
    return TokenGraph.from_edges(edge_index, n)


# attend and its options, which a compiled call refuses by the same words
CALLS = [
    (lambda: call(v=V.tolist()), TypeError, "^v must be a float tensor.*got list"),
    (lambda: call(k=K.double()), ValueError, "^k must be like q.*torch.float64"),
    (lambda: call(k=K[..., :2]), ValueError, r"q and k must agree.*\[2, 2, 5, 2\]"),
    (lambda: call(v=V[:, :, :4]), ValueError, r"k and v must agree.*\[2, 2, 4, 6\]"),
    (lambda: call(graph="causal(5)"), TypeError, "^graph must be a TokenGraph.*got str"),
    (lambda: call(graph=window(6, 2)), ValueError, r"window\(6, 2\).* does not fit q"),
    (lambda: call(graph=BY_HEAD), ValueError, "differs by heads.*but q has heads 4"),
    (lambda: call(bias=torch.ones(8)), ValueError, r"^bias must.*got \[8\]"),
    (lambda: call(sink_logits=torch.ones(3)), ValueError, r"^sink_logits must.*got \[3\]"),
    (lambda: call(dropout=1.0), ValueError, r"^dropout must be a probability in \[0, 1\), got 1.0"),
    (lambda: call(scale=torch.tensor(0.5)), TypeError, "^scale must.*got Tensor"),
    (lambda: call(score_mod=lambda score, b: score), TypeError, r"^score_mod must take.*of \(score, b\)"),
    (lambda: call(score_mod=lambda s, b, h, i, j: i - j), TypeError, "^score_mod must.*int64 tensor"),
    (lambda: call(backend="fast"), ValueError, "^backend must be one of 'auto', 'dense'.*got 'fast'"),
    (lambda: call(backend="varlen"), RefusalError, "varlen"),
]
CASES = [
    *CALLS,
    (lambda: call(backend=Backend("own", lambda call: call.q)), TypeError, "^backend 'own'.*Tensor"),
    (lambda: call(return_info=True)[1].weights(torch.tensor([[0], [3]])), ValueError, "0 -> 3 is no edge"),
    # the arithmetic of one edge
    (lambda: edges.softmax(torch.ones(3), EDGES[0, :2], 2), ValueError, r"^dst must be.*\[2\], \[3\]"),
    (
        lambda: edges.softmax(torch.ones(3), EDGES[0] + 2, 2),
        IndexError,
        r"^dst must be receivers in 0 \.\. 1",
    ),
    (lambda: edges.per_query_head(torch.ones(1, 2, 1), 3), ValueError, "^num_heads must.*got 3"),
    (lambda: score_mods.relative_bias(torch.ones(2, 4)), ValueError, r"^table must.*\[2, 4\]"),
    # heads and layers
    (lambda: StandardHeads(8, 3), ValueError, "width 8 .* num_heads 3: give head_dim"),
    (lambda: HEADS.receive(torch.ones(1, 5, 7)), ValueError, r"^x must.*\[1, 5, 7\]"),
    (lambda: FactoredHeads.of(nn.Linear(2, 2)), TypeError, "FactoredHeads.of needs.*got Linear"),
    (lambda: MessagePassingAttention(nn.Linear(2, 2)), TypeError, "^heads must.*got Linear"),
    (lambda: LAYER(X), TypeError, "needs one graph.*got none"),
    (lambda: LAYER(X, EDGES.float()), TypeError, "expected a torch_geometric.*torch.float32"),
    # graphs
    (lambda: rule(lambda dst, src: src <= dst), TypeError, r"^rule must.*got .*\(dst, src\)"),
    (lambda: rule(lambda b, h, dst, src: dst - src), TypeError, "the rule of.*torch.int64"),
    (lambda: listed(EDGES.float()), TypeError, "^edge_index must.*torch.float32"),
    (lambda: listed(EDGES.t()), ValueError, r"^edge_index must.*\[3, 2\].*pairs.t\(\)"),
    (lambda: listed(EDGES[:, [0, 0]]), ValueError, "1 duplicate.*coalesce=True"),
    (lambda: WINDOW | causal(3), ValueError, r"^graphs joined by \|.*causal\(3\)"),
    (lambda: WINDOW @ causal(3), ValueError, "^graphs joined by @ must meet.*3 receivers"),
    (lambda: WINDOW.rows(1, 6), IndexError, r"^rows\(1, 6\).*num_dst = 5"),
    (lambda: BY_HEAD.edge_index, ValueError, "differs by head has no single edge list"),
    (lambda: window(4, "2"), TypeError, "^w must be an integer, got '2'"),
    (lambda: patterns.tree([-1, 7]), IndexError, "^parents.*got 7"),
    (lambda: patterns.erdos_renyi(4, 2), ValueError, "^p must be a probability.*got 2"),
    (lambda: algebra.restrict(WINDOW, [0, 0]), ValueError, "tokens.*twice"),
    # graphs of other libraries, texts and files
    (lambda: convert.from_mask(SQUARE.float()), ValueError, "ambiguous.*mask != 0"),
    (lambda: convert.from_networkx(nx.DiGraph([("a", "b")])), ValueError, "^order is needed.*'a', 'b'"),
    (lambda: convert.from_pyg(EDGES), ValueError, "num_dst and num_src are needed"),
    (lambda: expressions.parse("windw(4, 2)"), ValueError, "^column 1.*did you mean 'window'"),
    (lambda: files.write(CROSS, "new.edges"), ValueError, r"a file holds graphs.*cross\(2, 3\)"),
    # caches and models
    (lambda: KeyValueCache(CROSS), ValueError, r"a cache needs a graph.*cross\(2, 3\)"),
    (lambda: PatternMessageCache(HEADS, WINDOW), TypeError, "^heads must.*got StandardHeads"),
    (lambda: MODEL(torch.tensor([[11]])), IndexError, r"^tokens must be in 0 \.\. 10"),
    # tools
    (lambda: trace.record(nn.Linear(2, 2), X), ValueError, "MessagePassingAttention.*Linear"),
    (lambda: audit(LAYER, WINDOW, (4, 8)), ValueError, r"^input_shape must.*got \(4, 8\)"),
    (lambda: page("def", room=-1), ValueError, "^room must be at least 0, got -1"),
]


@pytest.mark.parametrize(("call", "error", "match"), CASES, ids=range(len(CASES)))
def test_malformed_input_is_refused_by_name(call, error, match):
    with pytest.raises(error, match=match) as refused:
        call()
    assert type(refused.value) is error
    assert len(str(refused.value)) <= 400
    assert str(refused.value).isprintable()


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error", "match"), CALLS, ids=range(len(CALLS)))
def test_a_compiled_call_refuses_by_the_same_words(call, error, match):
    torch.compiler.reset()
    with pytest.raises(error, match=match):
        torch.compile(call, backend="eager")()


def test_a_score_mod_may_take_more_by_default_and_any_number():
    for mod in (lambda score, b, h, dst, src, more=0: score, lambda *arguments: arguments[0]):
        assert torch.equal(call(score_mod=mod), call())
