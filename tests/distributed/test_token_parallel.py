"""Tokens on ranks: on gloo processes of this machine, equal to one process in outputs, gradients and dropped
edges.
"""

import functools
import itertools
import re

import pytest
import torch
from support import ranks
from support.bounds import attention_truth

import gnn_attention as ga
from gnn_attention import distributed, patterns, score_mods
from gnn_attention.convert import catalogue, expressions
from gnn_attention.distributed import partition as partitions
from gnn_attention.verify.measure import ALLOWED_GRADIENT, ALLOWED_OUTPUT, judge

SEED = 20
D, DV, HQ, HKV = 4, 3, 4, 2


def drawn(graph, dtype=torch.float64, heads=HQ, kv_heads=HKV):
    """q, k, v and what the output is multiplied with, the same on every rank."""
    rng = torch.Generator().manual_seed(SEED)
    heads = graph.heads or heads
    kv_heads = kv_heads if heads % kv_heads == 0 else heads
    batch = graph.batch or 2
    shapes = (
        (heads, graph.num_dst, D),
        (kv_heads, graph.num_src, D),
        (kv_heads, graph.num_src, DV),
        (heads, graph.num_dst, DV),
    )
    return [torch.randn(batch, *shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def in_one_process(graph, tensors, options):
    """Output and gradients of q, k, v (and of the bias)."""
    q, k, v, factor = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = dict(options)
    if "bias" in options:
        leaves.append(options["bias"].clone().requires_grad_())
        options["bias"] = leaves[-1]
    torch.manual_seed(SEED)
    out = ga.attend(*leaves[:3], graph, backend="reference", **options)
    (out * factor).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def on_ranks(graph, partition, tensors, options, backend="auto", exchange="auto"):
    """The same of this rank's tokens, each beside how a whole result is cut down to them."""
    rank = torch.distributed.get_rank()
    cuts = [lambda x, s=s: distributed.scatter(x, partition, side=s) for s in ("dst", "src", "src", "dst")]
    q, k, v, factor = (cut(x) for cut, x in zip(cuts, tensors, strict=True))
    leaves, options = [x.clone().requires_grad_() for x in (q, k, v)], dict(options)
    cuts = [cuts[3], *cuts[:3]]
    if "bias" in options:
        own = graph.positions_of(distributed.in_edges(graph, partition))
        cuts.append(lambda x: x[..., own])
        leaves.append(options["bias"][..., own].clone().requires_grad_())
        options["bias"] = leaves[-1]
    torch.manual_seed(SEED if rank == 0 else 99)  # dropout takes the first rank's seed
    out = distributed.attend(*leaves[:3], graph, partition, backend=backend, exchange=exchange, **options)
    (out * factor).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)], cuts


def worst(graph, partition, options=None, dtype=torch.float64, **how):
    """The error of output and gradients as a share of what is allowed: in float64 against one process, else
    by the rule.
    """
    options, tensors = options or {}, drawn(graph, dtype)
    found, cuts = on_ranks(graph, partition, tensors, options, **how)
    if dtype != torch.float64:
        return judged(graph, partition, found, tensors, options)
    wholes = in_one_process(graph, tensors, options)
    parts = [cut(whole) for cut, whole in zip(cuts, wholes, strict=True)]
    return max(ranks.share(found[at], parts[at], wholes[at]) for at in (slice(1), slice(1, None)))


def judged(graph, partition, found, tensors, options):
    """By the rule, on the first rank, which judges the results of all put together; 0 on the others."""
    sides = ("dst", "dst", "src", "src")
    out, *gradients = (
        distributed.gather(x, partition, side=side) for x, side in zip(found, sides, strict=True)
    )
    if torch.distributed.get_rank():
        return 0.0
    q, k, v, factor = tensors
    assert not set(options) - {"score_mod", "scale", "sink_logits"}, "the rule knows no truth of these"
    added = table_of(options["score_mod"], graph, q) if "score_mod" in options else None
    truth = attention_truth(
        q, k, v, graph, factor, options.get("scale"), sink_logits=options.get("sink_logits"), added=added
    )
    outcome = judge(out, dict(zip("qkv", gradients, strict=True)), truth)
    return max(outcome.output / ALLOWED_OUTPUT, outcome.gradient / ALLOWED_GRADIENT)


