"""Programs and functions that use the library. They are part of a checkout, not of the package.

``compare``, ``cost``, ``heads`` and ``training`` are programs: ``python -m examples.compare --help``. The
modules ``bounds`` and ``sinks`` (influence), ``expressive``, ``pairwise`` (messages) and ``minilm`` hold
functions.
"""
