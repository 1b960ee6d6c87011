"""Look-ups in a learned table: gradients are summed in float64 and in a fixed order."""

import pytest
import torch

from gnn_attention._support.deterministic_index import entries


def test_the_gradient_of_a_table_is_summed_in_float64():
    """In float32, 1e8 and then a hundred ones would add up to 1e8."""
    table, index = torch.zeros(1, 1, requires_grad=True), torch.zeros(101, dtype=torch.int64)
    entries(table, index, index).backward(torch.tensor([1e8] + 100 * [1.0]))
    assert table.grad.item() == torch.tensor(100000100.0).item() > 1e8


def test_a_learned_table_has_first_and_second_derivatives():
    table = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    head, column = torch.arange(2).view(2, 1), torch.tensor([0, 4, 4, 1])
    assert torch.autograd.gradcheck(lambda t: entries(t, head, column).square(), (table,))
    assert torch.autograd.gradgradcheck(lambda t: entries(t, head, column).square(), (table,))
    counts = torch.func.grad(lambda t: entries(t, head, column).sum())(table)
    assert torch.equal(counts, torch.tensor([[1.0, 1, 0, 0, 2]]).double().expand(2, 5))
    with pytest.raises(IndexError, match="out of bounds"):
        entries(table, torch.tensor([2]), torch.tensor([0]))
