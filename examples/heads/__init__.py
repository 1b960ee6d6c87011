"""Describe in words what each head of a language model looks for and says, and test it by cutting edges.

The function is :func:`readings`, the command ``python -m examples.heads``.
"""

from examples.heads.jobs import JOBS
from examples.heads.reading import Effect, Reading, passages, readings

__all__ = ["JOBS", "Effect", "Reading", "passages", "readings"]
