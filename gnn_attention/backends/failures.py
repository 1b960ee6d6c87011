"""Record of kernels that failed to compile or launch in this process; ``auto`` avoids them."""

from typing import Any

from gnn_attention._support.dynamo import constant
from gnn_attention.backends.call import AttentionCall, any_needs_gradients

_FAILURES: dict[tuple[Any, ...], str] = {}


def record(name: str, call: AttentionCall, error: Exception) -> None:
    """Remember that the backend ``name`` failed with ``error`` in calls like this one."""
    _FAILURES[_kind(name, call)] = f"{type(error).__name__}: {str(error).strip()[:200]}"


def reason(name: str, call: AttentionCall) -> str | None:
    """Return why the backend ``name`` failed in an earlier call like this one, or None."""
    return _reason(_kind(name, call)) if _FAILURES else None


@constant
def _reason(kind: tuple[Any, ...]) -> str | None:
    return _FAILURES.get(kind)


def _kind(name: str, call: AttentionCall) -> tuple[Any, ...]:
    """Return the device, dtype, widths and options, which are equal for a call and its slices."""
    options = call.bias is not None, call.dropout > 0, call.sink_logits is not None, call.with_lse
    widths = call.q.shape[3], call.v.shape[3]
    needs_gradients = any_needs_gradients((call.q, call.k, call.v))
    score_mod = type(call.score_mod).__name__
    return name, call.q.device, call.q.dtype, score_mod, *widths, *options, needs_gradients
