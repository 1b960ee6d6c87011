"""On several gloo processes, outputs, gradients and dropped edges equal those of one process."""

import functools
import re

import pytest
import torch
from support import ranks

import gnn_attention as ga
from gnn_attention import distributed, patterns, score_mods
from gnn_attention.distributed import partition as partitions

SEED = 20
D, DV, HQ, HKV = 4, 3, 4, 2


def make_inputs(graph, dtype=torch.float64):
    """Return q, k, v and the factor of the output in the loss, which are the same on every rank."""
    rng = torch.Generator().manual_seed(SEED)
    heads = graph.heads or HQ
    batch = 0 if graph == NO_SAMPLES else graph.batch or 2
    kv_heads = HKV if heads % HKV == 0 else heads
    dst, src = graph.num_dst, graph.num_src
    shapes = ((heads, dst, D), (kv_heads, src, D), (kv_heads, src, DV), (heads, dst, DV))
    return [torch.randn(batch, *shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def run_one_process(graph, tensors, options):
    """Return the output and the gradients of q, k and v that one process computes."""
    *leaves, factor = tensors
    leaves = [x.clone().requires_grad_() for x in leaves]
    torch.manual_seed(SEED)
    out = ga.attend(*leaves, graph, backend="reference", **options)
    (out * factor).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def scatter_all(tensors, partition):
    """Return this rank's rows of an output or its factor, and of q, k and v or their gradients."""
    sides = ("dst", "dst", "src", "src")
    return [distributed.scatter(x, partition, side=side) for x, side in zip(tensors, sides, strict=True)]


def run_rank(graph, partition, tensors, options):
    """Return the output and the gradients of q, k and v for this rank's tokens."""
    factor, *leaves = scatter_all((tensors[3], *tensors[:3]), partition)
    leaves = [x.clone().requires_grad_() for x in leaves]
    # All ranks drop edges by the seed of the first rank.
    torch.manual_seed(SEED if torch.distributed.get_rank() == 0 else 99)
    out = distributed.attend(*leaves, graph, partition, **options)
    (out * factor).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def max_error(graph, partition, options):
    """Return the largest error of outputs or gradients as a share of the allowed error."""
    tensors = make_inputs(graph)
    results, expected = run_rank(graph, partition, tensors, options), run_one_process(graph, tensors, options)
    expected_rows = scatter_all(expected, partition)
    return max(ranks.share(results[i], expected_rows[i], expected[i]) for i in (slice(1), slice(1, None)))


def resolve_partition(graph, kind, world):
    if hasattr(partitions, kind):
        return getattr(partitions, kind)(graph, world)
    rng, sizes = torch.Generator().manual_seed(3), (graph.num_dst, graph.num_src)
    # The first rank owns all receivers, the last one all senders.
    if kind == "apart":
        owners = (torch.full((size,), rank) for size, rank in zip(sizes, (0, world - 1), strict=True))
    else:
        owners = (torch.randint(world, (size,), generator=rng) for size in sizes)
    return partitions.Partition(*(partitions.Shares(owner, world) for owner in owners))


def compare_cases(rank, world, cases):
    """Return each case's error as a share of the allowed error, by graph, partition and options."""
    errors = {}
    for graph, kind, names in cases:
        options = {}
        for name in names.split():
            options |= OPTIONS[name](graph)
        errors[repr(graph), kind, names] = max_error(graph, resolve_partition(graph, kind, world), options)
    return errors


def make_bias(graph):
    """Return a relative bias with a table of 9 distances for each head."""
    return score_mods.relative_bias(torch.linspace(-1, 1, 9).expand(graph.heads or HQ, 9).clone())


OPTIONS = {
    "alibi": lambda graph: {"score_mod": score_mods.alibi(score_mods.alibi_slopes(graph.heads or HQ))},
    "relative": lambda graph: {"score_mod": make_bias(graph), "scale": 0.3},
    "sinks": lambda graph: {"sink_logits": torch.linspace(-1, 2, graph.heads or HQ, dtype=torch.float64)},
    "dropout": lambda graph: {"dropout": 0.4},
}
WINDOW, WINDOW_AND_SINKS = patterns.window(37, 5), patterns.window(30, 6) | patterns.sinks(30, 2)
LISTED = patterns.erdos_renyi(29, 0.2)
NO_SAMPLES = patterns.window(8, 3)
CASES = [
    (WINDOW, "contiguous", ""),
    (WINDOW, "zigzag", "alibi"),
    (WINDOW_AND_SINKS, "contiguous", "sinks"),
    (WINDOW_AND_SINKS, "contiguous", "dropout"),
    (LISTED, "scattered", "relative"),
    (patterns.causal(13), "scattered", "dropout"),
    (patterns.causal(23), "zigzag", "relative sinks"),
    (patterns.cross(9, 14), "contiguous", "dropout"),
    (patterns.documents([3, 11, 7]), "by_edges", ""),
    (patterns.duo_attention(23, HQ, [1], 5), "zigzag", "alibi dropout"),
    # These lack samples, tokens, edges, or a rank's receivers or senders; the last has only some rows.
    (NO_SAMPLES, "contiguous", "sinks"),
    (patterns.causal(2), "contiguous", "alibi dropout sinks"),
    (patterns.causal(0), "contiguous", "alibi dropout sinks"),
    (patterns.causal(9) - patterns.causal(9), "zigzag", "alibi dropout sinks"),
    (patterns.cross(5, 6), "apart", "alibi dropout sinks"),
    (patterns.window(12, 4).rows(5, 12), "scattered", "alibi dropout sinks"),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_process(world):
    """The processes start once for all cases, and outputs and all gradients are compared."""
    for errors in ranks.run(world, compare_cases, CASES):
        assert not {case: error for case, error in errors.items() if not error <= 1}


def record_bytes(name, position):
    """Return a list to which later calls of a collective append the bytes of their argument."""
    collective, sizes = getattr(torch.distributed, name), []

    def record_and_call(*arguments, **options):
        sizes.append(arguments[position].nbytes)
        return collective(*arguments, **options)

    setattr(torch.distributed, name, record_and_call)
    return sizes


def measure_bytes(rank, world, cases):
    """Return the bytes of k and v that this rank sends, and of their gradients, for each graph."""
    sizes = record_bytes("all_to_all_single", 1)
    for graph, kind in cases:
        run_rank(graph, resolve_partition(graph, kind, world), make_inputs(graph, torch.float32), {})
    return list(zip(sizes[::2], sizes[1::2], strict=True))


def test_bytes_are_those_of_the_plan():
    """A rank sends its keys and values, and in the backward pass the gradients of those it received."""
    cases = [(patterns.causal(21), "zigzag"), (LISTED, "scattered"), (WINDOW, "contiguous")]
    measured = ranks.run(3, measure_bytes, cases)
    for number, (graph, kind) in enumerate(cases):
        sizes = {"kv_heads": HKV, "value_dim": DV, "batch": 2, "dtype": torch.float32}
        plan = distributed.plan(graph, 3, HQ, D, partition=resolve_partition(graph, kind, 3), **sizes)
        assert [rank[number] for rank in measured] == [(load.sent, load.received) for load in plan.ranks]


def compare_q_gradient_and_lse(rank, world):
    """Return the largest error of lse, and of gradients if only q needs them."""
    graph = patterns.causal(10)
    partition = partitions.contiguous(graph, world)
    q, k, v, _ = (distributed.scatter(x, partition) for x in make_inputs(graph))
    expected = run_one_process(graph, [*make_inputs(graph)[:3], torch.ones(())], {})
    leaf = q.clone().requires_grad_()
    distributed.attend(leaf, k, v, graph).sum().backward()
    error = ranks.share([leaf.grad], [distributed.scatter(expected[1], partition)], expected[1:])
    _, info = ga.attend(q, k, v, distributed.local(graph), return_info=True)
    lse = ga.attend(*make_inputs(graph)[:3], graph, return_info=True)[1].lse
    return max(error, ranks.share([info.lse], [distributed.scatter(lse, partition, axis=2)]))


def test_some_gradients_and_lse():
    assert max(ranks.run(3, compare_q_gradient_and_lse)) <= 1


def collect_errors(rank, world):
    """Return the messages of calls with a wrong argument on one rank, each followed by a valid call."""
    graph, other_graph, is_first = patterns.causal(8), patterns.window(8, 3), rank == 0
    x = torch.ones(1, 1, 4, 4)
    partition = partitions.contiguous(graph, 2)
    attend = functools.partial(distributed.attend, x, x, x, graph)
    calls = [
        lambda: distributed.attend(x[:, :, : 3 if is_first else 4], x, x, graph),
        lambda: distributed.attend(x, x, x, graph if is_first else other_graph),
        lambda: attend("contiguous" if is_first else "zigzag"),
        lambda: distributed.attend(x, x.clone().requires_grad_(is_first), x, graph),
        lambda: attend(sink_logits=torch.zeros(3)),
        lambda: attend(backend="dense" if is_first else "rows"),
        lambda: attend(backend="varlen"),
        lambda: attend(partitions.contiguous(graph, 3)),
        lambda: attend(backend=3 if is_first else "auto"),
        lambda: attend(scale=0.5 if is_first else 0.25),
        lambda: distributed.gather(x[:, :, : 2 if is_first else 4], partition),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        messages.append(str(error.value))
        # Every output is a mean of ones.
        assert torch.equal(attend(), x)
    return messages


MESSAGES = [
    "rank 0: ValueError: .*does not fit q with 3 receivers",
    "all ranks must pass the same graph: rank 0 has .*causal.*, rank 1 has .*window",
    "all ranks must pass the same partition: rank 0 has Partition.*name='contiguous'",
    "all ranks must pass the same requires_grad: rank 0 has True, rank 1 has False",
    r"rank 0: ValueError: sink_logits must be \[Hq\] = \[1\], got \[3\]; rank 1: ",
    "all ranks must pass the same backend: rank 0 has dense, rank 1 has rows",
    "rank 0: backend 'varlen' does not support .*; rank 1: backend 'varlen' does not support",
    "partition must have 2 ranks, got 3",
    "rank 0: TypeError: backend must be a name or a .*Backend, got int",
    "all ranks must pass the same options: rank 0 has scale 0.5, dropout 0, nothing else, rank 1",
    "rank 0: ValueError: x must have the rank's 4 tokens",
]


def test_a_wrong_argument_of_one_rank_raises_on_all():
    first, second = ranks.run(2, collect_errors)
    assert first == second
    for message, pattern in zip(first, MESSAGES, strict=True):
        assert re.search(pattern, message), (pattern, message)


def test_without_a_process_group_the_error_shows_the_way():
    x = torch.ones(1, 1, 4, 4)
    with pytest.raises(ValueError, match="is not initialised: use torchrun"):
        distributed.attend(x, x, x, patterns.causal(4))
