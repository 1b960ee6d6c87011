"""Decoding: both caches give what the full pass gives, at every position, whatever the chunks; and forget
what the graph allows.

The oracle is the dense formula in float64 over all tokens at once (``verify.oracle``), with the mask of the
whole graph.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import assert_exact, assert_rule, attention_truth
from support.covering import pairwise
from torch import Tensor, nn

from gnn_attention import FactoredHeads, MergedHeads, StandardHeads, TokenGraph, algebra, patterns, score_mods
from gnn_attention.cache import KeyValueCache, PatternMessageCache
from gnn_attention.cache import _base as token_cache
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.rotary import Rotary
from gnn_attention.verify import oracle
from gnn_attention.verify.layer_checks import plain_names

N, B, HEADS, KV_HEADS, DIM, VALUE_DIM = 23, 2, 4, 2, 6, 5
PARENTS = [-1] + [(5 * i + 3) % i for i in range(1, N)]


def listed() -> TokenGraph:
    """Edges in no order, all from earlier tokens or a token itself; some receivers hear nobody."""
    pairs = [
        (s, d) for d in range(N) for s in range(d + 1) if (3 * s + 5 * d + s * d) % 4 == 0 and d not in (0, 4)
    ]
    pairs.sort(key=lambda pair: (pair[0] * 7 + pair[1] * 11) % 17)
    return TokenGraph.from_edges(torch.tensor(pairs).T, N)


def later() -> TokenGraph:
    """A square piece of a longer graph: its tokens stand at 5, 6, ..."""
    whole = patterns.window(N + 5, 4) | patterns.sinks(N + 5, 7)
    return whole.rows(5, N + 5).T.rows(5, N + 5).T


GRAPHS: dict[str, tuple[TokenGraph, int]] = {  # with the fewest tokens of the first chunk
    "causal": (patterns.causal(N), 1),
    "strict causal": (patterns.strict_causal(N), 1),
    "window": (patterns.window(N, 6), 1),
    "prefix": (patterns.prefix(N, 5), 5),
    "prefix & window": (patterns.prefix(N, 5) & patterns.band(N, 6, 6), 5),
    "sinks": (patterns.sinks(N, 3), 1),
    "window | sinks": (patterns.window(N, 4) | patterns.sinks(N, 2), 1),
    "dilated": (patterns.dilated(N, 3, 2), 1),
    "tree": (patterns.tree(PARENTS), 1),
    "tree after a prompt": (patterns.tree_decoding(9, [-1, 0, 0, 1, 1, 2, 3, 3, 0, 8, 8, 10, 4, 12]), 1),
    "documents": (patterns.documents([5, 0, 1, 9, 8]), 1),
    "listed": (listed(), 1),
    "by head": (
        algebra.per_head(
            patterns.window(N, 2), patterns.causal(N), patterns.sinks(N, 1), patterns.dilated(N, 3, 3)
        ),
        1,
    ),
    "by sample": (algebra.per_sample(patterns.window(N, 3), patterns.documents([7, 16])), 1),
    "at other positions": (later(), 1),
    "nobody": (patterns.window(N, 0), 1),
}
CHUNKS = {"1": [1], "3": [3], "7": [7], "mixed": [2, 1, 6, 1, 1, 3]}


def chunks(name: str, first: int, n: int = N) -> list[int]:
    """Sizes of the chunks; the first has at least so many tokens."""
    left = n
    sizes = []
    for size in chain([max(first, CHUNKS[name][0])], cycle(CHUNKS[name])):
        sizes.append(min(size, left))
        left -= sizes[-1]
        if not left:
            return sizes
    raise AssertionError


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(batch: int = B, n: int = N, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: grouped heads, and values of another width."""
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    q, k, v = (drawn(batch, heads, n, width, seed=i, dtype=dtype) for i, (heads, width) in enumerate(shapes))
    return q, k, v


