"""Programs and functions that use the library. They are part of a checkout, not of the package.

``compare``, ``cost``, ``forces``, ``heads``, ``meanflow`` and ``training`` are programs: ``python -m
examples.compare --help``. The modules ``bounds`` and ``sinks`` (influence), ``expressive``, ``pairwise``
(messages), ``derivatives`` and ``minilm`` hold functions, ``clusters`` and ``curves`` data of programs.
"""
