"""Guarantees: what the library promises, each measured against its threshold.

``python -m tests.guarantees F4`` measures one, without a name all of them. ``GUARANTEES`` holds them by name:
``GUARANTEES["F1"].measure(100, print)`` measures a hundred cases of the first.
"""

from tests.guarantees import equality
from tests.guarantees.draws import Draw
from tests.guarantees.equality import Mismatch, Tally
from tests.guarantees.guarantee import Guarantee, Measured
from tests.guarantees.record import Result, Results
from tests.guarantees.registry import GUARANTEES

__all__ = [
    "GUARANTEES",
    "Draw",
    "Guarantee",
    "Measured",
    "Mismatch",
    "Result",
    "Results",
    "Tally",
    "equality",
]