def absolute(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A score_mod that knows every index as it is."""
    b, h, dst, src = (x.to(score.dtype) for x in (b, h, dst, src))
    return score + torch.sin(0.3 * dst + h) * torch.cos(0.7 * src) + 0.1 * b


def absolute_dense(offset: int, logits: Tensor) -> Tensor:
    """The same on all logits at once."""
    b, h, dst, src = (torch.arange(size, dtype=logits.dtype) for size in logits.shape)
    dst, src = dst + offset, src + offset
    added = torch.sin(0.3 * dst[:, None] + h.view(-1, 1, 1)) * torch.cos(0.7 * src)
    return logits + added + 0.1 * b.view(-1, 1, 1, 1)


def whole_mask(graph: TokenGraph, batch: int = B) -> Tensor:
    mask = graph.mask()
    mask = (
        mask
        if graph.batch is not None
        else mask.expand(1, *mask.shape)
        if graph.heads is not None
        else mask[None, None]
    )
    return mask.expand(batch, HEADS, *mask.shape[2:])


def decoded(
    cache: KeyValueCache, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], **options: Any
) -> Tensor:
    """All tokens through a cache, chunk by chunk."""
    found = []
    for parts in zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True):
        cache.append(*parts[1:])
        found.append(cache.attend(parts[0], **options))
    return torch.cat(found, dim=2)


@torch.no_grad()
def check_decoding(name: str, sizes: list[int]) -> None:
    """The full pass at every position."""
    graph, _ = GRAPHS[name]
    heard = whole_mask(graph).flatten(0, 1).any(0)  # [dst, src]
    cache, (q, k, v), start, found = KeyValueCache(graph), tokens(), 0, []
    for count in sizes:
        now = slice(start, start + count)
        cache.append(k[:, :, now], v[:, :, now])
        there = [src for src in range(start + count) if heard[start:, src].any()]
        assert cache.positions.tolist() == [src + graph.src_offset for src in there]
        assert all(torch.equal(rows, x[:, :, there]) for rows, x in zip(cache.senders(), (k, v), strict=True))
        found.append(cache.attend(q[:, :, now]))
        start += count
        assert cache.length == start
    assert_exact(torch.cat(found, dim=2), oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5))


@pytest.mark.parametrize("name", GRAPHS)
def test_equals_the_full_pass(name: str) -> None:
    check_decoding(name, chunks("1", GRAPHS[name][1]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(GRAPHS)), st.lists(st.integers(1, 9), min_size=N, max_size=N))
def test_equals_the_full_pass_in_any_chunks(name: str, drawn_sizes: list[int]) -> None:
    sizes = [max(GRAPHS[name][1], drawn_sizes[0]), *drawn_sizes[1:]]
    before = [sum(sizes[:number]) for number in range(N)]
    check_decoding(name, [min(size, N - past) for size, past in zip(sizes, before, strict=True) if past < N])


@pytest.mark.parametrize(
    ("name", "size", "mod", "sinks"),
    [
        (name, *(("mixed", absolute, False), ("3", None, True), ("1", absolute, True))[number % 3])
        for number, name in enumerate(GRAPHS)
    ],
)
@torch.no_grad()
def test_score_mods_see_absolute_positions_and_sinks_are_heard(
    name: str, size: str, mod: Any, sinks: bool
) -> None:
    graph, first = GRAPHS[name]
    q, k, v = tokens()
    own = drawn(HEADS, seed=7) if sinks else None
    found = decoded(
        KeyValueCache(graph), q, k, v, chunks(size, first), score_mod=mod, sink_logits=own, scale=0.7
    )
    modify = None if mod is None else partial(absolute_dense, graph.src_offset)
    assert_exact(found, oracle.attention(q, k, v, whole_mask(graph), 0.7, modify, own))


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    list(
        zip(GRAPHS, cycle([torch.float32, torch.bfloat16]), cycle(["1", "1", "mixed", "mixed"]), strict=False)
    ),
)
@torch.no_grad()
def test_is_as_precise_as_sdpa(name: str, dtype: torch.dtype, size: str) -> None:
    """Of 8 samples: of few numbers the largest error is a matter of luck, SDPA's too."""
    graph, first = GRAPHS[name]
    q, k, v = tokens(graph.batch or 8, dtype=dtype)
    found = decoded(KeyValueCache(graph), q, k, v, chunks(size, first))
    assert found.dtype == dtype
    assert_rule(found, {}, attention_truth(q, k, v, graph))


@pytest.mark.parametrize(
    "name", ["window | sinks", "strict causal", "listed", "prefix", "by head", "tree", "nobody"]
)
def test_gradients_flow_back_to_all_chunks(name: str) -> None:
    graph, first = GRAPHS[name]
    inputs = [x.requires_grad_() for x in tokens()]
    direction = drawn(B, HEADS, N, VALUE_DIM, seed=9)
    found = decoded(KeyValueCache(graph), *inputs, chunks("mixed", first))
    wanted = oracle.attention(*inputs, whole_mask(graph), DIM**-0.5)
    assert_exact(found, wanted)
    gradients, true = (torch.autograd.grad((out * direction).sum(), inputs) for out in (found, wanted))
    assert_exact(gradients, true)


def test_gradients_of_the_receivers_alone() -> None:
    """What later chunks add may not touch what the backward pass of the earlier ones needs."""
    q, graph = tokens()[0].requires_grad_(), patterns.window(N, 4)
    k, v = drawn(B, HEADS, N, DIM, seed=1), drawn(B, HEADS, N, DIM, seed=2)
    found = decoded(KeyValueCache(graph), q, k, v, chunks("mixed", 1))
    wanted = oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5)
    assert_exact(torch.autograd.grad((found**2).sum(), q)[0], torch.autograd.grad((wanted**2).sum(), q)[0])


