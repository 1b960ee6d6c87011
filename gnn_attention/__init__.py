"""An attention mask is a graph: build it, combine it, attend along its edges, and verify that the
result equals dense attention.

``import gnn_attention as ga`` imports torch only. Names that need another package, such as
``ga.MessagePassingAttention`` (torch_geometric), are loaded on first use. Start with the names in
``__all__``, and import others from their modules, such as ``gnn_attention.graph.tiling``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gnn_attention import algebra, convert, edge_ops, patterns, score_mods
from gnn_attention.attend import attend, explain, list_backends
from gnn_attention.backends import Backend, RefusalError
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads

if TYPE_CHECKING:
    from gnn_attention import analyse, cache, distributed, draw, explorer, lm, model, verify
    from gnn_attention.analyse import cost
    from gnn_attention.huggingface import use_graph
    from gnn_attention.interpret import trace
    from gnn_attention.interpret.audit import audit
    from gnn_attention.layer import MessagePassingAttention

__version__ = "0.2.0"

# The groups are graphs, attention on graphs, heads and the layer, and tools for models.
__all__ = ["TokenGraph", "algebra", "analyse", "convert", "draw", "patterns"]
__all__ += ["Backend", "RefusalError", "attend", "edge_ops", "explain", "list_backends", "score_mods"]
__all__ += ["FactoredHeads", "MergedHeads", "MessagePassingAttention", "StandardHeads"]
__all__ += ["audit", "cache", "cost", "distributed", "explorer", "lm", "model", "trace", "use_graph"]
__all__ += ["verify"]

# Each name is loaded on first use from this "module" or "module:attribute".
_LAZY_IMPORTS = {
    "MessagePassingAttention": "layer:MessagePassingAttention",
    "analyse": "analyse",
    "audit": "interpret.audit:audit",
    "cache": "cache",
    "cost": "analyse.cost",
    "distributed": "distributed",
    "draw": "draw",
    "explorer": "explorer",
    "lm": "lm",
    "model": "model",
    "trace": "interpret.trace",
    "use_graph": "huggingface:use_graph",
    "verify": "verify",
    # These shortcuts are not in __all__.
    "FactoredMatrix": "heads.factored_matrix:FactoredMatrix",
    "LatentHeads": "heads.latent:LatentHeads",
    "circuits": "interpret.circuits",
    "cost_model": "backends.cost_model",
    "expressions": "convert.expressions",
    "foreign": "model.foreign",
    "heads_of": "model.foreign:heads_of",
    "rotary": "rotary",
    "tiling": "graph.tiling",
}


def __getattr__(name: str) -> Any:
    """Load a name on first use (PEP 562)."""
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'gnn_attention' has no attribute {name!r}")
    path, _, attribute = _LAZY_IMPORTS[name].partition(":")
    module = importlib.import_module(f"gnn_attention.{path}")
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return __all__
