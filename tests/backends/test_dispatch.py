"""Which backend "auto" takes: by a graph's structure and the machine's costs, and the reason in words."""

from dataclasses import replace

import pytest
import torch
from support.bounds import assert_exact
from support.covering import thinned
from support.plans import edges_of_tiles
from torch._subclasses import FakeTensorMode

import gnn_attention as ga
from gnn_attention import patterns, score_mods
from gnn_attention.backends import BACKENDS, cost_model, dense, dispatch, reference, rows
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cost_model import Costs
from gnn_attention.backends.gpu.roofline import Sizes
from gnn_attention.backends.plan import planner


@pytest.fixture(autouse=True)
def _no_file_of_costs(tmp_path, monkeypatch):
    """The constants of the package, whatever this machine's file says."""
    monkeypatch.setenv(cost_model.VARIABLE, str(tmp_path / "none.json"))
    cost_model.costs.cache_clear()
    dispatch.devices._measured.cache_clear()
    yield
    cost_model.costs.cache_clear()
    dispatch.devices._measured.cache_clear()


def scattered(n, degree, seed=0):
    rng = torch.Generator().manual_seed(seed)
    src = torch.rand(n, n, generator=rng).topk(degree, 1).indices.flatten()
    return ga.convert.from_edge_index(torch.stack([src, torch.arange(n).repeat_interleave(degree)]), n, n)