@pytest.mark.parametrize("backend", ["reference", "dense", "tiles", "rows", "mixed"])
@torch.no_grad()
def test_every_backend_serves(backend: str) -> None:
    q, k, v = tokens()
    for name in ("window | sinks", "listed"):
        graph, first = GRAPHS[name]
        found = decoded(KeyValueCache(graph), q, k, v, chunks("mixed", first), backend=backend)
        assert_exact(found, oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5))


@torch.no_grad()
def test_a_long_list_is_not_searched_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large chunks of a listed graph renumber its edges: the same result."""
    monkeypatch.setattr("gnn_attention.graph.regions.enumerate_pairs.FEW", 0)
    q, k, v = tokens()
    for graph in (
        listed(),
        TokenGraph.from_edges((patterns.window(N, 4) | patterns.sinks(N, 2)).edge_index.flip(1), N),
    ):
        found = decoded(KeyValueCache(graph), q, k, v, chunks("mixed", 1), score_mod=absolute)
        assert_exact(
            found, oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5, partial(absolute_dense, 0))
        )


@torch.no_grad()
def test_a_receiver_that_hears_nobody_gets_exactly_0() -> None:
    q, k, v = tokens()
    assert not decoded(KeyValueCache(patterns.window(N, 0)), q, k, v, [1] * N).any()
    assert not decoded(KeyValueCache(patterns.strict_causal(N)), q, k, v, [1] * N)[:, :, 0].any()


@pytest.mark.parametrize("name", ["window", "window | sinks", "dilated", "listed", "by head"])
@torch.no_grad()
def test_a_non_edge_carries_no_nan(name: str) -> None:
    """Each token that holds NaN reaches those who hear it and nobody else, dropped or not."""
    graph, first = GRAPHS[name]
    mask = whole_mask(graph)
    for token in range(0, N, 5):
        q, k, v = tokens()
        k[:, :, token], v[:, :, token] = torch.nan, torch.inf
        found = decoded(KeyValueCache(graph), q, k, v, chunks("mixed", first))
        assert torch.equal(found.isnan().all(-1), mask[..., token])
        assert torch.equal(found.isfinite().all(-1), ~mask[..., token])


def heads_with(bias: bool = True, **options: Any) -> StandardHeads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = StandardHeads(
            12, HEADS, head_dim=DIM, num_kv_heads=KV_HEADS, value_dim=VALUE_DIM, bias=bias, **options
        ).double()
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.startswith(("b_", "q_norm", "k_norm")):
                nn.init.normal_(parameter)
    return made


def value_bias_alone() -> StandardHeads:
    """b_V and no other bias."""
    like = heads_with()
    return StandardHeads.from_arrays(like.W_Q, like.W_K, like.W_V, like.W_O, b_V=like.b_V)


@pytest.mark.parametrize("name", ["causal", "window | sinks", "tree", "prefix", "at other positions"])
@torch.no_grad()
def test_rotated_and_normed_heads_stand_where_they_stand(name: str) -> None:
    graph, first = GRAPHS[name]
    heads, x = heads_with(rotary=Rotary(), qk_norm=True), drawn(B, N, 12, seed=4)
    cache = KeyValueCache(graph)
    found = [cache.update(heads, part, score_mod=absolute) for part in x.split(chunks("mixed", first), dim=1)]
    where = torch.arange(N) + graph.dst_offset
    q, (k, v) = heads.receive(x, where), heads.send(x, where)
    z = oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5, partial(absolute_dense, graph.src_offset))
    assert_exact(torch.cat(found, dim=1), torch.einsum("bhtv,hvw->btw", z, heads.W_O) + heads.b_O)


@torch.no_grad()
def test_heads_are_told_where_new_tokens_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the positions of the graph, which need not begin at 0; every layer is told the same."""
    heads, x, told = heads_with(), drawn(B, N, 12, seed=4), []
    receive = heads.receive
    monkeypatch.setattr(
        heads, "receive", lambda states, positions: (told.append(positions.tolist()), receive(states))[1]
    )
    cache = KeyValueCache(GRAPHS["at other positions"][0], layers=2)
    for part in x[:, :7].split(3, dim=1):
        for layer in (1, 0):
            cache.update(heads, part, layer)
    assert told == [[5, 6, 7]] * 2 + [[8, 9, 10]] * 2 + [[11]] * 2


