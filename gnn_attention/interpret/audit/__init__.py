"""Whether information flows along edges alone."""

from gnn_attention.interpret.audit.api import audit
from gnn_attention.interpret.audit.report import Leak, Verdict
from gnn_attention.interpret.audit.runner import WITNESSES

__all__ = ["WITNESSES", "Leak", "Verdict", "audit"]
