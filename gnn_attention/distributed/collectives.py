"""Exchange rows of tokens and their gradients between ranks, and check that all ranks agree.

Every rank must call every collective, even if it has no rows, and also in the backward pass:
:func:`keep_in_graph` makes autograd reach every collective on every rank.
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
    rows: Float[Tensor, "local channels"],
    send_indices: Sequence[Int[Tensor, " sent"]],
    recv_counts: Sequence[int],
    group: Any,
) -> Float[Tensor, "all channels"]:
    """Return the local rows, followed by the rows that rank 0, 1, ... sent. A collective.

    ``send_indices[r]`` are the local rows for rank r; ``recv_counts[r]`` counts the rows from it.
    The gradients of a row are summed over all ranks that have it, by rank, in float32 or better.
    """
    is_float = rows.is_floating_point()
    # Autograd accumulates the gradients of these rows, so they need the wider dtype.
    wide_rows = rows.to(edge_softmax.accumulation_dtype(rows.dtype)) if is_float else rows
    row_chunks = (wide_rows.index_select(0, index.to(rows.device)) for index in send_indices)
    outgoing = torch.cat(list(row_chunks)).to(rows.dtype)
    send_counts = [len(index) for index in send_indices]
    incoming: Tensor = _AllToAll.apply(outgoing, send_counts, list(recv_counts), group)  # type: ignore[no-untyped-call]
    return torch.cat([wide_rows, incoming.to(wide_rows.dtype)]).to(rows.dtype)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send_counts: list[int], recv_counts: list[int], group: Any) -> Tensor:
        ctx.send_counts, ctx.recv_counts, ctx.group = send_counts, recv_counts, group
        incoming = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        distributed.all_to_all_single(incoming, rows.contiguous(), recv_counts, send_counts, group=group)
        return incoming

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.recv_counts, ctx.send_counts, ctx.group), None, None, None  # type: ignore[no-untyped-call]


def keep_in_graph(out: Tensor, *inputs: Tensor) -> Tensor:
    """Return ``out`` plus an empty sum of each input, so that their backward pass always runs."""
    for x in inputs:
        # An empty sum is 0 even if x holds a NaN.
        out = out + x.unsqueeze(0)[:0].sum().to(out.dtype) if x.requires_grad else out
    return out


def check_agreement(values: Mapping[str, object], failure: str, group: Any, device: torch.device) -> None:
    """Raise the same ValueError on every rank if one has a ``failure``, or if ``values`` differ.

    A rank with a failure needs no values. The check gathers a short hash from every rank; values
    are sent only if there is an error.
    """
    texts = {name: str(value) for name, value in values.items()}
    digest = int.from_bytes(hashlib.sha256(repr((failure, texts)).encode()).digest()[:7], "big")
    digests = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    distributed.all_gather(digests, torch.tensor([digest], device=device), group=group)
    if not failure and all(int(x) == digest for x in digests):
        return
    reports: list[Any] = [None] * len(digests)
    distributed.all_gather_object(reports, (failure, texts), group=group)
    if failures := [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(reports) if reason]:
        raise ValueError("; ".join(failures))
    rank0 = reports[0][1]
    name, rank = next((n, r) for n in rank0 for r, (_, other) in enumerate(reports) if other[n] != rank0[n])
    text = reports[rank][1][name]
    raise ValueError(f"all ranks must pass the same {name}: rank 0 has {rank0[name]}, rank {rank} has {text}")


@contextmanager
def raise_on_all_ranks(group: Any, x: object) -> Iterator[None]:
    """Raise the block's error on all ranks; ranks without one must call :func:`check_agreement` next."""
    failure = ""
    try:
        yield
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        failure = f"{type(error).__name__}: {error}"
    if failure:
        check_agreement({}, failure, group, x.device if isinstance(x, Tensor) else torch.device("cpu"))
