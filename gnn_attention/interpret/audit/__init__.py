"""Whether information flows along edges alone."""

from gnn_attention.interpret.audit.api import WITNESSES, Leak, PartOf, Verdict, audit

__all__ = ["WITNESSES", "Leak", "PartOf", "Verdict", "audit"]
