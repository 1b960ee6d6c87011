"""Tokens on ranks: on gloo processes, equal to one process in outputs, gradients and dropped edges."""

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
WAYS = ("halo", "ring", "gather")
D, DV, HQ, HKV = 4, 3, 4, 2


def drawn(graph, dtype=torch.float64):
    """q, k, v and what the output is multiplied with, the same on every rank."""
    rng = torch.Generator().manual_seed(SEED)
    heads, batch = graph.heads or HQ, graph.batch or 2
    kv_heads = HKV if heads % HKV == 0 else heads
    dst, src = graph.num_dst, graph.num_src
    shapes = ((heads, dst, D), (kv_heads, src, D), (kv_heads, src, DV), (heads, dst, DV))
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
    """The same of this rank's tokens, and for each how a whole result is cut down to them."""
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
    """Errors as a share of what is allowed: in float64 against one process, else by the rule."""
    options, tensors = options or {}, drawn(graph, dtype)
    found, cuts = on_ranks(graph, partition, tensors, options, **how)
    if dtype != torch.float64:
        return judged(graph, partition, found, tensors, options)
    wholes = in_one_process(graph, tensors, options)
    parts = [cut(whole) for cut, whole in zip(cuts, wholes, strict=True)]
    return max(ranks.share(found[at], parts[at], wholes[at]) for at in (slice(1), slice(1, None)))


def judged(graph, partition, found, tensors, options):
    """By the rule, on the first rank, which judges the results of all; 0 on the others."""
    sides = zip(found, ("dst", "dst", "src", "src"), strict=True)
    out, *gradients = (distributed.gather(x, partition, side=side) for x, side in sides)
    if torch.distributed.get_rank():
        return 0.0
    q, k, v, factor = tensors
    truth = attention_truth(q, k, v, graph, factor, **options)
    outcome = judge(out, dict(zip("qkv", gradients, strict=True)), truth)
    return max(outcome.output / ALLOWED_OUTPUT, outcome.gradient / ALLOWED_GRADIENT)


def partition_of(graph, kind, world):
    if kind != "scattered":
        return getattr(partitions, kind)(graph, world)
    rng = torch.Generator().manual_seed(3)
    dst = src = partitions.of_owners(torch.randint(world, (graph.num_dst,), generator=rng), world)
    if graph.num_dst != graph.num_src:
        src = partitions.of_owners(torch.arange(graph.num_src) % world, world)
    return partitions.Partition(dst, src)


def check(rank, world, cases):
    """Errors as a share of what is allowed, by (example, partition, exchange, name of options, dtype)."""
    errors = {}
    for case in cases:
        example, kind, exchange, extra, dtype = case
        graph = expressions.evaluate(example)
        partition, options = partition_of(graph, kind, world), OPTIONS[extra](graph)
        errors[str(case)] = worst(graph, partition, options, getattr(torch, dtype), exchange=exchange)
    return errors


def assert_allowed(results):
    for found in results:
        assert not {case: error for case, error in found.items() if not error <= 1}


def learned_table(graph):
    """A relative bias that differs by head and distance."""
    return score_mods.relative_bias(torch.linspace(-1, 1, 9).expand(graph.heads or HQ, 9).clone())


def drawn_bias(graph):
    return torch.randn(HQ, graph.num_edges, generator=torch.Generator().manual_seed(1)).double()


def alibi(graph):
    return score_mods.alibi(score_mods.alibi_slopes(graph.heads or HQ))


OPTIONS = {
    "plain": lambda graph: {},
    "alibi": lambda graph: {"score_mod": alibi(graph), "scale": 0.3},
    "relative": lambda graph: {"score_mod": learned_table(graph)},
    "sinks": lambda graph: {"sink_logits": torch.linspace(-1, 2, graph.heads or HQ, dtype=torch.float64)},
    "dropout": lambda graph: {"dropout": 0.4},
    "bias": lambda graph: {"bias": drawn_bias(graph)},
}

