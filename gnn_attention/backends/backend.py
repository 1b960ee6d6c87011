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
        """The whole message."""
        return str(self.args[0])

    @property
    def reason(self) -> str:
        """Why, without the name of the backend and the graph."""
        return str(self.args[1])


def _never(call: AttentionCall) -> str | None:
    """A backend without a limit beyond its capabilities."""
    return None


@dataclass(frozen=True)
class _Reason:
    """The reason from the capabilities, or else from what is special about a backend."""

    capabilities: Capabilities
    special: UnsupportedReason

    def __call__(self, call: AttentionCall) -> str | None:
        return unsupported_reason(self.capabilities, call) or self.special(call)


@dataclass(frozen=True)
class Backend:
    """A way to compute attention: ``run(call) -> (out, lse or None)``.

    ``capabilities`` say which devices, dtypes and options are supported. ``unsupported_reason`` is given for
    what they cannot say, such as memory: ``unsupported_reason(call) -> reason or None``; of the finished
    object it answers for both. Without ``varying_graphs`` among the capabilities a graph that differs by
    sample or head comes as one call for each of them. An object of this class can be passed to
    ``attend(..., backend=...)`` and to ``verify.run(backends=[...])``, to try and check a backend of one's
    own. ``compiled`` says that a first call takes seconds: on a CPU, ``verify`` leaves it out unless it is
    named. ``recomputes`` says that gradients come from weights recomputed from lse, as in every fused kernel:
    ``verify`` then compares them with the errors of SDPA's fused kernel, too.
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
        if not isinstance(self.name, str):
            raise TypeError(f"name of a Backend must be a string, got {_described(self.name)}")
        for word, form, part in (
            ("run", "(call) -> (out, lse or None)", self.run),
            ("unsupported_reason", "(call) -> str or None", self.unsupported_reason),
            ("bytes_needed", "(call) -> int, or None", self.bytes_needed or _never),
        ):
            if not callable(part):
                raise TypeError(f"{word} of a Backend must be a function {form}, got {_described(part)}")
        if not isinstance(self.capabilities, Capabilities):
            raise TypeError(
                f"capabilities of a Backend must be Capabilities, got {_described(self.capabilities)}"
            )
        special = (
            self.unsupported_reason.special
            if isinstance(self.unsupported_reason, _Reason)
            else self.unsupported_reason
        )
        object.__setattr__(self, "unsupported_reason", _Reason(self.capabilities, special))


def _described(value: object) -> str:
    return f"{quoted(value)} of type {type(value).__name__}"
