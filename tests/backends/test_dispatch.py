"""``auto`` chooses a backend by the graph's structure and the machine's costs, and gives its reason."""

import re
from dataclasses import replace

import pytest
import torch
from support.extras import needs
from torch._subclasses import FakeTensorMode

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS, cost_model, dense, dispatch, reference, rows
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cost_model import Costs
from gnn_attention.graph.edges import ChosenEdges


@pytest.fixture(autouse=True)
def _use_default_costs(tmp_path, monkeypatch):
    """Use the default constants, not those of this machine's file."""
    monkeypatch.setenv(cost_model.PATH_VARIABLE, str(tmp_path / "none.json"))
    cost_model.costs.cache_clear()
    yield
    cost_model.costs.cache_clear()


def scattered_list(n, degree, seed=0):
    rng = torch.Generator().manual_seed(seed)
    src = torch.rand(n, n, generator=rng).topk(degree, 1).indices.flatten()
    edges = torch.stack([src, torch.arange(n).repeat_interleave(degree)])
    return ga.convert.from_edge_index(edges, n, n).prepare()


def blocks(n, share, seed=0):
    tiles = torch.rand(n // 64, n // 64, generator=torch.Generator().manual_seed(seed)) < share
    return ga.TokenGraph.from_rule(lambda b, h, dst, src: tiles[dst // 64, src // 64], n, name="blocks")


def shuffled_list(graph):
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    return ga.convert.from_edge_index(graph.edge_index[:, order], graph.num_dst, graph.num_src).prepare()


def window_with_scattered_edges(n):
    return patterns.window(n, 128) | scattered_list(n, 2)


CHOICES = {
    "full": (lambda: patterns.full(2048), "dense", "one SDPA call without a mask"),
    "causal": (lambda: patterns.causal(2048), "dense", "one SDPA call without a mask"),
    "tiny": (lambda: patterns.window(128, 3), "dense", "for few pairs"),
    "no edges to speak of": (lambda: patterns.cross(0, 4096), "dense", "for few pairs"),
    "window": (lambda: patterns.window(2048, 256), "tiles", "well filled tiles"),
    "window as a list": (lambda: shuffled_list(patterns.window(2048, 256)), "tiles", "well filled tiles"),
    "long": (lambda: patterns.window(2**16, 256), "tiles", "well filled tiles"),
    "documents": (lambda: patterns.documents([500, 300, 1000, 200, 2000]), "tiles", "well filled tiles"),
    "decoding rows": (lambda: patterns.window(8192, 1024).rows(8000, 8100), "tiles", "well filled tiles"),
    "blocks": (lambda: blocks(4096, 0.1), "tiles", "well filled tiles"),
    "scattered": (lambda: scattered_list(2048, 8), "rows", "few and far between"),
    "tree": (lambda: patterns.tree([(i - 1) // 2 for i in range(4096)]), "rows", "few and far between"),
    "band and few": (lambda: window_with_scattered_edges(4096), "mixed", "some of its tiles are well filled"),
    "all but one": (lambda: patterns.full(512) - patterns.sinks(512, 1), None, "the least estimated time"),
}


def make_call(graph, heads=8, dim=64, batch=1, **options):
    q = torch.empty(graph.batch or batch, heads, graph.num_dst, dim, device="meta")
    k = torch.empty(graph.batch or batch, heads, graph.num_src, dim, device="meta")
    return AttentionCall.from_arguments(q, k, k, graph, **options)


@pytest.mark.parametrize("name", CHOICES)
def test_choices_of_auto(name):
    make_graph, expected, reason = CHOICES[name]
    graph = make_graph()
    explanation = ga.explain(graph, heads=8, dim=64)
    assert explanation.choice == (expected or explanation.choice)
    assert dispatch.choose(make_call(graph)).name == explanation.choice
    assert reason in explanation.reason


def test_costs_from_the_file_of_the_machine_decide():
    call = lambda: make_call(patterns.window(2048, 256))  # noqa: E731
    assert dispatch.choose(call()).name == "tiles"
    cost_model.save(Costs(cell=1e9))
    assert dispatch.choose(call()).name == "rows"
    cost_model.path_of_costs().write_text("{")
    cost_model.costs.cache_clear()
    with pytest.raises(ValueError, match="does not hold the constants"):
        dispatch.choose(call())


def halve_score(score, b, h, dst, src):
    return score / 2


def test_the_bound_on_memory(monkeypatch):
    """Beyond the bound ``auto`` skips dense, even for many small samples; an error gives all reasons."""
    small, large = (make_call(patterns.window(128, 3), batch=n, score_mod=halve_score) for n in (1, 10**6))
    assert (dispatch.choose(small).name, dispatch.choose(large).name) == ("dense", "rows")
    monkeypatch.setattr(dispatch, "_rank_backends", lambda graph, *options: ("dense", "rows", "reference"))
    assert dispatch.choose(make_call(patterns.window(1024, 1000))).name == "dense"
    monkeypatch.setattr(dense, "AUTO_MAX_BYTES", 1024 * 1024)
    assert dispatch.choose(make_call(patterns.window(1024, 999))).name == "rows"
    monkeypatch.setattr(rows, "MAX_BYTES", 1000)
    monkeypatch.setattr(reference, "MAX_BYTES", 1000)
    message = (
        r"no backend supports .*window\(1024, 998\).* with 8 heads: "
        "dense: it would need .* rows: its list .* reference: "
    )
    with pytest.raises(NotImplementedError, match=message):
        dispatch.choose(make_call(patterns.window(1024, 998)))


def test_explain_prints_a_line_for_each_backend():
    """The lines show the graph, the choice with its reason, and the time and memory of each backend."""
    explanation = ga.explain(patterns.window(2048, 256), heads=8, dim=64)
    lines = str(explanation).splitlines()
    assert "window(2048, 256)" in lines[0]
    assert lines[1] == f"auto takes tiles: {explanation.reason}"
    assert explanation.estimated
    assert "estimated from a sample" in lines[-1]
    assert "sample" not in str(ga.explain(patterns.window(256, 64), heads=8, dim=64))
    costs = dict(line.split(maxsplit=1) for line in lines[2:-1])
    assert costs == dict(explanation.rules)
    assert list(costs) == list(BACKENDS)
    assert re.fullmatch(r"about \d+\.\d{3} ms, \d+\.\d MiB more memory", costs["tiles"])


# These are plain calls on CUDA in bfloat16, with 8 heads on 4; tests/test_limits.py has options and dtypes.
N = 4096


def window_by_head(b, h, dst, src):
    return (src <= dst) & (dst - src < 256 + h)


ON_CUDA = {
    "full": (lambda: patterns.full(N), "dense"),
    "causal": (lambda: patterns.causal(N), "dense"),
    "window": (lambda: patterns.window(N, 256), "varlen"),
    "documents": (lambda: patterns.documents([N // 4] * 4), "varlen"),
    "window and sinks": (lambda: patterns.window(N, 256) | patterns.sinks(N, 4), "flex"),
    "bigbird": (lambda: patterns.bigbird(N, 64), "flex"),
    "natten": (lambda: patterns.natten((64, 64), 5), "rows"),
    "random list": (lambda: scattered_list(N, 16), "rows"),
    "chosen": (lambda: ga.TokenGraph.from_indices(torch.arange(N).view(-1, 1) // 2, N), "rows"),
    "by head": (lambda: ga.TokenGraph.from_rule(window_by_head, N, heads=8), "flex"),
    "decoding row": (lambda: patterns.window(N, 1024).rows(N - 1, N), "rows"),
    "last row of full": (lambda: patterns.full(N).rows(N - 1, N), "dense"),
    "few pairs": (lambda: patterns.window(64, 9), "dense"),
}


def choice_on_cuda(graph, **options):
    """Return the backend that ``auto`` chooses for fake tensors on CUDA, which needs no GPU."""
    with FakeTensorMode():
        shapes = (8, graph.num_dst, 64), (4, graph.num_src, 64)
        q, k = (torch.empty(1, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        return dispatch.choose(AttentionCall.from_arguments(q, k, k, graph, **options)).name


@pytest.mark.parametrize("name", ON_CUDA)
def test_choices_of_auto_on_cuda(name):
    """``explain`` lists the backends in order up to the chosen one, with a reason for each."""
    make_graph, backend = ON_CUDA[name]
    if backend == "flex":
        needs("triton")
    graph = make_graph()
    assert choice_on_cuda(graph) == backend
    explanation = ga.explain(graph, 8, 64, device="cuda")
    assert explanation.choice == backend
    order = [name for name, _ in explanation.rules]
    assert order == [candidate.backend for candidate in dispatch.ON_CUDA][: len(order)]
    assert explanation.rules[-1] == (backend, "taken")
    lines = str(explanation).splitlines()
    assert lines[1] == f"auto takes {backend}: {explanation.reason}"
    assert [line.split()[0] for line in lines[2:]] == order


def diagonal_tiles(edges_per_tile):
    """Return a list of N // 128 tiles of 128 along the diagonal, filled row by row with so many edges."""
    offset, first = torch.arange(edges_per_tile), torch.arange(0, N, 128).view(-1, 1)
    edges = torch.stack([(first + offset % 128).flatten(), (first + offset // 128).flatten()])
    return ga.TokenGraph.from_edges(edges, N).prepare()


def test_flex_is_chosen_if_an_eighth_of_each_tile_is_filled():
    """A tile of 128 has 16,384 pairs, and an eighth of them are 2,048."""
    needs("triton")
    assert choice_on_cuda(diagonal_tiles(2048)) == "flex"
    assert choice_on_cuda(diagonal_tiles(2047)) == "rows"


def add_one(score, b, h, dst, src):
    return score + 1


def test_calls_beyond_the_limit_of_rows_go_to_dense_or_the_reference(monkeypatch):
    """Dense takes up to 4 GiB of logits, then the reference follows; an error gives every reason."""
    monkeypatch.setattr(rows, "MAX_BYTES", 1000)
    # Each head and pair takes 5 numbers of 4 bytes, and each pair has positions of 34 bytes.
    small, large = (scattered_list(tokens, 8) for tokens in (4096, 5120))
    assert [(5 * 4 * 8 + 34) * graph.num_dst**2 > 2**32 for graph in (small, large)] == [False, True]
    assert choice_on_cuda(small, score_mod=add_one) == "dense"
    assert choice_on_cuda(large, score_mod=add_one) == "reference"
    monkeypatch.setattr(reference, "MAX_BYTES", 1000)
    order = "; ".join(
        f"{name}: .*" for name in ("rows", "dense", "varlen", "flex", "rows", "dense", "reference")
    )
    with pytest.raises(NotImplementedError, match=f"no backend supports .*: {order}"):
        choice_on_cuda(large, score_mod=add_one)


def test_the_choice_does_not_read_senders_that_were_chosen_row_by_row(monkeypatch):
    """The in-degrees of chosen senders are on a device, for which the host would have to wait."""
    monkeypatch.setattr(ChosenEdges, "in_degree", lambda self: pytest.fail("the host asks for in-degrees"))
    index = torch.arange(N).view(-1, 1) // 2
    for senders in (index, index.expand(8, -1, -1)):
        graph = ga.TokenGraph.from_indices(senders, N)
        assert ga.explain(graph, heads=8, dim=64, device="cuda").choice == "rows"


def test_a_step_with_gradients_is_no_step_of_decoding():
    """Dense takes a step with gradients or a score_mod, because its pairs are few."""
    with FakeTensorMode():
        q, k = (torch.empty(1, 8, tokens, 64, device="cuda", requires_grad=True) for tokens in (1, N))
        call = AttentionCall.from_arguments(q, k, k, ON_CUDA["decoding row"][0]())
        assert dispatch.choose(call).name == "dense"
        with torch.no_grad():
            assert dispatch.choose(call).name == "rows"
            assert dispatch.choose(replace(call, score_mod=add_one)).name == "dense"


def test_explain_takes_cpu_and_cuda_as_devices():
    assert ga.explain(patterns.causal(512), 8, 64, "cpu") == ga.explain(patterns.causal(512), 8, 64)
    with pytest.raises(ValueError, match=r"device must be 'cpu' or 'cuda', got 'H200'"):
        ga.explain(patterns.causal(64), 8, 64, "H200")
