"""A cache drops senders, forks, rewinds and reorders, and goes on after an error."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.decoding import GRAPHS, SINKS, B, N, decode, full_pass, make_heads, part, randn, tokens
from support.refusals import assert_refusals

from gnn_attention import MergedHeads, patterns
from gnn_attention.cache import KeyValueCache, PatternMessageCache


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
    # Two tensors have 2 float32 in each row, and there are some spare rows.
    assert max(sizes) <= 2 * 2 * 4 * (w + s + (w + s) // 4 + 16)
    assert torch.equal(cache.senders()[0][0, 0, :, 0].long(), cache.positions)
    # The memory of a long prompt is freed.
    prompt, rows = KeyValueCache(patterns.window(3000, 8)), torch.zeros(1, 1, 2000, 2)
    sizes = [prompt.append(new, new) or prompt.nbytes for new in (rows, *rows[:, :, :3].split(1, 2))]
    assert sizes[-1] < sizes[0] / 40


@torch.no_grad()
def test_beams_are_reordered() -> None:
    """One prompt has three continuations, of which two survive, as if each had been there from the start."""
    rows, cache = tokens(3), KeyValueCache(SINKS)
    prompt = [x[:1] for x in part(0, 6, *rows)]
    decode(cache, *prompt, [6])
    cache.reorder(torch.tensor([0, 0, 0]))
    decode(cache, *part(6, 10, *rows), [1, 3])
    cache.reorder([2, 0])
    output = decode(cache, *(x[:2] for x in part(10, None, *rows)), [1] * (N - 10))
    pairs = list(zip(prompt, rows, strict=True))
    for beam, root in enumerate((2, 0)):
        text = [torch.cat([p, x[root : root + 1, :, 6:10], x[beam : beam + 1, :, 10:]], 2) for p, x in pairs]
        assert_exact(output[beam : beam + 1], full_pass(*text, SINKS)[:, :, 10:])


@pytest.mark.parametrize(
    "copy_cache", [KeyValueCache.fork, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@torch.no_grad()
def test_a_fork_is_independent(copy_cache: Any) -> None:
    rows, cache = tokens(), KeyValueCache(SINKS)
    decode(cache, *part(0, 9, *rows), [4, 5])
    second_cache, outputs = copy_cache(cache), []
    for start, stop in ((9, 11), *((t, t + 1) for t in range(11, N))):
        q, k, v = part(start, stop, *rows)
        cache.append(k, v)
        second_cache.append(-k, -v)
        outputs.append([x.attend(q) for x in (cache, second_cache)])
    for steps, sign in zip(zip(*outputs, strict=True), (1, -1), strict=True):
        k, v = (torch.cat([x[:, :, :9], sign * x[:, :, 9:]], 2) for x in rows[1:])
        assert_exact(torch.cat(steps, 2), full_pass(rows[0], k, v, SINKS)[:, :, 9:])


@pytest.mark.parametrize("name", ["causal", "window", "window | sinks", "tree", "listed"])
@torch.no_grad()
def test_a_rejected_draft_leaves_no_trace(name: str) -> None:
    """In speculative decoding, a rewound cache continues as if the draft had never been appended."""
    graph, _ = GRAPHS[name]
    cache, outputs = KeyValueCache(graph), []
    for t in range(N - 3):
        draft = [torch.cat([x[:, :, t : t + 1], -x[:, :, t + 1 : t + 4]], 2) for x in tokens()]
        outputs.append(decode(cache, *draft, [4])[:, :, :1])
        # The rest of the chunk can attend again.
        cache.rewind(t + 3)
        assert_exact(cache.attend(draft[0][:, :, :3])[:, :, :1], outputs[-1])
        cache.rewind(t + 1)
        assert cache.length == t + 1
    assert_exact(torch.cat(outputs, 2), full_pass(*tokens(), graph)[:, :, : N - 3])


@torch.no_grad()
def test_rewinding_stops_where_a_sender_was_dropped() -> None:
    q, k, v = rows = tokens()
    cache = KeyValueCache(SINKS)
    decode(cache, *part(0, 12, *rows), [8, 1, 1, 2])
    reason = r"rewind\(9\): sender 5 was dropped after its last receiver 9, .* rewind to 10 or later"
    with pytest.raises(ValueError, match=reason):
        cache.rewind(9)
    with pytest.raises(ValueError, match=r"rewind\(13\): the cache has only 12 tokens"):
        cache.rewind(13)
    cache.rewind(10)
    with pytest.raises(ValueError, match="no new tokens: append them first"):
        cache.attend(q[:, :, :1])
    cache.rewind(10)
    output = decode(cache, *part(10, None, *rows), [1] * 13)
    assert_exact(output, full_pass(*rows, SINKS)[:, :, 10:])
    causal = KeyValueCache(patterns.causal(N))
    decode(causal, *rows, [1] * N)
    # A causal cache can go back to any token, because no sender was dropped.
    causal.rewind(3)
    assert_exact(decode(causal, *part(3, None, *rows), [4] * 5), full_pass(*rows, causal.graph)[:, :, 3:])
    causal.rewind(0)
    # An empty cache takes other numbers of samples and heads.
    causal.append(k[:1, :1], v[:1, :1])


def test_modes_may_change_and_attending_changes_nothing() -> None:
    """``inference_mode``, ``no_grad`` and autograd may follow each other; ``senders()`` returns copies."""
    rows, cache = tokens(), KeyValueCache(SINKS)
    with torch.inference_mode():
        outputs = [decode(cache, *part(0, 6, *rows), [6])]
        assert torch.equal(cache.attend(rows[0][:, :, :6]), outputs[0])
        senders = cache.senders()
        copies = [x.clone() for x in senders]
    with torch.no_grad():
        outputs.append(decode(cache, *part(6, 12, *rows), [1] * 6))
    outputs.append(decode(cache, *part(12, None, *rows), [1] * 11))
    assert_exact(torch.cat(outputs, 2), full_pass(*rows, SINKS))
    assert all(torch.equal(x, y) for x, y in zip(senders, copies, strict=True))


@torch.no_grad()
def test_every_layer_gets_every_chunk() -> None:
    _, k, v = tokens()
    cache, rows = KeyValueCache(patterns.causal(N), layers=2), (k[:, :, :3], v[:, :, :3])
    cache.append(*rows, layer=0)
    short, message = (k[:, :, :2], v[:, :, :2]), r"must wait until layer 1 also has the tokens 0 \.\. 2"
    assert_refusals(
        [
            (lambda: cache.append(*rows), ValueError, message),
            (lambda: cache.reorder([0, 1]), ValueError, message),
            (lambda: cache.rewind(0), ValueError, message),
            (lambda: cache.append(*short, layer=1), ValueError, r"the tokens 0 \.\. 2, .* got a chunk of 2"),
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


MISMATCH = "a chunk must be like those before it, "
WRONG_CHUNKS = [
    (lambda k, v: (k[0], v), ValueError, r"k must be \[B Hkv T D\], got"),
    (lambda k, v: (k, v.long()), TypeError, r"v must be a float tensor .*, got torch.int64"),
    (lambda k, v: (k, v[:, :, :1]), ValueError, r"v must be \[B Hkv T Dv\] with T = 3, as in k, got"),
    (lambda k, v: (k[:1], v[:1]), ValueError, MISMATCH + r"\[2, 2, T, 6\] in .* got \[1, 2, T, 6\]"),
    (lambda k, v: (k.float(), v.float()), ValueError, MISMATCH + ".* in torch.float64 .* in torch.float32"),
    (lambda k, v: (k[:, :, :0], v[:, :, :0]), ValueError, "a chunk must have at least one token, got none"),
    (lambda k, v: (k.repeat(1, 1, 9, 1), v.repeat(1, 1, 9, 1)), ValueError, "no room for 27 more"),
]


@torch.no_grad()
def test_wrong_chunks() -> None:
    """Errors name the wrong argument, and the cache goes on without the chunk."""
    rows, cache = tokens(), KeyValueCache(SINKS)
    first_output, chunk = decode(cache, *part(0, 3, *rows), [3]), part(0, 3, *rows[1:])
    assert_refusals(
        (lambda f=f: cache.append(*f(*chunk)), error, message) for f, error, message in WRONG_CHUNKS
    )
    output = decode(cache, *part(3, None, *rows), [4] * 5)
    assert_exact(torch.cat([first_output, output], 2), full_pass(*rows, SINKS))


@torch.no_grad()
def test_senders_must_have_come() -> None:
    _, k, v = tokens()
    cache = KeyValueCache(patterns.prefix(N, 5))
    reason = r"receiver 0 .* attends to sender 4, which .* the next chunk must have at least 5 tokens"
    with pytest.raises(ValueError, match=reason):
        cache.append(k[:, :, :3], v[:, :, :3])
    cache.append(k[:, :, :5], v[:, :, :5])
    cache.append(k[:, :, 5:6], v[:, :, 5:6])


Q, K, V = tokens()
EMPTY, THREE = KeyValueCache(patterns.causal(N)), KeyValueCache(patterns.causal(N))
THREE.append(K[:, :, :3], V[:, :, :3])
WRONG = [
    (lambda: KeyValueCache(5), TypeError, "graph must be a TokenGraph of all tokens to come, got int"),
    (lambda: KeyValueCache(patterns.causal(9).rows(3, 9)), ValueError, "must have the same tokens"),
    (lambda: KeyValueCache(patterns.causal(9), 0), ValueError, "layers must be at least 1, got 0"),
    (lambda: EMPTY.attend(Q), ValueError, "layer 0 has no new tokens: append them first"),
    (EMPTY.senders, ValueError, "layer 0 has no new tokens: append them first"),
    (lambda: THREE.attend(Q[:, :, :4]), ValueError, "does not fit q with 4 receivers"),
    (lambda: THREE.attend(Q[:, :, :3], backend="fast"), ValueError, "backend must be one of"),
    (lambda: THREE.check_graph(patterns.causal(22)), ValueError, r"cache of .*23.*, got .*causal\(22\)"),
    (lambda: THREE.reorder([0, 2]), IndexError, r"index must hold samples in 0 \.\. 1, got \[0, 2\]"),
    (lambda: THREE.reorder([0.5]), TypeError, r"each entry of index must be an integer, got 0.5"),
    (lambda: THREE.reorder([[0]]), TypeError, r"each entry of index must be an integer, got \[0\]"),
    (lambda: KeyValueCache(GRAPHS["by sample"][0]).reorder([1, 0]), ValueError, "varies by sample"),
]


@torch.no_grad()
def test_wrong_arguments() -> None:
    assert_refusals(WRONG)
    # Graphs with the same edges are equal.
    THREE.check_graph(patterns.window(N, N))
    assert repr(THREE) == "KeyValueCache(causal(23): 3 senders of 3 in 1 layers, 0.0 MB)"


@torch.no_grad()
def test_wrong_states_and_heads() -> None:
    heads, x, graph = make_heads(), randn(B, N, 12), patterns.causal(N)
    cache, merged, sender = KeyValueCache(graph), MergedHeads.of(heads), MergedHeads.of(heads, "sender")
    second_cache = PatternMessageCache(merged, graph, "states")
    states = r"x must be the states \[B, T, width\] of the new tokens, got a Tensor .*\[23, 12\]"
    forms = "heads must be FactoredHeads or MergedHeads, got StandardHeads; use KeyValueCache"
    side = "needs heads with side='receiver'"
    assert_refusals(
        [
            (lambda: cache.update(heads, x[0]), ValueError, states),
            (lambda: cache.update(heads, x[..., :3]), ValueError, "x must be"),
            # This error occurs after the rows were appended.
            (lambda: cache.update(heads, x, backend="fast"), ValueError, "backend must be one of"),
            (lambda: PatternMessageCache(heads, graph), TypeError, forms),
            (lambda: PatternMessageCache(merged, graph, "keys"), ValueError, "one of 'messages', 'states'"),
            (lambda: PatternMessageCache(sender, graph, "states"), ValueError, side),
            (lambda: second_cache.update(x.float()), ValueError, "x must be"),
            (lambda: second_cache.attend(x[:, :1]), ValueError, "append them first"),
        ]
    )
    assert (cache.length, second_cache.length, cache.nbytes) == (0, 0, 0)
