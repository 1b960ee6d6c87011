"""Interval arithmetic: rules on whole ranges of tokens."""
