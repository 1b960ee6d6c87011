"""Look-ups whose gradient is summed in one order."""

import torch
from support.bounds import assert_exact

from gnn_attention._support.deterministic_index import entries


def test_the_gradient_of_a_table_with_two_axes_is_that_of_torch():
    table = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[2], [0], [2]]), torch.tensor([1, 1, 3])
    found, wanted = (
        torch.autograd.grad(x.sin().sum(), table)[0] for x in (entries(table, *index), table[index])
    )
    assert_exact(found, wanted)
