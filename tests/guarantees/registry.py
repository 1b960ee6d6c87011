"""All guarantees by name, in the order in which they are printed; each is loaded with its first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from tests.guarantees.guarantee import Guarantee

MODULES = {
    "F1": "equality",
    "F2": "errors",
    "F3": "errors",
    "F4": "interference",
    "F5": "malformed",
    "F6": "gradients",
    "F7": "compilation",
    "F8": "determinism",
    "F9": "decoding",
    "F12": "memory",
    "soak": "endurance",
    "threads": "threads",
}


class _Guarantees(Mapping[str, Guarantee]):
    """Guarantees by name; names alone load nothing (transformers, networkx and matplotlib would come with
    them).

    >>> GUARANTEES["F1"].bar
    '0 mismatches in 10,000 cases'
    """

    def __getitem__(self, name: str) -> Guarantee:
        module = importlib.import_module(f"tests.guarantees.{MODULES[name]}")
        guarantees: tuple[Guarantee, ...] = getattr(module, "GUARANTEES", None) or (module.GUARANTEE,)
        return next(guarantee for guarantee in guarantees if guarantee.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


GUARANTEES: Mapping[str, Guarantee] = _Guarantees()
