"""A backend as a value: how to run a call, and which calls it supports.

From its capabilities, which are data, come the reason of a refusal and the support matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from gnn_attention._support.checks import describe_type
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import AttentionCall

UnsupportedReason = Callable[[AttentionCall], str | None]
Support = bool | str  # everywhere, nowhere, or on this type of device alone
OPTIONS = ("score_mod", "bias", "dropout", "sink_logits", "lse", "backward", "double_backward")
NAMES = {"backward": "backward pass", "double_backward": "second derivative"}
REMEDIES = {
    "score_mod": "leave score_mod out",
    "bias": "leave bias out",
    "dropout": "give dropout=0.0",
    "sink_logits": "leave sink_logits out",
    "lse": "give return_info=False",
    "backward": "call it under torch.no_grad()",
}


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
class Capabilities:
    """Which calls a backend computes; an option is True, False, or the only type of device that supports it.

    ``devices`` and ``dtypes`` are empty where all are supported. ``varying_graphs``: a graph that differs by
    sample or head is taken whole; without, one plain graph comes at a time. ``cached``: a call of the same
    shapes, dtypes and options is supported too, so that the answer is cached with the graph.
    ``visits_non_edges``: the kernel assumes finite tokens, so ``attend`` looks at them where the backend is
    chosen by its name or by "auto". ``parallel_edges`` are "kept", each an edge; or "merged", where an edge
    that stands m times is one whose score has ``log m`` added, by a score_mod; or "refused". ``instead``
    names what to use for other calls.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    score_mod: Support = True
    bias: Support = True
    dropout: Support = True
    sink_logits: Support = True
    lse: Support = True
    backward: Support = True
    double_backward: Support = True
    varying_graphs: bool = True
    cached: bool = False
    visits_non_edges: bool = False
    parallel_edges: str = "merged"
    instead: str = "backend='dense'"

    def limits(self) -> str:
        """The unsupported options, devices and dtypes in words.

        >>> Capabilities().limits(), Capabilities(devices=("cuda",), bias=False, lse="cuda").limits()
        ('every option', 'on cuda; no bias; lse on cuda only')
        """
        support = {NAMES.get(option, option): getattr(self, option) for option in OPTIONS}
        found = [f"on {_devices(self)}"] if self.devices else []
        found += [f"in {_dtypes(self)}"] if self.dtypes else []
        missing = [name for name, where in support.items() if where is False]
        found += [f"no {', '.join(missing)}"] if missing else []
        found += [f"{name} on {where} only" for name, where in support.items() if isinstance(where, str)]
        return "; ".join(found) or "every option"


def unsupported_reason(
    supported: Capabilities, special: UnsupportedReason, call: AttentionCall
) -> str | None:
    """Why the call is unsupported, with what to do, else ``special(call)``, which may be None."""
    # whether a second derivative is taken shows only in a backward pass, which refuses it
    q, instead = call.q, supported.instead
    if supported.devices and q.device.type not in supported.devices:
        return f"it runs on {_devices(supported)}, q is on {q.device}; move q, k and v, or use {instead}"
    if supported.dtypes and q.dtype not in supported.dtypes:
        dtype = str(q.dtype).removeprefix("torch.")
        return f"it computes in {_dtypes(supported)}, q is {dtype}; convert q, k and v, or use {instead}"
    used = {
        "score_mod": call.score_mod is not None,
        "bias": call.bias is not None,
        "dropout": bool(call.dropout),
        "sink_logits": call.sink_logits is not None,
        "lse": call.with_lse,
        "backward": torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)),
    }
    for option in (name for name, wanted in used.items() if wanted):
        support = getattr(supported, option)
        if support is False or (support is not True and q.device.type not in (support, "meta")):
            where = f" on {q.device.type}" if support else ""
            return f"it has no {NAMES.get(option, option)}{where}; {REMEDIES[option]}, or use {instead}"
    if call.graph.has_parallel_edges and supported.parallel_edges != "kept":
        options = [name for name in ("bias", "dropout") if used[name]]
        # The logarithm of the multiplicity is added by a score_mod.
        mergeable = supported.parallel_edges == "merged" and supported.score_mod in (True, q.device.type)
        if not mergeable or options or torch.compiler.is_compiling():
            why = f" with {options[0]}" if options else ""
            return f"it takes no parallel edges{why}; use backend='rows', or graph.coalesce()"
        call = call.merge_parallel_edges()
    return special(call)


def _devices(supported: Capabilities) -> str:
    # a tensor on "meta" has a shape alone
    return " and ".join(device for device in supported.devices if device != "meta")


def _dtypes(supported: Capabilities) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in supported.dtypes)


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
                raise TypeError(
                    f"{name} of a Backend must be {form}, got {describe_type(getattr(self, name))}"
                )
        special = (
            reason.args[1] if isinstance(reason, partial) and reason.func is unsupported_reason else reason
        )
        answer = partial(unsupported_reason, self.capabilities, special)
        object.__setattr__(self, "unsupported_reason", answer)
