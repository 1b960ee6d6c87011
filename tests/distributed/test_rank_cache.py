"""Decoding over ranks: every rank gets the full pass of one process, whichever rank stores a token."""

import itertools

import pytest
import torch
from support import ranks
from support.refusals import assert_refusals

import gnn_attention as ga
from gnn_attention import distributed, patterns, score_mods
from gnn_attention.distributed import partition as partitions

T, PREFIX = 23, 9
CHUNKS = [1, 3, 1, 1, 5, 1, 2]
ALIBI = score_mods.alibi(score_mods.alibi_slopes(4))
GRAPHS = {
    "causal": patterns.causal(T),
    "window": patterns.window(T, 4) | patterns.sinks(T, 1),
    "strict": patterns.strict_causal(T),
    "list": ga.TokenGraph.from_edges(patterns.dilated(T, 3, 4).edge_index, T),
    "heads": patterns.duo_attention(T, 4, [1], 5),
}
SINKS = torch.linspace(-1, 1, 4, dtype=torch.float64)


def drawn():
    """q, k, v, the same on every rank."""
    rng = torch.Generator().manual_seed(5)
    sizes = ((4, 6), (2, 6), (2, 3))
    return [torch.randn(2, heads, T, dim, generator=rng, dtype=torch.float64) for heads, dim in sizes]


def decode(rank, world, name, filled):
    """The error of all chunks as a share of what is allowed, and the senders of this rank at the end."""
    graph, (q, k, v) = GRAPHS[name], drawn()
    want = ga.attend(q, k, v, graph, score_mod=ALIBI, sink_logits=SINKS, backend="reference")
    cache = distributed.cache(graph, block=2)
    start = 0
    if filled:
        prefix = partitions.zigzag(patterns.causal(PREFIX), world)
        cache.fill(*(distributed.scatter(x[:, :, :PREFIX], prefix) for x in (k, v)), prefix)
        start = PREFIX
    errors = [0.0]
    for count in CHUNKS:
        part = slice(start, start + count)
        cache.append(k[:, :, part], v[:, :, part])
        out = cache.attend(q[:, :, part], score_mod=ALIBI, sink_logits=SINKS)
        errors.append(ranks.share([out], [want[:, :, part]], [want]))
        start += count
    return max(errors), cache.positions().tolist(), cache.length


def all_decoded(rank, world, cases):
    return [decode(rank, world, *case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (3, [("window", True), ("heads", False)]),
        (4, list(itertools.product(GRAPHS, (True, False)))),
    ],
)
def test_decoding_on_ranks_is_the_full_pass(world, cases):
    """Chunks of any size, from the start or after a text that was spread by another partition."""
    results = ranks.run(world, all_decoded, cases)
    for i, case in enumerate(cases):
        check([found[i] for found in results], *case)


def check(results, name, filled):
    """Equal outputs; every sender that is still attended to is stored, once."""
    assert max(error for error, *_ in results) <= 1
    length = sum(CHUNKS) + (PREFIX if filled else 0)
    assert {done for *_, done in results} == {length}
    stored = sorted(position for _, positions, _ in results for position in positions)
    needed = GRAPHS[name].mask().view(-1, T, T)[:, length - CHUNKS[-1] :].any(0).any(0)
    assert len(set(stored)) == len(stored)
    assert set(needed.nonzero().flatten().tolist()) & set(range(length)) <= set(stored)


def continued(rank, world):
    """What a model writes on ranks, and in one process; a wrong chunk leaves the cache as it was."""
    torch.manual_seed(0)
    config = ga.model.Config(30, width=16, num_heads=2, head_dim=8, mlp_width=16)
    model = ga.model.LanguageModel(config).double().eval()
    graph, tokens = patterns.window(30, 5) | patterns.sinks(30, 1), torch.tensor([3, 1, 4, 1, 5])
    cache = distributed.cache(graph, layers=2)
    single = ga.model.generate(model, tokens, 12, temperature=0, graph=graph)
    together = ga.model.generate(model, tokens, 12, temperature=0, cache=cache)
    before = cache.length, cache.positions().tolist()
    with pytest.raises(ValueError, match=r"must have 1 \.\. 14 tokens, .*, got 20"):
        model.proceed(torch.zeros(1, 20, dtype=torch.int64), cache)
    return single.tolist() == together.tolist(), before == (cache.length, cache.positions().tolist())


@pytest.mark.slow
def test_a_model_generates_on_ranks_what_it_does_in_one_process():
    assert ranks.run(2, continued) == [(True, True)] * 2


def bytes_of_a_token(rank, world):
    """Bytes sent for one token, after a short and a long past."""
    sent = []
    for past in (20, 200):
        cache, x = distributed.cache(patterns.causal(past + 1)), torch.ones(1, 2, past + 1, 4)
        cache.append(x[:, :, :past], x[:, :, :past])
        cache.append(x[:, :, past:], x[:, :, past:])
        before = distributed.traffic().forward
        cache.attend(x[:, :, past:])
        sent.append(distributed.traffic().forward - before)
    return sent


@pytest.mark.slow
def test_a_new_token_costs_the_same_after_any_past():
    """A value and a number for each head, to the other rank: 2 heads x (4 + 1) numbers x 4 bytes."""
    assert ranks.run(2, bytes_of_a_token) == [[40, 40]] * 2


def wrong_calls(rank, world):
    """Each raises on every rank, and the cache goes on."""
    graph, x = patterns.window(6, 3), torch.ones(1, 1, 2, 4)
    cache = distributed.cache(graph)
    with pytest.raises(ValueError, match="no new tokens"):
        cache.attend(x)
    cache.append(x, x)
    long, wide, late = torch.ones(1, 1, 5, 4), torch.ones(1, 2, 1, 4), patterns.anti_causal(6)
    partition, leaf = partitions.contiguous(graph, world), x.clone().requires_grad_()
    assert_refusals(
        [
            (lambda: cache.attend(x[:, :, :1]), ValueError, r"tokens 0 \.\. 1, the last chunk, got 1"),
            (
                lambda: cache.append(long, long),
                ValueError,
                r"must have 1 \.\. 4 tokens, 2 of 6 have come, got 5",
            ),
            (lambda: cache.append(wide, wide), ValueError, "like those before it"),
            (lambda: cache.append(leaf, x), NotImplementedError, "wants gradients"),
            (lambda: cache.append(x, x, layer=1), IndexError, "layer must be in"),
            (lambda: cache.fill(x, x, partition), ValueError, "fill needs an empty layer"),
            (lambda: distributed.cache(patterns.cross(3, 4)), ValueError, "same tokens"),
            (lambda: distributed.cache(late).append(x, x), ValueError, "which has not come"),
        ]
    )
    return cache.attend(x).tolist()


@pytest.mark.slow
def test_wrong_calls_change_nothing():
    """Values are all 1, so is their mean."""
    assert ranks.run(2, wrong_calls) == [torch.ones(1, 1, 2, 4).tolist()] * 2
