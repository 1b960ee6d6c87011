"""Interval arithmetic: what a rule says of whole ranges of tokens."""
