"""The table of backends: name -> how to run it and what it supports. None falls back, or imports another but for ``split``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import dense, flex, mixed, reference, rows, split, tiles, triton, varlen
from gnn_attention.backends.call import Call

__all__ = ["BACKENDS", "Backend", "Call", "RefusalError"]


class RefusalError(NotImplementedError):
    """A backend was asked for by name and says why (``reason``) it cannot hold the call."""

    def __str__(self) -> str:
        """The whole message."""
        return str(self.args[0])

    @property
    def reason(self) -> str:
        """Why, in the backend's own words."""
        return str(self.args[1])


def _never(call: Call) -> str | None:
    """A backend that holds every call."""
    return None


@dataclass(frozen=True)
class Backend:
    """A way to compute attention: ``run(call) -> (out, lse or None)``.

    ``refusal(call)`` names the reason why it cannot hold a call, or returns None. An object of this class can be passed to
    ``attend(..., backend=...)`` and to ``verify.run(backends=[...])``: that is how to try, and check, one of your own.
    ``compiled`` says that a first call takes seconds: on a CPU, ``verify`` leaves it out unless it is named.
    ``recomputes`` says that gradients come from weights computed again from lse, as in every fused kernel: ``verify`` then holds
    them against the errors of SDPA's fused kernel, too.
    """

    name: str
    run: Callable[[Call], tuple[Tensor, Tensor | None]]
    supports: str = ""
    refusal: Callable[[Call], str | None] = _never
    bytes_needed: Callable[[Call], int] | None = None
    compiled: bool = False
    recomputes: bool = False

    def __post_init__(self) -> None:
        """TypeError for a name that is no string, or a function that cannot be called."""
        if not isinstance(self.name, str):
            raise TypeError(f"name of a Backend must be a string, got {quoted(self.name)} of type {type(self.name).__name__}")
        for field, form, part in (
            ("run", "(call) -> (out, lse or None)", self.run),
            ("refusal", "(call) -> str or None", self.refusal),
        ):
            if not callable(part):
                raise TypeError(
                    f"{field} of a Backend must be a function {form}, got {quoted(part)} of type {type(part).__name__}"
                )
        if self.bytes_needed is not None and not callable(self.bytes_needed):
            got = f"{quoted(self.bytes_needed)} of type {type(self.bytes_needed).__name__}"
            raise TypeError(f"bytes_needed of a Backend must be a function (call) -> int, or None, got {got}")


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
            "tiles",
            tiles.run,
            "every graph and option; dense kernels on the tiles that hold edges: for structured and block-sparse graphs",
            tiles.refusal,
            tiles.bytes_needed,
            recomputes=True,
        ),
        Backend(
            "rows",
            rows.run,
            "every graph and option; edge by edge in time and memory of the edges: for irregular graphs",
            rows.refusal,
            rows.bytes_needed,
            recomputes=True,
        ),
        Backend(
            "mixed",
            mixed.run,
            "every graph, without score_mod, bias and dropout; tiles where they are well filled, rows for all other edges",
            mixed.refusal,
            mixed.bytes_needed,
            recomputes=True,
        ),
        Backend(
            "flex",
            flex.run,
            "FlexAttention, compiled: float32 and half types, score_mods; a CPU runs the forward pass only and tells no lse",
            flex.refusal,
            flex.bytes_needed,
            compiled=True,
            recomputes=True,
        ),
        Backend(
            "varlen",
            varlen.run,
            "packed documents with one window for all, plain calls and sinks: torch's flash attention for CUDA, half types",
            varlen.refusal,
            varlen.bytes_needed,
            recomputes=True,
        ),
        Backend(
            "split",
            split.run,
            "every graph and option that its parts' backends hold; each part on the kernel for it, joined by log-sum-exp",
            split.refusal,
            split.bytes_needed,
            recomputes=True,
        ),
        Backend(
            "triton",
            triton.run,
            "every graph and option but score_mods of one's own: kernels for CUDA, in the form that suits the graph",
            triton.refusal,
            triton.bytes_needed,
            compiled=True,
            recomputes=True,
        ),
        *(
            Backend(
                f"triton-{form}",
                partial(triton.run, form=form),
                f"the same, in the form {form} for every graph",
                partial(triton.refusal, form=form),
                triton.bytes_needed,
                compiled=True,
                recomputes=True,
            )
            for form in triton.FORMS
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
