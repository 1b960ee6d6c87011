"""What ranks tell one another: rows of tokens, with gradients, and whether all of them were given the same.

All ranks call every collective, even without rows, and in the backward pass too: :func:`keep_in_graph` makes
autograd reach it on each of them.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from gnn_attention import edge_softmax
from gnn_attention._support.shapes import Float, Int, Tensor


def exchange(
    rows: Float[Tensor, "own channels"],
    send: Sequence[Int[Tensor, " sent"]],
    receive: Sequence[int],
    group: Any,
) -> Float[Tensor, "own_and_received channels"]:
    """The own rows, then those that other ranks sent, those of rank 0 first. A collective.

    ``send[r]``: which own rows go to rank r; ``receive[r]``: how many come from it. The gradient of a row is
    the sum of those of all ranks that have it, in float32 or better and in the order of the ranks.
    """
    is_float = rows.is_floating_point()
    wide = rows.to(edge_softmax.accumulation_dtype(rows.dtype)) if is_float else rows
    sent = torch.cat([wide.index_select(0, chosen.to(rows.device)) for chosen in send]).to(rows.dtype)
    counts = [len(chosen) for chosen in send], list(receive)
    arrived: Tensor = _AllToAll.apply(sent, *counts, group)  # type: ignore[no-untyped-call]
    return torch.cat([wide, arrived.to(wide.dtype)]).to(rows.dtype)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        distributed.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        returned: Tensor = _AllToAll.apply(grad, ctx.receive, ctx.send, ctx.group)  # type: ignore[no-untyped-call]
        return returned, None, None, None


def keep_in_graph(out: Tensor, *others: Tensor) -> Tensor:
    """``out``, with a gradient of 0 to the others: their backward passes run on every rank."""
    for x in others:
        # the sum of no numbers, for 0 times a NaN would be NaN
        out = out + x.unsqueeze(0)[:0].sum().to(out.dtype) if x.requires_grad else out
    return out


def check_agreement(values: Mapping[str, object], failure: str, group: Any, device: torch.device) -> None:
    """One ValueError, the same on every rank, unless ``values`` are equal on all and none has a ``failure``.

    A rank with a failure needs no values. One small all-gather of a hash; texts travel only after an error.
    """
    texts = {word: str(value) for word, value in values.items()}
    number = int.from_bytes(hashlib.sha256(repr((failure, texts)).encode()).digest()[:7], "big")
    table = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    distributed.all_gather(table, torch.tensor([number], device=device), group=group)
    if not failure and all(int(other) == number for other in table):
        return
    told: list[Any] = [None] * len(table)
    distributed.all_gather_object(told, (failure, texts), group=group)
    if failures := [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(told) if reason]:
        raise ValueError("; ".join(failures))
    of_ranks = [texts for _, texts in told]
    first = of_ranks[0]
    word, rank = next((w, r) for w in first for r, texts in enumerate(of_ranks) if texts[w] != first[w])
    got = f"rank 0 has {first[word]}, but rank {rank} has {of_ranks[rank][word]}"
    raise ValueError(f"all ranks must give {word} alike: {got}")


@contextmanager
def raised_on_all_ranks(group: Any, x: object) -> Iterator[None]:
    """A wrong argument of this rank, raised on every rank; the others call :func:`check_agreement`.

    ``x``: a tensor on the device that the ranks use, if it is one.
    """
    failure = ""
    try:
        yield
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        failure = f"{type(error).__name__}: {error}"
    if failure:
        check_agreement({}, failure, group, x.device if isinstance(x, Tensor) else torch.device("cpu"))
