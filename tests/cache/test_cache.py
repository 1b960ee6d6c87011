"""Decoding with either cache equals the full pass at every position, in any chunks."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import assert_exact
from support.covering import thin
from support.decoding import (
    DIM,
    GRAPHS,
    HEADS,
    SINKS,
    B,
    N,
    absolute,
    absolute_dense,
    chunks,
    cut,
    decode,
    full_pass,
    listed,
    make_heads,
    randn,
    tokens,
    whole_mask,
)

from gnn_attention import FactoredHeads, MergedHeads, StandardHeads, TokenGraph, patterns
from gnn_attention.cache import KeyValueCache, PatternMessageCache
from gnn_attention.rotary import Rotary
from gnn_attention.verify import oracle
from gnn_attention.verify.truth import name_parameters


@torch.no_grad()
def check_decoding(name: str, sizes: list[int]) -> None:
    """Compare a cache with the full pass at every position."""
    graph, _ = GRAPHS[name]
    edges = whole_mask(graph).flatten(0, 1).any(0)  # [dst, src]
    cache, (q, k, v), start, outputs = KeyValueCache(graph), tokens(), 0, []
    for count in sizes:
        chunk = slice(start, start + count)
        cache.append(k[:, :, chunk], v[:, :, chunk])
        index = [src for src in range(start + count) if edges[start:, src].any()]
        assert cache.positions.tolist() == [src + graph.src_offset for src in index]
        assert all(torch.equal(rows, x[:, :, index]) for rows, x in zip(cache.senders(), (k, v), strict=True))
        outputs.append(cache.attend(q[:, :, chunk]))
        start += count
        assert cache.length == start
    assert_exact(torch.cat(outputs, dim=2), oracle.attention(q, k, v, whole_mask(graph), DIM**-0.5))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(GRAPHS)), st.lists(st.integers(1, 9), min_size=N, max_size=N))
def test_equals_the_full_pass_in_any_chunks(name: str, drawn_sizes: list[int]) -> None:
    check_decoding(name, cut([max(GRAPHS[name][1], drawn_sizes[0]), *drawn_sizes[1:]]))


OPTIONS = [("mixed", absolute, False), ("3", None, True), ("1", absolute, True)]


@pytest.mark.parametrize(("number", "name"), list(enumerate(GRAPHS)))
@torch.no_grad()
def test_score_mods_at_absolute_positions_and_sinks(number: int, name: str) -> None:
    (graph, first_size), (size, mod, sinks) = GRAPHS[name], OPTIONS[number % 3]
    logits = randn(HEADS, seed=7) if sinks else None
    options = {"score_mod": mod, "sink_logits": logits, "scale": 0.7}
    output = decode(KeyValueCache(graph), *tokens(), chunks(size, first_size), **options)
    modify = None if mod is None else partial(absolute_dense, graph.src_offset)
    assert_exact(output, full_pass(*tokens(), graph, 0.7, modify, logits))


@pytest.mark.parametrize("name", ["window | sinks", "strict causal", "listed", "prefix", "by head"])
@pytest.mark.parametrize("of", ["all", "receivers"])
def test_gradients_flow_back_to_all_chunks(name: str, of: str) -> None:
    """A later chunk may not change tensors that the backward pass of an earlier chunk needs."""
    (graph, first_size), inputs = GRAPHS[name], tokens()
    parameters = [x.requires_grad_() for x in (inputs if of == "all" else inputs[:1])]
    output = decode(KeyValueCache(graph), *inputs, chunks("mixed", first_size))
    expected = full_pass(*inputs, graph)
    assert_exact(output, expected)
    assert_exact(*(torch.autograd.grad((out**2).sum(), parameters) for out in (output, expected)))


@torch.no_grad()
def test_a_long_list_is_not_searched_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large chunks of a list renumber its edges, with the same result."""
    monkeypatch.setattr("gnn_attention.graph.regions.enumerate_pairs.MAX_ENUMERATED_PAIRS", 0)
    for graph in (listed(), TokenGraph.from_edges(SINKS.edge_index.flip(1), N)):
        output = decode(KeyValueCache(graph), *tokens(), chunks("mixed", 1), score_mod=absolute)
        assert_exact(output, full_pass(*tokens(), graph, DIM**-0.5, partial(absolute_dense, 0)))


@pytest.mark.parametrize("name", ["window", "window | sinks", "dilated", "listed", "by head"])
@torch.no_grad()
def test_a_non_edge_carries_no_nan(name: str) -> None:
    """A NaN in a token reaches only receivers that attend to it, whether it is dropped or not."""
    graph, first_size = GRAPHS[name]
    mask = whole_mask(graph)
    for token in range(0, N, 5):
        q, k, v = tokens()
        k[:, :, token], v[:, :, token] = torch.nan, torch.inf
        output = decode(KeyValueCache(graph), q, k, v, chunks("mixed", first_size))
        assert torch.equal(output.isnan().all(-1), mask[..., token])
        assert torch.equal(output.isfinite().all(-1), ~mask[..., token])


