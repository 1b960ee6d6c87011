"""A sign-flip test of paired differences, and Holm's correction for several tests."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from gnn_attention._support.shapes import Float, Tensor

# With more pairs than this, 2^16 random choices of signs replace the 2^n possible ones.
MAX_EXACT_PAIRS = 16


def flip_test(differences: Float[Tensor, " pairs"]) -> float:
    """Return the one-sided p-value of "symmetric about 0", against a mean above 0.

    It is the share of all ``2^n`` choices of signs with a mean at least as large as the observed one (for
    more than 16 pairs, of 65,535 random choices and the observed one). NaN are left out; without any number p
    is 1. Source: Fisher 1935, "The Design of Experiments", section 21.

    >>> flip_test(torch.tensor([1.0, 2.0, 3.0])), flip_test(torch.tensor([-1.0, 1.0]))
    (0.125, 0.75)
    """
    values = differences[~differences.isnan()].double()
    if not values.any():
        return 1.0
    signs = _signs(len(values))
    # Equal sums may round differently: the error of a sum is below n eps times the sum of absolute values.
    tolerance = len(values) * torch.finfo(torch.float64).eps * float(values.abs().sum())
    return float((signs @ values >= values.sum() - tolerance).double().mean())


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for several tests by Holm's method.

    If those at most ``level`` are called significant, the probability of any false positive is at most
    ``level``. The corrected value is ``max over j <= i of (m - j) p_(j)`` for the sorted p (j from 0), at
    most 1. Source: Holm 1979.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p_holm, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        p_holm[index] = largest
    return p_holm


@lru_cache(maxsize=2)
def _signs(count: int) -> Float[Tensor, "choices pairs"]:
    if count <= MAX_EXACT_PAIRS:
        bits = torch.arange(2**count).unsqueeze(1) >> torch.arange(count)
        return 1.0 - 2.0 * (bits & 1).double()
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (2**MAX_EXACT_PAIRS, count), generator=generator).double() * 2 - 1
    signs[0] = 1.0
    return signs
