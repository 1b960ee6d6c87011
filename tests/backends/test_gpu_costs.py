"""What kernels of a GPU would visit, what that would cost, and which form of a graph follows from it."""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.workloads import barabasi_albert
from gnn_attention import patterns
from gnn_attention.backends import cost_model
from gnn_attention.backends.gpu import devices, workload
from gnn_attention.backends.gpu.devices import PRESETS, Device, named
from gnn_attention.backends.gpu.roofline import Sizes, estimate_forms, estimates, form_of
from gnn_attention.backends.gpu.workload import HEIGHTS, Counts, counted, packing
from gnn_attention.graph import tiling
from gnn_attention.verify.measure import EXACT

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


def edges_of_tiles(mask, height, width):
    """How many edges each tile holds that holds any, by looking at all pairs."""
    rows, columns = -(-mask.shape[0] // height), -(-mask.shape[1] // width)
    padded = torch.zeros(rows * height, columns * width, dtype=torch.int64)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    tiles = padded.view(rows, height, columns, width).sum((1, 3))
    return tiles[tiles > 0]


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_looking_at_every_pair(name):
    graph = COUNTED[name]()
    mask, found = graph.mask(), counted(graph)
    assert (found.receivers, found.senders, found.edges) == (*mask.shape, int(mask.sum()))
    assert found.unique == tuple(len(edges_of_tiles(mask, height, 1)) for height in HEIGHTS)
    small = edges_of_tiles(mask, 64, 64)
    every = [len(edges_of_tiles(mask, *size)) for size in ((64, 64), (128, 64), (128, 128))]
    assert [found.small_tiles, found.tall_tiles, found.large_tiles] == every
    assert found.strays == int(small[small < 64].sum())
    assert (found.whole, found.causal) == (graph.is_causal() or graph.is_full(), graph.is_causal())


def test_cut_tiles_hold_non_edges():
    assert counted(patterns.causal(512)).cut_tiles == 4  # those on the diagonal, of 10
    assert counted(patterns.full(512)).cut_tiles == 0


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


def test_packed_documents_are_known():
    assert packing(patterns.documents([100, 28, 300])).cu_seqlens.tolist() == [0, 100, 128, 428]
    assert packing(patterns.window(500, 40)).window == (39, 0)
    others = patterns.window(500, 40) | patterns.sinks(500, 2), scattered(300, 3)
    assert [packing(graph) for graph in others] == [None, None]


def test_nothing_is_counted_where_no_tokens_are():
    found = counted(patterns.cross(0, 7))
    assert (found, found.shared(16), found.filled()) == (Counts(0, 7, 0), 0, 0)


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
    larger = Sizes(16, 64, 64), Sizes(8, 128, 128), Sizes(8, 64, 64, torch.float32)
    dearer = [estimates(graph, sizes, H200) for sizes in larger]
    dearer += [estimates(graph, SIZES, H200, backward=True), estimates(graph, SIZES, slow)]
    for way, estimate in found.items():
        assert 0 < estimate.share <= 1
        for other in dearer:
            assert way not in other or other[way].seconds >= estimate.seconds
    for other in (dearer[0], dearer[1], dearer[3], dearer[4]):
        assert all(other[way].seconds > found[way].seconds for way in found)
    assert "varlen" not in dearer[2]


@pytest.mark.parametrize(("share", "better"), [(0.005, "rows"), (0.05, "tiles")])
def test_a_tile_is_worth_its_price_from_about_one_edge_in_a_hundred_on(share, better):
    edges = 10_000 * 64**2 * share
    counts = Counts(10**6, 10**6, round(edges), (edges,) * 3, 10_000, 10_000, 5000)
    found = estimate_forms(counts, SIZES, H200)
    assert (found["rows", 1].seconds < found["tiles", 64].seconds) == (better == "rows")


def test_documents_alone_are_for_varlen_and_strays_make_a_split():
    assert "varlen" in estimates(GRAPHS["documents"](), SIZES, H200)
    assert "varlen" not in estimates(GRAPHS["random"](), SIZES, H200)
    assert "split" not in estimates(GRAPHS["random"](), SIZES, H200)
    found = estimates(GRAPHS["union"](), SIZES, H200)
    assert found["split"].flops < found["tiles"].flops
    assert found["split"].passed < found["rows"].passed
    # both results are read and one is written, in bfloat16 and float32
    counts, merged = counted(GRAPHS["union"]()), 3 * 8 * 4096 * 64 * (2 + 4)
    tiles = estimate_forms(counts._replace(small_tiles=counts.filled_tiles, tall_tiles=0.0), SIZES, H200)
    rows = estimate_forms(counts._replace(edges=counts.strays), SIZES, H200)["rows", 1]
    assert found["split"].misses == pytest.approx(tiles["tiles", 64].misses + rows.misses + merged)


FORM_OF = {
    "random": (lambda: scattered(4096, 32), "rows", 1),
    "Barabasi-Albert": (lambda: barabasi_albert(2**15, 16), "rows", 1),
    "BigBird of blocks": (lambda: patterns.bigbird_etc(4096 - 128, 64, 128), "tiles", 64),
    "dilated": (lambda: patterns.dilated(65536, 64, 8), "tiles", 64),
    "window": (lambda: patterns.window(4096, 256), "tiles", 64),
}


@pytest.mark.parametrize("name", FORM_OF)
def test_the_form_is_that_of_the_notes(name):
    """Random edges by rows, blocks, bands and local graphs by tiles; all estimates are in the reason."""
    make, *wanted = FORM_OF[name]
    graph = make()
    found = form_of(graph, SIZES, H200)
    assert [found.name, found.height] == wanted
    words = ("predicted, not measured", "rows ", "windows of 64 ", "tiles ")
    assert all(word in found.reason for word in words)
    measured = form_of(graph, SIZES, replace(H200, measured="2026-12-01"))
    assert "constants measured 2026-12-01" in measured.reason


def test_a_device_is_that_of_its_preset_or_an_a100():
    found = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100", "a100": "A100"}
    assert [named(name) for name in found] == [PRESETS[preset] for preset in found.values()]
    assert named("Some New GPU") == replace(PRESETS["A100"], name="Some New GPU")
    assert devices.device_of(torch.device("cpu")) == devices.GENERIC


def test_measured_constants_are_kept_for_each_device():
    own = [Device(name, *range(1, 7), measured="2026-12-01") for name in ("NVIDIA H200", "NVIDIA B300")]
    for device in own:
        assert devices.save_device(device) == devices.path_of_devices()
    devices._measured.cache_clear()  # as a new process has it
    assert [named(device.name) for device in own] == own
    assert named("H200") == own[0]
    assert [file.name for file in devices.path_of_devices().parent.iterdir()] == ["gpu-costs.json"]


@pytest.mark.parametrize("damage", ["", "[]", '{"devices": {"X": {}}}', "zero"])
def test_a_damaged_file_is_named(damage):
    """Also one with a constant that is no positive number."""
    path = devices.save_device(replace(H200, measured="today"))
    if damage == "zero":
        damage = re.sub('"copy": [0-9.e+]*', '"copy": 0.0', path.read_text())
    path.write_text(damage)
    devices._measured.cache_clear()
    message = r"gpu-costs.json does not hold the constants .* benchmarks.gpu --calibrate"
    with pytest.raises(ValueError, match=message):
        named("H200")
