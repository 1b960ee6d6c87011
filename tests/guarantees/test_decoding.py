"""F9: every cell of decoding is met, holds, and planted faults are seen: in caches, masks and arguments."""

import importlib.util
from collections import Counter
from itertools import product

import pytest
import torch
from support.extras import needs

from gnn_attention import cache as caches
from gnn_attention.cache._slots import ResidentSenders
from gnn_attention.graph.liveness import last_receivers
from tests.guarantees import chunked, decoding, greedy
from tests.guarantees.decoding import CELLS, GUARANTEE, case, measure
from tests.guarantees.guarantee import no_progress

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone


def fails(cells, seeds=(0, 1)):
    found = Counter()
    for cell in cells:
        for seed in seeds:
            if isinstance(cell, chunked.Cell):
                found[cell] += not chunked.judged(cell, seed).passed
            else:
                found[cell] += greedy.compared(cell, seed).differs is not None
    return sum(many > 0 for many in found.values())


def in_chunks(**wanted):
    def fits(cell):
        return all(value in str(getattr(cell, key)) for key, value in wanted.items())

    return list(filter(fits, chunked.CELLS))


def texts(**wanted):
    return [cell for cell in greedy.CELLS if wanted.items() <= vars(cell).items()]


def test_the_quick_cases_meet_every_kind_and_the_full_ones_every_cell():
    assert {case(number)[0] for number in range(GUARANTEE.full)} == set(CELLS)
    assert GUARANTEE.full == 11 * 8 * 3 + 5 * 3 * 4
    quick = [case(number)[0] for number in range(GUARANTEE.quick)]
    chunks = [cell for cell in quick if isinstance(cell, chunked.Cell)]
    models = [cell for cell in quick if isinstance(cell, greedy.Cell)]
    for met, wanted in (
        ({cell.way for cell in chunks}, chunked.WAYS),
        ({cell.family for cell in chunks}, chunked.FAMILIES),
        ({cell.chunk for cell in chunks}, chunked.CHUNKS),
        ({cell.architecture for cell in models}, greedy.ARCHITECTURES),
        ({cell.cache for cell in models}, greedy.CACHES),
        ({cell.padding for cell in models}, greedy.PADDINGS),
    ):
        assert met == set(wanted)


def test_without_transformers_it_says_so_and_does_not_hold(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = measure(12, no_progress)
    assert not found.holds
    assert found.failures == ()
    assert len(found.skipped) == 1
    assert "transformers is not installed: pip install 'gnn_attention[hf]'" in found.skipped[0]


def test_definitions_and_graphs_agree():
    """Pair by pair, for lengths that the seeds draw."""
    for family, made in chunked.FAMILIES.items():
        for n in (40, 53, 68):
            graph, definition = made(n)
            pairs = product(range(chunked.HEADS), range(n), range(n))
            table = torch.tensor([definition(*pair) for pair in pairs]).view(-1, n, n)
            assert torch.equal(graph.mask().expand(chunked.HEADS, n, n), table), (family, n)


def test_a_raised_error_is_a_failure_and_names_the_case(monkeypatch):
    def broken(self, *arguments, **keywords):
        raise RuntimeError("planted")

    monkeypatch.setattr(caches.KeyValueCache, "append", broken)
    found = measure(8, no_progress)
    assert found.failures[0] == "case 0: attend, float64, causal, chunks of 1, seed 0: RuntimeError: planted"


def test_keys_out_of_order_are_seen(monkeypatch):
    """A chunk is stored backwards: chunks of one token cannot show it."""
    true, cache = caches.KeyValueCache.append, caches.KeyValueCache
    monkeypatch.setattr(cache, "append", lambda self, k, v, layer=0: true(self, k.flip(2), v, layer))
    assert fails(in_chunks(way="attend, float64", chunk="3"), seeds=(0,)) == 8
    assert fails(in_chunks(way="attend, float32", chunk="3"), seeds=(0,)) == 8
    assert fails(in_chunks(way="attend, float64", chunk="1"), seeds=(0,)) == 0


def test_positions_that_begin_anew_with_each_chunk_are_seen(monkeypatch):
    """Rotations would not notice in a whole pass; in chunks they do."""
    true, cache = caches.KeyValueCache._positions_of, caches.KeyValueCache
    monkeypatch.setattr(cache, "_positions_of", lambda self, x, layer: true(self, x, layer) - self.length)
    assert fails(in_chunks(way="rotated", family="causal")) == 3
    assert fails(in_chunks(way="latent", family="causal")) == 3


def test_a_sender_forgotten_too_early_is_seen(monkeypatch):
    """A sender with a later receiver is dropped already; none is where the last token attends to all."""

    def needed(cache):
        return (last_receivers(cache.graph)[cache.positions] > cache.start).nonzero().flatten()

    monkeypatch.setattr(ResidentSenders, "needed", property(needed))
    assert fails(in_chunks(way="attend, float64", chunk="1")) == 6


def forgetful(monkeypatch, **changed):
    """Attention that is given other arguments."""
    transformers = needs("transformers")

    from gnn_attention import huggingface

    def attend(*arguments, **keywords):
        return huggingface.attention(*arguments, **{**keywords, **changed})

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "gnn_attention", attend)


@pytest.mark.parametrize(("changed", "model"), [({"softcap": None}, "Gemma 2"), ({"s_aux": None}, "gpt-oss")])
def test_a_dropped_argument_is_seen(monkeypatch, changed, model):
    needs("transformers")
    cells = texts(architecture=model, cache="dynamic cache")
    assert fails(cells, seeds=(0,)) == 0
    forgetful(monkeypatch, **changed)
    assert fails(cells, seeds=(0,)) == len(cells)


# positions that begin again, of padding that is no longer masked
@pytest.mark.filterwarnings("ignore:.*packed documents are not separated:UserWarning")
@pytest.mark.parametrize(
    ("argument", "value", "cells"),
    [
        ("attention_mask", None, texts(architecture="Llama", padding="padding on the left")),
        ("attention_mask", None, texts(architecture="GPT-2", padding="mixed padding")),
        ("mask_function", lambda b, h, dst, src: src <= dst, texts(architecture="Mistral")),
    ],
)
def test_a_dropped_mask_is_seen(monkeypatch, argument, value, cells):
    transformers = needs("transformers")

    from gnn_attention import huggingface

    def careless(**keywords):
        return huggingface.mask(**{**keywords, argument: value})

    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "gnn_attention", careless)
    assert fails(cells, seeds=(0,)) >= len(cells) - 1


def test_a_token_that_differs_names_row_step_and_margin(monkeypatch):
    needs("transformers")
    forgetful(monkeypatch, scaling=1.0)
    monkeypatch.setattr(decoding, "CELLS", tuple(texts(cache="static cache", padding="mixed padding")))
    found = measure(5, no_progress)
    assert found.failures
    assert all(line.startswith("case ") for line in found.failures)
    assert any("eager" in line and "ahead by" in line for line in found.failures)
