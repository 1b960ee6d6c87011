"""Which receivers can be asked together: groups such that every pair of tokens is looked at on its own by one of them.

One backward pass from a group of receivers tells for every sender whether *any* of the group heard it. For a pair
``(dst, src)`` that answer is about dst alone where no other of its group may hear src. A family of groups that has such a
place for every pair therefore decides all pairs, the allowed ones (is the edge used?) and the others (does it leak?).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gnn_attention._support.shapes import Bool, Tensor

__all__ = ["groups"]

DENSE_GAIN = 32  # pairs that a dense product multiplies in the time of one edge


def groups(heard: Bool[Tensor, "dst src"]) -> Bool[Tensor, "groups dst"]:
    """Groups of receivers, far fewer than receivers where ``heard[dst, src]`` (dst may hear of src) is sparse.

    Every pair ``(dst, src)`` has a group with dst in it and nobody else who may hear src: a colouring of the conflict graph,
    but of pairs, since a single colouring would hide a leak behind an allowed sender of another member. Greedy: the group
    that settles most open pairs, then the next. As many groups as a sender has receivers are needed at least; where that is
    half of all, or the greedy ones run out, everybody is asked alone.

    >>> alone, everyone = torch.eye(64, dtype=torch.bool), torch.ones(64, 64, dtype=torch.bool)
    >>> len(groups(alone)) < 16, len(groups(everyone.tril())), len(groups(everyone.tril() & everyone.triu(-3))) < 24
    (True, 64, True)
    """
    alone = torch.eye(len(heard), dtype=torch.bool, device="cpu")
    if 2 * int(heard.sum(0).max()) >= len(heard):
        return alone
    hears, open_pairs = heard.float(), torch.ones(heard.shape, device="cpu")
    found: list[Tensor] = []
    while bool(open_pairs.any()):
        if len(found) == len(heard) - 1:
            return alone
        group = _most_settling(hears, open_pairs)
        settled = (group @ hears - hears == 0) & (group[:, None] > 0)
        open_pairs[settled] = 0
        found.append(group > 0)
    return torch.stack(found)


def _most_settling(hears: Tensor, open_pairs: Tensor) -> Tensor:
    """One group, receiver by receiver as long as another one settles more open pairs than it spoils.

    ``gain`` and ``loss`` of every receiver are kept up to date by what each new member changes: its own senders, not all pairs.
    """
    member = torch.zeros(len(hears), device="cpu")
    settled = torch.zeros(hears.shape[1], device="cpu")  # for each sender, how many of its open pairs the group settles
    free = torch.ones(hears.shape[1], device="cpu")  # the senders that no member may hear
    gain, loss, along = open_pairs.sum(1), torch.zeros(len(hears), device="cpu"), _along(hears)
    by_sender = open_pairs.T.contiguous()
    while True:
        worth = (gain - loss).masked_fill(member > 0, -1)
        best = int(worth.argmax())
        if worth[best] <= 0:
            return member
        now = torch.where(hears[best] > 0, 0, settled) + open_pairs[best] * free
        loss = loss + along(now - settled)
        taken = (hears[best] * free).nonzero().flatten()
        gain = gain - by_sender[taken].sum(0)
        settled, free, member[best] = now, free * (1 - hears[best]), 1


def _along(hears: Tensor) -> Callable[[Tensor], Tensor]:
    """``hears @ x``, edge by edge where these are few; whole numbers below 2^24, so that the order of sums does not matter."""
    dst, src = hears.nonzero(as_tuple=True)
    if len(dst) * DENSE_GAIN > hears.numel():
        return lambda x: hears @ x
    return lambda x: torch.zeros(len(hears), device="cpu").index_add_(0, dst, x[src])
