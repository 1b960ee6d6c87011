"""An attention mask is a graph: build it, combine it, run attention along its edges, and verify that it
equals dense attention.

``import gnn_attention as ga`` loads torch alone. ``ga.MessagePassingAttention`` (torch_geometric),
``ga.verify`` and ``ga.model`` are loaded when they are first used, as are ``ga.analyse``, ``ga.draw``,
``ga.expressions`` and ``ga.catalogue``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gnn_attention import algebra, backends, convert, edges, patterns, rotary, score_mods
from gnn_attention.attend import attend, explain, list_backends
from gnn_attention.backends import Backend, RefusalError, cost_model
from gnn_attention.graph import TokenGraph, tiling
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads
from gnn_attention.heads.factored_matrix import FactoredMatrix

if TYPE_CHECKING:
    from gnn_attention import analyse, cache, cost, distributed, draw, explorer, model, verify
    from gnn_attention.convert import catalogue, expressions
    from gnn_attention.convert import files as graph_files
    from gnn_attention.heads.latent import LatentHeads
    from gnn_attention.heads.lazy import LazyHeads
    from gnn_attention.huggingface import use_graph
    from gnn_attention.interpret import circuits, trace
    from gnn_attention.interpret.audit import audit
    from gnn_attention.layer import MessagePassingAttention
    from gnn_attention.layer import pairwise as general
    from gnn_attention.model import foreign, minilm
    from gnn_attention.model.foreign import heads_of
    from gnn_attention.training import compare as experiment
    from gnn_attention.training import tasks

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
    "LatentHeads": ("gnn_attention.heads.latent", "LatentHeads"),
    "LazyHeads": ("gnn_attention.heads.lazy", "LazyHeads"),
    "MessagePassingAttention": ("gnn_attention.layer", "MessagePassingAttention"),
    "analyse": ("gnn_attention.analyse", None),
    "audit": ("gnn_attention.interpret.audit", "audit"),
    "cache": ("gnn_attention.cache", None),
    "catalogue": ("gnn_attention.convert.catalogue", None),
    "circuits": ("gnn_attention.interpret.circuits", None),
    "cost": ("gnn_attention.cost", None),
    "distributed": ("gnn_attention.distributed", None),
    "draw": ("gnn_attention.draw", None),
    "experiment": ("gnn_attention.training.compare", None),
    "explorer": ("gnn_attention.explorer", None),
    "expressions": ("gnn_attention.convert.expressions", None),
    "foreign": ("gnn_attention.model.foreign", None),
    "general": ("gnn_attention.layer.pairwise", None),
    "graph_files": ("gnn_attention.convert.files", None),
    "heads_of": ("gnn_attention.model.foreign", "heads_of"),
    "minilm": ("gnn_attention.model.minilm", None),
    "model": ("gnn_attention.model", None),
    "tasks": ("gnn_attention.training.tasks", None),
    "trace": ("gnn_attention.interpret.trace", None),
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
