"""Hugging Face models whose layers select senders themselves compute the numbers of eager attention."""

# ruff: noqa: E402
import math

import pytest
import torch
from support.bounds import assert_exact, attention_truth
from support.extras import needs
from support.refusals import assert_refusals
from torch import nn

transformers = needs("transformers")

from support.hf_models import build64, inputs
from transformers.masking_utils import causal_mask_function

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.huggingface import attention, mask

pytestmark = pytest.mark.usefixtures("wide")


def test_left_padding_that_an_indexer_counts_is_named():
    """The indexer of MiniMax M3 counts padding with any attention."""
    model, batch = build64("minimax_m3_vl", "gnn_attention"), inputs("minimax_m3_vl", "left")
    with pytest.warns(UserWarning, match="layer 1: its indexer counts padding on the left, so results"):
        model(**batch)


BATCH, HEADS, DST, SRC, MOST = 2, 4, 9, 11, 4


def qkv(value_dim=5):
    draw = torch.Generator().manual_seed(0)
    sizes = (HEADS, DST, 8), (2, SRC, 8), (2, SRC, value_dim)
    return [torch.randn(BATCH, *size, generator=draw, dtype=torch.float64) for size in sizes]


def oracle(q, k, v, mask):
    return attention_truth(q, k, v, mask).out


def draw_index(shape, high, seed=0):
    """Draw indices, with -1 anywhere and with duplicates."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-1, high, shape, generator=draw).to(torch.int32)


def build_mask(padded=True):
    """Return a causal mask whose receivers are the last tokens; sample 1 has padding on the left."""
    tokens = torch.ones(BATCH, SRC, dtype=torch.bool)
    if padded:
        tokens[1, :4] = False
    lazy = mask(BATCH, DST, SRC, SRC - DST, 0, causal_mask_function, tokens)
    past = torch.ones(SRC, SRC).tril()[SRC - DST :].bool()
    return lazy, past & tokens[:, None, None]


def build(block_size=None):
    module = nn.Module()
    if block_size is not None:
        module.indexer = nn.Module()
        module.indexer.block_size = block_size
    return module


def cells_of(index, size=1):
    """Return the mask of an index ``[..., dst, K]`` of blocks, computed by a loop."""
    cells = torch.zeros(*index.shape[:-1], math.ceil(SRC / size) * size, dtype=torch.bool)
    for position in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
        if (block := int(index[tuple(position)])) >= 0:
            cells[(*position[:-1], slice(block * size, (block + 1) * size))] = True
    return cells[..., :SRC]


def test_indices_within_masks_of_every_kind():
    """They have padding, -1, duplicates, later senders, isolated receivers and masks for each head."""
    q, k, v = qkv()
    index, (lazy, base) = draw_index((BATCH, DST, MOST), SRC), build_mask()
    index[0, 3] = -1
    is_selected = cells_of(index)[:, None]
    by_head = torch.rand(BATCH, HEADS, DST, SRC, generator=torch.Generator().manual_seed(1)) < 0.5
    for attention_mask, allowed in ((lazy, base), (by_head, by_head), (by_head[:, :1], by_head[:, :1])):
        output = attention(build(), q, k, v, attention_mask, indices=index)[0].transpose(1, 2)
        assert_exact(output, oracle(q, k, v, allowed & is_selected))
        assert not output[0, :, 3].any()


def test_blocks_for_each_group_of_heads():
    q, k, v = qkv()
    index, (lazy, base) = draw_index((BATCH, 2, DST, 2), math.ceil(SRC / 3)), build_mask(padded=False)
    output = attention(build(3), q, k, v, lazy, block_indices=index)[0].transpose(1, 2)
    allowed = base & cells_of(index, 3).repeat_interleave(HEADS // 2, 1)
    assert_exact(output, oracle(q, k, v, allowed))


def test_graphs_and_cuts_hold_within_a_selection():
    """A selection inside ``use_graph`` equals the mask of both."""
    module = build()
    module.config = transformers.LlamaConfig(attn_implementation="gnn_attention")
    q, k, v = qkv()
    q, index = torch.cat([q, q[:, :, :2]], 2), draw_index((BATCH, SRC, MOST), SRC)
    lazy = lambda: mask(BATCH, SRC, SRC, 0, 0, causal_mask_function)  # noqa: E731
    base, window = torch.ones(SRC, SRC).tril().bool() & cells_of(index)[:, None], patterns.window(SRC, 4)
    with ga.use_graph(module, window):
        output = attention(module, q, k, v, lazy(), indices=index)[0].transpose(1, 2)
    assert_exact(output, oracle(q, k, v, base & window.mask()))


def test_layers_that_share_a_selection_share_its_graph(monkeypatch):
    calls, method = [], ga.TokenGraph.from_indices
    monkeypatch.setattr(ga.TokenGraph, "from_indices", lambda *a, **k: calls.append(1) or method(*a, **k))
    build64("glm_moe_dsa", "gnn_attention")(**inputs("glm_moe_dsa"))
    assert len(calls) == 2


def test_other_selections_are_refused_by_name():
    q, k, v = qkv()
    lazy = build_mask()[0]
    index, blocks = draw_index((BATCH, DST, MOST), SRC), draw_index((BATCH, 2, DST, 2), 4)
    cases = [
        (build(), {"indices": torch.zeros(1)}, r"passes indices of \[1\] for 9 .*\[batch, dst, K\]"),
        (build(), {"indices": blocks}, r"passes indices of \[2, 2, 9, 2\] "),
        (build(3), {"block_indices": index}, r"or block_indices \[batch, groups, dst, K\]"),
        (
            build(3),
            {"block_indices": blocks[:, [0, 1, 1]]},
            r"of \[2, 3, 9, 2\] for 9 receivers and 4 heads",
        ),
        (build(3), {"block_indices": blocks, "indices": index}, "passes indices and block_indices"),
        (build(), {"block_indices": blocks}, "block_size: use 'eager'"),
    ]
    call = lambda module, options: lambda: attention(module, q, k, v, lazy, **options)  # noqa: E731
    assert_refusals((call(module, options), NotImplementedError, text) for module, options, text in cases)
