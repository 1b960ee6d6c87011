"""Check whether information in a module flows only along the edges of a graph."""

from gnn_attention.interpret.audit.api import audit
from gnn_attention.interpret.audit.report import Leak, Verdict

__all__ = ["Leak", "Verdict", "audit"]
