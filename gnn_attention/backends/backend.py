"""A backend as a value: how to run a call, and which calls it supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.capabilities import Capabilities, unsupported_reason

UnsupportedReason = Callable[[AttentionCall], str | None]


class RefusalError(NotImplementedError):
    """A backend that was given by name does not support the call; ``reason`` says why."""

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def reason(self) -> str:
        """Why, without the name of the backend and the graph."""
        return str(self.args[1])


def _never(call: AttentionCall) -> str | None:
    """None: every call is supported."""
    return None


@dataclass(frozen=True)
class _Reason:
    capabilities: Capabilities
    special: UnsupportedReason

    def __call__(self, call: AttentionCall) -> str | None:
        return unsupported_reason(self.capabilities, call) or self.special(call)


@dataclass(frozen=True)
class Backend:
    """A way to compute attention: ``run(call) -> (out, lse or None)``.

    ``capabilities`` say which devices, dtypes and options are supported, ``unsupported_reason(call) -> reason
    or None`` what they cannot say, such as memory; in the finished object it answers for both. ``compiled``:
    a first call takes seconds, so that ``verify`` on a CPU leaves it out unless it is named. ``recomputes``:
    gradients come from weights recomputed from lse, and ``verify`` compares them with the errors of SDPA's
    fused kernel, too. A backend of one's own can be passed to ``attend(..., backend=...)`` and to
    ``verify.run(backends=[...])``.
    """

    name: str
    run: Callable[[AttentionCall], tuple[Tensor, Tensor | None]]
    supports: str = ""
    unsupported_reason: UnsupportedReason = _never
    bytes_needed: Callable[[AttentionCall], int] | None = None
    compiled: bool = False
    recomputes: bool = False
    capabilities: Capabilities = field(default_factory=Capabilities)

    def __post_init__(self) -> None:
        """TypeError for a name that is no string, a function that cannot be called, or other capabilities."""
        _check("name", "a string", self.name, isinstance(self.name, str))
        reason, needed = self.unsupported_reason, self.bytes_needed
        _check("run", "a function (call) -> (out, lse or None)", self.run, callable(self.run))
        _check("unsupported_reason", "a function (call) -> str or None", reason, callable(reason))
        _check(
            "bytes_needed", "a function (call) -> int, or None", needed, needed is None or callable(needed)
        )
        capabilities = self.capabilities
        _check("capabilities", "Capabilities", capabilities, isinstance(capabilities, Capabilities))
        special = reason.special if isinstance(reason, _Reason) else reason
        object.__setattr__(self, "unsupported_reason", _Reason(capabilities, special))


def _check(name: str, wanted: str, value: object, fits: bool) -> None:
    if not fits:
        got = f"{quoted(value)} of type {type(value).__name__}"
        raise TypeError(f"{name} of a Backend must be {wanted}, got {got}")
