"""The class of backends, and the capabilities that state which calls a backend supports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from gnn_attention._support.checks import describe_type
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.edge_ops.normalisers import ELEMENTWISE

UnsupportedReason = Callable[[AttentionCall], str | None]
Support = bool | str  # A string is the only type of device that supports the option.
OPTIONS = ("score_mod", "bias", "edge_attr", "dropout", "sink_logits", "lse", "backward", "double_backward")
NORMALISER_LIMITS = {"softmax": ["softmax only"], "elementwise": ["no sparsemax or function"]}
LABELS = {"backward": "backward pass", "double_backward": "second derivative"}
REMEDIES = {
    "score_mod": "leave score_mod out",
    "bias": "leave bias out",
    "edge_attr": "leave edge_attr out",
    "dropout": "pass dropout=0.0",
    "sink_logits": "leave sink_logits out",
    "lse": "pass return_info=False",
    "backward": "call it under torch.no_grad()",
}


class RefusalError(NotImplementedError):
    """Raised if a backend given by name does not support the call; ``reason`` says why."""

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def reason(self) -> str:
        """Why the call is refused, without the names of the backend and the graph."""
        return str(self.args[1])


class CompilationError(NotImplementedError):
    """Raised if a kernel cannot be compiled for the call; ``auto`` then tries another backend."""


def _support_every_call(call: AttentionCall) -> None:
    """Return None: every call is supported."""


@dataclass(frozen=True)
class Capabilities:
    """The calls that a backend supports; an option is True, False, or the one device type that supports it.

    ``devices`` and ``dtypes`` are empty if all are supported. ``varying_graphs``: the backend runs graphs
    that vary by sample or head; otherwise ``attend`` passes it one slice at a time. ``cached``: support
    depends only on shapes, dtypes and options, so the graph caches it. ``visits_non_edges``: the kernel needs
    finite tokens, so ``attend`` checks them, unless the backend is passed as a value. ``parallel_edges``:
    "kept" (each is an edge), "merged" (m equal edges become one, and a score_mod adds ``log m`` to its score)
    or "refused". ``normalisers`` are "all", "elementwise" (and the softmax), or the "softmax" alone.
    ``instead`` says what to use for unsupported calls.
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
    normalisers: str = "softmax"
    edge_attr: Support = False
    varying_graphs: bool = True
    cached: bool = False
    visits_non_edges: bool = False
    parallel_edges: str = "merged"
    instead: str = "backend='dense'"

    def limits(self) -> str:
        """Describe the unsupported options, devices and dtypes.

        >>> Capabilities(normalisers="all", edge_attr=True).limits()
        'every option'
        >>> Capabilities(devices=("cuda",), bias=False, lse="cuda").limits()
        'on cuda; softmax only; no bias, edge_attr; lse on cuda only'
        """
        support = {LABELS.get(option, option): getattr(self, option) for option in OPTIONS}
        limits = [f"on {_join_devices(self)}"] if self.devices else []
        limits += [f"in {_join_dtypes(self)}"] if self.dtypes else []
        limits += NORMALISER_LIMITS.get(self.normalisers, [])
        missing_options = [name for name, device in support.items() if device is False]
        limits += [f"no {', '.join(missing_options)}"] if missing_options else []
        limits += [f"{name} on {device} only" for name, device in support.items() if isinstance(device, str)]
        return "; ".join(limits) or "every option"


