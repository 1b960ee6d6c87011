"""Reading what a model does: traces, circuits, audits."""