def table_of(mod, graph, q):
    """What a score_mod that only adds adds to each logit."""
    sizes = (q.shape[0], q.shape[1], graph.num_dst, graph.num_src)
    b, h, dst, src = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    return mod(
        torch.zeros(sizes, dtype=torch.float64), b, h, dst + graph.dst_offset, src + graph.src_offset
    ).detach()


def partition_of(graph, kind, world):
    """A partition by its name."""
    if kind == "scattered":
        rng = torch.Generator().manual_seed(3)
        dst = partitions.of_owners(torch.randint(world, (graph.num_dst,), generator=rng), world)
        square = graph.num_dst == graph.num_src
        return partitions.Partition(
            dst, dst if square else partitions.of_owners(torch.arange(graph.num_src) % world, world)
        )
    return getattr(partitions, kind)(graph, world)


def check(rank, world, cases):
    """The error of each case, as a share of what is allowed: (example, kind of partition, exchange, name of
    options, dtype).
    """
    errors = {}
    for case in cases:
        example, kind, exchange, extra, dtype = case
        graph = expressions.evaluate(example) if isinstance(example, str) else example
        options = OPTIONS[extra](graph)
        errors[str(case)] = worst(
            graph, partition_of(graph, kind, world), options, getattr(torch, dtype), exchange=exchange
        )
    return errors


def learned_table(graph):
    """A relative bias that differs by head and distance."""
    return score_mods.relative_bias(torch.linspace(-1, 1, 9).expand(graph.heads or HQ, 9).clone())


OPTIONS = {
    "plain": lambda graph: {},
    "alibi": lambda graph: {
        "score_mod": score_mods.alibi(score_mods.alibi_slopes(graph.heads or HQ)),
        "scale": 0.3,
    },
    "relative": lambda graph: {"score_mod": learned_table(graph)},
    "sinks": lambda graph: {"sink_logits": torch.linspace(-1, 2, graph.heads or HQ, dtype=torch.float64)},
    "dropout": lambda graph: {"dropout": 0.4},
    "bias": lambda graph: {
        "bias": torch.randn(HQ, graph.num_edges, generator=torch.Generator().manual_seed(1)).double()
    },
}

