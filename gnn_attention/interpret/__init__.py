"""Tools to read what a model does: traces, circuits and audits."""
