"""Interval arithmetic evaluates rules on whole ranges of tokens."""