FORMS = {
    "standard": lambda h: h,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
    "factored, sender": lambda h: FactoredHeads.of(h, "sender"),
    "merged, sender": lambda h: MergedHeads.of(h, "sender"),
}
HEADS_OF = {"bias": heads_with, "no bias": lambda: heads_with(bias=False), "b_V alone": value_bias_alone}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_form_of_the_weights(form: str) -> None:
    heads, x = heads_with(), drawn(B, N, 12, seed=4)
    for name in ("window | sinks", "strict causal"):
        graph, first = GRAPHS[name]
        cache, made = KeyValueCache(graph), FORMS[form](heads)
        found = [cache.update(made, part) for part in x.split(chunks("3", first), dim=1)]
        assert_exact(
            torch.cat(found, dim=1), oracle.layer(plain_names(heads), x, x, whole_mask(graph), DIM**-0.5)
        )


@pytest.mark.parametrize(
    ("form", "keep", "kind", "where"),
    pairwise(
        lambda form, keep, **_: keep == "messages" or "sender" not in form,
        form=["factored", "merged", "factored, sender", "merged, sender"],
        keep=["messages", "states"],
        kind=list(HEADS_OF),
        where=[("window | sinks", "1"), ("strict causal", "7"), ("by head", "mixed"), ("tree", "3")],
    ),
)
@torch.no_grad()
def test_patterns_and_messages_equal_the_full_pass(
    form: str, keep: str, kind: str, where: tuple[str, str]
) -> None:
    """S1.14 to S1.18: step by step as in the full pass of the standard form, at every position."""
    heads, x = HEADS_OF[kind](), drawn(B, N, 12, seed=4)
    made = FORMS[form](heads)
    (graph, first), size = GRAPHS[where[0]], where[1]
    cache = PatternMessageCache(made, graph, keep)
    found = [cache.update(part, absolute) for part in x.split(chunks(size, first), dim=1)]
    wanted = oracle.layer(plain_names(heads), x, x, whole_mask(graph), DIM**-0.5, partial(absolute_dense, 0))
    assert_exact(torch.cat(found, dim=1), wanted)
    said = (
        made.patterns(x) if made.side == "sender" else x.unsqueeze(1)
    )  # without the channel that carries the biases
    assert_exact(cache.senders()[0], said[:, :, cache.positions])


@torch.no_grad()
def test_sink_logits_take_their_share_of_a_mixture_of_states() -> None:
    """The weights of a receiver then sum to less than 1."""
    heads, x, sinks = heads_with(), drawn(B, N, 12, seed=4), drawn(HEADS, seed=7)
    q, (k, v) = heads.receive(x), heads.send(x)
    graph = patterns.window(N, 4)
    wanted = heads.collect(oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5, sink_logits=sinks))
    for made in (FactoredHeads.of(heads), MergedHeads.of(heads)):
        for keep in ("messages", "states"):
            cache = PatternMessageCache(made, graph, keep)
            found = [cache.update(part, sink_logits=sinks) for part in x.split(3, dim=1)]
            assert_exact(torch.cat(found, dim=1), wanted)


