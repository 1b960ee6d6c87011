"""Decoding over ranks: what every rank gets is the full pass of one process, whoever keeps which token."""

import itertools

import pytest
import torch
from support import ranks

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
    return [
        torch.randn(2, heads, T, dim, generator=rng, dtype=torch.float64)
        for heads, dim in ((4, 6), (2, 6), (2, 3))
    ]


def decode(rank, world, name, filled):
    """The error of the outputs of all chunks as a share of what is allowed, and the senders that this rank
    has at the end.
    """
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
    """Several cases."""
    return [decode(rank, world, *case) for case in cases]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (3, [("window", True), ("heads", False)]),
        pytest.param(4, list(itertools.product(GRAPHS, (True, False))), marks=pytest.mark.slow),
    ],
)
def test_decoding_on_ranks_is_the_full_pass(world, cases):
    """Chunks of any size, after a text that was spread by another partition or from the start."""
    results = ranks.run(world, all_decoded, cases)
    for i, case in enumerate(cases):
        check([found[i] for found in results], *case)


def check(results, name, filled):
    """Equal outputs; every sender that is still heard is kept, once."""
    assert max(error for error, *_ in results) <= 1
    length = sum(CHUNKS) + (PREFIX if filled else 0)
    assert {done for *_, done in results} == {length}
    kept = sorted(position for _, positions, _ in results for position in positions)
    heard = GRAPHS[name].mask().view(-1, T, T)[:, length - CHUNKS[-1] :].any(0).any(0)
    assert len(set(kept)) == len(kept)
    assert set(heard.nonzero().flatten().tolist()) & set(range(length)) <= set(kept)


def continued(rank, world):
    """What a model writes on ranks, and alone; a chunk that is refused leaves the cache as it was."""
    torch.manual_seed(0)
    model = (
        ga.model.LanguageModel(ga.model.Config(30, width=16, num_heads=2, head_dim=8, mlp_width=16))
        .double()
        .eval()
    )
    graph, tokens = patterns.window(30, 5) | patterns.sinks(30, 1), torch.tensor([3, 1, 4, 1, 5])
    cache = distributed.cache(graph, layers=2)
    alone = ga.model.generate(model, tokens, 12, temperature=0, graph=graph)
    together = ga.model.generate(model, tokens, 12, temperature=0, cache=cache)
    held = cache.length, cache.positions().tolist()
    with pytest.raises(ValueError, match=r"must have 1 \.\. 14, got 20"):
        model.proceed(torch.zeros(1, 20, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="make a new one for another graph"):
        cache.check_graph(patterns.causal(30))
    return alone.tolist(), together.tolist(), held == (cache.length, cache.positions().tolist())


def test_a_model_generates_on_ranks_what_it_does_alone():
    """Token by token, its cache spread over both."""
    for alone, together, unchanged in ranks.run(2, continued):
        assert alone == together
        assert unchanged


def bytes_for_several(rank, world):
    """After a short and a long past."""
    return [bytes_for(past) for past in (20, 200)]


def bytes_for(past):
    """Bytes sent for one token after a past of so many."""
    graph, rows = patterns.causal(past + 1), torch.ones(1, 2, past + 1, 4)
    cache = distributed.cache(graph)
    cache.append(rows, rows)
    cache.attend(rows)
    before = distributed.traffic().forward
    out = distributed.cache(graph)
    out.append(rows[:, :, :past], rows[:, :, :past])
    out.append(rows[:, :, past:], rows[:, :, past:])
    out.attend(rows[:, :, past:])
    return distributed.traffic().forward - before


def test_a_new_token_costs_the_same_after_any_past():
    """A value and a number for each head, to the other rank: 2 heads x (4 + 1) numbers x 4 bytes."""
    assert ranks.run(2, bytes_for_several) == [[40, 40]] * 2


def refusals(rank, world):
    """Each wrong use is refused by name, on every rank, and the cache goes on."""
    graph, x = patterns.window(6, 3), torch.ones(1, 1, 2, 4)
    cache = distributed.cache(graph)
    with pytest.raises(ValueError, match="no new tokens"):
        cache.attend(x)
    cache.append(x, x)
    with pytest.raises(ValueError, match=r"tokens 0 \.\. 1, the last chunk, got 1"):
        cache.attend(x[:, :, :1])
    with pytest.raises(ValueError, match=r"must have 1 \.\. 4, got 5"):
        cache.append(torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 4))
    with pytest.raises(ValueError, match="like those before it"):
        cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    with pytest.raises(NotImplementedError, match="wants gradients"):
        cache.append(x.clone().requires_grad_(), x)
    with pytest.raises(IndexError, match="layer must be in"):
        cache.append(x, x, layer=1)
    with pytest.raises(ValueError, match="fill needs an empty layer"):
        cache.fill(x, x, partitions.contiguous(graph, world))
    with pytest.raises(ValueError, match="same tokens"):
        distributed.cache(patterns.cross(3, 4))
    with pytest.raises(ValueError, match="which has not come"):
        distributed.cache(patterns.anti_causal(6)).append(x, x)
    with pytest.raises(TypeError, match="graph must be a TokenGraph"):
        distributed.cache(None)
    return cache.attend(x).tolist()


def test_wrong_use_is_refused_and_changes_nothing():
    """Values are all 1, so is what is heard."""
    assert ranks.run(2, refusals) == [torch.ones(1, 1, 2, 4).tolist()] * 2
