"""How many functions and modules of the package the second call of ``attend`` and of the layer visits."""

import sys
from pathlib import Path

import pytest
import torch

import gnn_attention as ga
from gnn_attention import patterns

PACKAGE = str(Path(ga.__file__).parent)
TOKENS = 1024


def visited(run):
    """The own functions, as (file, name), of a call after the first, which plans."""
    run()
    found = set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def edge_list():
    ends = torch.randint(0, TOKENS, (2, 4000), generator=torch.Generator().manual_seed(0))
    return ga.convert.from_edge_index(ends, TOKENS, TOKENS, coalesce=True)


@pytest.fixture(autouse=True)
def _seeded():
    """Logits that exp cannot reach take another way."""
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
    found = visited(lambda: ga.attend(q, k, v, graph, backend=backend))
    assert (PACKAGE + "/attend.py", "attend") in found
    assert_few(found, 8)


def assert_few(found, files):
    assert len({file for file, _ in found}) <= files
    assert len(found) <= 35, sorted(found)


LAYER = {"edge list": edge_list(), "window": patterns.window(TOKENS, 8), "edge_index": edge_list().edge_index}


@pytest.mark.parametrize("name", LAYER)
@torch.no_grad()
def test_the_layer(name):
    """Edge by edge: message, aggregate and update; one module more looks for steps of a user's own."""
    layer = ga.MessagePassingAttention(ga.StandardHeads(64, 8), backend="message_passing")
    found = visited(lambda: layer(torch.randn(TOKENS, 64), LAYER[name]))
    assert {"message", "update"} <= {name.split(".")[-1] for _, name in found}
    assert_few(found, 9)
