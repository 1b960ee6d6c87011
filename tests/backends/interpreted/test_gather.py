"""The kernel that measures how fast rows are gathered adds up the right ones."""

import pytest
import torch
from support.bounds import assert_sum

from benchmarks.gpu.gather_kernel import EACH, sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [64, 1024])
def test_every_64_rows_are_added_up(width):
    """Of 128 bytes and of 2 KB, in bfloat16."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(50, width, generator=rng).bfloat16().to(DEVICE)
    places = torch.randint(50, (2 * EACH,), generator=rng, dtype=torch.int32).to(DEVICE)
    each = rows.double()[places.long()].view(2, EACH, width)
    assert_sum(sums(rows, places), each.sum(1), terms=EACH, magnitude=float(each.abs().sum(1).max()))
