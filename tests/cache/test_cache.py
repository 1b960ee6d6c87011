"""Decoding: both caches give what the full pass gives, at every position, whatever the chunks.

The oracle is the dense formula in float64 over all tokens at once (``verify.oracle``).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from functools import partial
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import assert_exact, assert_rule, attention_truth
from support.covering import pairwise
from support.refusals import assert_refusals
from torch import Tensor, nn

from gnn_attention import FactoredHeads, MergedHeads, StandardHeads, TokenGraph, algebra, patterns
from gnn_attention.cache import KeyValueCache, PatternMessageCache
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.rotary import Rotary
from gnn_attention.verify import oracle
from gnn_attention.verify.truth import plain_names

N, B, HEADS, KV_HEADS, DIM, VALUE_DIM = 23, 2, 4, 2, 6, 5
PARENTS = [-1] + [(5 * i + 3) % i for i in range(1, N)]


def listed() -> TokenGraph:
    """Edges in no order, all from earlier tokens or a token itself; some rows are isolated."""
    ends = ((s, d) for d in range(N) for s in range(d + 1) if d not in (0, 4))
    pairs = [(s, d) for s, d in ends if (3 * s + 5 * d + s * d) % 4 == 0]
    pairs.sort(key=lambda pair: (pair[0] * 7 + pair[1] * 11) % 17)
    return TokenGraph.from_edges(torch.tensor(pairs).T, N)


def later() -> TokenGraph:
    """A square piece of a longer graph: its tokens stand at 5, 6, ..."""
    whole = patterns.window(N + 5, 4) | patterns.sinks(N + 5, 7)
    return whole.rows(5, N + 5).T.rows(5, N + 5).T


HEADWISE = (patterns.window(N, 2), patterns.causal(N), patterns.sinks(N, 1), patterns.dilated(N, 3, 3))
BRANCHES = [-1, 0, 0, 1, 1, 2, 3, 3, 0, 8, 8, 10, 4, 12]
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
    "tree after a prompt": (patterns.tree_decoding(9, BRANCHES), 1),
    "documents": (patterns.documents([5, 0, 1, 9, 8]), 1),
    "listed": (listed(), 1),
    "by head": (algebra.per_head(*HEADWISE), 1),
    "by sample": (algebra.per_sample(patterns.window(N, 3), patterns.documents([7, 16])), 1),
    "at other positions": (later(), 1),
    "empty": (patterns.window(N, 0), 1),
}
SINKS = patterns.window(N, 5) | patterns.sinks(N, 1)
CHUNKS = {"1": [1], "3": [3], "7": [7], "mixed": [2, 1, 6, 1, 1, 3]}


def chunks(name: str, first: int) -> list[int]:
    """Sizes of the chunks; the first has at least so many tokens."""
    return cut(chain([max(first, CHUNKS[name][0])], cycle(CHUNKS[name])))


def cut(sizes: Iterable[int]) -> list[int]:
    """So many of the sizes, the last one cut, that they sum to N."""
    found: list[int] = []
    for size in sizes:
        found.append(min(size, N - sum(found)))
        if sum(found) == N:
            break
    return found


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
    mask = mask if graph.batch else mask[None] if graph.heads else mask[None, None]
    return mask.expand(batch, HEADS, *mask.shape[2:])


def full_pass(
    q: Tensor, k: Tensor, v: Tensor, graph: TokenGraph, scale: float = DIM**-0.5, *more: Any
) -> Tensor:
    return oracle.attention(q, k, v, whole_mask(graph, len(q)), scale, *more)


def part(start: int, stop: int | None, *rows: Tensor) -> list[Tensor]:
    """Tokens ``start .. stop - 1`` of q, k and v."""
    return [x[:, :, start:stop] for x in rows]


def decoded(cache: Any, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], **options: Any) -> Tensor:
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
    edges = whole_mask(graph).flatten(0, 1).any(0)  # [dst, src]
    cache, (q, k, v), start, found = KeyValueCache(graph), tokens(), 0, []
    for count in sizes:
        now = slice(start, start + count)
        cache.append(k[:, :, now], v[:, :, now])
        there = [src for src in range(start + count) if edges[start:, src].any()]
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
    check_decoding(name, cut([max(GRAPHS[name][1], drawn_sizes[0]), *drawn_sizes[1:]]))


WITH = [("mixed", absolute, False), ("3", None, True), ("1", absolute, True)]


@pytest.mark.parametrize(("number", "name"), list(enumerate(GRAPHS)))
@torch.no_grad()
def test_score_mods_at_absolute_positions_and_sinks(number: int, name: str) -> None:
    (graph, first), (size, mod, sinks) = GRAPHS[name], WITH[number % 3]
    logits = drawn(HEADS, seed=7) if sinks else None
    options = {"score_mod": mod, "sink_logits": logits, "scale": 0.7}
    found = decoded(KeyValueCache(graph), *tokens(), chunks(size, first), **options)
    modify = None if mod is None else partial(absolute_dense, graph.src_offset)
    assert_exact(found, full_pass(*tokens(), graph, 0.7, modify, logits))


@pytest.mark.parametrize(("number", "name"), list(enumerate(GRAPHS)))
@torch.no_grad()
def test_is_as_precise_as_sdpa(number: int, name: str) -> None:
    """Of 8 samples: of few numbers the largest error is a matter of luck, SDPA's too."""
    (graph, first), dtype = GRAPHS[name], (torch.float32, torch.bfloat16)[number % 2]
    q, k, v = tokens(graph.batch or 8, dtype=dtype)
    found = decoded(KeyValueCache(graph), q, k, v, chunks("1" if number % 4 < 2 else "mixed", first))
    assert found.dtype == dtype
    assert_rule(found, {}, attention_truth(q, k, v, graph))


