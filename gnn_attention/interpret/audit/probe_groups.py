"""Groups of receivers for one backward pass, such that every pair of tokens is isolated once.

A backward pass from a group gives for every sender whether *any* member depends on it: for a pair ``(dst,
src)`` dst's own gradient, where no other member may depend on src. Groups with such a place for every pair
decide all pairs, the allowed ones (is the edge used?) and the others (does it leak?).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gnn_attention._support.shapes import Bool, Tensor

# pairs that a dense product multiplies in the time of one edge
DENSE_GAIN = 32


def groups(allowed: Bool[Tensor, "dst src"]) -> Bool[Tensor, "groups dst"]:
    """Groups of receivers, far fewer than receivers where ``allowed[dst, src]`` is sparse.

    Every pair ``(dst, src)`` has a group with dst in it and no other member allowed for src. Greedy: the
    group that settles most open pairs, then the next. At least as many groups as a sender has receivers are
    needed; where that is half of all, or greedy groups are no fewer, every receiver is probed alone.

    >>> alone, everyone = torch.eye(64, dtype=torch.bool), torch.ones(64, 64, dtype=torch.bool)
    >>> window = everyone.tril() & everyone.triu(-3)
    >>> len(groups(alone)) < 16, len(groups(everyone.tril())), len(groups(window)) < 24
    (True, 64, True)
    """
    alone = torch.eye(len(allowed), dtype=torch.bool, device="cpu")
    if 2 * int(allowed.sum(0).max()) >= len(allowed):
        return alone
    senders, open_pairs = allowed.float(), torch.ones(allowed.shape, device="cpu")
    found: list[Tensor] = []
    while bool(open_pairs.any()):
        if len(found) == len(allowed) - 1:
            return alone
        group = _best_group(senders, open_pairs)
        settled = (group @ senders - senders == 0) & (group[:, None] > 0)
        open_pairs[settled] = 0
        found.append(group > 0)
    return torch.stack(found)


def _best_group(senders: Tensor, open_pairs: Tensor) -> Tensor:
    # receiver by receiver, as long as another one settles more open pairs than it takes away; gain and loss
    # are updated by the senders of each new member, not by all pairs
    member = torch.zeros(len(senders), device="cpu")
    # for each sender: how many of its open pairs the group settles, and whether no member may depend on it
    settled, free = (make(senders.shape[1], device="cpu") for make in (torch.zeros, torch.ones))
    gain, loss, product = open_pairs.sum(1), torch.zeros(len(senders), device="cpu"), _product_with(senders)
    by_sender = open_pairs.T.contiguous()
    while True:
        worth = (gain - loss).masked_fill(member > 0, -1)
        best = int(worth.argmax())
        if worth[best] <= 0:
            return member
        now = torch.where(senders[best] > 0, 0, settled) + open_pairs[best] * free
        loss = loss + product(now - settled)
        taken = (senders[best] * free).nonzero().flatten()
        gain = gain - by_sender[taken].sum(0)
        settled, free, member[best] = now, free * (1 - senders[best]), 1


def _product_with(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    # edge by edge where these are few; whole numbers below 2^24, so that the order of sums does not matter
    dst, src = matrix.nonzero(as_tuple=True)
    if len(dst) * DENSE_GAIN > matrix.numel():
        return lambda x: matrix @ x
    return lambda x: torch.zeros(len(matrix), device="cpu").index_add_(0, dst, x[src])
