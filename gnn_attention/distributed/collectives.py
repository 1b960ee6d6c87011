"""Rows between ranks: torch.distributed's collectives, started and finished separately, with gradients.

``start`` sends rows, ``finish`` waits for those that arrive; what is computed in between overlaps with the
communication. In the backward pass ``finish`` sends the gradients back and ``start`` waits for them. All
ranks call every collective, even without rows; :func:`keep_in_graph` makes autograd reach it on each of them.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.distributed.subgraphs import RowTransfer

WRONG_ARGUMENT = (TypeError, ValueError, IndexError, NotImplementedError)

_older: Any = distributed.all_gather_into_tensor
_all_gather_single: Any = getattr(distributed, "all_gather_single", _older)
_sent = {"forward": 0, "backward": 0, "control": 0}


class Traffic(NamedTuple):
    """Bytes that this process has sent: rows of k and v, their gradients, and control messages."""

    forward: int
    backward: int
    control: int


def traffic() -> Traffic:
    """The bytes that this process has sent so far."""
    return Traffic(**_sent)


@dataclass(eq=False)
class PendingExchange:
    """One exchange of rows between :func:`start` and :func:`finish`.

    Rows and gradients travel in ``dtype`` (that of the rows by default); gradients are summed in theirs.
    """

    transfer: RowTransfer
    group: Any
    dtype: torch.dtype | None = None
    work: Any = None
    # read and written until the work is done
    buffers: tuple[Tensor, ...] = ()


def start(pending: PendingExchange, rows: Float[Tensor, "own channels"]) -> Float[Tensor, "..."]:
    """Send the rows; the result is for :func:`finish` alone."""
    return _Start.apply(rows, pending)  # type: ignore[no-untyped-call,no-any-return]


def finish(pending: PendingExchange, buffer: Float[Tensor, "..."]) -> Float[Tensor, "received channels"]:
    """The rows that arrived, those of rank 0 first."""
    return _Finish.apply(buffer, pending)  # type: ignore[no-untyped-call,no-any-return]


def keep_in_graph(out: Tensor, *others: Tensor) -> Tensor:
    """``out``, with a gradient of 0 to the others: their backward passes run on every rank."""
    return _KeepInGraph.apply(out, *others)  # type: ignore[no-untyped-call,no-any-return]


def all_to_all(
    rows: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...], group: Any, kind: str
) -> tuple[Tensor, Any]:
    """A started all-to-all: the buffer of the rows that arrive, and the work to wait for."""
    buffer = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    _count(kind, rows)
    counts = list(receive_counts), list(send_counts)
    work = distributed.all_to_all_single(buffer, rows.contiguous(), *counts, group=group, async_op=True)
    return buffer, work


def all_gather(x: Tensor, group: Any, kind: str = "forward") -> Float[Tensor, "ranks ..."]:
    """``x`` of every rank, all of one shape; without gradients."""
    everyone = x.new_empty(distributed.get_world_size(group), *x.shape)
    _all_gather_single(everyone.flatten(0, 1), x.contiguous(), group=group)
    _count(kind, x, len(everyone) - 1)
    return everyone


def broadcast_first(x: Int[Tensor, "..."], group: Any) -> Int[Tensor, "..."]:
    """``x`` of the first rank of the group, on all of them."""
    x = x.clone()
    distributed.broadcast(x, distributed.get_global_rank(group, 0), group=group)
    _count("control", x)
    return x


def _count(kind: str, x: Tensor, copies: int = 1) -> None:
    _sent[kind] += x.numel() * x.element_size() * copies


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pending: PendingExchange) -> Tensor:
        ctx.pending, ctx.shape, ctx.dtype = pending, rows.shape, rows.dtype
        transfer, rows = pending.transfer, rows if pending.dtype is None else rows.to(pending.dtype)
        sent = rows if transfer.rows is None else rows.index_select(0, transfer.rows)
        counts = transfer.send_counts, transfer.receive_counts
        buffer, pending.work = all_to_all(sent, *counts, pending.group, "forward")
        pending.buffers = (sent, buffer)
        return buffer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        pending: PendingExchange = ctx.pending
        pending.work.wait()
        _, returned = pending.buffers
        pending.buffers = ()
        return _sum_of_gradients(returned, pending.transfer, ctx.shape, ctx.dtype), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, pending: PendingExchange) -> Tensor:
        ctx.pending, ctx.shape = pending, buffer.shape
        pending.work.wait()
        pending.buffers = ()
        return buffer.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        pending: PendingExchange = ctx.pending
        grad, transfer = grad.contiguous(), pending.transfer
        counts = transfer.receive_counts, transfer.send_counts
        returned, pending.work = all_to_all(grad, *counts, pending.group, "backward")
        pending.buffers = (grad, returned)
        return grad.new_zeros(()).expand(ctx.shape), None


class _KeepInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.zeros = [x.new_zeros(()).expand(x.shape) for x in others]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        return grad, *(zero if needed else None for zero, needed in zip(ctx.zeros, wanted, strict=True))


def _sum_of_gradients(returned: Tensor, transfer: RowTransfer, shape: Any, dtype: torch.dtype) -> Tensor:
    """The gradients of each row from all ranks, in the order of the ranks: deterministic."""
    if transfer.rows is None:
        return returned.to(dtype)
    total = returned.new_zeros(shape, dtype=torch.promote_types(returned.dtype, torch.float32))
    counts = list(transfer.send_counts)
    for rows, part in zip(torch.split(transfer.rows, counts), torch.split(returned, counts), strict=True):
        total.index_add_(0, rows, part.to(total.dtype))
    return total.to(dtype)


def check_agreement(values: Mapping[str, object], failure: str, group: Any, device: torch.device) -> None:
    """One ValueError, the same on every rank, unless ``values`` are equal on all and none has a ``failure``.

    A rank with a failure needs no values. One small all-gather of a hash; texts travel only after an error.
    """
    texts = {word: str(value) for word, value in values.items()}
    number = int.from_bytes(hashlib.sha256(repr((failure, texts)).encode()).digest()[:7], "big")
    table = all_gather(torch.tensor([number], device=device), group, "control")
    if not failure and bool((table == number).all()):
        return
    found: list[Any] = [None] * len(table)
    distributed.all_gather_object(found, (failure, texts), group=group)
    raise ValueError(_disagreement(found))


@contextmanager
def raised_on_all_ranks(group: Any, x: object) -> Iterator[None]:
    """A wrong argument of this rank, raised on every rank; the others call :func:`check_agreement`.

    ``x``: a tensor on the device that the ranks use, if it is one.
    """
    failure = ""
    try:
        yield
    except WRONG_ARGUMENT as error:
        failure = f"{type(error).__name__}: {error}"
    if failure:
        check_agreement({}, failure, group, x.device if isinstance(x, Tensor) else torch.device("cpu"))


def _disagreement(found: list[tuple[str, dict[str, str]]]) -> str:
    failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(found) if failure]
    if failures:
        return "; ".join(failures)
    of_ranks = [texts for _, texts in found]
    word = next(word for word in of_ranks[0] if len({texts[word] for texts in of_ranks}) > 1)
    first = of_ranks[0][word]
    rank, other = next((rank, texts[word]) for rank, texts in enumerate(of_ranks) if texts[word] != first)
    return f"all ranks must give {word} alike: rank 0 has {first}, but rank {rank} has {other}"
