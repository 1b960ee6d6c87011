"""What a backend does not support, found before a check is run: a covering selection must not count on it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gnn_attention.backends import Backend
from gnn_attention.backends.call import Call
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS

__all__ = ["DROPOUT", "refused"]

DROPOUT = "dropout"
CHANNELS = 16


@functools.lru_cache(maxsize=1024)
def refused(backend: Backend, device: str, dtype: torch.dtype, option: str) -> str | None:
    """Why the backend does not take calls with an option (a feature of the checks, or dropout), without gradients; or None."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        return None  # checks are listed where they cannot be run
    case = GRAPHS["causal"]
    n = case.graph.num_dst
    q, k, v = (torch.zeros(BATCH, heads, n, CHANNELS, dtype=dtype, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    options = _options(option, dtype, device)
    mod, bias, sinks = (options.get(name) for name in ("score_mod", "bias", "sink_logits"))
    with torch.no_grad():
        call = Call.checked(q, k, v, case.graph, None, mod, bias, sinks, 0.5 if option == DROPOUT else 0.0)
        reason = backend.refusal(call)
    return None if reason is None else f"{backend.name}: {reason}"


def _options(option: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    if option == DROPOUT:
        return {}
    feature = FEATURES[option]
    drawn = feature.learned(GRAPHS["causal"], torch.Generator().manual_seed(0))
    return feature.options({name: x.to(device, dtype) for name, x in drawn.items()})