@torch.no_grad()
def test_step_by_step_as_the_text_says() -> None:
    """Append the token's pattern and message; alpha = softmax(P x_q' / sqrt(d_k))."""
    heads, x = heads_with(bias=False), drawn(1, N, 12, seed=4)
    cache = PatternMessageCache(MergedHeads.of(heads, side="sender"), patterns.causal(N))
    serving = [h // (HEADS // KV_HEADS) for h in range(HEADS)]
    for t in range(N):
        cache.append(x[:, t : t + 1])
        (P, M), seen = cache.senders(), x[0, : t + 1]
        assert_exact(P[0], torch.stack([seen @ heads.W_K[g] @ heads.W_Q[h].T for h, g in enumerate(serving)]))
        assert_exact(M[0], torch.stack([seen @ heads.W_V[g] @ heads.W_O[h] for h, g in enumerate(serving)]))
        alpha = torch.softmax(P[0] @ x[0, t] / DIM**0.5, dim=-1)
        assert_exact(cache.attend(x[:, t : t + 1])[0, 0], torch.einsum("hj,hjw->w", alpha, M[0]))


@torch.no_grad()
def test_what_is_kept_for_each_token() -> None:
    """Counted: 2 kv_heads D, 2 heads width, (1 + heads) width, width + 1 numbers for a token."""
    heads, x = heads_with(bias=False), drawn(1, N, 12, seed=4)
    caches = {
        KV_HEADS * (DIM + VALUE_DIM): KeyValueCache(patterns.causal(N)),
        2 * HEADS * 12: PatternMessageCache(FactoredHeads.of(heads, "sender"), patterns.causal(N)),
        (1 + HEADS) * 12: PatternMessageCache(FactoredHeads.of(heads), patterns.causal(N)),
        12 + 1: PatternMessageCache(FactoredHeads.of(heads), patterns.causal(N), "states"),
    }
    for numbers, cache in caches.items():
        cache.update(heads, x) if isinstance(cache, KeyValueCache) else cache.update(x)
        assert cache.nbytes == numbers * 8 * cache._senders.room
        assert N <= cache._senders.room <= N + N // 4 + 16


@torch.no_grad()
def test_a_latent_is_kept_once() -> None:
    """Latent attention: a value is the first channels of its key."""
    heads, x = (
        LatentHeads(12, HEADS, content_dim=4, rotary_dim=2, latent_dim=7).double(),
        drawn(B, N, 12, seed=4),
    )
    graph = patterns.window(N, 4) | patterns.sinks(N, 2)
    cache, twice = KeyValueCache(graph, latent=7), KeyValueCache(graph)
    found = torch.cat([cache.update(heads, part) for part in x.split(3, dim=1)], dim=1)
    q, (k, v) = heads.receive(x), heads.send(x)
    assert_exact(found, heads.collect(oracle.attention(q, k, v, whole_mask(graph), heads.scale)))
    for part in x.split(3, dim=1):
        twice.update(heads, part)
    assert cache.nbytes * (9 + 7) == twice.nbytes * 9
    assert all(torch.equal(one, other) for one, other in zip(cache.senders(), twice.senders(), strict=True))
    for wrong in (k[..., :6], -v):
        with pytest.raises(ValueError, match="v must be the first 7 channels of k in a cache with latent=7"):
            KeyValueCache(graph, latent=7).append(k, wrong)


@torch.no_grad()
def test_the_memory_of_a_window_does_not_grow() -> None:
    w, s, steps = 16, 4, 600
    cache, sizes, kept = KeyValueCache(patterns.window(steps, w) | patterns.sinks(steps, s)), set(), set()
    for t in range(steps):
        row = torch.full((1, 1, 1, 2), float(t))
        cache.append(row, row)
        if t >= 2 * w:
            sizes.add(cache.nbytes)
            kept.add(len(cache.positions))
            assert cache.positions[:s].tolist() == list(range(s))
        assert cache.positions[-1] == t
    assert kept == {w + s}
    needed = w + s
    assert max(sizes) <= 2 * 2 * 4 * (
        needed + needed // 4 + 16
    )  # two tensors with 2 float32 a row, and some rows to spare
    assert torch.equal(cache.senders()[0][0, 0, :, 0].long(), cache.positions)


@torch.no_grad()
def test_a_long_prompt_leaves_its_room() -> None:
    cache, rows = KeyValueCache(patterns.window(3000, 8)), torch.zeros(1, 1, 2000, 2)
    cache.append(rows, rows)
    whole = cache.nbytes
    for _ in range(3):
        cache.append(rows[:, :, :1], rows[:, :, :1])
    assert cache.nbytes < whole / 40
    assert cache.positions.tolist() == list(range(1995, 2003))


@torch.no_grad()
def test_beams_are_reordered() -> None:
    """One prompt, three ways on, of which two survive: as if each had been heard from the start."""
    graph = patterns.window(N, 5) | patterns.sinks(N, 1)
    q, k, v = tokens(3)
    prompt = [x[:1, :, :6] for x in (q, k, v)]
    cache = KeyValueCache(graph)
    decoded(cache, *prompt, [6])
    cache.reorder(torch.tensor([0, 0, 0]))
    decoded(cache, *(x[:, :, 6:10] for x in (q, k, v)), [1, 3])
    cache.reorder([2, 0])
    found = decoded(cache, *(x[:2, :, 10:] for x in (q, k, v)), [1] * (N - 10))
    pairs = list(zip(prompt, (q, k, v), strict=True))
    for beam, past in enumerate((2, 0)):
        said = [torch.cat([p, x[past : past + 1, :, 6:10], x[beam : beam + 1, :, 10:]], 2) for p, x in pairs]
        assert_exact(
            found[beam : beam + 1], oracle.attention(*said, whole_mask(graph, 1), DIM**-0.5)[:, :, 10:]
        )


@pytest.mark.parametrize(
    "copied", [KeyValueCache.fork, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
)
@torch.no_grad()
def test_a_fork_goes_its_own_way(copied: Any) -> None:
    graph = patterns.window(N, 5) | patterns.sinks(N, 1)
    q, k, v = tokens()
    cache = KeyValueCache(graph)
    decoded(cache, *(x[:, :, :9] for x in (q, k, v)), [4, 5])
    other, found = copied(cache), []
    for now in (slice(9, 11), *(slice(t, t + 1) for t in range(11, N))):  # both at once
        for one, sign in ((cache, 1), (other, -1)):
            one.append(sign * k[:, :, now], sign * v[:, :, now])
        found.append([one.attend(q[:, :, now]) for one in (cache, other)])
    for number, sign in enumerate((1, -1)):
        said = [torch.cat([x[:, :, :9], sign * x[:, :, 9:]], 2) for x in (k, v)]
        wanted = oracle.attention(q, *said, whole_mask(graph), DIM**-0.5)[:, :, 9:]
        assert_exact(torch.cat([step[number] for step in found], 2), wanted)


@pytest.mark.parametrize("name", ["causal", "window", "window | sinks", "tree", "listed"])
@torch.no_grad()
def test_a_refused_draft_leaves_no_trace(name: str) -> None:
    """Speculative decoding."""
    graph, _ = GRAPHS[name]
    q, k, v = tokens()
    cache, found = KeyValueCache(graph), []
    for t in range(N - 3):
        draft = [torch.cat([x[:, :, t : t + 1], -x[:, :, t + 1 : t + 4]], 2) for x in (q, k, v)]
        found.append(decoded(cache, *draft, [4])[:, :, :1])
        cache.rewind(t + 3)
        assert_exact(
            cache.attend(draft[0][:, :, :3])[:, :, :1], found[-1]
        )  # those of the chunk that are left
        cache.rewind(t + 1)
        assert cache.length == t + 1
    assert_exact(torch.cat(found, 2), oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5)[:, :, : N - 3])


@torch.no_grad()
def test_rewinding_stops_where_somebody_was_dropped() -> None:
    graph = patterns.window(N, 5) | patterns.sinks(N, 1)
    q, k, v = tokens()
    cache = KeyValueCache(graph)
    decoded(cache, *(x[:, :, :12] for x in (q, k, v)), [8, 1, 1, 2])
    with pytest.raises(
        ValueError, match=r"rewind\(9\): sender 5 was dropped after its last receiver 9, .* down to 10"
    ):
        cache.rewind(9)
    with pytest.raises(ValueError, match=r"rewind\(13\): only 12 tokens have come"):
        cache.rewind(13)
    cache.rewind(10)
    with pytest.raises(ValueError, match="no new tokens to attend with: append them first"):
        cache.attend(q[:, :, :1])
    cache.rewind(10)
    found = decoded(cache, *(x[:, :, 10:] for x in (q, k, v)), [1] * 13)
    assert_exact(found, oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5)[:, :, 10:])
    everything = KeyValueCache(patterns.causal(N))
    decoded(everything, q, k, v, [1] * N)
    everything.rewind(3)  # where nobody was dropped: as far as you like
    found = decoded(everything, *(x[:, :, 3:] for x in (q, k, v)), [4] * 5)
    assert_exact(found, oracle.attention(q, k, v, whole_mask(patterns.causal(N)), DIM**-0.5)[:, :, 3:])
    documents = KeyValueCache(patterns.documents([5, 18]))
    decoded(documents, q, k, v, [1] * N)
    documents.rewind(5)  # the first document is over: nobody needs it
    with pytest.raises(ValueError, match=r"rewind\(4\): sender 0 was dropped"):
        documents.rewind(4)
    documents.rewind(0)
    documents.append(k[:1, :1], v[:1, :1])  # other samples, other heads: a new beginning


