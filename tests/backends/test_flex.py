"""FlexAttention with one mask_mod for every graph: right, compiled rarely, and refusing by name what it
cannot do.
"""

import shutil
from types import SimpleNamespace

import pytest
import torch
from support.bounds import assert_rule, assert_sum, attention_truth, error
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

from gnn_attention import TokenGraph, attend, patterns, score_mods
from gnn_attention.backends import BACKENDS, _flex_block_mask, flex
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS

FLEX = BACKENDS["flex"]
DIM, VALUE_DIM = 6, 5
CPU = torch.device("cpu")
ALIKE = [name for name, case in GRAPHS.items() if not case.varies]

UNTRACED = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"

needs_compiler = pytest.mark.skipif(
    flex._compiler_missing() is not None, reason=str(flex._compiler_missing())
)


def run_uncompiled(monkeypatch):
    """FlexAttention as Python runs it: the same call around it, without 15 seconds of a C++ compiler for each
    kernel.

    Nor is it traced anew in each call (where torch has a switch for that).
    """
    monkeypatch.setattr(UNTRACED, True, raising=False)
    monkeypatch.setattr(flex, "_compiled", lambda threads: flex._attention)
    monkeypatch.setattr(flex, "_cpu_cannot_compile", lambda: None)


@pytest.fixture(params=["uncompiled", pytest.param("compiled", marks=[pytest.mark.slow, needs_compiler])])
def kernel(request, monkeypatch):
    """The kernel for CPUs, and FlexAttention without one."""
    if request.param == "uncompiled":
        run_uncompiled(monkeypatch)


@pytest.fixture(params=["uncompiled", pytest.param("compiled", marks=[pytest.mark.nightly, needs_compiler])])
def nightly_kernel(request, monkeypatch):
    """The same, for kernels of which the slow tests have one that does as much."""
    if request.param == "uncompiled":
        run_uncompiled(monkeypatch)


@pytest.fixture
def traced(monkeypatch):
    """All of torch.compile but the C++ compiler."""
    compile_, made = torch.compile, []

    def without_compiler(function, options=None, **others):
        made.append(options)
        return compile_(function, backend="eager", **others)

    monkeypatch.setattr(torch, "compile", without_compiler)
    monkeypatch.setattr(flex, "_cpu_cannot_compile", lambda: None)
    flex._compiled.cache_clear()
    torch.compiler.reset()
    yield made
    flex._compiled.cache_clear()
    torch.compiler.reset()


def draw(graph, dtype=torch.float32, batch=BATCH, seed=0):
    """q, k, v in float64 whose numbers are those of the dtype."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (HEADS, graph.num_dst, DIM), (KV_HEADS, graph.num_src, DIM), (KV_HEADS, graph.num_src, VALUE_DIM)
    return [
        torch.randn(batch, *shape, generator=rng, dtype=torch.float64).to(dtype).double() for shape in shapes
    ]


def compiled():
    """Kernels made so far."""
    return counters["stats"]["unique_graphs"]


def check(graph, mask, dtype=torch.float32, modify=None, batch=BATCH, **options):
    """Error at most twice that of SDPA on the same numbers, against dense attention in float64."""
    wide = draw(graph, dtype, batch)
    q, k, v = (x.to(dtype) for x in wide)
    mask, scale = mask[:batch], options.get("scale") or DIM**-0.5
    out = attend(q, k, v, graph, backend=FLEX, **options)
    assert out.dtype == dtype
    empty = ~mask.any(-1)
    assert (out[empty.expand(out.shape[:3])] == 0).all()
    assert_rule(out, {}, truth_of(q, k, v, mask, scale, modify))


def truth_of(q, k, v, mask, scale=DIM**-0.5, modify=None):
    """Attention in float64 and SDPA's errors, which takes what a score_mod adds to a logit as a table."""
    products = scale * q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    added = None if modify is None else modify(products).detach() - products
    with torch.no_grad():
        return attention_truth(q, k, v, mask, scale=scale, added=added)


