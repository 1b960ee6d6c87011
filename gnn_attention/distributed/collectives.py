"""How rows travel between ranks: torch.distributed's collectives, started and finished apart, backward as forward.

``start`` sends rows on their way, ``finish`` waits for those that arrive; what is computed in between hides the journey. In the
backward pass ``finish`` sends the gradients back and ``start`` waits for them, so the same computation hides them too. Every rank
takes part in every journey, with or without rows of its own: :func:`tied` sees to it that autograd comes by.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.distributed.subgraphs import Travel

__all__ = ["Flight", "Traffic", "agree", "finish", "from_first", "gathered", "moved", "start", "tied", "traffic"]


class Traffic(NamedTuple):
    """Bytes that this process has sent to others: rows of k and v, their gradients, and what ranks tell each other beside."""

    forward: int
    backward: int
    control: int


_all_gather: Callable[..., Any] = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_sent = {"forward": 0, "backward": 0, "control": 0}


def traffic() -> Traffic:
    """What this process has sent so far."""
    return Traffic(**_sent)


class Flight:
    """One journey of rows: who gives and takes how many, and what is under way. ``gather``: all rows of all go to everybody.

    Rows and their gradients travel in ``dtype``, that of the rows unless given; what comes back is summed in theirs.
    """

    def __init__(self, travel: Travel, group: Any, gather: bool = False, dtype: torch.dtype | None = None) -> None:
        self.travel, self.group, self.gather, self.dtype = travel, group, gather, dtype
        self.work: Any = None
        self.held: tuple[Tensor, ...] = ()  # what is read and written meanwhile


def start(flight: Flight, rows: Float[Tensor, "own channels"]) -> Float[Tensor, "..."]:
    """Send the rows; what is returned is for :func:`finish` alone."""
    under_way: Tensor = _Start.apply(rows, flight)  # type: ignore[no-untyped-call]
    return under_way


def finish(flight: Flight, under_way: Float[Tensor, "..."]) -> Float[Tensor, "taken channels"]:
    """The rows that arrived, those of rank 0 first."""
    rows: Tensor = _Finish.apply(under_way, flight)  # type: ignore[no-untyped-call]
    return rows


def tied(out: Tensor, *others: Tensor) -> Tensor:
    """``out`` itself, which now depends on the others too, with gradient 0: their backward passes are reached on every rank."""
    result: Tensor = _Tied.apply(out, *others)  # type: ignore[no-untyped-call]
    return result


def moved(rows: Tensor, give_counts: tuple[int, ...], take_counts: tuple[int, ...], group: Any, kind: str) -> tuple[Tensor, Any]:
    """An all-to-all under way: the rows that arrive, and the work to wait for."""
    arriving = rows.new_empty(sum(take_counts), *rows.shape[1:])
    _sent[kind] += rows.numel() * rows.element_size()
    work = distributed.all_to_all_single(
        arriving, rows.contiguous(), list(take_counts), list(give_counts), group=group, async_op=True
    )
    return arriving, work


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight, ctx.shape, ctx.dtype = flight, rows.shape, rows.dtype
        travel, rows = flight.travel, rows if flight.dtype is None else rows.to(flight.dtype)
        if flight.gather:
            return _start_gather(flight, rows)
        given = rows if travel.give is None else rows.index_select(0, travel.give)
        arriving, flight.work = moved(given, travel.give_counts, travel.take_counts, flight.group, "forward")
        flight.held = (given, arriving)
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradients that came back, summed rank by rank."""
        flight: Flight = ctx.flight
        flight.work.wait()
        _, back = flight.held
        flight.held = ()
        return _summed(back, flight.travel, ctx.shape, ctx.dtype), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, under_way: Tensor, flight: Flight) -> Tensor:
        ctx.flight, ctx.shape = flight, under_way.shape
        flight.work.wait()
        flight.held = ()
        if not flight.gather:
            return under_way.detach()
        return torch.cat([rows[:count] for rows, count in zip(under_way, flight.travel.take_counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        flight: Flight = ctx.flight
        grad, travel = grad.contiguous(), ctx.flight.travel
        back, flight.work = moved(grad, travel.take_counts, travel.give_counts, flight.group, "backward")
        flight.held = (grad, back)
        return grad.new_zeros(()).expand(ctx.shape), None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.nothing = [x.new_zeros(()).expand(x.shape) for x in others]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(x if wanted else None for x, wanted in zip(ctx.nothing, ctx.needs_input_grad[1:], strict=True))


def _summed(back: Tensor, travel: Travel, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The sum of each row's gradients from all ranks, in their order; a rank names a row once, so nothing is left to a race."""
    parts = [part for part in torch.split(back, list(travel.give_counts)) if len(part)]
    if travel.give is None and len(parts) == 1:
        return parts[0].to(dtype)
    total = back.new_zeros(shape, dtype=torch.promote_types(back.dtype, torch.float32))
    if travel.give is None:
        for part in parts:
            total.add_(part)
    else:
        for place, part in zip(
            torch.split(travel.give, list(travel.give_counts)), torch.split(back, list(travel.give_counts)), strict=True
        ):
            total.index_add_(0, place, part.to(total.dtype))
    return total.to(dtype)


def _start_gather(flight: Flight, rows: Tensor) -> Tensor:
    """Blocks of one size, the largest: what an all-gather takes."""
    world, counts = len(flight.travel.take_counts), flight.travel.take_counts
    tallest = max(*counts, len(rows))
    block = rows if len(rows) == tallest else torch.cat([rows, rows.new_zeros(tallest - len(rows), *rows.shape[1:])])
    gathered = rows.new_empty(world, *block.shape)
    block = block.contiguous()
    _sent["forward"] += block.numel() * block.element_size() * (world - 1)
    flight.work = _all_gather(gathered.flatten(0, 1), block, group=flight.group, async_op=True)
    flight.held = (block, gathered)
    return gathered


# -- what ranks must agree on -----------------------------------------------------------------------------------------


def agree(words: Sequence[str], said: Sequence[object], trouble: str, group: Any, device: torch.device) -> None:
    """Nothing if all ranks say the same to all ``words`` and none has ``trouble``; else one ValueError, the same on every rank.

    One small all-gather of numbers; texts travel only where something is wrong. A rank in trouble need not say anything.
    """
    numbers = [0] * len(words) if trouble else [_number(str(value)) for value in said]
    own = torch.tensor([int(bool(trouble)), *numbers], dtype=torch.int64, device=device)
    world = distributed.get_world_size(group)
    everyone = own.new_empty(world * len(own))
    _all_gather(everyone, own, group=group)
    _sent["control"] += own.numel() * 8 * (world - 1)
    table = everyone.view(world, -1).cpu()
    if not bool(table[:, 0].any()) and bool((table == table[0]).all()):
        return
    texts: list[Any] = [None] * world
    distributed.all_gather_object(texts, (trouble, [str(value) for value in said]), group=group)
    raise ValueError(_message(words, texts))


def gathered(x: Tensor, group: Any) -> Float[Tensor, "ranks ..."]:
    """``x`` of every rank, all of one shape; without gradients."""
    everyone = x.new_empty(distributed.get_world_size(group), *x.shape)
    _all_gather(everyone.flatten(0, 1), x.contiguous(), group=group)
    _sent["forward"] += x.numel() * x.element_size() * (len(everyone) - 1)
    return everyone


def from_first(x: Int[Tensor, "..."], group: Any) -> Int[Tensor, "..."]:
    """``x`` of the first rank of the group, on all of them."""
    x = x.clone()
    distributed.broadcast(x, distributed.get_global_rank(group, 0), group=group)
    _sent["control"] += x.numel() * x.element_size()
    return x


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _message(words: Sequence[str], texts: list[tuple[str, list[str]]]) -> str:
    troubled = [f"rank {rank}: {trouble}" for rank, (trouble, _) in enumerate(texts) if trouble]
    if troubled:
        return "; ".join(troubled)
    first = texts[0][1]
    i, rank = next((i, rank) for i in range(len(words)) for rank, (_, said) in enumerate(texts) if said[i] != first[i])
    return f"all ranks must give {words[i]} alike: rank 0 has {first[i]}, but rank {rank} has {texts[rank][1][i]}"