def blocks(n, share, seed=0):
    tiles = torch.rand(n // 64, n // 64, generator=torch.Generator().manual_seed(seed)) < share
    return ga.TokenGraph.from_rule(lambda b, h, dst, src: tiles[dst // 64, src // 64], n, name="blocks")


def listed(graph):
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    return ga.convert.from_edge_index(graph.edge_index[:, order], graph.num_dst, graph.num_src)


def window_and_few(n):
    return patterns.window(n, 128) | scattered(n, 2)


TAKEN = {
    "full": (lambda: patterns.full(2048), "dense", "one SDPA call without a mask"),
    "causal": (lambda: patterns.causal(2048), "dense", "one SDPA call without a mask"),
    "causal as a list": (lambda: listed(patterns.causal(512)), "dense", "one SDPA call without a mask"),
    "tiny": (lambda: patterns.window(128, 3), "dense", "so few pairs"),
    "tiny tree": (lambda: patterns.tree([-1, 0, 0, 1, 1]), "dense", "so few pairs"),
    "no edges to speak of": (lambda: patterns.cross(0, 4096), "dense", "so few pairs"),
    "window": (lambda: patterns.window(2048, 256), "tiles", "well filled tiles"),
    "window as a list": (lambda: listed(patterns.window(2048, 256)), "tiles", "well filled tiles"),
    "long": (lambda: patterns.window(2**16, 256), "tiles", "well filled tiles"),
    "documents": (lambda: patterns.documents([500, 300, 1000, 200, 2000]), "tiles", "well filled tiles"),
    "decoding rows": (lambda: patterns.window(8192, 1024).rows(8000, 8100), "tiles", "well filled tiles"),
    "blocks": (lambda: blocks(4096, 0.1), "tiles", "well filled tiles"),
    "scattered": (lambda: scattered(2048, 8), "rows", "few and far between"),
    "tree": (lambda: patterns.tree([(i - 1) // 2 for i in range(4096)]), "rows", "few and far between"),
    "band and few": (lambda: window_and_few(4096), "mixed", "some of its tiles are well filled"),
    "all but one": (lambda: patterns.full(512) - patterns.sinks(512, 1), None, "the least estimated time"),
}


def call_on(graph, heads=8, dim=64, batch=1, **options):
    q = torch.empty(graph.batch or batch, heads, graph.num_dst, dim, device="meta")
    k = torch.empty(graph.batch or batch, heads, graph.num_src, dim, device="meta")
    return AttentionCall.checked(q, k, k, graph, **options)


@pytest.mark.parametrize("name", TAKEN)
def test_what_auto_takes(name):
    make, wanted, reason = TAKEN[name]
    graph = make()
    found = ga.explain(graph, heads=8, dim=64)
    assert found.choice == (wanted or found.choice)
    assert dispatch.choose(call_on(graph)).name == found.choice
    assert reason in found.reason


MADE_UP = {
    "dense": Costs(masked_pair=1e-6),
    "rows": Costs(call=0.0, edge=1e-6, node=1e-6),
    "tiles": Costs(call=0.0, rectangle=0.0, cell=1e-6),
    "mixed": Costs(call=0.0, rectangle=1e-9, cell=0.5, edge=1.0, node=1e-6, masked_pair=1e3),
}


@pytest.mark.parametrize("wanted", MADE_UP)
def test_the_order_follows_the_costs(wanted, monkeypatch):
    monkeypatch.setattr(dispatch, "costs", lambda: MADE_UP[wanted])
    monkeypatch.setattr(planner, "costs", lambda: MADE_UP[wanted])
    graph = window_and_few(1024)
    assert dispatch.choose(call_on(graph)).name == wanted
    times = {name: seconds for name, _, _, seconds in ga.explain(graph, 8, 64).rows if seconds is not None}
    order = [name for name in dispatch._by_time(call_on(graph)) if name in times]
    assert [times[name] for name in order] == sorted(times[name] for name in order)


def test_costs_from_the_file_of_the_machine_decide():
    call = lambda: call_on(patterns.window(2048, 256))  # noqa: E731
    assert dispatch.choose(call()).name == "tiles"
    cost_model.save(Costs(cell=1e9))
    assert dispatch.choose(call()).name == "rows"
    cost_model.path_of_costs().write_text("{")
    cost_model.costs.cache_clear()
    with pytest.raises(ValueError, match="does not hold the constants"):
        dispatch.choose(call())


def test_lse_of_a_causal_graph_takes_no_table_of_all_pairs():
    graph = patterns.causal(4096)
    assert dispatch.choose(call_on(graph)).name == "dense"
    assert dispatch.choose(call_on(graph, with_lse=True)).name == "tiles"


def half_of(score, b, h, dst, src):
    return score / 2


@pytest.mark.parametrize("graph", [patterns.window(1024, 64), patterns.causal(1024), scattered(1024, 4)])
@pytest.mark.parametrize("options", [{"score_mod": score_mods.softcap(1.0)}, {"dropout": 0.5}])
def test_an_unsupported_backend_is_never_taken(graph, options):
    call = call_on(graph, **options)
    assert "mixed" not in dispatch._by_time(call)
    assert dispatch.choose(call).unsupported_reason(call) is None


def test_the_bound_on_memory(monkeypatch):
    """Dense is passed over beyond it, for many samples of a small graph too; else all reasons are named."""
    few, many = (call_on(patterns.window(128, 3), batch=n, score_mod=half_of) for n in (1, 10**6))
    assert (dispatch.choose(few).name, dispatch.choose(many).name) == ("dense", "rows")
    monkeypatch.setattr(dispatch, "_ordered", lambda graph, *rest: ("dense", "rows", "reference"))
    assert dispatch.choose(call_on(patterns.window(1024, 1000))).name == "dense"
    monkeypatch.setattr(dense, "COMFORTABLE", 1024 * 1024)
    assert dispatch.choose(call_on(patterns.window(1024, 999))).name == "rows"
    monkeypatch.setattr(rows, "MEMORY_LIMIT", 1000)
    monkeypatch.setattr(reference, "MEMORY_LIMIT", 1000)
    message = (
        r"no backend holds .*window\(1024, 998\).* with 8 heads: "
        "dense: it would need .* rows: its list .* reference: "
    )
    with pytest.raises(NotImplementedError, match=message):
        dispatch.choose(call_on(patterns.window(1024, 998)))


COUNTED = {
    "window": lambda n: patterns.window(n, 70),
    "window and sinks": lambda n: patterns.window(n, 5) | patterns.sinks(n, 2),
    "scattered": lambda n: scattered(n, 3),
    "reversed": lambda n: patterns.dilated(n, 9, 7).T,
    "blocks": lambda n: blocks(n, 0.3) if n % 64 == 0 else patterns.prefix(n, 100),
}


@pytest.mark.parametrize("n", [256, 330])
@pytest.mark.parametrize("name", COUNTED)
def test_cells_edges_and_flops_are_those_of_a_count_pair_by_pair(name, n):
    graph = COUNTED[name](n)
    mask = graph.mask()
    work = {kind: dispatch._work(graph, kind) for kind in ("dense", "tiles", "rows", "mixed")}
    filled_tiles = {times: edges_of_tiles(mask, 64 * times, 64) > 0 for times in planner.HEIGHTS}
    by_height = {times: int(tiles.sum()) * 64 * 64 * times for times, tiles in filled_tiles.items()}
    weights = {times: cells * planner.HEIGHTS[times] for times, cells in by_height.items()}
    best = min(weights, key=weights.get)
    assert work["tiles"].cells == by_height[best]
    assert_exact(float(work["tiles"].weighted_cells), float(weights[best]))
    assert work["tiles"].rectangles == int(filled_tiles[best].any(1).sum())
    assert (work["rows"].edges, work["rows"].nodes) == (int(mask.sum()), n)
    assert work["dense"].masked_pairs == n * n
    count, size = edges_of_tiles(mask, 64, 64), edges_of_tiles(torch.ones_like(mask), 64, 64)
    filled = (count >= planner.LEAST_FILL * size) & (count > 0)
    assert work["mixed"].cells == int(filled.sum()) * 64 * 64
    assert work["mixed"].edges == int(count[~filled].sum())
    edges, mixed = int(mask.sum()), work["mixed"].cells + work["mixed"].edges
    visited = {"dense": n * n, "tiles": by_height[best], "rows": edges, "reference": edges, "mixed": mixed}
    flops = {kind: count for kind, count, _, _ in ga.explain(graph, heads=3, dim=16).rows}
    for kind, cells in visited.items():
        assert flops[kind] == 4 * 3 * 16 * cells


def varying(n, width, heads, batch):
    return ga.TokenGraph.from_rule(
        lambda b, h, dst, src: (src <= dst) & (dst - src < width + 0 * (b + h)), n, heads=heads, batch=batch
    )


def test_a_graph_that_differs_by_head_or_sample_is_estimated_by_all_of_them():
    plain, both = ga.explain(patterns.window(300, 9), 1, 16), ga.explain(varying(300, 9, 4, 3), 4, 16)
    assert [row[:2] for row in both.rows] == [(name, 12 * flops) for name, flops, *_ in plain.rows]


def test_explain_prints_every_column():
    """The graph, the choice with its reason, and a line for each backend: flops, bytes and time."""
    found = ga.explain(patterns.window(2048, 256), heads=8, dim=64)
    lines = str(found).splitlines()
    assert "window(2048, 256)" in lines[0]
    assert lines[1] == f"auto takes tiles: {found.reason}"
    assert lines[2].split() == ["backend", "GFLOP", "extra", "MB", "estimated", "ms"]
    for line, (name, flops, extra, seconds) in zip(lines[3:], found.rows, strict=True):
        time = "-" if seconds is None else f"{seconds * 1e3:.3f}"
        assert line.split() == [name, f"{flops / 1e9:.3f}", f"{extra / 2**20:.1f}", time]


def band_and_few():
    return patterns.window(2**15, 193) | patterns.random_senders(2**15, 48, causal=False)


ON_H200 = {
    "full": (lambda: patterns.full(4096), "dense", "one SDPA call"),
    "causal": (lambda: patterns.causal(8192), "dense", "one SDPA call"),
    "tiny": (lambda: patterns.window(64, 9), "dense", "so few pairs"),
    "window": (lambda: patterns.window(8192, 256), "varlen", "one window"),
    "documents": (lambda: patterns.documents([2000] * 4), "varlen", "packed documents"),
    "scattered": (lambda: patterns.random_senders(8192, 16, causal=False), "triton", "its form rows; "),
    "dilated": (lambda: patterns.dilated(8192, 64, 8), "flex", "FlexAttention on its tiles of 128; "),
    "blocks": (lambda: patterns.bigbird_etc(4096 - 128, 64, 128), "flex", "FlexAttention"),
    "grid": (lambda: listed(patterns.natten((100, 100), 5)), "flex", "FlexAttention"),
    "strict": (lambda: patterns.strict_causal(8192), "split", "its parts by dense, joined"),
    "prefix": (lambda: patterns.prefix(8192, 700), "split", "its parts by dense, dense, joined"),
    "window and sinks": (lambda: patterns.window(2**15, 1024) | patterns.sinks(2**15, 4), "flex", "Flex"),
    "band and few": (band_and_few, "split", "its parts by varlen, triton, joined"),
}
VERIFIED = {"dilated": "triton", "blocks": "triton", "window": "varlen", "grid": "triton"}


@pytest.fixture
def h200(monkeypatch):
    """Calls on a GPU that is not there: tensors without data, and its name."""
    monkeypatch.setattr(dispatch.devices, "device_of", lambda device: dispatch.devices.PRESETS["H200"])

    def call(graph, dtype=torch.bfloat16, heads=8, dim=64, **options):
        with FakeTensorMode():
            q = torch.empty(graph.batch or 1, heads, graph.num_dst, dim, device="cuda", dtype=dtype)
            k = torch.empty(graph.batch or 1, heads, graph.num_src, dim, device="cuda", dtype=dtype)
        return AttentionCall.checked(q, k, k, graph, **options)

    return call


@pytest.mark.parametrize("name", thinned(ON_H200))
def test_what_auto_takes_on_a_gpu(name, h200):
    """It follows from bytes and products; ``explain`` and a call agree, and the reason says so."""
    make, wanted, reason = ON_H200[name]
    graph = make()
    found = ga.explain(graph, 8, 64, "H200")
    assert found.choice == dispatch._by_time(h200(graph))[0] == wanted
    assert reason in found.reason


@pytest.mark.parametrize("name", VERIFIED)
def test_on_a_verified_gpu_our_kernels_count_as_what_they_are(name, h200, monkeypatch):
    """But for a quarter more until the constants were measured."""
    monkeypatch.setitem(dispatch.devices.VERIFIED, "H200", "2026-12-01-h200.json")
    found = ga.explain(ON_H200[name][0](), 8, 64, "H200")
    assert found.choice == dispatch._by_time(h200(ON_H200[name][0]()))[0] == VERIFIED[name]
    assert "counted 1.25 times as long" in (found.trust if found.choice == "triton" else found.reason)


@pytest.mark.slow
def test_sinks_beside_a_window_are_a_part_where_varlen_is_faster_than_flex():
    """By the constants of an A100."""
    found = ga.explain(patterns.window(2**15, 2**13) | patterns.sinks(2**15, 4), 8, 64, "A100")
    assert (found.choice, found.reason[:34]) == ("split", "its parts by dense, varlen, joined")


@pytest.mark.parametrize("factor", [2.9, 3.1])
@pytest.mark.parametrize("name", ["dense", "flex", "varlen"])
def test_those_of_torch_are_taken_up_to_three_times_the_time_of_ours(name, factor, h200, monkeypatch):
    """And no longer."""
    long = {"dense": 9.0, "flex": 9.0, "varlen": 9.0, "modified": 9.0, "written out": 9.0, "windows": 9.0}
    seconds = long | {"rows": 1.0, "tiles": 9.0, name: factor / (1.25 if name == "flex" else 1.0)}
    made = {
        key: dispatch.estimates(patterns.full(8), Sizes(1, 8, 8), dispatch.devices.GENERIC)["dense"]
        for key in seconds
    }
    found = {key: made[key]._replace(seconds=seconds[key]) for key in seconds}
    monkeypatch.setattr(dispatch, "estimates", lambda *given: found)
    assert dispatch._by_time(h200(patterns.window(8192, 256)))[0] == (name if factor < 3 else "triton")


@pytest.mark.parametrize(("name", "first"), [("dilated", "tiles"), ("scattered", "rows")])
def test_an_unsupported_backend_is_passed_over(name, first, h200, monkeypatch):
    """The order has every backend; without Triton those of a CPU serve, by the same structure."""
    call = h200(ON_H200[name][0]())
    order = dispatch._by_time(call)
    assert set(order) == {"dense", "triton", "flex", "tiles", "rows", "mixed", "reference"}
    assert order[3] == first
    for missing in ("triton", "flex"):
        without = replace(BACKENDS[missing], unsupported_reason=lambda call: "not here")
        monkeypatch.setitem(BACKENDS, missing, without)
    monkeypatch.setattr(dispatch, "_too_large", lambda call: "too large")
    assert dispatch.choose(call).name == first


WINDOW, PACKED, CAUSAL = patterns.window(8192, 256), patterns.documents([2000] * 4), patterns.causal(8192)
HALF, MOD = torch.bfloat16, {"score_mod": score_mods.softcap(1.0)}


@pytest.mark.parametrize(
    ("graph", "dtype", "options", "wanted"),
    [
        (WINDOW, torch.float32, {}, "flex"),  # varlen supports half types
        (WINDOW, torch.float64, {}, "triton"),  # flex does not support those
        (PACKED, HALF, MOD, "flex"),  # varlen supports plain calls
        (PACKED, HALF, {"with_lse": True}, "varlen"),
        (CAUSAL, HALF, {"with_lse": True}, "dense"),
        (CAUSAL, torch.float32, {"with_lse": True}, "flex"),  # SDPA gives lse of halves
        (CAUSAL, HALF, MOD, "flex"),  # SDPA would write logits out
        (CAUSAL, HALF, {"score_mod": score_mods.alibi(score_mods.alibi_slopes(8))}, "flex"),
        (patterns.strict_causal(8192), HALF, MOD, "flex"),  # so it would for the part of a split
    ],
)
def test_options_and_dtypes_count_on_a_gpu(graph, dtype, options, wanted, h200):
    assert dispatch._by_time(h200(graph, dtype, **options))[0] == wanted


def test_our_kernels_must_be_clearly_better_until_they_were_measured(h200, monkeypatch):
    graph = patterns.window(8192, 256)
    preset = dispatch.devices.PRESETS["H200"]
    found = dispatch.estimates(graph, Sizes(8, 64, 64), preset)
    assert found["tiles"].seconds < found["varlen"].seconds
    assert dispatch._by_time(h200(graph))[0] == "varlen"
    monkeypatch.setitem(dispatch.devices.VERIFIED, "H200", "2026-12-01-h200.json")
    assert dispatch._by_time(h200(patterns.window(8192, 256)))[0] == "varlen"
    monkeypatch.setattr(dispatch.devices, "device_of", lambda device: replace(preset, measured="today"))
    assert dispatch._by_time(h200(patterns.window(8192, 256)))[0] == "triton"


def test_a_prediction_says_what_it_is():
    found = ga.explain(patterns.window(8192, 256), 8, 64, "H200")
    lines = str(found).splitlines()
    assert lines[2].startswith("predicted for H200, bfloat16 (not measured: ")
    assert lines[3] == f"kernels of our own: {found.trust}"
    for part in (
        "not verified on this class of device",
        "up to 3 times",
        "compares 64 receivers",
        "with a warning",
    ):
        assert part in found.trust
    for line, (name, *_), (share, limit) in zip(lines[5:], found.rows, found.shares, strict=True):
        assert line.startswith(name)
        assert line.endswith(f"{100 * share:.0f} %  {limit}")
        assert 0 < share <= 1
    in_float32 = ga.explain(patterns.window(8192, 256), 8, 64, "H200", torch.float32)
    assert {row[0] for row in found.rows} - {row[0] for row in in_float32.rows} == {"varlen"}


def test_a_gpu_need_not_be_there():
    """Without one, "cuda" is a GPU like any; an unknown name is refused; None and "cpu" are this machine."""
    assert ga.explain(patterns.causal(4096), 8, 64, "cuda").choice == "dense"
    with pytest.raises(ValueError, match=r"device must be one of cpu, cuda, H200, .* got 'H2000'"):
        ga.explain(patterns.causal(64), 8, 64, "H2000")
    assert ga.explain(patterns.causal(512), 8, 64, "cpu") == ga.explain(patterns.causal(512), 8, 64)