def assert_lse(found, q, k, mask, sinks=None, scale=DIM**-0.5):
    """Of float32: products summed and scaled, as many exponentials as there are senders, their sum, its
    logarithm, the sink.
    """
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    true = (scale * q @ k.mT).masked_fill(~mask, -torch.inf).logsumexp(-1)
    if sinks is not None:
        true = torch.logaddexp(true, sinks.double().view(1, -1, 1)).masked_fill(~mask.any(-1), -torch.inf)
    largest = (
        scale * float((q.abs() @ k.abs().mT).max())
        + float(true.masked_fill(true.isinf(), 0.0).abs().max())
        + 1.0
    )
    assert_sum(found, true, q.shape[3] + k.shape[2] + 10, largest)


@pytest.mark.parametrize("name", list(GRAPHS))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_is_the_graph_on_every_pair(name, device, monkeypatch):
    """For tiles of both devices, empty and full ones too; beyond the border there is no edge."""
    case, block = GRAPHS[name], _flex_block_mask.BLOCKS[device]
    monkeypatch.setitem(_flex_block_mask.BLOCKS, "cpu", block)
    table, lists = _flex_block_mask._made(case.graph, CPU)
    sides = [block * max(2, -(-size // block)) for size in (case.graph.num_dst, case.graph.num_src)]
    b, h = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
    edges = _flex_block_mask.is_edge(
        table, block, b, h, torch.arange(sides[0]).view(-1, 1), torch.arange(sides[1])
    )
    inside = edges[:, :, : case.graph.num_dst, : case.graph.num_src]
    assert torch.equal(inside, case.mask)
    assert edges.sum() == inside.sum()
    assert len(lists) == 4


@pytest.mark.parametrize(
    "graph", [patterns.window(1000, 150), patterns.causal(640), patterns.documents([300, 400])], ids=repr
)
def test_long_graphs_have_all_kinds_of_tiles(graph):
    """The lists hold every tile with an edge once, the full ones apart, and the table is true on every
    pair.
    """
    table, (some_number, some, full_number, full) = _flex_block_mask.plan(graph, CPU)
    n, block = graph.num_dst, 64
    edges = _flex_block_mask.is_edge(
        table, block, *(torch.zeros(1, dtype=torch.int64),) * 2, torch.arange(n).view(-1, 1), torch.arange(n)
    )
    assert torch.equal(edges, graph.mask())
    assert full_number.sum() > 0
    for row in range(-(-n // block)):
        part = graph.mask()[row * block : (row + 1) * block]
        counts = [int(part[:, c * block : (c + 1) * block].sum()) for c in range(-(-n // block))]
        whole = [c for c, count in enumerate(counts) if count == block * block]
        assert full[0, 0, row, : full_number[0, 0, row]].tolist() == whole
        assert some[0, 0, row, : some_number[0, 0, row]].tolist() == [
            c for c, x in enumerate(counts) if x and c not in whole
        ]


@pytest.mark.parametrize(
    ("graph", "full"),
    [
        (patterns.cross(128, 100), [[True, False], [True, False]]),
        (patterns.cross(100, 128), [[True, True], [False, False]]),
    ],
    ids=repr,
)
def test_tiles_that_the_border_cuts_are_not_full(graph, full):
    assert _flex_block_mask._kinds(_flex_block_mask.tiles(graph, 64))[0][0, 0].tolist() == full


def test_the_plan_is_made_once_and_weighs_what_was_said():
    """The estimate is an upper bound of the bytes, and close."""
    graph = patterns.window(5000, 100)
    plan = _flex_block_mask.plan(graph, CPU)
    assert _flex_block_mask.plan(graph, CPU) is plan
    bytes_held = sum(4 * x.numel() for x in (plan.table, *plan.lists))
    assert bytes_held <= _flex_block_mask.plan_bytes(graph, CPU) + 4 * 4 * 79 <= 1.2 * bytes_held


@pytest.mark.parametrize(
    "graph", [patterns.window(1000, 150), patterns.cross(700, 200), GRAPHS["by head"].graph], ids=repr
)
def test_the_lists_of_columns_are_those_of_rows_turned_round(graph):
    """What a backward pass is given, against FlexAttention's own transposition."""
    full, some = _flex_block_mask._kinds(_flex_block_mask.tiles(graph, 128))
    lists = _flex_block_mask._lists(full, some, backward=True)
    other = BlockMask.from_kv_blocks(*lists[:4], BLOCK_SIZE=128)
    theirs = (other.q_num_blocks, other.q_indices, other.full_q_num_blocks, other.full_q_indices)
    assert all(torch.equal(mine, its) for mine, its in zip(lists[4:], theirs, strict=True))


@pytest.mark.parametrize(
    "graph", [patterns.window(5000, 150), patterns.causal(700), GRAPHS["by head"].graph], ids=repr
)
def test_lists_for_cuda_are_as_wide_as_the_longest_row(graph):
    """The same tiles; FlexAttention takes them as they are (uncompiled, which asks the table about every
    pair).
    """
    wide = _flex_block_mask._lists(
        *_flex_block_mask._kinds(_flex_block_mask.tiles(graph, 128)), backward=True
    )
    narrow = _flex_block_mask._compact(wide)
    for number, all_columns, columns in zip(wide[::2], wide[1::2], narrow[1::2], strict=True):
        assert columns.is_contiguous()
        listed = torch.arange(columns.shape[-1]) < number.unsqueeze(-1)
        assert torch.equal(listed.sum(-1), number)
        assert torch.equal(columns[listed], all_columns[..., : columns.shape[-1]][listed])
    assert narrow[1].shape == narrow[3].shape
    assert narrow[5].shape == narrow[7].shape
    if graph.num_dst == 5000:
        assert sum(x.numel() for x in narrow) < sum(x.numel() for x in wide) / 5


@pytest.mark.parametrize(
    "name", ["window, 97 tokens", "listed", "by head", "by sample", "no edges", "one token"]
)
@pytest.mark.parametrize("sinks", [True, False])
def test_lse_and_sinks_where_they_are_given(name, sinks, monkeypatch):
    """What CUDA gives, here from uncompiled FlexAttention, which ignores the lists and asks the table about
    every pair.
    """
    run_uncompiled(monkeypatch)
    case = GRAPHS[name]
    q, k, v = (x.float() for x in draw(case.graph))
    chosen = torch.randn(HEADS, generator=torch.Generator().manual_seed(5)) if sinks else None
    out, lse = flex._run_finite(
        flex.AttentionCall.checked(q, k, v, case.graph, sink_logits=chosen, with_lse=True)
    )
    with torch.no_grad():
        assert_rule(out, {}, attention_truth(q, k, v, case.mask, sink_logits=chosen))
    assert_lse(lse, q, k, case.mask, chosen)


@pytest.mark.slow
@needs_compiler
def test_graphs_of_every_structure_and_length_share_one_kernel():
    """Right on all of them, and compiled once."""
    torch.compiler.reset()
    before = compiled()
    for name in ALIKE:
        check(GRAPHS[name].graph, GRAPHS[name].mask)
    for graph in (patterns.window(700, 90), patterns.cross(130, 40), patterns.causal(300).rows(100, 290)):
        check(graph, graph.mask().expand(2, 1, -1, -1), batch=2)
    assert compiled() - before == 1


@pytest.mark.slow
@needs_compiler
def test_score_mods_are_told_absolute_positions_and_share_kernels():
    """A relative bias on other rows, another table and another length of graph: one kernel."""
    before, graph = compiled(), patterns.causal(70)
    for part, seed in ((graph, 0), (graph.rows(40, 65), 1), (patterns.window(90, 12), 2)):
        table = torch.randn(HEADS, 7, generator=torch.Generator().manual_seed(seed))
        distance = torch.arange(part.dst_offset, part.dst_offset + part.num_dst).view(-1, 1) - torch.arange(
            part.num_src
        )
        added = table[:, distance.clamp(-3, 3) + 3]
        mask = part.mask().expand(BATCH, 1, -1, -1)
        check(
            part,
            mask,
            modify=lambda logits, a=added: logits + a.to(logits),
            score_mod=score_mods.relative_bias(table),
        )
    assert compiled() - before == 1


def test_a_token_that_is_not_finite_reaches_those_who_hear_it(kernel):
    """NaN and inf in q, k and v, on a graph for all."""
    graph = GRAPHS["listed"].graph
    mask = graph.mask()
    q, k, v = (x.float() for x in draw(graph))
    truth = truth_of(q, k, v, mask)
    k[0, 0, 3, 2], v[2, 1, 5, 1], q[1, 2, 4, 0], q[3, 1, 7, 0] = torch.inf, torch.nan, torch.nan, -torch.inf
    out = attend(q, k, v, graph, backend=FLEX)
    bad = torch.zeros(BATCH, HEADS, graph.num_dst, dtype=torch.bool)
    bad[0, :2] = mask[:, 3]
    bad[2, 2:] = mask[:, 5]
    bad[3, 1, 7] = True
    assert torch.equal(out.isnan(), bad.unsqueeze(-1).expand(out.shape))
    assert_rule(torch.where(bad.unsqueeze(-1), truth.out.float(), out), {}, truth)


@pytest.mark.parametrize("name", ["by head", "by sample"])
def test_tokens_that_are_not_finite_where_graphs_differ(name, kernel):
    """Key/value head 1 serves the query heads 2 and 3; all other rows are right."""
    case = GRAPHS[name]
    q, k, v = (x.float() for x in draw(case.graph))
    truth = truth_of(q, k, v, case.mask)
    v[5, 1, 9, 0] = torch.nan
    out = attend(q, k, v, case.graph, backend=FLEX)
    bad = torch.zeros(out.shape[:3], dtype=torch.bool)
    bad[5, 2:] = case.mask[5, 2:, :, 9]
    assert bad.any()
    assert torch.equal(out.isnan().any(-1), bad)
    assert_rule(torch.where(bad.unsqueeze(-1), truth.out.float(), out), {}, truth)


@pytest.mark.parametrize("feature", ["scale 0.7", "alibi", "softcap", "log multiplicity", "relative bias"])
@pytest.mark.parametrize("name", ["window, 97 tokens", "decode rows", "by head"])
def test_features(feature, name, nightly_kernel):
    """The score_mods of the package, as they are."""
    case, kind = GRAPHS[name], FEATURES[feature]
    learned = kind.learned(case, torch.Generator().manual_seed(0))
    options = kind.options({key: x.float() for key, x in learned.items()})
    modify = lambda logits: kind.dense(case, {key: x.to(logits) for key, x in learned.items()}, logits)  # noqa: E731
    check(case.graph, case.mask, modify=modify, **options)


def test_a_chain_a_module_and_a_score_mod_that_ignores_the_score(kernel):
    """Modules without gradients, closures over tensors, a scale, and a result of fewer axes than the
    score.
    """
    graph = patterns.window(97, 16)
    mask, distance = graph.mask().expand(BATCH, 1, -1, -1), torch.arange(97).view(-1, 1) - torch.arange(97)
    learned = score_mods.RelativeBias(HEADS, 2)
    torch.nn.init.normal_(learned.table, generator=torch.Generator().manual_seed(0))
    slopes, counts = score_mods.alibi_slopes(HEADS), torch.arange(1.0, 98.0)

    def chained(logits):
        bias = learned.table.detach()[:, distance.clamp(-2, 2) + 2].to(logits)
        bend = 3.0 * torch.tanh(
            (logits + bias - logits.new_tensor(slopes).view(-1, 1, 1) * distance.abs()) / 3.0
        )
        return bend + counts.to(logits).log()

    with torch.no_grad():
        mods = score_mods.chain(
            learned, score_mods.alibi(slopes), score_mods.softcap(3.0), score_mods.log_multiplicity(counts)
        )
        check(graph, mask, modify=chained, score_mod=mods, scale=0.7)
    far = lambda score, b, h, dst, src: -0.1 * dst.to(torch.float32)  # noqa: E731
    check(
        graph,
        mask,
        modify=lambda logits: -0.1 * torch.arange(97.0).view(-1, 1).to(logits).expand_as(logits),
        score_mod=far,
    )


@needs_compiler
@pytest.mark.slow
def test_distances_in_bfloat16():
    """A score_mod computes in float32: in bfloat16 eight tokens at a distance of 1500 would be one."""
    graph = patterns.causal(1500)
    distance = torch.arange(1500).view(-1, 1) - torch.arange(1500)
    q, k, v = draw(graph, torch.bfloat16, batch=2)
    mask = graph.mask().expand(2, 1, -1, -1)
    true = oracle.attention(q, k, v, mask, DIM**-0.5, lambda logits: logits + distance)
    far = lambda score, b, h, dst, src: score + (dst - src).to(score.dtype)  # noqa: E731
    out = attend(*(x.bfloat16() for x in (q, k, v)), graph, score_mod=far, backend=FLEX)
    # a weight and an output are rounded to bfloat16: eps / 2 each, of the largest value
    assert error(out, true) <= torch.finfo(torch.bfloat16).eps * float(v.abs().max())


@needs_compiler
@pytest.mark.slow
def test_other_layouts_threads_and_modes():
    """Heads next to channels, a last axis that is not dense, two threads, inference mode: right each time."""
    graph = patterns.window(130, 20)
    q, k, v = (x.float() for x in draw(graph))
    truth = truth_of(q, k, v, graph.mask())
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    flipped = [x.mT.contiguous().mT for x in (q, k, v)]
    for inputs in (swapped, flipped):
        assert_rule(attend(*inputs, graph, backend=FLEX), {}, truth)
    with torch.inference_mode():
        found = attend(q, k, v, graph, backend=FLEX)
    assert_rule(found, {}, truth)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert_rule(attend(q, k, v, graph, backend=FLEX), {}, truth)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize(
    "alibi", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.nightly)]
)
def test_inside_a_compiled_program(alibi):
    """As a part of it, whatever it computes before and after; a NaN reaches those who hear it."""
    graph, slopes = patterns.window(130, 20), score_mods.alibi_slopes(HEADS)
    q, k, v = (x.float() for x in draw(graph))
    options = {"score_mod": score_mods.alibi(slopes)} if alibi else {}
    distance = (torch.arange(130).view(-1, 1) - torch.arange(130)).abs()

    def program(q, k, v):
        return 2 * attend(q + 1, k.mT.contiguous().mT * 2, v, graph, backend=FLEX, **options)

    def bent(logits):
        return logits - logits.new_tensor(slopes).view(-1, 1, 1) * distance

    fast = torch.compile(program, fullgraph=True)
    assert_rule(
        fast(q, k, v) / 2, {}, truth_of(q + 1, 2 * k, v, graph.mask(), modify=bent if alibi else None)
    )
    spoilt = v.index_put((torch.tensor([1]), torch.tensor([1]), torch.tensor([60])), torch.tensor(torch.nan))
    edges = torch.zeros(BATCH, HEADS, 130, dtype=torch.bool)
    edges[1, 2:] = graph.mask()[:, 60]
    assert torch.equal(fast(q, k, spoilt).isnan().any(-1), edges)


@pytest.mark.parametrize(
    "sizes", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)], ids=["B", "H", "dst", "src"]
)
def test_a_call_of_nothing(sizes):
    """An axis of size 0, with lse as on CUDA."""
    batch, heads, num_dst, num_src = sizes
    q, k = torch.randn(batch, heads, num_dst, DIM), torch.randn(batch, heads, num_src, DIM)
    v = torch.randn(batch, heads, num_src, VALUE_DIM, requires_grad=True)
    out, lse = flex.run(
        flex.AttentionCall(q, k, v, patterns.cross(num_dst, num_src), scale=1.0, with_lse=True)
    )
    assert out.shape == (batch, heads, num_dst, VALUE_DIM)
    assert (out == 0).all()
    assert out.requires_grad
    assert torch.equal(lse, torch.full((batch, heads, num_dst), -torch.inf))


@needs_compiler
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_without_receivers_or_senders(sizes):
    """The sum of nothing is 0; nothing is compiled, and no score_mod sees a token."""
    graph = TokenGraph.from_rule(lambda b, h, dst, src: src <= dst, *sizes)
    q, k, v = (x.float() for x in draw(graph))
    of_dst, of_src = (torch.zeros(size) for size in sizes)
    for mod in (None, lambda score, b, h, dst, src: score + of_dst[dst] + of_src[src]):
        out = attend(q, k, v, graph, score_mod=mod, backend=FLEX)
        assert out.shape == (BATCH, HEADS, sizes[0], VALUE_DIM)
        assert (out == 0).all()


def test_shapes_without_numbers():
    """Meta tensors have shapes only."""
    graph = patterns.causal(9)
    out = attend(*(x.to("meta") for x in draw(graph, torch.float16)), graph, backend="dense")
    q, k, v = (x.half().to("meta") for x in draw(graph))
    assert attend(q, k, v, graph, backend=FLEX).shape == out.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": torch.zeros(15)}, "it has no bias; leave bias out, or use backend='dense'"),
        ({"dropout": 0.1}, "no dropout"),
        ({"sink_logits": torch.zeros(HEADS)}, "it has no sink_logits on cpu; leave sink_logits out"),
        ({"return_info": True}, "it has no lse on cpu; give return_info=False"),
        (
            {"score_mod": score_mods.RelativeBias(HEADS, 2)},
            "no backward pass on cpu, and the score_mod has parameters",
        ),
    ],
)
def test_options_that_it_has_not(options, message):
    """Each is named, with what to do."""
    graph = patterns.causal(5)
    q, k, v = (x.float() for x in draw(graph))
    with pytest.raises(NotImplementedError, match=message):
        attend(q, k, v, graph, backend=FLEX, **options)


def test_tensors_that_it_cannot_take():
    """float64, gradients, transforms, dual numbers."""
    graph = patterns.causal(5)
    q, k, v = draw(graph)
    with pytest.raises(NotImplementedError, match="computes in float32, bfloat16, float16, q is float64"):
        attend(q, k, v, graph, backend=FLEX)
    q, k, v = (x.float() for x in (q, k, v))
    with pytest.raises(
        NotImplementedError, match=r"no backward pass on cpu; call it under torch.no_grad\(\)"
    ):
        attend(q, k, v.clone().requires_grad_(), graph, backend=FLEX)
    with pytest.raises(NotImplementedError, match=r"does not run under torch.vmap"):
        torch.vmap(lambda q: attend(q, k, v, graph, backend=FLEX))(q[None])
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="no forward-mode derivative"),
    ):
        attend(torch.autograd.forward_ad.make_dual(q, q), k, v, graph, backend=FLEX)


