"""All figures, by name, in the order in which they are printed; each is loaded when it is asked for, with what it needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from gnn_attention.figures._figure import Figure

__all__ = ["FIGURES"]

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
    "F10": "mutated_files",
    "F11": "pages",
    "F12": "memory",
    "soak": "endurance",
    "threads": "threads",
    "interrupts": "interrupts",
}


class _Figures(Mapping[str, Figure]):
    """Figures by name; names alone load nothing (transformers, networkx and matplotlib would come with them).

    >>> FIGURES["F1"].bar
    '0 mismatches in 10,000 cases'
    """

    def __getitem__(self, name: str) -> Figure:
        module = importlib.import_module(f"gnn_attention.figures.{MODULES[name]}")
        figures: tuple[Figure, ...] = getattr(module, "FIGURES", None) or (module.FIGURE,)
        return next(figure for figure in figures if figure.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


FIGURES: Mapping[str, Figure] = _Figures()
