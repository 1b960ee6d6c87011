"""An attention mask is a graph: build it, combine it, attend along its edges, and verify that it equals
dense attention.

``import gnn_attention as ga`` loads torch alone; what needs more, as ``ga.MessagePassingAttention`` needs
torch_geometric, is loaded on first use. ``__all__`` holds the names to begin with; the rest goes by module,
as ``gnn_attention.graph.tiling``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gnn_attention import algebra, convert, patterns, score_mods
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

# graphs; attention along them; layers and weights; models and what one does with them
__all__ = ["TokenGraph", "algebra", "analyse", "convert", "draw", "patterns"]
__all__ += ["Backend", "RefusalError", "attend", "explain", "list_backends", "score_mods"]
__all__ += ["FactoredHeads", "MergedHeads", "MessagePassingAttention", "StandardHeads"]
__all__ += ["audit", "cache", "cost", "distributed", "explorer", "lm", "model", "trace", "use_graph"]
__all__ += ["verify"]

# Loaded on first use: the module, or a name in it.
_ON_DEMAND = {
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
    # Shortcuts: these are not in __all__.
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
    """Load on first use what needs more than torch (PEP 562); shortcuts outside ``__all__`` load here too."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'gnn_attention' has no attribute {name!r}")
    module, _, attribute = _ON_DEMAND[name].partition(":")
    loaded = importlib.import_module(f"gnn_attention.{module}")
    return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return __all__