@torch.no_grad()
def test_appending_is_the_only_change() -> None:
    """To attend again gives the same; rows that were handed out stay as they are."""
    graph, (q, k, v) = patterns.window(N, 5), tokens()
    cache = KeyValueCache(graph)
    decoded(cache, *(x[:, :, :6] for x in (q, k, v)), [6])
    once, kept = cache.attend(q[:, :, :6]), [x.clone() for x in cache.senders()]
    handed_out = cache.senders()
    assert torch.equal(once, cache.attend(q[:, :, :6]))
    decoded(cache, *(x[:, :, 6:] for x in (q, k, v)), [1] * 17)
    assert all(torch.equal(x, y) for x, y in zip(kept, handed_out, strict=True))


def test_inference_mode_may_begin_and_end() -> None:
    graph, (q, k, v) = patterns.window(N, 5), tokens()
    cache = KeyValueCache(graph)
    with torch.inference_mode():
        parts = [decoded(cache, *(x[:, :, :6] for x in (q, k, v)), [6])]
    with torch.no_grad():
        parts.append(decoded(cache, *(x[:, :, 6:12] for x in (q, k, v)), [1] * 6))
    parts.append(decoded(cache, *(x[:, :, 12:] for x in (q, k, v)), [1] * 11))
    assert_exact(torch.cat(parts, 2), oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5))


@torch.no_grad()
def test_layers_share_the_edges_and_not_the_rows() -> None:
    graph, (q, k, v) = patterns.window(N, 4) | patterns.sinks(N, 2), tokens()
    cache, found = KeyValueCache(graph, layers=3), []
    for t in range(N):
        parts = [x[:, :, t : t + 1] for x in (q, k, v)]
        for layer, sign in enumerate((1, -1, 2)):
            cache.append(sign * parts[1], sign * parts[2], layer)
        found.append([cache.attend(parts[0], layer) for layer in range(3)])
    for layer, sign in enumerate((1, -1, 2)):
        wanted = oracle.attention(q, sign * k, sign * v, whole_mask(graph), DIM**-0.5)
        assert_exact(torch.cat([step[layer] for step in found], 2), wanted)


