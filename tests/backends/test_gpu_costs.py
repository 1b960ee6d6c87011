"""What kernels of a GPU would visit, what that would cost, and which form of a graph follows from it."""

import re
from dataclasses import replace

import pytest
import torch
from support.plans import edges_of_tiles

from benchmarks.gpu.calibrate import save_device
from gnn_attention import patterns
from gnn_attention.backends import cost_model
from gnn_attention.backends.gpu import devices, workload
from gnn_attention.backends.gpu.devices import PRESETS, Device, named
from gnn_attention.backends.gpu.roofline import Sizes, assigned, estimate_forms, estimates
from gnn_attention.backends.gpu.workload import HEIGHTS, Counts, counted
from gnn_attention.graph import TokenGraph, tiling
from gnn_attention.verify import record
from gnn_attention.verify.measure import EXACT
from gnn_attention.verify.report import Report

H200 = PRESETS["H200"]
SIZES = Sizes(8, 64, 64)


@pytest.fixture(autouse=True)
def _no_measured_constants(tmp_path, monkeypatch):
    """The presets, whatever this machine's file says."""
    monkeypatch.setenv(cost_model.VARIABLE, str(tmp_path / "costs.json"))
    devices._measured.cache_clear()
    yield
    devices._measured.cache_clear()


def scattered(n, degree, seed=0):
    """Every token attends to ``degree`` others drawn at random."""
    return patterns.random_senders(n, degree, seed=seed, causal=False)