@pytest.mark.parametrize("name", ["window | sinks", "strict causal", "listed", "prefix", "by head", "tree"])
@pytest.mark.parametrize("of", ["all", "receivers"])
def test_gradients_flow_back_to_all_chunks(name: str, of: str) -> None:
    """What later chunks add may not touch what the backward pass of the earlier ones needs."""
    (graph, first), inputs = GRAPHS[name], tokens()
    learning = [x.requires_grad_() for x in (inputs if of == "all" else inputs[:1])]
    found = decoded(KeyValueCache(graph), *inputs, chunks("mixed", first))
    wanted = full_pass(*inputs, graph)
    assert_exact(found, wanted)
    assert_exact(*(torch.autograd.grad((out**2).sum(), learning) for out in (found, wanted)))


@pytest.mark.parametrize("backend", ["reference", "dense", "tiles", "rows", "mixed"])
@torch.no_grad()
def test_every_backend_serves(backend: str) -> None:
    for graph in (SINKS, listed()):
        found = decoded(KeyValueCache(graph), *tokens(), chunks("mixed", 1), backend=backend)
        assert_exact(found, full_pass(*tokens(), graph))


@torch.no_grad()
def test_a_long_list_is_not_searched_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large chunks of a listed graph renumber its edges: the same result."""
    monkeypatch.setattr("gnn_attention.graph.regions.enumerate_pairs.FEW", 0)
    for graph in (listed(), TokenGraph.from_edges(SINKS.edge_index.flip(1), N)):
        found = decoded(KeyValueCache(graph), *tokens(), chunks("mixed", 1), score_mod=absolute)
        assert_exact(found, full_pass(*tokens(), graph, DIM**-0.5, partial(absolute_dense, 0)))


@pytest.mark.parametrize("name", ["window", "window | sinks", "dilated", "listed", "by head"])
@torch.no_grad()
def test_a_non_edge_carries_no_nan(name: str) -> None:
    """A token that holds NaN reaches those that attend to it alone, dropped or not."""
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
        options = {"num_kv_heads": KV_HEADS} | options
        options |= {"head_dim": DIM, "value_dim": VALUE_DIM, "bias": bias}
        made = StandardHeads(12, HEADS, **options).double()
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.startswith(("b_", "q_norm", "k_norm")):
                nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("name", ["causal", "window | sinks", "tree", "prefix", "at other positions"])
@torch.no_grad()
def test_rotated_and_normed_heads(name: str) -> None:
    graph, first = GRAPHS[name]
    heads, x = heads_with(rotary=Rotary(), qk_norm=True), drawn(B, N, 12, seed=4)
    cache = KeyValueCache(graph, layers=2)
    found = []
    for new in x.split(chunks("mixed", first), dim=1):
        # all layers have the same tokens, and rows of their own
        cache.update(heads, -new, layer=1)
        found.append(cache.update(heads, new, score_mod=absolute))
    where = torch.arange(N) + graph.dst_offset
    q, (k, v) = heads.receive(x, where), heads.send(x, where)
    z = full_pass(q, k, v, graph, DIM**-0.5, partial(absolute_dense, graph.src_offset))
    assert_exact(torch.cat(found, dim=1), torch.einsum("bhtv,hvw->btw", z, heads.W_O) + heads.b_O)


@torch.no_grad()
def test_heads_of_a_rank_have_the_numbers_of_their_layer() -> None:
    """Two halves of the heads, as ranks have them: their updates sum to that of all."""
    whole, x, updates = heads_with(bias=False, num_kv_heads=HEADS), drawn(B, N, 12, seed=4), []
    wanted = KeyValueCache(SINKS).update(whole, x, score_mod=absolute)
    for first in (0, 2):
        parts = (getattr(whole, name)[first : first + 2] for name in ("W_Q", "W_K", "W_V", "W_O"))
        half = StandardHeads.from_arrays(*parts)
        half.first_head = first
        updates.append(KeyValueCache(SINKS).update(half, x, score_mod=absolute))
    assert_exact(sum(updates), wanted)


FORMS = {
    "standard": lambda h: h,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
    "factored, sender": lambda h: FactoredHeads.of(h, "sender"),
    "merged, sender": lambda h: MergedHeads.of(h, "sender"),
}
ONE_BIAS = StandardHeads.from_arrays(
    *map(heads_with().get_parameter, ("W_Q", "W_K", "W_V", "W_O")), b_V=heads_with().b_V
)
HEADS_OF = {"bias": heads_with, "no bias": lambda: heads_with(bias=False), "b_V alone": lambda: ONE_BIAS}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_form_of_the_weights(form: str) -> None:
    heads, x = heads_with(), drawn(B, N, 12, seed=4)
    for name in ("window | sinks", "strict causal"):
        cache, made = KeyValueCache(GRAPHS[name][0]), FORMS[form](heads)
        found = [cache.update(made, new) for new in x.split(3, dim=1)]
        wanted = oracle.layer(plain_names(heads), x, x, whole_mask(cache.graph), DIM**-0.5)
        assert_exact(torch.cat(found, dim=1), wanted)


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
def test_patterns_and_messages(form: str, keep: str, kind: str, where: tuple[str, str]) -> None:
    """S1.14 to S1.18: step by step as in the full pass of the standard form, at every position."""
    heads, x = HEADS_OF[kind](), drawn(B, N, 12, seed=4)
    made = FORMS[form](heads)
    (graph, first), size = GRAPHS[where[0]], where[1]
    cache = PatternMessageCache(made, graph, keep)
    found = [cache.update(new, absolute) for new in x.split(chunks(size, first), dim=1)]
    wanted = oracle.layer(plain_names(heads), x, x, whole_mask(graph), DIM**-0.5, partial(absolute_dense, 0))
    assert_exact(torch.cat(found, dim=1), wanted)
    sent = made.patterns(x) if made.side == "sender" else x.unsqueeze(1)
    assert_exact(cache.senders()[0], sent[:, :, cache.positions])


@torch.no_grad()
def test_sink_logits_take_their_share_of_a_mixture_of_states() -> None:
    """The weights of a receiver then sum to less than 1."""
    heads, x, sinks = heads_with(), drawn(B, N, 12, seed=4), drawn(HEADS, seed=7)
    q, (k, v) = heads.receive(x), heads.send(x)
    graph = patterns.window(N, 4)
    wanted = heads.collect(full_pass(q, k, v, graph, DIM**-0.5, None, sinks))
    for made in (FactoredHeads.of(heads), MergedHeads.of(heads)):
        for keep in ("messages", "states"):
            cache = PatternMessageCache(made, graph, keep)
            found = [cache.update(new, sink_logits=sinks) for new in x.split(3, dim=1)]
            assert_exact(torch.cat(found, dim=1), wanted)


@torch.no_grad()
def test_what_is_stored_for_each_token() -> None:
    """Counted: 2 kv_heads D, 2 heads width, (1 + heads) width, width + 1 numbers for a token."""
    heads, x = heads_with(bias=False), drawn(1, N, 12, seed=4)
    graph, factored = patterns.causal(N), FactoredHeads.of(heads)
    caches = {
        KV_HEADS * (DIM + VALUE_DIM): KeyValueCache(graph),
        2 * HEADS * 12: PatternMessageCache(FactoredHeads.of(heads, "sender"), graph),
        (1 + HEADS) * 12: PatternMessageCache(factored, graph),
        12 + 1: PatternMessageCache(factored, graph, "states"),
    }
    for numbers, cache in caches.items():
        cache.update(heads, x) if isinstance(cache, KeyValueCache) else cache.update(x)
        assert cache.nbytes == numbers * 8 * cache._senders.room
        assert N <= cache._senders.room <= N + N // 4 + 16


@torch.no_grad()
def test_a_latent_is_stored_once() -> None:
    """Latent attention: a value is the first channels of its key."""
    heads = LatentHeads(12, HEADS, content_dim=4, rotary_dim=2, latent_dim=7).double()
    x, cache, twice = drawn(B, N, 12, seed=4), KeyValueCache(SINKS, latent=7), KeyValueCache(SINKS)
    found = torch.cat([cache.update(heads, new) for new in x.split(3, dim=1)], dim=1)
    q, (k, v) = heads.receive(x), heads.send(x)
    assert_exact(found, heads.collect(full_pass(q, k, v, SINKS, heads.scale)))
    for new in x.split(3, dim=1):
        twice.update(heads, new)
    assert cache.nbytes * (9 + 7) == twice.nbytes * 9
    assert all(torch.equal(one, other) for one, other in zip(cache.senders(), twice.senders(), strict=True))
    for wrong in (k[..., :6], -v):
        with pytest.raises(ValueError, match="v must be the first 7 channels of k in a cache with latent=7"):
            KeyValueCache(SINKS, latent=7).append(k, wrong)


@torch.no_grad()
def test_the_memory_of_a_window_does_not_grow() -> None:
    w, s, steps = 16, 4, 600
    cache, sizes = KeyValueCache(patterns.window(steps, w) | patterns.sinks(steps, s)), set()
    for t in range(steps):
        row = torch.full((1, 1, 1, 2), float(t))
        cache.append(row, row)
        if t >= 2 * w:
            sizes.add(cache.nbytes)
            assert cache.positions.tolist() == [*range(s), *range(t - w + 1, t + 1)]
    # two tensors with 2 float32 a row, and some rows to spare
    assert max(sizes) <= 2 * 2 * 4 * (w + s + (w + s) // 4 + 16)
    assert torch.equal(cache.senders()[0][0, 0, :, 0].long(), cache.positions)
    # a long prompt is given back
    prompt, rows = KeyValueCache(patterns.window(3000, 8)), torch.zeros(1, 1, 2000, 2)
    sizes = [prompt.append(new, new) or prompt.nbytes for new in (rows, *rows[:, :, :3].split(1, 2))]
    assert sizes[-1] < sizes[0] / 40


@torch.no_grad()
def test_beams_are_reordered() -> None:
    """One prompt, three ways on, of which two survive: as if each had been there from the start."""
    rows, cache = tokens(3), KeyValueCache(SINKS)
    prompt = [x[:1] for x in part(0, 6, *rows)]
    decoded(cache, *prompt, [6])
    cache.reorder(torch.tensor([0, 0, 0]))
    decoded(cache, *part(6, 10, *rows), [1, 3])
    cache.reorder([2, 0])
    found = decoded(cache, *(x[:2] for x in part(10, None, *rows)), [1] * (N - 10))
    pairs = list(zip(prompt, rows, strict=True))
    for beam, past in enumerate((2, 0)):
        text = [torch.cat([p, x[past : past + 1, :, 6:10], x[beam : beam + 1, :, 10:]], 2) for p, x in pairs]
        assert_exact(found[beam : beam + 1], full_pass(*text, SINKS)[:, :, 10:])


@pytest.mark.parametrize(
    "copied", [KeyValueCache.fork, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@torch.no_grad()
def test_a_fork_is_independent(copied: Any) -> None:
    rows, cache = tokens(), KeyValueCache(SINKS)
    decoded(cache, *part(0, 9, *rows), [4, 5])
    other, found = copied(cache), []
    for start, stop in ((9, 11), *((t, t + 1) for t in range(11, N))):
        q, k, v = part(start, stop, *rows)
        cache.append(k, v)
        other.append(-k, -v)
        found.append([one.attend(q) for one in (cache, other)])
    for steps, sign in zip(zip(*found, strict=True), (1, -1), strict=True):
        k, v = (torch.cat([x[:, :, :9], sign * x[:, :, 9:]], 2) for x in rows[1:])
        assert_exact(torch.cat(steps, 2), full_pass(rows[0], k, v, SINKS)[:, :, 9:])


@pytest.mark.parametrize("name", ["causal", "window", "window | sinks", "tree", "listed"])
@torch.no_grad()
def test_a_rejected_draft_leaves_no_trace(name: str) -> None:
    """Speculative decoding."""
    graph, _ = GRAPHS[name]
    cache, found = KeyValueCache(graph), []
    for t in range(N - 3):
        draft = [torch.cat([x[:, :, t : t + 1], -x[:, :, t + 1 : t + 4]], 2) for x in tokens()]
        found.append(decoded(cache, *draft, [4])[:, :, :1])
        cache.rewind(t + 3)  # what is left of the chunk attends again
        assert_exact(cache.attend(draft[0][:, :, :3])[:, :, :1], found[-1])
        cache.rewind(t + 1)
        assert cache.length == t + 1
    assert_exact(torch.cat(found, 2), full_pass(*tokens(), graph)[:, :, : N - 3])


@torch.no_grad()
def test_rewinding_stops_where_a_sender_was_dropped() -> None:
    q, k, v = rows = tokens()
    cache = KeyValueCache(SINKS)
    decoded(cache, *part(0, 12, *rows), [8, 1, 1, 2])
    reason = r"rewind\(9\): sender 5 was dropped after its last receiver 9, .* down to 10"
    with pytest.raises(ValueError, match=reason):
        cache.rewind(9)
    with pytest.raises(ValueError, match=r"rewind\(13\): only 12 tokens have come"):
        cache.rewind(13)
    cache.rewind(10)
    with pytest.raises(ValueError, match="no new tokens to attend with: append them first"):
        cache.attend(q[:, :, :1])
    cache.rewind(10)
    found = decoded(cache, *part(10, None, *rows), [1] * 13)
    assert_exact(found, full_pass(*rows, SINKS)[:, :, 10:])
    whole = KeyValueCache(patterns.causal(N))
    decoded(whole, *rows, [1] * N)
    whole.rewind(3)  # where no sender was dropped: to any token
    assert_exact(decoded(whole, *part(3, None, *rows), [4] * 5), full_pass(*rows, whole.graph)[:, :, 3:])
    whole.rewind(0)
    whole.append(k[:1, :1], v[:1, :1])  # other samples, other heads: a new beginning


def test_modes_may_change_and_attending_changes_nothing() -> None:
    """inference_mode, no_grad and autograd in turn; senders() returns copies."""
    rows, cache = tokens(), KeyValueCache(SINKS)
    with torch.inference_mode():
        parts = [decoded(cache, *part(0, 6, *rows), [6])]
        assert torch.equal(cache.attend(rows[0][:, :, :6]), parts[0])
        senders = cache.senders()
        copies = [x.clone() for x in senders]
    with torch.no_grad():
        parts.append(decoded(cache, *part(6, 12, *rows), [1] * 6))
    parts.append(decoded(cache, *part(12, None, *rows), [1] * 11))
    assert_exact(torch.cat(parts, 2), full_pass(*rows, SINKS))
    assert all(torch.equal(x, y) for x, y in zip(senders, copies, strict=True))


@torch.no_grad()
def test_every_layer_gets_every_chunk() -> None:
    _, k, v = tokens()
    cache, rows = KeyValueCache(patterns.causal(N), layers=2), (k[:, :, :3], v[:, :, :3])
    cache.append(*rows, layer=0)
    early = (partial(cache.append, *rows), partial(cache.reorder, [0, 1]), partial(cache.rewind, 0))
    two = k[:, :, :2], v[:, :, :2]
    assert_refusals(
        [
            *(
                (call, ValueError, r"must wait until layer 1 has got the tokens 0 \.\. 2 too")
                for call in early
            ),
            (lambda: cache.append(*two, layer=1), ValueError, r"the tokens 0 \.\. 2, .* got a chunk of 2"),
            (lambda: cache.senders(1), ValueError, "layer 1 has no new tokens"),
            (lambda: cache.append(*rows, layer=2), IndexError, r"layer must be in 0 \.\. 1, got 2"),
        ]
    )
    cache.append(*rows, layer=1)
    with pytest.raises(KeyError), cache.all_or_nothing():  # noqa: PT012
        cache.append(*rows, layer=0)
        raise KeyError
    cache.append(*rows, layer=1)
    cache.append(*rows, layer=0)
    assert cache.length == 6


LIKE = "a chunk must be like those before it, "
WRONG_CHUNKS = [
    (lambda k, v: (k[0], v), ValueError, r"k must be \[B, Hkv, T, D\], got shape"),
    (lambda k, v: (k, v.long()), TypeError, r"v must be a float tensor .*, got torch.int64"),
    (lambda k, v: (k, None), TypeError, "v must be a float tensor .* got NoneType"),
    (lambda k, v: (k, v[:, :, :1]), ValueError, r"k and v must agree in \[B, Hkv, T\]"),
    (lambda k, v: (k[:1], v[:1]), ValueError, LIKE + r"\[2, 2, T, 6\] in .* got \[1, 2, T, 6\]"),
    (lambda k, v: (k, v[..., :3]), ValueError, LIKE + r"\[2, 2, T, 5\]"),
    (lambda k, v: (k.float(), v.float()), ValueError, LIKE + ".* in torch.float64 .* in torch.float32"),
    (lambda k, v: (k[:, :, :0], v[:, :, :0]), ValueError, "a chunk must have at least one token, got none"),
    (
        lambda k, v: (k.repeat(1, 1, 9, 1), v.repeat(1, 1, 9, 1)),
        ValueError,
        "3 have come: no room for 27 more",
    ),
]


@torch.no_grad()
def test_wrong_chunks() -> None:
    """They are refused by name, and the cache goes on without them."""
    rows, cache = tokens(), KeyValueCache(SINKS)
    first, wrong = decoded(cache, *part(0, 3, *rows), [3]), part(0, 3, *rows[1:])
    assert_refusals(
        (lambda f=f: cache.append(*f(*wrong)), error, message) for f, error, message in WRONG_CHUNKS
    )
    rest = decoded(cache, *part(3, None, *rows), [4] * 5)
    assert_exact(torch.cat([first, rest], 2), full_pass(*rows, SINKS))


@torch.no_grad()
def test_senders_must_have_come() -> None:
    _, k, v = tokens()
    cache = KeyValueCache(patterns.prefix(N, 5))
    reason = r"receiver 0 .* attends to sender 4, which has not come: give at least 5 tokens in the next"
    with pytest.raises(ValueError, match=reason):
        cache.append(k[:, :, :3], v[:, :, :3])
    cache.append(k[:, :, :5], v[:, :, :5])
    cache.append(k[:, :, 5:6], v[:, :, 5:6])
    ladder = KeyValueCache(patterns.band(9, 1, 1))  # each token waits for the next
    with pytest.raises(ValueError, match="give at least 9 tokens in the next chunk"):
        ladder.append(k[:, :, :2], v[:, :, :2])


Q, K, V = tokens()
EMPTY, THREE = KeyValueCache(patterns.causal(N)), KeyValueCache(patterns.causal(N))
THREE.append(K[:, :, :3], V[:, :, :3])
WRONG = [
    (lambda: KeyValueCache(5), TypeError, "graph must be a TokenGraph of all tokens to come, got int"),
    (lambda: KeyValueCache(patterns.causal(9).rows(3, 9)), ValueError, "receivers and senders are the same"),
    (lambda: KeyValueCache(patterns.causal(9), 0), ValueError, "layers must be at least 1, got 0"),
    (lambda: EMPTY.attend(Q), ValueError, "layer 0 has no new tokens to attend with: append them first"),
    (EMPTY.senders, ValueError, "layer 0 has no new tokens: append them first"),
    (lambda: THREE.attend(Q[:, :, :4]), ValueError, r"q must have a row for each .* 0 \.\. 2, .* got 4"),
    (lambda: THREE.attend(Q[:, :, :3], backend="fast"), ValueError, "backend must be one of"),
    (lambda: THREE.check_graph(patterns.causal(22)), ValueError, r"cache of .*23.*, got .*causal\(22\)"),
    (lambda: THREE.reorder([0, 2]), IndexError, r"index must hold samples in 0 \.\. 1, got \[0, 2\]"),
    (lambda: THREE.reorder([0.5]), TypeError, "index must hold integers"),
    (lambda: THREE.reorder([[0]]), ValueError, r"index must be a list .* got shape \[1, 1\]"),
    (lambda: KeyValueCache(GRAPHS["by sample"][0]).reorder([1, 0]), ValueError, "differs by sample"),
]


@torch.no_grad()
def test_wrong_arguments() -> None:
    assert_refusals(WRONG)
    THREE.check_graph(patterns.window(N, N))  # the same edges: the same graph
    assert repr(THREE) == "KeyValueCache(causal(23): 3 senders of 3 in 1 layers, 0.0 MB)"


@torch.no_grad()
def test_wrong_states_and_heads() -> None:
    heads, x, graph = heads_with(), drawn(B, N, 12), patterns.causal(N)
    cache, merged, sender = KeyValueCache(graph), MergedHeads.of(heads), MergedHeads.of(heads, "sender")
    states = r"x must be the states \[B, T, width\] of the new tokens, got \[23, 12\]"
    forms = "heads must be FactoredHeads or MergedHeads, .* got StandardHeads; keys and values are stored by"
    wrong: list[Any] = [
        (lambda: cache.update(heads, x[0]), ValueError, states),
        (lambda: cache.update(heads, x[..., :3]), ValueError, "x must be"),
        # found after the rows were there
        (lambda: cache.update(heads, x, backend="fast"), ValueError, "backend must be one of"),
        (lambda: PatternMessageCache(heads, graph), TypeError, forms),
        (lambda: PatternMessageCache(merged, graph, "keys"), ValueError, "one of 'messages', 'states', got"),
        (
            lambda: PatternMessageCache(sender, graph, "states"),
            ValueError,
            "needs heads with side='receiver'",
        ),
    ]
    others = [PatternMessageCache(merged, graph, keep) for keep in ("messages", "states")]
    for one in others:
        wrong += [
            (partial(one.update, bad), ValueError, "x must be") for bad in (x[0], x[..., :3], x.float())
        ]
        wrong.append((partial(one.attend, x[:, :1]), ValueError, "append them first"))
    assert_refusals(wrong)
    assert [one.length for one in (cache, *others)] == [0, 0, 0]
    assert cache.nbytes == 0