@torch.no_grad()
def test_every_layer_gets_every_chunk() -> None:
    _, k, v = tokens()
    cache, rows = KeyValueCache(patterns.causal(N), layers=2), (k[:, :, :3], v[:, :, :3])
    cache.append(*rows, layer=0)
    for refused in (partial(cache.append, *rows), partial(cache.reorder, [0, 1]), partial(cache.rewind, 0)):
        with pytest.raises(ValueError, match=r"must wait until layer 1 was given the tokens 0 \.\. 2 too"):
            refused()
    with pytest.raises(ValueError, match=r"layer 1 must be given the tokens 0 \.\. 2, .* got a chunk of 2"):
        cache.append(k[:, :, :2], v[:, :, :2], layer=1)
    with pytest.raises(ValueError, match="layer 1 has no new tokens"):
        cache.senders(1)
    with pytest.raises(IndexError, match=r"layer must be in 0 \.\. 1, got 2"):
        cache.append(*rows, layer=2)
    cache.append(*rows, layer=1)

    def half_a_chunk() -> None:
        with cache.all_or_nothing():
            cache.append(*rows, layer=0)
            cache.append(*rows, layer=7)

    with pytest.raises(IndexError, match="layer must be"):
        half_a_chunk()
    cache.append(*rows, layer=1)
    cache.append(*rows, layer=0)
    assert cache.length == 6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda k, v: (k[0], v), ValueError, r"k must be \[B, Hkv, T, D\], got shape"),
        (
            lambda k, v: (k, v.long()),
            TypeError,
            r"v must be a float tensor \[B, Hkv, T, D\], got torch.int64",
        ),
        (lambda k, v: (k, None), TypeError, "v must be a float tensor .* got NoneType"),
        (lambda k, v: (k, v[:, :, :1]), ValueError, r"k and v must agree in \[B, Hkv, T\]"),
        (
            lambda k, v: (k[:1], v[:1]),
            ValueError,
            r"a chunk must be like those before it, \[2, 2, T, 6\] in .* got \[1, 2, T, 6\]",
        ),
        (lambda k, v: (k, v[..., :3]), ValueError, r"a chunk must be like those before it, \[2, 2, T, 5\]"),
        (
            lambda k, v: (k.float(), v.float()),
            ValueError,
            "like those before it, .* in torch.float64 .* in torch.float32",
        ),
        (
            lambda k, v: (k[:, :, :0], v[:, :, :0]),
            ValueError,
            "a chunk must have at least one token, got none",
        ),
        (
            lambda k, v: (k.repeat(1, 1, 9, 1), v.repeat(1, 1, 9, 1)),
            ValueError,
            r"window\(23, 5\).* has 23 receivers, of which 3 have come: no room for 27 more",
        ),
    ],
)
@torch.no_grad()
def test_wrong_chunks(change: Any, error: type[Exception], message: str) -> None:
    """They are refused by name, and the cache goes on as if nothing had been said."""
    graph, (q, k, v) = patterns.window(N, 5), tokens()
    cache = KeyValueCache(graph)
    first = decoded(cache, *(x[:, :, :3] for x in (q, k, v)), [3])
    with pytest.raises(error, match=message):
        cache.append(*change(k[:, :, :3], v[:, :, :3]))
    rest = decoded(cache, *(x[:, :, 3:] for x in (q, k, v)), [4] * 5)
    assert_exact(torch.cat([first, rest], 2), oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5))


@torch.no_grad()
def test_a_receiver_cannot_hear_who_has_not_come() -> None:
    _, k, v = tokens()
    cache = KeyValueCache(patterns.prefix(N, 5))
    with pytest.raises(
        ValueError,
        match=r"receiver 0 .* attends to sender 4, which has not come: give at least 5 tokens in the next chunk",
    ):
        cache.append(k[:, :, :3], v[:, :, :3])
    cache.append(k[:, :, :5], v[:, :, :5])
    cache.append(k[:, :, 5:6], v[:, :, 5:6])
    ladder = KeyValueCache(patterns.band(9, 1, 1))  # everyone waits for the next
    with pytest.raises(ValueError, match="give at least 9 tokens in the next chunk"):
        ladder.append(k[:, :, :2], v[:, :, :2])


