"""``auto`` chooses the backends that the table of docs/limits.md names for calls on a GPU."""

import re
from pathlib import Path

import pytest
import torch
from support.extras import needs
from torch._subclasses.fake_tensor import FakeTensorMode

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import choose

TEXT = Path(__file__).resolve().parents[1].joinpath("docs", "limits.md").read_text(encoding="utf-8")
N, HEADS = 600, 4
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPES |= {"float32": torch.float32, "float64": torch.float64}


def irregular():
    """Return a graph with an edge list whose tiles of 128 are nearly empty."""
    edges = torch.randint(0, N, (2, 8 * N), generator=torch.Generator().manual_seed(0))
    return ga.convert.from_edge_index(edges, N, N, coalesce=True)


def select_senders():
    """Return a graph of eight random senders for each receiver and head."""
    index = torch.rand(HEADS, N, N, generator=torch.Generator().manual_seed(0)).topk(8).indices
    return ga.TokenGraph.from_indices(index, N)


UNIFORM = [patterns.full(N), patterns.causal(N)]
PACKED = [patterns.window(N, 100), patterns.documents([300, 250, 50])]
by_head = ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (src <= dst) & (dst - src <= 60 * (h + 1)), N, heads=HEADS
)
FILLED = [patterns.window(N, 100) | patterns.sinks(N, 4), by_head]
SCATTERED = [irregular(), select_senders(), patterns.dilated(N, 10, 20)]
GRAPHS = {
    "full or causal": UNIFORM,
    "full or causal, grouped heads": UNIFORM,
    "window, documents": PACKED,
    "tiles of 128 at least 1/8 filled: window and sinks, by head": FILLED,
    "all of the above": [*UNIFORM, *PACKED, *FILLED],
    "irregular lists, chosen rows, thinly filled tiles": SCATTERED,
    "one receiver of some senders, without gradients": [patterns.window(N, 100).rows(N - 1, N)],
    "several receivers, at most 16,384 pairs": [patterns.window(100, 5), patterns.causal(128)],
}
OPTIONS = {
    "plain": {},
    "lse": {"with_lse": True},
    "sinks": {"sink_logits": (HEADS,)},
    "score_mod": {"score_mod": ga.score_mods.softcap(2.0)},
    "bias": {"bias": (HEADS, -1)},
    "dropout": {"dropout": 0.1},
}


def rows():
    """Yield the graph, options, dtype and backend of every cell of the table."""
    for line in re.findall(r"^\| (.*) \|$", TEXT, re.MULTILINE):
        graph, call, *cells = line.split(" | ")
        if graph not in GRAPHS:
            continue
        options = list(OPTIONS) if call == "every call" else call.split(", ")
        for dtypes, cell in zip(("float16, bfloat16", "float32", "float64"), cells, strict=True):
            for dtype in dtypes.split(", "):
                yield graph, options, dtype, cell.strip("`")


ROWS = list(rows())


def make_call(graph, option, dtype, kv_heads, needs_gradients):
    """Return a call on a GPU, which need not exist."""
    options = dict(OPTIONS[option])
    for name, shape in options.items():
        if isinstance(shape, tuple):
            sizes = [graph.num_edges if size < 0 else size for size in shape]
            options[name] = torch.empty(sizes, device="cuda", dtype=dtype)
    q = torch.empty(1, HEADS, graph.num_dst, 64, device="cuda", dtype=dtype, requires_grad=needs_gradients)
    k = torch.empty(1, kv_heads, graph.num_src, 64, device="cuda", dtype=dtype)
    return AttentionCall.from_arguments(q, k, k, graph, **options)


def test_every_graph_of_the_table_is_known():
    assert {graph for graph, *_ in ROWS} == set(GRAPHS)


@pytest.mark.parametrize(("kind", "options", "dtype", "backend"), ROWS)
def test_a_cell_is_what_auto_takes(kind, options, dtype, backend):
    kv_heads = 2 if "grouped" in kind else HEADS
    if backend == "flex":
        needs("triton")
    for graph in GRAPHS[kind]:
        for option in options:
            if option == "bias" and (graph.heads or graph.batch):
                continue
            with FakeTensorMode():
                call = make_call(graph, option, DTYPES[dtype], kv_heads, "without gradients" not in kind)
                assert choose(call).name == backend, (graph, option)
