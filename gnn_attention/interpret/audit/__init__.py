"""Whether information flows along edges alone."""

from gnn_attention.interpret.audit.api import audit
from gnn_attention.interpret.audit.report import Leak, Verdict

__all__ = ["Leak", "Verdict", "audit"]
