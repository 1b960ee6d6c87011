"""What each head of a language model looks for and says, in words, tested by cutting the edges named.

``python -m examples.heads --help`` is the command, :func:`readings` the function.
"""

from examples.heads.jobs import JOBS
from examples.heads.reading import Effect, Reading, passages, readings

__all__ = ["JOBS", "Effect", "Reading", "passages", "readings"]