def unsupported_reason(
    capabilities: Capabilities, more_reasons: UnsupportedReason, call: AttentionCall
) -> str | None:
    """Return why the call is unsupported and what to do, or else ``more_reasons(call)``."""
    # A second derivative cannot be foreseen here; the backward pass refuses it.
    q = call.q
    instead = capabilities.instead
    if capabilities.devices and q.device.type not in capabilities.devices:
        devices = _join_devices(capabilities)
        return f"it runs on {devices}, q is on {q.device}; move q, k and v, or use {instead}"
    if capabilities.dtypes and q.dtype not in capabilities.dtypes:
        dtype = str(q.dtype).removeprefix("torch.")
        dtypes = _join_dtypes(capabilities)
        return f"it computes in {dtypes}, q is {dtype}; convert q, k and v, or use {instead}"
    usage = {
        "score_mod": call.score_mod is not None,
        "bias": call.bias is not None,
        "edge_attr": call.features is not None,
        "dropout": bool(call.dropout),
        "sink_logits": call.sink_logits is not None,
        "lse": call.with_lse,
        "backward": torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)),
    }
    for option in (name for name, used in usage.items() if used):
        support = getattr(capabilities, option)
        if support is False or (support is not True and q.device.type not in (support, "meta")):
            device = f" on {q.device.type}" if support else ""
            instead = "backend='rows'" if option == "edge_attr" else instead
            return f"it has no {LABELS.get(option, option)}{device}; {REMEDIES[option]}, or use {instead}"
    supported = {"softmax": ("softmax",), "elementwise": ("softmax", *ELEMENTWISE)}
    if capabilities.normalisers != "all" and call.normaliser not in supported[capabilities.normalisers]:
        return f"it has no normaliser {call.normaliser!r}; use backend='rows'"
    if call.graph.has_parallel_edges and capabilities.parallel_edges != "kept":
        options = [name for name in ("bias", "dropout") if usage[name]]
        # Merging needs a score_mod, which adds the logarithm of the multiplicity.
        has_score_mod = capabilities.score_mod in (True, q.device.type)
        can_merge = capabilities.parallel_edges == "merged" and has_score_mod
        can_merge = can_merge and call.normaliser == "softmax"
        if not can_merge or options or torch.compiler.is_compiling():
            option = f" with {options[0]}" if options else ""
            return f"it takes no parallel edges{option}; use backend='rows', or graph.coalesce()"
        call = call.merge_parallel_edges()
    return more_reasons(call)


def _join_devices(capabilities: Capabilities) -> str:
    # No user computes on "meta", where tensors have only a shape.
    return " and ".join(device for device in capabilities.devices if device != "meta")


def _join_dtypes(capabilities: Capabilities) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in capabilities.dtypes)


@dataclass(frozen=True)
class Backend:
    """A way to compute attention: ``run(call) -> (out, lse or None)``.

    ``capabilities`` state the supported devices, dtypes and options. ``unsupported_reason(call) -> reason or
    None`` adds other limits, such as memory; the attribute then checks both. ``compiled``: the first call
    takes seconds, so ``verify`` skips the backend on a CPU unless it is named. ``recomputes``: the backward
    pass recomputes the weights from lse, so ``verify`` also allows the errors of SDPA's fused kernel. Your
    own backend can be passed to ``attend(..., backend=...)`` and ``verify.run(backends=[...])``.
    """

    name: str
    run: Callable[[AttentionCall], tuple[Tensor, Tensor | None]]
    supports: str = ""
    unsupported_reason: UnsupportedReason = _support_every_call
    bytes_needed: Callable[[AttentionCall], int] | None = None
    compiled: bool = False
    recomputes: bool = False
    capabilities: Capabilities = field(default_factory=Capabilities)

    def __post_init__(self) -> None:
        """Check the types of the fields, and join ``unsupported_reason`` with the capabilities."""
        reason, estimate = self.unsupported_reason, self.bytes_needed
        requirements = {
            "name": ("a string", isinstance(self.name, str)),
            "run": ("a function (call) -> (out, lse or None)", callable(self.run)),
            "unsupported_reason": ("a function (call) -> str or None", callable(reason)),
            "bytes_needed": ("a function (call) -> int, or None", estimate is None or callable(estimate)),
            "capabilities": ("Capabilities", isinstance(self.capabilities, Capabilities)),
        }
        for name, (requirement, is_met) in requirements.items():
            if not is_met:
                value = describe_type(getattr(self, name))
                raise TypeError(f"{name} of a Backend must be {requirement}, got {value}")
        # dataclasses.replace passes the joined function, so the caller's own function is taken out of it.
        if isinstance(reason, partial) and reason.func is unsupported_reason:
            reason = reason.args[1]
        object.__setattr__(self, "unsupported_reason", partial(unsupported_reason, self.capabilities, reason))
