"""Malformed input raises an error that names the argument, what came and what to do, in each package.

The tests of a package have a table of everything that it refuses.
"""

import pytest
import torch
from torch import nn

from gnn_attention import (
    Backend,
    FactoredHeads,
    MessagePassingAttention,
    StandardHeads,
    TokenGraph,
    attend,
    convert,
    patterns,
)
from gnn_attention import edge_softmax as edges
from gnn_attention.backends import RefusalError
from gnn_attention.cache import KeyValueCache
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


def call(q=Q, k=K, v=V, graph=WINDOW, **options):
    return attend(q, k, v, graph, **options)


CASES = [
    # attend and its options
    (lambda: call(k=K[..., :2]), ValueError, r"q and k must agree.*\[2, 2, 5, 2\]"),
    (lambda: call(v=V[:, :, :4]), ValueError, r"k and v must agree.*\[2, 2, 4, 6\]"),
    (lambda: call(score_mod=lambda score, b: score), TypeError, r"^score_mod must take.*of \(score, b\)"),
    (lambda: call(score_mod=lambda s, b, h, i, j: i - j), TypeError, "^score_mod must.*int64 tensor"),
    (lambda: call(backend="varlen"), RefusalError, "varlen"),
    (lambda: call(backend=Backend("own", lambda call: call.q)), TypeError, "^backend 'own'.*Tensor"),
    (lambda: call(return_info=True)[1].weights(torch.tensor([[0], [3]])), ValueError, "0 -> 3 is not an"),
    # arithmetic of edges
    (lambda: edges.softmax(torch.ones(3), EDGES[0, :2], 2), ValueError, r"^dst must be .*\[2\] and \[3\]"),
    (
        lambda: edges.softmax(torch.ones(3), EDGES[0] + 2, 2),
        IndexError,
        r"^dst must be receivers in 0 \.\. 1",
    ),
    (lambda: edges.per_query_head(torch.ones(1, 2, 1), 3), ValueError, "^num_heads must.*got 3"),
    (
        lambda: edges.per_query_head(torch.ones(1, 2, 1), 2.0),
        TypeError,
        "^num_heads must be an integer, got 2.0",
    ),
    (lambda: edges.softmax(torch.ones(3), EDGES[0], 2.5), TypeError, "^num_dst must be an integer, got 2.5"),
    # heads and layers
    (lambda: FactoredHeads.of(nn.Linear(2, 2)), TypeError, "FactoredHeads.of needs.*got Linear"),
    (lambda: MessagePassingAttention(nn.Linear(2, 2)), TypeError, "^heads must.*got Linear"),
    (lambda: LAYER(X, EDGES.float()), TypeError, "expected a torch_geometric.*torch.float32"),
    # graphs
    (lambda: TokenGraph.from_edges(EDGES[:, [0, 0]], 2), ValueError, "1 duplicate.*coalesce=True"),
    (lambda: WINDOW | causal(3), ValueError, r"^graphs joined by \|.*causal\(3\)"),
    (lambda: window(4, "2"), TypeError, "^w must be an integer, got '2'"),
    # graphs of other libraries, texts and files
    (lambda: convert.from_mask(SQUARE.float()), ValueError, "ambiguous.*mask != 0"),
    (lambda: expressions.parse("windw(4, 2)"), ValueError, "^column 1.*did you mean 'window'"),
    (lambda: files.write(CROSS, "new.edges"), ValueError, r"receivers and senders must.*cross\(2, 3\)"),
    # caches and models
    (lambda: KeyValueCache(CROSS), ValueError, r"graph must have the same tokens.*cross\(2, 3\)"),
    (lambda: MODEL(torch.tensor([[11]])), IndexError, r"^tokens must be in 0 \.\. 10"),
    # tools
    (lambda: trace.record(nn.Linear(2, 2), X), ValueError, "MessagePassingAttention.*Linear"),
    (lambda: audit(LAYER, WINDOW, (4, 8)), ValueError, r"^input_shape must.*got \(4, 8\)"),
    (lambda: page("def", room=-1), ValueError, "^room must be at least 0, got -1"),
]


@pytest.mark.parametrize(("call", "error", "match"), CASES, ids=range(len(CASES)))
def test_malformed_input_is_refused_by_name(call, error, match):
    with pytest.raises(error, match=match) as refusal:
        call()
    assert type(refusal.value) is error
    assert len(str(refusal.value)) <= 400
    assert str(refusal.value).isprintable()


def test_a_score_mod_may_take_more_by_default_and_any_number():
    for mod in (lambda score, b, h, dst, src, more=0: score, lambda *arguments: arguments[0]):
        assert torch.equal(call(score_mod=mod), call())