QUICK = [
    ("window(37, 5)", "contiguous", "halo", "plain", "float64"),
    ("window(37, 5)", "zigzag", "auto", "alibi", "float32"),
    ("causal(23)", "zigzag", "ring", "dropout", "float64"),
    ("causal(23)", "scattered", "gather", "relative", "float64"),
    ("window(30, 6) | sinks(30, 2)", "contiguous", "halo", "sinks", "float64"),
    ("erdos_renyi(29, 0.2)", "scattered", "halo", "bias", "float64"),
    ("cross(9, 14)", "contiguous", "auto", "dropout", "float64"),
    ("documents([3, 11, 7])", "contiguous", "ring", "bias", "float64"),
    ("window(19, 6)", "scattered", "gather", "bias", "float64"),
    ("strict_causal(11)", "contiguous", "halo", "sinks", "float64"),
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_equal_one_process(world):
    """Outputs and all gradients, for several graphs, partitions, exchanges and options in one start."""
    for found in ranks.run(world, check, QUICK):
        assert not {case: error for case, error in found.items() if not error <= 1}


def awkward(example):
    """The example with a number of tokens that no number of ranks divides, where its builder allows one."""
    for sizes in (("64", "61"), ("60", "59"), ("16)", "17)"), ("32", "31")):
        try:
            changed = example.replace(*sizes)
            if changed != example and isinstance(expressions.evaluate(changed), ga.TokenGraph):
                return changed
        except (ValueError, TypeError, IndexError):
            continue
    return example


def zoo(rank, world):
    """Every graph of the zoo, on partitions, exchanges and options in turn."""
    examples = [awkward(example) for example in catalogue.EXAMPLES.values()]
    graphs = [example for example in examples if isinstance(expressions.evaluate(example), ga.TokenGraph)]
    kinds, ways, extras = (
        ("contiguous", "zigzag", "scattered"),
        ("halo", "ring", "gather", "auto"),
        list(OPTIONS)[:-1],
    )
    cases = [
        (g, kinds[i % 3], ways[i % 4], extras[i % 5], ("float64", "float32")[i % 2])
        for i, g in enumerate(graphs)
    ]
    cases = [
        (*case[:-1], "float64") if "dropout" in case else case for case in cases
    ]  # one process alone draws the same
    assert len(cases) > 70
    return check(rank, world, cases)


@pytest.mark.slow
def test_the_whole_zoo_on_four_ranks_equals_one_process():
    """At awkward sizes: outputs and all gradients."""
    for found in ranks.run(4, zoo, deadline=400):
        assert not {case: error for case, error in found.items() if not error <= 1}


def several(rank, world):
    """What each of the functions that are asked on so many ranks returns."""
    return {function.__name__: function(rank, world) for function in ASKED[world]}


@functools.cache
def answers(world):
    """Of all of them, by rank."""
    return ranks.run(world, several)


def of_each(world, function):
    """What ``function(rank, world)`` returned on every rank."""
    return [found[function.__name__] for found in answers(world)]


def sent(rank, world, example, kind, exchange):
    """Bytes of k and v that this rank sent forward, and of their gradients backward, in one call; after one
    to get acquainted.
    """
    graph = expressions.evaluate(example)
    partition, tensors = partition_of(graph, kind, world), drawn(graph, torch.float32)
    on_ranks(graph, partition, tensors, {}, exchange=exchange)
    before = distributed.traffic()
    on_ranks(graph, partition, tensors, {}, exchange=exchange)
    after = distributed.traffic()
    return after.forward - before.forward, after.backward - before.backward


ROW = 2 * HKV * (D + DV) * 4  # bytes of a sender: 2 samples, keys and values, float32


def windows_sent(rank, world):
    """The bytes of a window over two lengths."""
    return [sent(rank, world, f"window({tokens}, 8)", "contiguous", "halo") for tokens in (40, 400)]


def test_bytes_of_a_window_do_not_grow_with_its_length():
    """Each rank but the last sends w - 1 senders on, and gets as many gradients back, whatever the number of
    tokens.
    """
    expected = [(7 * ROW, 0), (7 * ROW, 7 * ROW), (7 * ROW, 7 * ROW), (0, 7 * ROW)]
    assert of_each(4, windows_sent) == [[bytes_sent] * 2 for bytes_sent in expected]


PLANNED = [("causal(21)", "zigzag", way) for way in ("halo", "ring", "gather")]
PLANNED += [("erdos_renyi(30, 0.1)", "scattered", "halo"), ("cross(7, 16)", "contiguous", "halo")]


def many_sent(rank, world):
    """The bytes of several cases."""
    return [sent(rank, world, *case) for case in PLANNED]


def test_bytes_are_those_of_the_plan():
    """What was planned without running anything is what was sent, in every way of exchanging."""
    measured = of_each(3, many_sent)
    for i, (example, kind, way) in enumerate(PLANNED):
        graph = expressions.evaluate(example)
        sizes = {"kv_heads": HKV, "value_dim": DV, "batch": 2, "dtype": torch.float32}
        planned = distributed.plan(graph, 3, HQ, D, partition=partition_of(graph, kind, 3), **sizes)
        expected = next(each.received for each in planned.exchanges if each.name == way)
        assert sum(rank[i][0] for rank in measured) == expected
        if way != "gather":  # whose blocks are filled up to the largest
            assert sum(rank[i][1] for rank in measured) == expected


class Told(torch.autograd.Function):
    """The score itself; tells a list when it is asked for, and when its gradient is."""

    @staticmethod
    def forward(ctx, score, log, name):
        """Remember whom to tell."""
        ctx.log, ctx.name = log, name
        log.append(name)
        return score.clone()

    @staticmethod
    def backward(ctx, grad):
        """Tell it."""
        ctx.log.append(f"{ctx.name} backward")
        return grad, None, None


def order_of_events(rank, world):
    """When a rank sends, waits, and computes on its own senders and on those that arrived."""
    graph, log = patterns.window(8, 3), []
    tensors = drawn(graph)
    own = set(partitions.contiguous(graph, world).src.tokens(rank).tolist())

    def mod(score, b, h, dst, src):
        inside = [int(token) in own for token in src.flatten()]
        return Told.apply(score, log, "own" if all(inside) else "others")

    plain, sent = torch.distributed.all_to_all_single, []

    class Waited:
        def __init__(self, work):
            self.work = work

        def wait(self):
            log.append("waits")
            self.work.wait()

    def told(*arguments, **options):
        sent.append(arguments)
        log.append("sends")
        return Waited(plain(*arguments, **options))

    on_ranks(graph, partitions.contiguous(graph, world), tensors, {})  # ranks tell each other who is heard
    torch.distributed.all_to_all_single = told
    on_ranks(
        graph,
        partitions.contiguous(graph, world),
        tensors,
        {"score_mod": mod},
        backend="reference",
        exchange="halo",
    )
    return log


def test_the_own_part_is_computed_while_the_others_travel():
    """Forward and backward: sent first, then the own part, and only then waited for."""
    forward = ["sends", "own", "waits", "others"]
    backward = ["others backward", "sends", "own backward", "waits"]
    assert ranks.run(2, order_of_events)[1] == forward + backward


def told(rank, world, backend):
    """Bytes that ranks tell each other beside rows, call by call, where the group's backend has this name."""
    torch.distributed.get_backend = lambda group=None: backend
    x, spoken = torch.ones(1, 1, 4, 4), [distributed.traffic().control]
    for graph in (patterns.causal(8), patterns.causal(8)):
        for _ in range(3):
            distributed.attend(x, x, x, graph, exchange="ring")
            spoken.append(distributed.traffic().control)
    return [after - before for before, after in itertools.pairwise(spoken)]


def test_ranks_agree_at_every_call_over_gloo_and_elsewhere_at_the_first_of_each_kind():
    """Seven things and whether there is trouble, 8 bytes each, to the other rank; of a graph that is known
    nothing more.
    """
    assert ranks.run(2, told, "gloo") == [[64] * 6] * 2
    assert ranks.run(2, told, "nccl") == [[64, 0, 0, 64, 0, 0]] * 2


def corners(rank, world):
    """More ranks than tokens, ranks without receivers or senders, graphs without edges or tokens."""
    few = patterns.causal(2)
    one_sided = patterns.cross(5, 6)
    owners = [partitions.of_owners(torch.full((n,), r), world) for n, r in ((5, 0), (6, world - 1))]
    empty = patterns.causal(9) - patterns.causal(9)
    cases = {
        "few": (few, "contiguous"),
        "nobody": (patterns.causal(0), "contiguous"),
        "edgeless": (empty, "zigzag"),
        "apart": (one_sided, partitions.Partition(*owners)),
        "rows": (patterns.window(12, 4).rows(5, 12), "contiguous"),
        "shifted": (patterns.window(12, 4).rows(5, 12), "scattered"),
    }
    errors = {}
    for name, (graph, kind) in cases.items():
        partition = kind if isinstance(kind, partitions.Partition) else partition_of(graph, kind, world)
        for way in ("halo", "ring", "gather"):
            options = OPTIONS["alibi"](graph) | OPTIONS["dropout"](graph) | OPTIONS["sinks"](graph)
            errors[name, way] = worst(graph, partition, options, exchange=way)
    return errors


def test_corners_equal_one_process():
    """Whoever has nothing to do takes part all the same; positions of a part of a graph are the whole's."""
    for found in of_each(4, corners):
        assert max(found.values()) <= 1, found


def partly(rank, world):
    """Gradients of q alone, none at all, and of a rank whose output nobody asks about beyond its sum."""
    graph = patterns.causal(10)
    partition = partitions.contiguous(graph, world)
    q, k, v, _ = (distributed.scatter(x, partition) for x in drawn(graph))
    whole = in_one_process(graph, [*drawn(graph)[:3], torch.ones(())], {})
    errors = []
    for way in ("halo", "ring", "gather"):
        with torch.no_grad():
            out = distributed.attend(q, k, v, graph, exchange=way)
        errors.append(ranks.share([out], [distributed.scatter(whole[0], partition)]))
        leaf = q.clone().requires_grad_()
        distributed.attend(leaf, k, v, graph, exchange=way).sum().backward()
        errors.append(ranks.share([leaf.grad], [distributed.scatter(whole[1], partition)], whole[1:]))
    _, info = distributed.attend(q, k, v, graph, return_info=True)
    lse = ga.attend(*drawn(graph)[:3], graph, return_info=True)[1].lse
    return max(*errors, ranks.share([info.lse], [distributed.scatter(lse, partition, axis=2)]))


@pytest.mark.parametrize("world", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_some_gradients_or_none(world):
    """And lse; one rank alone is one process."""
    assert max(of_each(world, partly)) <= 1


HALVES = [
    ("causal(32)", "zigzag", "ring", "plain", "bfloat16"),
    ("full(64)", "contiguous", "ring", "plain", "float16"),
]
HALVES += [(f"causal({n})", "zigzag", way, "plain", "float16") for n, way in ((61, "halo"), (64, "gather"))]


def halves(rank, world):
    """Their errors as shares of what the rule allows: what is merged was not rounded before."""
    return check(rank, world, HALVES)


def test_half_precision_is_as_good_as_torchs_kernel():
    """Within 2 times its error in the output and 3 times in the gradients."""
    for found in of_each(4, halves):
        assert not {case: error for case, error in found.items() if not error <= 1}


def poisoned(rank, world, way):
    """A NaN in the keys of token 3: who hears it, and whether anybody else's values or gradients know of
    it.
    """
    graph = patterns.window(12, 3)
    partition = partitions.zigzag(graph, world)
    q, k, v, factor = drawn(graph)
    k[:, :, 3] = torch.nan
    hears = graph.mask()[:, 3]
    factor[:, :, hears] = 0.0  # the loss does not look at them
    found, _ = on_ranks(graph, partition, (q, k, v, factor), {}, exchange=way)
    spoilt = found[0].isnan().any(-1).any(1).any(0)
    hearing = distributed.scatter(hears, partition, axis=0)
    return torch.equal(spoilt, hearing), bool(found[1][:, :, ~hearing].isfinite().all())


def all_poisoned(rank, world):
    """In every way of exchanging."""
    return {way: poisoned(rank, world, way) for way in ("halo", "ring", "gather")}


def test_a_nan_reaches_those_who_hear_it_and_nobody_else():
    """On whatever rank; the queries of all others have finite gradients."""
    for found in of_each(2, all_poisoned):
        assert found == dict.fromkeys(("halo", "ring", "gather"), (True, True))


def dropped_edges(rank, world):
    """Which weights are kept, read off with one-hot values: 0 or 1 / (1 - p) times the weight."""
    graph, n = patterns.causal(13), 13
    q = k = torch.zeros(1, 2, n, 4, dtype=torch.float64)
    v = torch.eye(n, dtype=torch.float64).expand(1, 2, n, n).contiguous()
    torch.manual_seed(SEED)
    whole = ga.attend(q, k, v, graph, dropout=0.5)
    same = []
    for kind in ("contiguous", "zigzag", "scattered"):
        partition = partition_of(graph, kind, world)
        torch.manual_seed(SEED + rank)
        out = distributed.attend(
            *(distributed.scatter(x, partition) for x in (q, k, v)),
            graph,
            partition,
            dropout=0.5,
            exchange="ring",
        )
        same.append(torch.equal(out > 0, distributed.scatter(whole, partition) > 0))
    return same, int((whole > 0).sum())


def test_the_same_edges_are_dropped_as_in_one_process():
    """Edge by edge, whatever the partition."""
    results = of_each(3, dropped_edges)
    assert all(same == [True] * 3 for same, _ in results)
    assert 0 < results[0][1] < 2 * 91


def models(rank, world, kind):
    """Logits and the gradients of all parameters of a model, and a layer with rotary heads and grouped
    keys.
    """
    torch.manual_seed(0)
    graph = patterns.window(19, 6) | patterns.sinks(19, 2)
    mine = distributed.local(graph, partition_of(graph, kind, world))
    model = ga.model.LanguageModel(
        ga.model.Config(40, width=16, num_heads=2, head_dim=8, mlp_width=16)
    ).double()
    heads = ga.StandardHeads(16, 4, num_kv_heads=2, rotary=ga.rotary.Rotary()).double()
    layer = ga.MessagePassingAttention(heads, backend="auto")
    tokens, x = torch.randint(40, (2, 19)), torch.randn(2, 19, 16, dtype=torch.float64)

    def gradients(output, of):
        """Of a loss that weighs every token differently."""
        of.zero_grad()
        (output * torch.linspace(1, 2, 19, dtype=torch.float64).view(-1, 1)[at]).sum().backward()
        return [parameter.grad.clone() for parameter in of.parameters()]

    at = slice(None)
    wholes = [(model(tokens, graph), model), (layer(x, graph), layer)]
    want = [(output.detach(), gradients(output, of)) for output, of in wholes]
    at = mine.partition.dst.tokens(rank)
    parts = [(model(tokens[:, at], mine), model), (layer(x[:, at], mine), layer)]
    errors = []
    for (output, of), (whole, grads) in zip(parts, want, strict=True):
        found = gradients(output, of)
        for gradient in found:
            torch.distributed.all_reduce(gradient)
        errors += [ranks.share([output.detach()], [whole[:, at]], [whole]), ranks.share(found, grads)]
    return max(errors)


@pytest.mark.parametrize("kind", ["zigzag", pytest.param("scattered", marks=pytest.mark.slow)])
def test_models_and_layers_run_on_ranks(kind):
    """With ``local(graph)`` in the graph's place: logits, and gradients summed over ranks, of learned and
    rotary positions.
    """
    assert max(ranks.run(3, models, kind)) <= 1


def idle(rank, world):
    """Gradients under DDP where a rank has no tokens, or no edges: of two steps, against those of one
    process.
    """
    torch.manual_seed(0)
    config, errors = ga.model.Config(40, width=16, num_heads=2, head_dim=8, mlp_width=16), []
    model, alone = (ga.model.LanguageModel(config).double() for _ in range(2))
    alone.load_state_dict(model.state_dict())
    together = torch.nn.parallel.DistributedDataParallel(model)
    for graph in (patterns.causal(2), patterns.documents([3, 1, 1]), patterns.causal(5) - patterns.causal(5)):
        tokens, mine = torch.randint(40, (2, graph.num_dst)), distributed.local(graph)
        for called, graphs, own in (
            (alone, graph, tokens),
            (together, mine, distributed.scatter(tokens, mine.partition, -1)),
        ):
            called.zero_grad()
            called(own, graphs).square().sum().backward()
        found = [got.grad * world for got in model.parameters()]
        wanted = [torch.zeros_like(want) if want.grad is None else want.grad for want in alone.parameters()]
        errors.append(ranks.share(found, wanted))
    return max(errors)


def test_a_rank_without_edges_takes_part_in_ddp():
    """What is learned of edges, a table of distances, has gradients of 0 there, not none: DDP waits for
    them.
    """
    assert max(of_each(3, idle)) <= 1


def compiled(rank, world):
    """The error of a compiled layer and of its gradient, and what fullgraph=True says."""
    torch.manual_seed(0)
    x, outcomes = torch.randn(2, 19, 16, dtype=torch.float64), []
    layer = ga.MessagePassingAttention(ga.StandardHeads(16, 4), backend="auto").double()
    for called in (layer, torch.compile(layer, backend="eager")):
        mine = distributed.local(patterns.window(19, 6))  # of which nothing is known yet
        own = distributed.scatter(x, mine.partition)
        leaf = own.clone().requires_grad_()
        out = called(leaf, mine)
        out.square().sum().backward()
        outcomes.append((out.detach(), leaf.grad))
    torch.compiler.reset()
    try:
        torch.compile(layer, backend="eager", fullgraph=True)(own, mine)
    except Exception as error:
        refusal = str(error)
    return max(ranks.share([found], [true]) for true, found in zip(*outcomes, strict=True)), refusal


@pytest.mark.slow
def test_a_layer_is_compiled_around_its_attention():
    """With a break in the graph, which fullgraph=True refuses."""
    for error, refusal in ranks.run(2, compiled, deadline=120.0):
        assert error <= 1
        assert re.search("function run .* was wrapped with `torch.compiler.disable`", refusal)


def both(rank, world):
    """Heads as shards and tokens on ranks, over a graph that differs by head: two of each."""
    torch.manual_seed(0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "heads"))
    graph = patterns.duo_attention(14, 4, [1, 2], 3)
    layer = ga.MessagePassingAttention(
        ga.StandardHeads(16, 4, num_kv_heads=2),
        score_mods.alibi(score_mods.alibi_slopes(4)),
        dropout=0.3,
        backend="auto",
    ).double()
    x = torch.randn(2, 14, 16, dtype=torch.float64)
    torch.manual_seed(SEED)
    want = layer(x, graph).detach()
    distributed.shard_heads(layer, mesh["heads"])
    mine = distributed.local(graph, "zigzag", mesh["tokens"])
    torch.manual_seed(SEED)
    found = layer(distributed.scatter(x, mine.partition, group=mesh["tokens"]), mine)
    return ranks.share([found.detach()], [distributed.scatter(want, mine.partition, group=mesh["tokens"])])


def test_heads_and_tokens_go_together():
    """On a mesh of two axes: each head keeps its own graph, slope and dropped edges."""
    assert max(of_each(4, both)) <= 1


def gathers(rank, world):
    """gather undoes scatter, and its gradient is the sum of all ranks'."""
    x = torch.arange(22, dtype=torch.float64).view(1, 11, 2)
    partition = partitions.zigzag(patterns.causal(11), world)
    own = distributed.scatter(x, partition).requires_grad_()
    whole = distributed.gather(own, partition)
    (whole * (rank + 1)).sum().backward()
    return torch.equal(whole, x), own.grad.unique().tolist()


def test_gather_undoes_scatter():
    """1 + 2 + 3 of three ranks."""
    assert of_each(3, gathers) == [(True, [6.0])] * 3


def refused(rank, world):
    """What one rank alone does wrong is told on both, and the next call is served."""
    graph, other = patterns.causal(8), patterns.window(8, 3)
    x, said = torch.ones(1, 1, 4, 4), []

    def attempt(*arguments, **options):
        try:
            distributed.attend(*arguments, **options)
        except ValueError as error:
            said.append(str(error))
        assert torch.equal(distributed.attend(x, x, x, graph), x)  # means of ones

    first = rank == 0
    attempt(x[:, :, : 3 if first else 4], x, x, graph)
    attempt(x, x, x, graph if first else other)
    attempt(x, x, x, graph, "contiguous" if first else "zigzag")
    attempt(x, x, x, graph, exchange="ring" if first else "gather")
    attempt(x, x.clone().requires_grad_(first), x, graph)
    attempt(x, x.double() if first else x, x, graph)
    attempt(x, x, x, graph, bias=torch.zeros(3))
    attempt(x, x, x, graph, exchange="pigeon")
    attempt(x, x, x, graph, backend="dense" if first else "rows")
    attempt(x, x, x, graph, backend="abacus")
    attempt(x, x, x, graph, partitions.contiguous(graph, 3))
    attempt(x, x, x, graph, partitions.contiguous(patterns.causal(9), 2))
    attempt(x, x, x, graph, backend=3 if first else "auto")
    attempt(x, x, x, graph, scale=0.5 if first else 0.25)
    attempt(x.repeat(1, 2 if first else 1, 1, 1), x, x, graph)
    for part, of in (((x[:, :, :2], x), "length"), ((x, x[:, :, :, :3]), "rows"), ((None, x), "kind")):
        try:
            distributed.gather(part[rank], partitions.contiguous(graph, 2))
        except ValueError as error:
            said.append(f"{of}: {error}")
    return said


REFUSED = [
    "rank 0: ValueError: .*does not fit q with 3 receivers",
    "all ranks must give graph alike: rank 0 has .*causal.*, but rank 1 has .*window",
    "all ranks must give partition alike: rank 0 has Partition.contiguous",
    "all ranks must give exchange alike: rank 0 has ring, but rank 1 has gather",
    "all ranks must give gradients alike: rank 0 has wanted, but rank 1 has not wanted",
    "rank 0: ValueError: k must be like q",
    r"rank 0: ValueError: bias must be broadcastable to \[B, Hq, E\] = \[1, 1, 10\], got \[3\]; rank 1: .*\[1, 1, 26\]",
    "exchange must be one of 'auto', 'halo', 'ring', 'gather', got 'pigeon'",
    "all ranks must give backend alike: rank 0 has dense, but rank 1 has rows",
    "backend 'abacus' cannot hold .*: it is none of",
    "partition is for 3 ranks, but the group has 2",
    "partition is of 9 receivers",
    "rank 0: TypeError: backend must be a name or a gnn_attention.backends.Backend, got int",
    "all ranks must give options alike: rank 0 has scale 0.5, dropout 0, nothing else, but rank 1 has scale 0.25",
    r"all ranks must give q, k and v alike: rank 0 has \[B, Hq, Hkv, D, Dv\] = \[1, 2, 1, 4, 4\]",
    "length: rank 0: ValueError: x must have the 4 own tokens",
    r"rows: all ranks must give a row of x alike: rank 0 has \[1, 1, 4\]",
    "kind: rank 0: TypeError: x must be a tensor, got NoneType",
]


def test_what_one_rank_does_wrong_is_told_on_all():
    """Nobody waits for ever, all raise the same, and the next call is served."""
    first, second = of_each(2, refused)
    assert first == second
    assert len(first) == len(REFUSED)
    for message, pattern in zip(first, REFUSED, strict=True):
        assert re.search(pattern, message), (pattern, message)


def views(rank, world):
    """What a rank's view of a graph refuses."""
    graph = patterns.causal(6)
    mine = distributed.local(graph)
    layer = ga.MessagePassingAttention(ga.StandardHeads(4, 1))
    x = torch.ones(1, 1, 3, 4)
    with pytest.raises(NotImplementedError, match=r"the message-passing path .backend=None. need"):
        layer(torch.zeros(1, 3, 4), mine)
    with pytest.raises(
        NotImplementedError, match=r"change the whole graph, then take gnn_attention.distributed.local"
    ):
        mine | mine
    with pytest.raises(NotImplementedError, match="A per-edge bias goes"):
        ga.attend(x, x, x, mine, bias=torch.zeros(1))
    with pytest.raises(TypeError, match="graph must be the TokenGraph of all tokens"):
        distributed.local(mine)
    with pytest.raises(ValueError, match="x must have 6 tokens on axis -2"):
        distributed.scatter(torch.zeros(5, 2), mine.partition)
    with pytest.raises(ValueError, match="rank 0: ValueError: x must have the 3 own tokens"):
        distributed.gather(torch.zeros(5, 2), mine.partition)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        distributed.scatter([0.0] * 6, mine.partition)
    with pytest.raises(IndexError, match=r"axis must be in -2 \.\. 1, one of x \[6, 2\], got 7"):
        distributed.scatter(torch.zeros(6, 2), mine.partition, axis=7)
    with pytest.raises(TypeError, match="graph must be the TokenGraph of all tokens, got NoneType"):
        distributed.in_edges(None)
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a DeviceMesh of one axis, got str"):
        distributed.local(graph, group="tokens")
    with pytest.raises(ValueError, match="side must be one of"):
        distributed.scatter(torch.zeros(6, 2), mine.partition, side="left")
    return repr(mine)


def test_a_view_refuses_what_it_cannot_hold():
    """By name."""
    said = [f"RankGraph(causal(6): rank {rank} of 2, 3 own src -> 3 own dst)" for rank in range(2)]
    assert of_each(2, views) == said


def test_without_a_process_group_the_way_is_shown():
    """In this process nobody has called init_process_group."""
    x = torch.ones(1, 1, 4, 4)
    with pytest.raises(
        ValueError, match=r"torch.distributed is not initialised: start the program with torchrun"
    ):
        distributed.attend(x, x, x, patterns.causal(4))


ASKED = {
    1: [partly],
    2: [refused, views, all_poisoned],
    3: [many_sent, partly, dropped_edges, gathers, idle],
    4: [windows_sent, corners, halves, both],
}