def test_a_graph_of_too_many_tiles(monkeypatch):
    """The lists hold every tile of the plane, of 64 x 64 pairs: about 4 bytes for each in two lists."""
    monkeypatch.setattr(flex, "_cpu_cannot_compile", lambda: None)
    tokens = 64 * 1000
    call = flex.AttentionCall.checked(
        *(torch.zeros(1, 1, 1, 1).expand(1, 1, tokens, 1),) * 3, patterns.window(tokens, 1)
    )
    assert flex.unsupported_reason(call) is None
    monkeypatch.setattr(flex, "MOST_BYTES", 4 * 1000**2)
    assert "the lists of tiles would take" in flex.unsupported_reason(call)


def test_a_machine_without_a_compiler(monkeypatch):
    """The error names what is missing."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    flex._compiler_missing.cache_clear()
    try:
        graph = patterns.causal(5)
        with pytest.raises(NotImplementedError, match="needs a C\\+\\+ compiler, such as g\\+\\+"):
            attend(*(x.float() for x in draw(graph)), graph, backend=FLEX)
    finally:
        flex._compiler_missing.cache_clear()


@pytest.mark.parametrize("installed", [True, False])
def test_cuda_needs_triton(installed, monkeypatch):
    """For a call whose q is on CUDA."""
    monkeypatch.setattr(flex, "_has_triton", lambda: installed)
    call = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda")))
    refused = flex._refusal_of_device(call)
    assert (refused is None) == installed
    assert installed or "needs Triton" in refused


@pytest.mark.parametrize("gradients", [True, False])
def test_score_mods_that_return_no_tensor(gradients, monkeypatch):
    """Are known before anything is compiled."""
    monkeypatch.setattr(flex, "_compiled", None)
    monkeypatch.setattr(flex, "_cpu_cannot_compile", lambda: None)
    graph = patterns.causal(5)
    q, k, v = (x.float() for x in draw(graph))
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises(TypeError, match="must return a float tensor, the new scores, got a int"),
    ):
        attend(q, k, v, graph, score_mod=lambda score, b, h, dst, src: 3, backend=FLEX)


@pytest.mark.slow
@needs_compiler
def test_score_mods_that_cannot_be_compiled():
    """What is not pointwise is the compiler's complaint, in our words."""
    graph = patterns.causal(5)
    q, k, v = (x.float() for x in draw(graph))
    with pytest.raises(
        NotImplementedError, match=r"cannot compile this call .* must be made of pointwise operators"
    ):
        attend(q, k, v, graph, score_mod=lambda score, b, h, dst, src: score.sort().values, backend=FLEX)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            RuntimeError("index out of bounds: 0 <= tmp3 < 3L"),
            IndexError,
            "the score_mod reads beyond the end of a tensor: index out",
        ),
        (RuntimeError("out of memory"), RuntimeError, "^out of memory$"),
        (NotImplementedError("index out of bounds"), NotImplementedError, "^index out of bounds$"),
        (ValueError("of the caller"), ValueError, "^of the caller$"),
    ],
)
def test_errors_of_a_kernel(error, kind, message, monkeypatch):
    """What a compiled score_mod says about an index is put in words; every other error comes as it is."""

    def fails(*arguments):
        raise error

    monkeypatch.setattr(flex, "_compiled", lambda threads: fails)
    monkeypatch.setattr(flex, "_cpu_cannot_compile", lambda: None)
    graph = patterns.causal(5)
    with pytest.raises(kind, match=message) as caught:
        attend(*(x.float() for x in draw(graph)), graph, backend=FLEX)
    assert type(caught.value) is kind