@torch.no_grad()
def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tokens()
    with pytest.raises(
        TypeError, match="graph must be a TokenGraph of all the tokens that may come, got int"
    ):
        KeyValueCache(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="receivers and senders are the same tokens, got TokenGraph"):
        KeyValueCache(patterns.causal(9).rows(3, 9))
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        KeyValueCache(patterns.causal(9), 0)
    cache = KeyValueCache(patterns.causal(N))
    with pytest.raises(ValueError, match="layer 0 has no new tokens to attend with: append them first"):
        cache.attend(q)
    with pytest.raises(ValueError, match="layer 0 has no new tokens: append them first"):
        cache.senders()
    cache.append(k[:, :, :3], v[:, :, :3])
    with pytest.raises(
        ValueError,
        match=r"q must have a row for each of the tokens 0 \.\. 2, the last that were appended, got 4",
    ):
        cache.attend(q[:, :, :4])
    with pytest.raises(ValueError, match="backend must be one of"):
        cache.attend(q[:, :, :3], backend="fast")
    cache.check_graph(patterns.window(N, N))  # the same edges: the same graph
    with pytest.raises(
        ValueError, match=r"this is a cache of TokenGraph\(causal\(23\).*, got TokenGraph\(causal\(22\)"
    ):
        cache.check_graph(patterns.causal(22))
    for index, error, message in (
        ([0, 2], IndexError, r"index must hold samples in 0 \.\. 1, got \[0, 2\]"),
        ([0.5], TypeError, "index must hold integers"),
        ([[0]], ValueError, r"index must be a list \[B\] of samples, got shape \[1, 1\]"),
    ):
        with pytest.raises(error, match=message):
            cache.reorder(index)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differs by sample, so a past cannot go on"):
        KeyValueCache(GRAPHS["by sample"][0]).reorder([1, 0])  # type: ignore[arg-type]
    assert cache.length == 3


@torch.no_grad()
def test_wrong_states_and_heads() -> None:
    heads, x = heads_with(), drawn(B, N, 12)
    cache = KeyValueCache(patterns.causal(N))
    for wrong, message in (
        (x[0], r"x must be the states \[B, T, width\] of the new tokens, got \[23, 12\]"),
        (x[..., :3], "x must be"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.update(heads, wrong)
    with pytest.raises(ValueError, match="backend must be one of"):  # found after the rows were there
        cache.update(heads, x, backend="fast")
    assert (cache.length, cache.nbytes) == (0, 0)
    with pytest.raises(
        TypeError,
        match=r"heads must be FactoredHeads or MergedHeads, .* got StandardHeads; keys and values are stored by",
    ):
        PatternMessageCache(heads, patterns.causal(N))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be one of 'messages', 'states', got 'keys'"):
        PatternMessageCache(MergedHeads.of(heads), patterns.causal(N), "keys")
    with pytest.raises(ValueError, match="keep='states' needs heads with side='receiver'"):
        PatternMessageCache(MergedHeads.of(heads, "sender"), patterns.causal(N), "states")
    for keep in ("messages", "states"):
        other = PatternMessageCache(MergedHeads.of(heads), patterns.causal(N), keep)
        for wrong in (x[0], x[..., :3], x.float()):
            with pytest.raises(ValueError, match="x must be"):
                other.update(wrong)
        with pytest.raises(ValueError, match="append them first"):
            other.attend(x[:, :1])
        assert other.length == 0


def test_a_cache_says_what_it_holds() -> None:
    cache, rows = KeyValueCache(patterns.window(100, 4), layers=2), torch.zeros(1, 2, 9, 8)
    for layer in (0, 1):
        cache.append(rows, rows, layer)
    assert repr(cache) == "KeyValueCache(window(100, 4): 9 senders kept of 9 in 2 layers, 0.0 MB)"


@torch.no_grad()
def test_a_learned_bias_is_asked_at_absolute_positions() -> None:
    """The relative bias of a model, beside sinks whose distance grows."""
    graph, (q, k, v) = patterns.window(N, 4) | patterns.sinks(N, 2), tokens()
    bias = score_mods.RelativeBias(HEADS, 9).double()
    nn.init.normal_(bias.table)
    found = decoded(KeyValueCache(graph), q, k, v, [1] * N, score_mod=bias)
    gap = (torch.arange(N).unsqueeze(1) - torch.arange(N)).clamp(-9, 9) + 9
    assert_exact(
        found,
        oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5, lambda logits: logits + bias.table[:, gap]),
    )


def test_the_wrapped_score_mod_can_be_copied() -> None:
    """Compilers and processes take it along."""
    wrapped = token_cache._AtPositions(score_mods.alibi((0.5,)), torch.tensor([0, 7]))
    zero, one = torch.tensor(0), torch.tensor(1)
    assert pickle.loads(pickle.dumps(wrapped))(torch.tensor(0.0), zero, zero, torch.tensor(9), one) == -1.0
