"""Whether information flows along edges alone."""

from gnn_attention.interpret.audit.api import audit
from gnn_attention.interpret.audit.report import Leak, Verdict
from gnn_attention.interpret.audit.runner import WITNESSES
from gnn_attention.interpret.audit.submodule import PartOf

__all__ = ["WITNESSES", "Leak", "PartOf", "Verdict", "audit"]
