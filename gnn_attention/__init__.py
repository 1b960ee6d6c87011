"""An attention mask is a graph: build it, combine it, run attention along its edges, and verify that it equals dense attention.

``import gnn_attention as ga`` loads torch alone. ``ga.MessagePassingAttention`` (torch_geometric), ``ga.verify`` and
``ga.model`` are loaded when they are first used, as are ``ga.analyse``, ``ga.draw``, ``ga.expressions`` and ``ga.catalogue``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gnn_attention import (  # the first of them, that Ctrl-C is heard while torch is loaded
    _interrupts,  # noqa: F401
    algebra,
    backends,
    convert,
    cost_model,
    edges,
    patterns,
    rotary,
    score_mods,
    tiling,
)
from gnn_attention.attend import attend, explain, list_backends
from gnn_attention.backends import Backend, RefusalError
from gnn_attention.factored import FactoredMatrix
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads

if TYPE_CHECKING:
    from gnn_attention import (
        analyse,
        bench,
        cache,
        catalogue,
        circuits,
        cost,
        distributed,
        draw,
        experiment,
        explorer,
        expressions,
        foreign,
        general,
        graph_files,
        minilm,
        model,
        tasks,
        trace,
        verify,
    )
    from gnn_attention.auditor import audit
    from gnn_attention.foreign import heads_of
    from gnn_attention.huggingface import use_graph
    from gnn_attention.latent_heads import LatentHeads
    from gnn_attention.layer import MessagePassingAttention
    from gnn_attention.lazy_heads import LazyHeads

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "FactoredHeads",
    "FactoredMatrix",
    "LatentHeads",
    "LazyHeads",
    "MergedHeads",
    "MessagePassingAttention",
    "RefusalError",
    "StandardHeads",
    "TokenGraph",
    "algebra",
    "analyse",
    "attend",
    "audit",
    "backends",
    "bench",
    "cache",
    "catalogue",
    "circuits",
    "convert",
    "cost",
    "cost_model",
    "distributed",
    "draw",
    "edges",
    "experiment",
    "explain",
    "explorer",
    "expressions",
    "foreign",
    "general",
    "graph_files",
    "heads_of",
    "list_backends",
    "minilm",
    "model",
    "patterns",
    "rotary",
    "score_mods",
    "tasks",
    "tiling",
    "trace",
    "use_graph",
    "verify",
]

_ON_DEMAND = {
    "LatentHeads": ("gnn_attention.latent_heads", "LatentHeads"),
    "LazyHeads": ("gnn_attention.lazy_heads", "LazyHeads"),
    "MessagePassingAttention": ("gnn_attention.layer", "MessagePassingAttention"),
    "analyse": ("gnn_attention.analyse", None),
    "audit": ("gnn_attention.auditor", "audit"),
    "bench": ("gnn_attention.bench", None),
    "cache": ("gnn_attention.cache", None),
    "catalogue": ("gnn_attention.catalogue", None),
    "circuits": ("gnn_attention.circuits", None),
    "cost": ("gnn_attention.cost", None),
    "distributed": ("gnn_attention.distributed", None),
    "draw": ("gnn_attention.draw", None),
    "experiment": ("gnn_attention.experiment", None),
    "explorer": ("gnn_attention.explorer", None),
    "expressions": ("gnn_attention.expressions", None),
    "foreign": ("gnn_attention.foreign", None),
    "general": ("gnn_attention.general", None),
    "graph_files": ("gnn_attention.graph_files", None),
    "heads_of": ("gnn_attention.foreign", "heads_of"),
    "minilm": ("gnn_attention.minilm", None),
    "model": ("gnn_attention.model", None),
    "tasks": ("gnn_attention.tasks", None),
    "trace": ("gnn_attention.trace", None),
    "use_graph": ("gnn_attention.huggingface", "use_graph"),
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
