"""Hugging Face models whose layers choose senders themselves: eager's numbers, along the edges alone."""

# ruff: noqa: E402
import math

import pytest
import torch
from support.bounds import assert_exact, attention_truth
from support.extras import needs
from support.refusals import assert_refusals
from torch import nn

transformers = needs("transformers")

from support.hf_models import built, inputs
from transformers.masking_utils import causal_mask_function

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.huggingface import attention, mask

pytestmark = pytest.mark.usefixtures("wide")


def test_left_padding_that_an_indexer_counts_is_named():
    """The numbers are those of sdpa, whose isolated rows are 0 too."""
    model, given = built("minimax_m3_vl", "gnn_attention"), inputs("minimax_m3_vl", "left")
    with pytest.warns(UserWarning, match="layer 1: its indexer counts blocks and scores from the padding"):
        model(**given)


BATCH, HEADS, DST, SRC, MOST = 2, 4, 9, 11, 4


def qkv(value_dim=5):
    draw = torch.Generator().manual_seed(0)
    sizes = (HEADS, DST, 8), (2, SRC, 8), (2, SRC, value_dim)
    return [torch.randn(BATCH, *size, generator=draw, dtype=torch.float64) for size in sizes]


def truth(q, k, v, mask):
    return attention_truth(q, k, v, mask).out


def drawn(shape, high, seed=0):
    """Numbers with -1 anywhere, and some that stand twice."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-1, high, shape, generator=draw).to(torch.int32)


def own_mask(padded=True):
    """Causal, the receivers are the last tokens; the second sample begins with padding."""
    tokens = torch.ones(BATCH, SRC, dtype=torch.bool)
    if padded:
        tokens[1, :4] = False
    lazy = mask(BATCH, DST, SRC, SRC - DST, 0, causal_mask_function, tokens)
    past = torch.ones(SRC, SRC).tril()[SRC - DST :].bool()
    return lazy, past & tokens[:, None, None]


def choosing(block_size=None):
    module = nn.Module()
    if block_size is not None:
        module.indexer = nn.Module()
        module.indexer.block_size = block_size
    return module


def cells_of(index, size=1):
    """The mask of an index ``[..., dst, K]`` of blocks, by a loop."""
    cells = torch.zeros(*index.shape[:-1], math.ceil(SRC / size) * size, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
        if (block := int(index[tuple(place)])) >= 0:
            cells[(*place[:-1], slice(block * size, (block + 1) * size))] = True
    return cells[..., :SRC]


def test_indices_within_masks_of_every_kind():
    """Padding, -1, duplicates, senders after the receiver, receivers without any; masks for each head too."""
    q, k, v = qkv()
    index, (lazy, own) = drawn((BATCH, DST, MOST), SRC), own_mask()
    index[0, 3] = -1
    chosen = cells_of(index)[:, None]
    by_head = torch.rand(BATCH, HEADS, DST, SRC, generator=torch.Generator().manual_seed(1)) < 0.5
    for given, allowed in ((lazy, own), (by_head, by_head), (by_head[:, :1], by_head[:, :1])):
        found = attention(choosing(), q, k, v, given, indices=index)[0].transpose(1, 2)
        assert_exact(found, truth(q, k, v, allowed & chosen))
        assert not found[0, :, 3].any()


def test_blocks_for_each_group_of_heads():
    q, k, v = qkv()
    index, (lazy, own) = drawn((BATCH, 2, DST, 2), math.ceil(SRC / 3)), own_mask(padded=False)
    found = attention(choosing(3), q, k, v, lazy, block_indices=index)[0].transpose(1, 2)
    allowed = own & cells_of(index, 3).repeat_interleave(HEADS // 2, 1)
    assert_exact(found, truth(q, k, v, allowed))


def test_graphs_and_cuts_hold_within_a_selection():
    """``use_graph`` and the edges that ``intervene`` takes away, against the mask of all three."""
    module = choosing()
    module.config = transformers.LlamaConfig(attn_implementation="gnn_attention")
    q, k, v = qkv()
    q, index = torch.cat([q, q[:, :, :2]], 2), drawn((BATCH, SRC, MOST), SRC)
    lazy = lambda: mask(BATCH, SRC, SRC, 0, 0, causal_mask_function)  # noqa: E731
    own, window = torch.ones(SRC, SRC).tril().bool() & cells_of(index)[:, None], patterns.window(SRC, 4)
    with ga.use_graph(module, window):
        found = attention(module, q, k, v, lazy(), indices=index)[0].transpose(1, 2)
    assert_exact(found, truth(q, k, v, own & window.mask()))


def test_layers_that_share_a_selection_share_its_graph(monkeypatch):
    made, plain = [], ga.TokenGraph.from_indices
    monkeypatch.setattr(ga.TokenGraph, "from_indices", lambda *a, **k: made.append(1) or plain(*a, **k))
    built("glm_moe_dsa", "gnn_attention")(**inputs("glm_moe_dsa"))
    assert len(made) == 2


def test_other_selections_are_refused_by_name():
    q, k, v = qkv()
    lazy = own_mask()[0]
    index, blocks = drawn((BATCH, DST, MOST), SRC), drawn((BATCH, 2, DST, 2), 4)
    cases = [
        (choosing(), {"indices": torch.zeros(1)}, r"passes indices of \[1\] for 9 .*\[batch, dst, K\]"),
        (choosing(), {"indices": blocks}, r"passes indices of \[2, 2, 9, 2\] "),
        (choosing(3), {"block_indices": index}, r"or block_indices \[batch, groups, dst, K\]"),
        (
            choosing(3),
            {"block_indices": blocks[:, [0, 1, 1]]},
            r"of \[2, 3, 9, 2\] for 9 receivers and 4 heads",
        ),
        (choosing(3), {"block_indices": blocks, "indices": index}, "passes indices and block_indices"),
        (choosing(), {"block_indices": blocks}, "and block_size"),
    ]
    call = lambda module, given: lambda: attention(module, q, k, v, lazy, **given)  # noqa: E731
    assert_refusals((call(module, given), NotImplementedError, text) for module, given, text in cases)
