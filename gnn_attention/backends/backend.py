"""A backend as a value: how to run a call, and which calls it supports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from gnn_attention._support.checks import described
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.capabilities import Capabilities, UnsupportedReason, unsupported_reason


class RefusalError(NotImplementedError):
    """A backend that was given by name does not support the call; ``reason`` says why."""

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def reason(self) -> str:
        """Why, without the name of the backend and the graph."""
        return str(self.args[1])


class CompilationError(NotImplementedError):
    """The kernel of a backend cannot be compiled for the call; ``auto`` takes the next backend on CUDA."""


def _never(call: AttentionCall) -> None:
    """Every call is supported."""


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
        reason, needed = self.unsupported_reason, self.bytes_needed
        forms = {
            "name": ("a string", isinstance(self.name, str)),
            "run": ("a function (call) -> (out, lse or None)", callable(self.run)),
            "unsupported_reason": ("a function (call) -> str or None", callable(reason)),
            "bytes_needed": ("a function (call) -> int, or None", needed is None or callable(needed)),
            "capabilities": ("Capabilities", isinstance(self.capabilities, Capabilities)),
        }
        for name, (form, fits) in forms.items():
            if not fits:
                raise TypeError(f"{name} of a Backend must be {form}, got {described(getattr(self, name))}")
        special = (
            reason.args[1] if isinstance(reason, partial) and reason.func is unsupported_reason else reason
        )
        answer = partial(unsupported_reason, self.capabilities, special)
        object.__setattr__(self, "unsupported_reason", answer)