def test_a_score_mod_that_reads_beyond_the_end(kernel):
    """Is an IndexError, compiled or not."""
    graph, table = patterns.causal(20), torch.zeros(3)
    with pytest.raises(
        IndexError, match=r"reads beyond the end of a tensor: index out of bounds|index 3 is out of bounds"
    ):
        attend(
            *(x.float() for x in draw(graph)),
            graph,
            score_mod=lambda score, b, h, dst, src: score + table[dst],
            backend=FLEX,
        )


def a_kernel_too_many(monkeypatch):
    """Python numbers that change in a score_mod would compile for ever: an error, and not the slow path."""
    monkeypatch.setattr(flex, "MOST_KERNELS", 1)
    graphs = patterns.causal(20), patterns.window(20, 4)
    q, k, v = (x.float() for x in draw(graphs[0], batch=2))
    torch.compiler.reset()
    before = compiled()
    check(graphs[0], graphs[0].mask().expand(2, 1, -1, -1), batch=2)
    with pytest.raises(
        NotImplementedError, match=r"has compiled 1 kernels.*give a score_mod its numbers as a tensor"
    ):
        attend(q, k, v, graphs[0], scale=0.3, backend=FLEX)
    check(graphs[1], graphs[1].mask().expand(2, 1, -1, -1), batch=2)  # the kernel that is there serves on
    assert compiled() - before == 1


def test_a_kernel_too_many_is_an_error(traced, monkeypatch):
    """And graphs share a kernel, which is made for as many threads as there are."""
    a_kernel_too_many(monkeypatch)
    assert traced == [{"cpp.threads": torch.get_num_threads()}]
