"""The table of backends: name -> how to run it and what it supports. A backend never imports another, and never falls back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gnn_attention._call import Call
from gnn_attention._shapes import Tensor
from gnn_attention.backends import dense, reference

__all__ = ["BACKENDS", "Backend", "Call"]


def _never(call: Call) -> str | None:
    """A backend that holds every call."""
    return None


@dataclass(frozen=True)
class Backend:
    """A way to compute attention: ``run(call) -> (out, lse or None)``.

    ``refusal(call)`` names the reason why it cannot hold a call, or returns None. An object of this class can be passed to
    ``attend(..., backend=...)`` and to ``verify.run(backends=[...])``: that is how to try, and check, one of your own.
    """

    name: str
    run: Callable[[Call], tuple[Tensor, Tensor | None]]
    supports: str = ""
    refusal: Callable[[Call], str | None] = _never
    bytes_needed: Callable[[Call], int] | None = None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "dense",
            dense.run,
            "every graph and option; SDPA on full and causal graphs without a mask, else time and memory of dst x src",
            dense.refusal,
            dense.bytes_needed,
        ),
        Backend(
            "reference",
            reference.run,
            "every graph and option; edge by edge in float32 or better, within 2 GiB: the oracle",
            reference.refusal,
            reference.bytes_needed,
        ),
    )
}
