"""Tools to inspect models: traces, circuits and audits."""
