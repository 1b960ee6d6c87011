"""Many heads of a small graph as one head of a larger."""

import pytest
import torch

from gnn_attention.backends.cpu import head_batching as folding
from gnn_attention.backends.plan.csr import sorted_edges

SRC, DST = torch.tensor([3, 0, 2, 1]), torch.tensor([0, 1, 1, 2])


def listed():
    return sorted_edges(SRC, DST, 4, 3)[0]


@pytest.mark.parametrize(("slices", "kv_slices"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_each_slice_hears_the_senders_of_its_group(slices, kv_slices):
    """Pairs of the folded list, one slice after the other."""
    found = folding.folded(listed(), slices, kv_slices)
    pairs = set(zip(found.src.tolist(), found.dst.tolist(), strict=True))
    group = slices // kv_slices
    wanted = {
        (s + i // group * 4, d + i * 3)
        for i in range(slices)
        for s, d in zip(SRC.tolist(), DST.tolist(), strict=True)
    }
    assert pairs == wanted
    assert len(found.src) == 4 * slices
    assert (found.ptr.numel(), found.out_ptr.numel()) == (3 * slices + 1, 4 * kv_slices + 1)


def test_folded_lists_are_kept_while_their_list_lives_and_are_few():
    """The same list and sizes give the same tensors; many sizes push the oldest out; a dead list leaves
    nothing.
    """
    first = listed()
    assert folding.folded(first, 2, 2).src is folding.folded(first, 2, 2).src
    assert folding.folded(first, 2, 1).src is not folding.folded(first, 2, 2).src
    for slices in range(2, 12):
        folding.folded(first, slices, slices)
    assert len(folding._kept[first.ptr]) == folding.MOST_KEPT
    before = len(folding._kept)
    del first
    assert len(folding._kept) == before - 1


def test_only_small_graphs_of_several_heads_are_folded(monkeypatch):
    """4 edges: 3 slices fit into 12, 4 do not; a single slice has nothing to fold."""
    monkeypatch.setattr(folding, "MOST_EDGES", 12)
    assert [folding.worth_folding(listed(), slices) for slices in (1, 3, 4)] == [False, True, False]


def test_flat_is_slice_after_slice():
    """A copy where memory is in another order; no tokens are no trouble."""
    x = torch.arange(120.0).view(2, 4, 3, 5).transpose(1, 2)
    assert torch.equal(folding.flat(x)[0, 0], torch.cat([x[b, h] for b in range(2) for h in range(3)]))
    assert folding.flat(x[:, :, :0]).shape == (1, 1, 0, 5)
