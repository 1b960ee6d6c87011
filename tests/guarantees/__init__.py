"""The guarantees of the library are measured, each against its threshold.

``python -m tests.guarantees F4`` measures one guarantee, and without a name all of them.
``registry.GUARANTEES`` holds them by name: ``GUARANTEES["F1"].measure(100, print)`` measures a hundred cases of F1.
"""
