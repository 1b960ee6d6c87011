"""An attention mask is a graph: build it, combine it, run attention along its edges, and verify that it equals dense attention.

``import gnn_attention as ga`` loads torch alone. ``ga.MessagePassingAttention`` (torch_geometric), ``ga.verify`` and
``ga.model`` are loaded when they are first used, as are ``ga.analyse``, ``ga.draw``, ``ga.expressions`` and ``ga.catalogue``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gnn_attention import algebra, backends, convert, costs, edges, patterns, rotary, score_mods, tiling
from gnn_attention.attend import attend, explain, list_backends
from gnn_attention.backends import Backend, RefusalError
from gnn_attention.factored import FactoredMatrix
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads

if TYPE_CHECKING:
    from gnn_attention import analyse, bench, catalogue, draw, expressions, model, verify
    from gnn_attention.layer import MessagePassingAttention

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "FactoredHeads",
    "FactoredMatrix",
    "MergedHeads",
    "MessagePassingAttention",
    "RefusalError",
    "StandardHeads",
    "TokenGraph",
    "algebra",
    "analyse",
    "attend",
    "backends",
    "bench",
    "catalogue",
    "convert",
    "costs",
    "draw",
    "edges",
    "explain",
    "expressions",
    "list_backends",
    "model",
    "patterns",
    "rotary",
    "score_mods",
    "tiling",
    "verify",
]

_ON_DEMAND = {
    "MessagePassingAttention": ("gnn_attention.layer", "MessagePassingAttention"),
    "analyse": ("gnn_attention.analyse", None),
    "bench": ("gnn_attention.bench", None),
    "catalogue": ("gnn_attention.catalogue", None),
    "draw": ("gnn_attention.draw", None),
    "expressions": ("gnn_attention.expressions", None),
    "model": ("gnn_attention.model", None),
    "verify": ("gnn_attention.verify", None),
}


def __getattr__(name: str) -> Any:
    """Load what needs torch_geometric when it is asked for (PEP 562)."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'gnn_attention' has no attribute {name!r}")
    module, attribute = _ON_DEMAND[name]
    loaded = importlib.import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return __all__