COUNTED = {
    "causal": lambda: patterns.causal(300),
    "full": lambda: patterns.full(200),
    "window": lambda: patterns.window(330, 70),
    "window and sinks": lambda: patterns.window(300, 5) | patterns.sinks(300, 2),
    "reversed": lambda: patterns.dilated(200, 9, 7).T,
    "decoding": lambda: patterns.window(400, 40).rows(300, 390),
    "a list": lambda: scattered(300, 5),
    "one tile": lambda: patterns.strict_causal(3),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_looking_at_every_pair(name):
    graph = COUNTED[name]()
    mask, found = graph.mask(), counted(graph)
    assert (found.receivers, found.senders, found.edges) == (*mask.shape, int(mask.sum()))
    assert found.unique == tuple(int((edges_of_tiles(mask, height, 1) > 0).sum()) for height in HEIGHTS)
    small = edges_of_tiles(mask, 64, 64)
    every = [int((edges_of_tiles(mask, *size) > 0).sum()) for size in ((64, 64), (128, 64), (128, 128))]
    assert [found.small_tiles, found.tall_tiles, found.large_tiles] == every
    assert found.strays == int(small[small < 64].sum())
    assert (found.whole, found.causal) == (graph.is_causal() or graph.is_full(), graph.is_causal())


@pytest.mark.parametrize("make", [lambda: scattered(4096, 9), lambda: patterns.dilated(16384, 64, 8)])
def test_samples_come_near(make, monkeypatch):
    """Of a long list and of many partial tiles a part is looked at."""
    exact = counted(make())
    monkeypatch.setattr(workload, "MOST_EDGES", 4000)
    monkeypatch.setattr(workload, "MOST_TILES", 200)
    sampled = counted(make())
    assert sampled != exact
    for name in ("edges", "small_tiles", "tall_tiles", "large_tiles"):
        assert getattr(sampled, name) == pytest.approx(getattr(exact, name), rel=0.1)
    assert sampled.unique == pytest.approx(exact.unique, rel=0.1)


def test_a_union_with_a_list_is_counted_by_its_members(monkeypatch):
    """It has no ranges, and its pairs are not visited."""
    near, far = patterns.window(2048, 100), scattered(2048, 7)
    seen, tiles = [], tiling.tiles
    monkeypatch.setattr(
        workload, "tiles", lambda graph, block: seen.append(graph.rule) or tiles(graph, block)
    )
    found, members = counted(near | far), [counted(near), counted(far)]
    assert seen == [near.rule] * 2
    assert found.edges == sum(member.edges for member in members)
    assert found.unique == tuple(a + b for a, b in zip(*(member.unique for member in members), strict=True))
    assert found.strays >= members[1].edges


def random_counts(n, degree):
    """Of a graph in which neighbours share no sender."""
    edges = n * degree
    return Counts(n, n, edges, (edges,) * 3, small_tiles=edges, tall_tiles=edges, large_tiles=edges)


@pytest.mark.parametrize(
    ("counts", "sizes", "backward", "milliseconds"),
    [
        # notes: a fifth of the gathers of a head hit the cache
        (random_counts(1_000_000, 32), SIZES, False, 13.0),
        (random_counts(1_000_000, 32), SIZES, True, 26.0),
        (random_counts(131_072, 32), SIZES, False, 1.56),  # all of them, 8.6 GB at 5.5 TB/s
        (random_counts(2_449_029, 50.5), Sizes(1, 128, 128, torch.float16), False, 14.7),
    ],
)
def test_the_bound_of_rows_is_that_of_its_gathers(counts, sizes, backward, milliseconds):
    found = estimate_forms(counts, sizes, H200, backward)["rows", 1]
    assert found.bound * 1e3 == pytest.approx(milliseconds, rel=0.05)
    assert found.seconds > found.bound
    assert found.limit == "gather"


@pytest.mark.parametrize(("tokens", "slices", "milliseconds"), [(8192, 64, 1.41), (32768, 16, 5.64)])
def test_the_bound_of_causal_attention_is_half_of_its_products(tokens, slices, milliseconds):
    """1.10 and 4.40 TFLOP at 780 TFLOP/s."""
    sizes = Sizes(slices, 128, 128)
    found = estimates(patterns.causal(tokens), sizes, H200)["dense"]
    assert found.bound * 1e3 == pytest.approx(milliseconds, rel=0.01)
    assert found.flops == pytest.approx(4 * slices * 128 * tokens**2 / 2, rel=EXACT)
    back = estimates(patterns.causal(tokens), sizes, H200, backward=True)["dense"]
    assert back.bound == pytest.approx(2.5 * found.bound, rel=EXACT)


GRAPHS = {
    "random": lambda: scattered(4096, 16),
    "window": lambda: patterns.window(4096, 300),
    "documents": lambda: patterns.documents([700, 1300, 2096]),
    "union": lambda: patterns.window(4096, 200) | scattered(4096, 16),
    "causal": lambda: patterns.causal(4096),
}
EACH = ("dense", "written out", "rows", "windows", "tiles", "flex")


@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_gets_cheaper_by_more_work(name):
    """More heads, wider heads, larger numbers, a backward pass, a slower device; no share is above 1."""
    graph = GRAPHS[name]()
    found = estimates(graph, SIZES, H200)
    assert set(EACH) <= set(found)
    slow = replace(H200, copy=H200.copy / 2, cache=H200.cache / 2, half=H200.half / 2, single=H200.single / 2)
    dearer = [estimates(graph, sizes, H200) for sizes in (Sizes(16, 64, 64), Sizes(8, 128, 128))]
    dearer += [estimates(graph, SIZES, H200, backward=True), estimates(graph, SIZES, slow)]
    assert all(0 < estimate.share <= 1 for estimate in found.values())
    assert all(other[way].seconds > found[way].seconds for other in dearer for way in found)
    single = estimates(graph, Sizes(8, 64, 64, torch.float32), H200)
    assert all(single[way].seconds >= found[way].seconds for way in single)


@pytest.mark.slow
def test_documents_alone_are_for_varlen_and_strays_make_a_split():
    assert "varlen" in estimates(GRAPHS["documents"](), SIZES, H200)
    assert "varlen" not in estimates(GRAPHS["random"](), SIZES, H200)
    assert "split" not in estimates(GRAPHS["random"](), SIZES, H200)
    union = GRAPHS["union"]()
    assert [kernel for kernel, _ in assigned(union, SIZES, H200)] == ["varlen", "triton"]
    listed = TokenGraph.from_edges(union.edge_index, 4096, 4096)
    found = estimates(listed, SIZES, H200)
    assert found["split"].flops < found["tiles"].flops
    assert found["split"].passed < found["rows"].passed
    # both results are read and one is written, in bfloat16 and float32
    counts, merged = counted(listed), 3 * 8 * 4096 * 64 * (2 + 4)
    tiles = estimate_forms(counts._replace(small_tiles=counts.filled_tiles, tall_tiles=0.0), SIZES, H200)
    rows = estimate_forms(counts._replace(edges=round(counts.strays)), SIZES, H200)["rows", 1]
    assert found["split"].misses == pytest.approx(tiles["tiles", 64].misses + rows.misses + merged, rel=EXACT)


def test_a_device_is_that_of_its_preset_or_an_a100():
    found = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100", "a100": "A100"}
    assert [named(name) for name in found] == [PRESETS[preset] for preset in found.values()]
    assert named("Some New GPU") == replace(PRESETS["A100"], name="Some New GPU")
    assert devices.device_of(torch.device("cpu")) == devices.GENERIC


def unfounded(verified):
    """The classes of devices that no record which stands is of."""
    found = set()
    for name, file in verified.items():
        path = record.RECORDS / file
        report = Report.from_file(path) if path.exists() else None
        stands = report is not None and record._reason(report, record.sources()) is None
        found |= set() if stands and name in devices._words(report.environment["device"]) else {name}
    return found


def test_a_device_counts_as_verified_only_by_a_record_that_stands():
    """Then our kernels are no longer counted three times as long as predicted."""
    assert not unfounded(devices.VERIFIED)
    assert unfounded({"H200": "none.json"}) == {"H200"}
    assert (H200.verified, H200.doubt) == ("", 3.0)


def test_a_verified_class_is_found_by_its_word(monkeypatch):
    monkeypatch.setitem(devices.VERIFIED, "H200", "a record")
    assert [named(name).doubt for name in ("NVIDIA H200", "H100")] == [1.25, 3.0]
    assert replace(H200, measured="today").doubt == 1.0


def test_measured_constants_are_kept_for_each_device():
    own = [Device(name, *range(1, 7), measured="2026-12-01") for name in ("NVIDIA H200", "NVIDIA B300")]
    for device in own:
        assert save_device(device) == devices.path_of_devices()
    devices._measured.cache_clear()  # as a new process has it
    assert [named(device.name) for device in own] == own
    assert named("H200") == own[0]
    assert [file.name for file in devices.path_of_devices().parent.iterdir()] == ["gpu-costs.json"]


@pytest.mark.parametrize("damage", ["", "[]", '{"devices": {"X": {}}}', "zero"])
def test_a_damaged_file_is_named(damage):
    """Also one with a constant that is no positive number."""
    path = save_device(replace(H200, measured="today"))
    if damage == "zero":
        damage = re.sub('"copy": [0-9.e+]*', '"copy": 0.0', path.read_text())
    path.write_text(damage)
    devices._measured.cache_clear()
    message = r"gpu-costs.json does not hold the constants .* benchmarks.gpu --calibrate"
    with pytest.raises(ValueError, match=message):
        named("H200")
