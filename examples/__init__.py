"""What is built with the library, in a checkout: it is no part of the package.

Programs, which ``--help`` explains: ``python -m examples.compare``, ``cost``, ``heads`` and ``training``.
Functions: ``bounds`` and ``sinks`` (influence), ``expressive``, ``pairwise`` (messages) and ``minilm``.
"""
