"""A sign-flip test of paired differences, and Holm's correction for many."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from gnn_attention._support.shapes import Float, Tensor

# Up to this many pairs all 2^n choices of signs are tried; beyond, as many random ones.
EXACT = 16


def flip_test(differences: Float[Tensor, " pairs"]) -> float:
    """The one-sided p-value that differences are symmetric about 0, against a mean above it.

    The share of all ``2^n`` choices of signs with a mean at least as large (beyond 16 pairs of 65,535 random
    ones and the given). NaN are left out; 1 without a difference. Source: Fisher 1935, "The Design of
    Experiments", section 21.

    >>> flip_test(torch.tensor([1.0, 2.0, 3.0])), flip_test(torch.tensor([-1.0, 1.0]))
    (0.125, 0.75)
    """
    known = differences[~differences.isnan()].double()
    if not known.any():
        return 1.0
    signs = _signs(len(known))
    # Equal sums may round differently: a sum of n numbers is off by less than n eps times that of their
    # sizes.
    slack = len(known) * torch.finfo(torch.float64).eps * float(known.abs().sum())
    return float((signs @ known >= known.sum() - slack).double().mean())


def holm(p: Sequence[float]) -> list[float]:
    """Holm's corrected p-values: at most ``level`` of them wrong in a share ``level`` of all such families.

    ``max over j <= i of (m - j) p_(j)`` for the sorted p, at most 1. Source: Holm 1979.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = largest
    return corrected


@lru_cache(maxsize=2)
def _signs(count: int) -> Float[Tensor, "choices pairs"]:
    if count <= EXACT:
        bits = torch.arange(2**count).unsqueeze(1) >> torch.arange(count)
        return 1.0 - 2.0 * (bits & 1).double()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 2, (2**EXACT, count), generator=generator).double() * 2 - 1
    drawn[0] = 1.0
    return drawn