QUICK = [
    ("window(37, 5)", "contiguous", "halo", "plain", "float64"),
    ("window(37, 5)", "zigzag", "auto", "alibi", "float64"),
    ("window(37, 5)", "zigzag", "halo", "sinks", "float32"),
    ("causal(23)", "zigzag", "ring", "dropout", "float64"),
    ("causal(13)", "scattered", "ring", "dropout", "float64"),
    ("causal(23)", "scattered", "gather", "relative", "float64"),
    ("window(30, 6) | sinks(30, 2)", "contiguous", "halo", "sinks", "float64"),
    ("erdos_renyi(29, 0.2)", "scattered", "halo", "bias", "float64"),
    ("cross(9, 14)", "contiguous", "auto", "dropout", "float64"),
    ("documents([3, 11, 7])", "contiguous", "ring", "bias", "float64"),
    ("window(19, 6)", "scattered", "gather", "bias", "float64"),
    ("strict_causal(11)", "contiguous", "halo", "sinks", "float64"),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_process(world):
    """Outputs and all gradients, for several graphs, partitions, exchanges and options in one start."""
    assert_allowed(ranks.run(world, check, QUICK))


def zoo(rank, world):
    """Every graph of the zoo, on partitions, exchanges and options in turn."""
    examples = catalogue.EXAMPLES.values()
    graphs = [example for example in examples if isinstance(expressions.evaluate(example), ga.TokenGraph)]
    kinds, ways = ("contiguous", "zigzag", "scattered"), ("halo", "ring", "gather", "auto")
    extras, cases = list(OPTIONS)[:-1], []
    for i, example in enumerate(graphs):
        # the rule knows no truth of the others
        dtype = "float32" if i % 2 and extras[i % 5] in ("plain", "sinks") else "float64"
        cases.append((example, kinds[i % 3], ways[i % 4], extras[i % 5], dtype))
    return check(rank, world, cases)


@pytest.mark.slow
def test_the_whole_zoo_equals_one_process():
    """Outputs and all gradients, on a number of ranks that divides few sizes."""
    assert_allowed(ranks.run(3, zoo, deadline=400))


def sent(rank, world, example, kind, exchange):
    """Bytes of k and v that this rank sends forward, and of their gradients backward, in a second call."""
    graph = expressions.evaluate(example)
    partition, tensors = partition_of(graph, kind, world), drawn(graph, torch.float32)
    on_ranks(graph, partition, tensors, {}, exchange=exchange)
    before = distributed.traffic()
    on_ranks(graph, partition, tensors, {}, exchange=exchange)
    after = distributed.traffic()
    return after.forward - before.forward, after.backward - before.backward


PLANNED = [("causal(21)", "zigzag", way) for way in ("halo", "ring", "gather")]
PLANNED += [("erdos_renyi(30, 0.1)", "scattered", "halo"), ("window(400, 8)", "contiguous", "halo")]


def many_sent(rank, world):
    return [sent(rank, world, *case) for case in PLANNED]


def test_bytes_are_those_of_the_plan():
    measured = ranks.run(3, many_sent)
    for i, (example, kind, way) in enumerate(PLANNED):
        graph = expressions.evaluate(example)
        sizes = {"kv_heads": HKV, "value_dim": DV, "batch": 2, "dtype": torch.float32}
        planned = distributed.plan(graph, 3, HQ, D, partition=partition_of(graph, kind, 3), **sizes)
        expected = next(each.received for each in planned.exchanges if each.name == way)
        assert sum(rank[i][0] for rank in measured) == expected
        assert sum(rank[i][1] for rank in measured) == expected


def order_of_events(rank, world):
    """When a rank sends, waits, and computes on its own senders and on those that arrived."""
    graph, log = patterns.window(8, 3), []
    partition, tensors = partitions.contiguous(graph, world), drawn(graph)
    own = set(partition.src.tokens(rank).tolist())

    def mod(score, b, h, dst, src):
        name = "own" if own.issuperset(src.flatten().tolist()) else "others"
        log.append(name)
        score = score.clone()
        score.register_hook(lambda grad: log.append(f"{name} backward"))
        return score

    plain = torch.distributed.all_to_all_single

    class Waits:
        def __init__(self, work):
            self.work = work

        def wait(self):
            log.append("waits")
            self.work.wait()

    def sends(*arguments, **options):
        log.append("sends")
        return Waits(plain(*arguments, **options))

    # the first call exchanges the numbers of the halo and tries the score_mod on a few pairs
    on_ranks(graph, partition, tensors, {"score_mod": mod}, backend="reference", exchange="halo")
    log.clear()
    torch.distributed.all_to_all_single = sends
    on_ranks(graph, partition, tensors, {"score_mod": mod}, backend="reference", exchange="halo")
    return log


def test_the_own_part_is_computed_while_the_others_travel():
    """Forward and backward: sent first, then the own part, and only then waited for."""
    backward = ["others backward", "sends", "own backward", "waits"]
    assert ranks.run(2, order_of_events)[1] == ["sends", "own", "waits", "others", *backward]


def control_bytes(rank, world, backend):
    """Bytes of control messages, call by call, where the group's backend has this name."""
    torch.distributed.get_backend = lambda group=None: backend
    x, sent = torch.ones(1, 1, 4, 4), [distributed.traffic().control]
    for graph in (patterns.causal(8), patterns.causal(8)):
        for _ in range(3):
            distributed.attend(x, x, x, graph, exchange="ring")
            sent.append(distributed.traffic().control)
    return [after - before for before, after in itertools.pairwise(sent)]


@pytest.mark.parametrize(("backend", "sent"), [("gloo", [8] * 6), ("nccl", [8, 0, 0, 8, 0, 0])])
def test_ranks_check_agreement(backend, sent):
    """At every call over gloo, elsewhere at the first of each kind: a hash of 8 bytes."""
    assert ranks.run(2, control_bytes, backend) == [sent] * 2


def corners(rank, world):
    """More ranks than tokens, ranks without receivers or senders, graphs without edges or tokens."""
    owners = [partitions.of_owners(torch.full((n,), r), world) for n, r in ((5, 0), (6, world - 1))]
    rows = patterns.window(12, 4).rows(5, 12)
    cases = {
        "few": (patterns.causal(2), "contiguous"),
        "no tokens": (patterns.causal(0), "contiguous"),
        "no edges": (patterns.causal(9) - patterns.causal(9), "zigzag"),
        "one side each": (patterns.cross(5, 6), partitions.Partition(*owners)),
        "rows, scattered": (rows, "scattered"),
    }
    errors = {}
    for name, (graph, kind) in cases.items():
        partition = kind if isinstance(kind, partitions.Partition) else partition_of(graph, kind, world)
        options = OPTIONS["alibi"](graph) | OPTIONS["dropout"](graph) | OPTIONS["sinks"](graph)
        for way in WAYS:
            errors[name, way] = worst(graph, partition, options, exchange=way)
    return errors


def test_corners_equal_one_process():
    """Ranks without work take part; positions of a part of a graph are those of the whole."""
    assert_allowed(ranks.run(4, corners))


def partly(rank, world):
    """Gradients of q alone, and lse."""
    graph = patterns.causal(10)
    partition, errors = partitions.contiguous(graph, world), []
    q, k, v, _ = (distributed.scatter(x, partition) for x in drawn(graph))
    whole = in_one_process(graph, [*drawn(graph)[:3], torch.ones(())], {})
    for way in WAYS:
        leaf = q.clone().requires_grad_()
        distributed.attend(leaf, k, v, graph, exchange=way).sum().backward()
        errors.append(ranks.share([leaf.grad], [distributed.scatter(whole[1], partition)], whole[1:]))
    _, info = distributed.attend(q, k, v, graph, return_info=True)
    lse = ga.attend(*drawn(graph)[:3], graph, return_info=True)[1].lse
    return max(*errors, ranks.share([info.lse], [distributed.scatter(lse, partition, axis=2)]))


def test_some_gradients_and_lse():
    assert max(ranks.run(3, partly)) <= 1


HALVES = [
    ("causal(32)", "zigzag", "ring", "plain", "bfloat16"),
    ("full(64)", "contiguous", "ring", "plain", "float16"),
]
HALVES += [(f"causal({n})", "zigzag", way, "plain", "float16") for n, way in ((61, "halo"), (64, "gather"))]


def halves(rank, world):
    return check(rank, world, HALVES)


def test_half_precision_is_as_good_as_torchs_kernel():
    """Within 2 times its error in the output and 3 times in the gradients: merging does not round."""
    assert_allowed(ranks.run(4, halves))


def with_nan(rank, world):
    """A NaN in the keys of token 3: whether its receivers are NaN and gradients of others are finite."""
    graph, found = patterns.window(12, 3), {}
    partition, attends = partitions.zigzag(graph, world), graph.mask()[:, 3]
    own = distributed.scatter(attends, partition, axis=0)
    for way in WAYS:
        q, k, v, factor = drawn(graph)
        k[:, :, 3] = torch.nan
        # the loss leaves them out
        factor[:, :, attends] = 0.0
        (out, grad, *_), _ = on_ranks(graph, partition, (q, k, v, factor), {}, exchange=way)
        rows = out.isnan().any(-1).any(1).any(0)
        found[way] = torch.equal(rows, own) and bool(grad[:, :, ~own].isfinite().all())
    return found


def test_a_nan_reaches_the_receivers_that_attend_to_it_and_no_other():
    assert ranks.run(2, with_nan) == [dict.fromkeys(WAYS, True)] * 2


def wrong(rank, world):
    """What wrong arguments of one rank raise; each time the next call is served."""
    graph, other, first = patterns.causal(8), patterns.window(8, 3), rank == 0
    x = torch.ones(1, 1, 4, 4)
    partition = partitions.contiguous(graph, 2)
    attend = functools.partial(distributed.attend, x, x, x, graph)
    calls = [
        lambda: distributed.attend(x[:, :, : 3 if first else 4], x, x, graph),
        lambda: distributed.attend(x, x, x, graph if first else other),
        lambda: attend("contiguous" if first else "zigzag"),
        lambda: distributed.attend(x, x.clone().requires_grad_(first), x, graph),
        lambda: attend(bias=torch.zeros(3)),
        lambda: attend(backend="dense" if first else "rows"),
        lambda: attend(backend="abacus"),
        lambda: attend(partitions.contiguous(graph, 3)),
        lambda: attend(backend=3 if first else "auto"),
        lambda: attend(scale=0.5 if first else 0.25),
        lambda: distributed.gather(x[:, :, : 2 if first else 4], partition),
        lambda: distributed.gather(None if first else x, partition),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        messages.append(str(error.value))
        # means of ones
        assert torch.equal(attend(), x)
    return messages


MESSAGES = [
    "rank 0: ValueError: .*does not fit q with 3 receivers",
    "all ranks must give graph alike: rank 0 has .*causal.*, but rank 1 has .*window",
    "all ranks must give partition alike: rank 0 has Partition.contiguous",
    "all ranks must give gradients alike: rank 0 has wanted, but rank 1 has not wanted",
    r"rank 0: ValueError: bias must be broadcastable to .*\[1, 1, 10\], got \[3\]; rank 1: .*\[1, 1, 26\]",
    "all ranks must give backend alike: rank 0 has dense, but rank 1 has rows",
    "backend 'abacus' cannot hold .*: it is none of",
    "partition must be for the 2 ranks of the group, got 3",
    "rank 0: TypeError: backend must be a name or a Backend, got 3 of type int",
    "all ranks must give options alike: rank 0 has scale 0.5, dropout 0, nothing else, but rank 1",
    "rank 0: ValueError: x must have the 4 own tokens",
    "rank 0: TypeError: x must be a Tensor, got None of type NoneType",
]


def test_a_wrong_argument_of_one_rank_raises_on_all():
    first, second = ranks.run(2, wrong)
    assert first == second
    for message, pattern in zip(first, MESSAGES, strict=True):
        assert re.search(pattern, message), (pattern, message)


def test_without_a_process_group_the_error_shows_the_way():
    x = torch.ones(1, 1, 4, 4)
    with pytest.raises(ValueError, match="is not initialised: start the program with torchrun"):
        distributed.attend(x, x, x, patterns.causal(4))
