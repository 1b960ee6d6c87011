"""Kernels that could not be compiled or launched in this process, which ``auto`` does not try again."""

from typing import Any

import torch

from gnn_attention._support.dynamo import constant
from gnn_attention.backends.call import AttentionCall, any_needs_gradients

_FAILURES: dict[tuple[Any, ...], str] = {}


def record(name: str, call: AttentionCall, error: Exception) -> None:
    """Remember that the backend ``name`` failed with ``error`` in calls like this one."""
    _FAILURES[_kind(name, call)] = f"{type(error).__name__}: {str(error).strip()[:200]}"


def reason(name: str, call: AttentionCall) -> str | None:
    """Why the backend ``name`` failed in an earlier call like this one, or None."""
    return _reason(_kind(name, call)) if _FAILURES else None


@constant
def _reason(kind: tuple[Any, ...]) -> str | None:
    return _FAILURES.get(kind)


def _kind(name: str, call: AttentionCall) -> tuple[Any, ...]:
    """Device, dtype, widths and options: the same for a call and for its parts by sample and head."""
    options = call.bias is not None, call.dropout > 0, call.sink_logits is not None, call.with_lse
    widths = call.q.shape[3], call.v.shape[3]
    gradients = any_needs_gradients((call.q, call.k, call.v))
    mod = type(call.score_mod).__name__
    device: torch.device = call.q.device
    return name, device, call.q.dtype, mod, *widths, *options, gradients
