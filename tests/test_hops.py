"""A second call of ``attend`` or of the layer runs few functions and modules of the package."""

import sys
from pathlib import Path

import pytest
import torch

import gnn_attention as ga
from gnn_attention import patterns

PACKAGE = str(Path(ga.__file__).parent)
TOKENS = 1024


def visit_functions(run):
    """Return the package's functions, as (file, name), that run in a second call; the first one plans."""
    run()
    functions = set()

    def record_function(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            functions.add((code.co_filename, code.co_qualname))

    sys.setprofile(record_function)
    try:
        run()
    finally:
        sys.setprofile(None)
    return functions


def edge_list():
    edges = torch.randint(0, TOKENS, (2, 4000), generator=torch.Generator().manual_seed(0))
    return ga.convert.from_edge_index(edges, TOKENS, TOKENS, coalesce=True)


@pytest.fixture(autouse=True)
def _seed():
    """Fix the inputs, because logits outside of the range of exp use another code path."""
    torch.manual_seed(0)


CALLS = {
    "tiles": (patterns.window(TOKENS, 64), "tiles"),
    "auto": (patterns.window(TOKENS, 64), "auto"),
    "rows": (edge_list(), "rows"),
    "dense": (patterns.window(34, 5), "auto"),
}


@pytest.mark.parametrize("name", CALLS)
def test_attend(name):
    graph, backend = CALLS[name]
    q, k, v = torch.randn(3, 1, 8, graph.num_dst, 64)
    functions = visit_functions(lambda: ga.attend(q, k, v, graph, backend=backend))
    assert (PACKAGE + "/attend.py", "attend") in functions
    assert_few(functions, max_files=8)


def assert_few(functions, max_files):
    assert len({file for file, _ in functions}) <= max_files
    assert len(functions) <= 35, sorted(functions)


LAYER = {"edge list": edge_list(), "window": patterns.window(TOKENS, 8), "edge_index": edge_list().edge_index}


@pytest.mark.parametrize("name", LAYER)
@torch.no_grad()
def test_the_layer(name):
    """The layer visits one more module than ``attend``: the one that looks for overridden methods."""
    layer = ga.MessagePassingAttention(ga.StandardHeads(64, 8), backend="message_passing")
    functions = visit_functions(lambda: layer(torch.randn(TOKENS, 64), LAYER[name]))
    assert {"message", "update"} <= {name.split(".")[-1] for _, name in functions}
    assert_few(functions, max_files=9)