@pytest.mark.parametrize("name", ["causal", "window | sinks", "tree", "prefix", "at other positions"])
@torch.no_grad()
def test_rotated_and_normed_heads(name: str) -> None:
    graph, first_size = GRAPHS[name]
    heads, x = make_heads(rotary=Rotary(), qk_norm=True), randn(B, N, 12, seed=4)
    cache = KeyValueCache(graph, layers=2)
    outputs = []
    for chunk in x.split(chunks("mixed", first_size), dim=1):
        # Layers have the same tokens, but buffers of their own.
        cache.update(heads, -chunk, layer=1)
        outputs.append(cache.update(heads, chunk, score_mod=absolute))
    positions = torch.arange(N) + graph.dst_offset
    q, (k, v) = heads.receive(x, positions), heads.send(x, positions)
    z = full_pass(q, k, v, graph, DIM**-0.5, partial(absolute_dense, graph.src_offset))
    assert_exact(torch.cat(outputs, dim=1), torch.einsum("bhtv,hvw->btw", z, heads.W_O) + heads.b_O)


FORMS = {
    "standard": lambda h: h,
    "factored": FactoredHeads.of,
    "merged": MergedHeads.of,
    "factored, sender": lambda h: FactoredHeads.of(h, "sender"),
    "merged, sender": lambda h: MergedHeads.of(h, "sender"),
}
ONE_BIAS = StandardHeads.from_arrays(
    *map(make_heads().get_parameter, ("W_Q", "W_K", "W_V", "W_O")), b_V=make_heads().b_V
)
HEADS_OF = {"bias": make_heads, "no bias": lambda: make_heads(bias=False), "b_V alone": lambda: ONE_BIAS}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_form_of_the_weights(form: str) -> None:
    heads, x = make_heads(), randn(B, N, 12, seed=4)
    for name in ("window | sinks", "strict causal"):
        cache, other_form = KeyValueCache(GRAPHS[name][0]), FORMS[form](heads)
        outputs = [cache.update(other_form, chunk) for chunk in x.split(3, dim=1)]
        expected = oracle.layer(name_parameters(heads), x, x, whole_mask(cache.graph), DIM**-0.5)
        assert_exact(torch.cat(outputs, dim=1), expected)


@pytest.mark.parametrize(
    ("form", "keep", "kind", "where"),
    thin(
        product(
            ["factored", "merged"],
            ["messages", "states"],
            HEADS_OF,
            [("window | sinks", "1"), ("strict causal", "7"), ("by head", "mixed"), ("tree", "3")],
        )
    )
    + thin(
        product(["factored, sender", "merged, sender"], ["messages"], HEADS_OF, [("window | sinks", "1")])
    ),
)
@torch.no_grad()
def test_patterns_and_messages(form: str, keep: str, kind: str, where: tuple[str, str]) -> None:
    """Every step agrees with the full pass of the standard form at every position (S1.14 to S1.18)."""
    heads, x = HEADS_OF[kind](), randn(B, N, 12, seed=4)
    other_form = FORMS[form](heads)
    (graph, first_size), size = GRAPHS[where[0]], where[1]
    cache = PatternMessageCache(other_form, graph, keep)
    outputs = [cache.update(chunk, absolute) for chunk in x.split(chunks(size, first_size), dim=1)]
    truth = oracle.layer(
        name_parameters(heads), x, x, whole_mask(graph), DIM**-0.5, partial(absolute_dense, 0)
    )
    assert_exact(torch.cat(outputs, dim=1), truth)
    patterns_or_states = other_form.patterns(x) if other_form.side == "sender" else x.unsqueeze(1)
    assert_exact(cache.senders()[0], patterns_or_states[:, :, cache.positions])


@torch.no_grad()
def test_sink_logits_take_their_share_of_a_mixture_of_states() -> None:
    """With a sink, the weights of a receiver sum to less than 1."""
    heads, x, sinks = make_heads(), randn(B, N, 12, seed=4), randn(HEADS, seed=7)
    q, (k, v) = heads.receive(x), heads.send(x)
    graph = patterns.window(N, 4)
    expected = heads.collect(full_pass(q, k, v, graph, DIM**-0.5, None, sinks))
    for other_form in (FactoredHeads.of(heads), MergedHeads.of(heads)):
        for keep in ("messages", "states"):
            cache = PatternMessageCache(other_form, graph, keep)
            outputs = [cache.update(chunk, sink_logits=sinks) for chunk in x.split(3, dim=1)]
            assert_exact(torch.cat(outputs, dim=1), expected)
