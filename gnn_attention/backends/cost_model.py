"""Cost of attention on this machine: the constants with which ``backend="auto"`` estimates times.

The time of a pass is a sum over the kernel calls, rectangles, cells (pairs inside rectangles), edges and
nodes that a backend visits. The defaults were measured on two cores of a current server CPU;
``python -m benchmarks calibrate`` measures the constants of another machine and saves them in a file.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from gnn_attention._support import atomic_files, checks

__all__ = ["Costs", "Work", "costs", "path_of_costs", "save"]

PATH_VARIABLE = "GNN_ATTENTION_COSTS"  # An environment variable with the path of the constants.


@dataclass(frozen=True)
class Work:
    """Counts of the work in one pass over a graph, for one head of one sample."""

    calls: int = 0
    rectangles: int = 0
    cells: int = 0
    weighted_cells: float = 0.0  # Cells of tall rectangles cost less, and count as less than one.
    edges: int = 0
    nodes: int = 0
    masked_pairs: int = 0
    plain_pairs: int = 0

    @property
    def pairs(self) -> int:
        """The number of pairs that dense kernels visit, edges and non-edges together."""
        return self.cells + self.masked_pairs + self.plain_pairs

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Work)))


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of a forward pass for a head of 64 channels in float32; training takes 3.5 times that.

    ``call``: one kernel call of any size. ``rectangle``: one rectangle of a call. ``cell``: one pair inside a
    rectangle. ``edge``, ``node``: one edge or node of a list. ``masked_pair``, ``plain_pair``: one pair in
    scaled_dot_product_attention with or without a mask (only half the pairs of a causal graph count).
    """

    call: float = 60_000.0
    rectangle: float = 500.0
    cell: float = 2.6
    edge: float = 7.5
    node: float = 170.0
    masked_pair: float = 2.0
    plain_pair: float = 1.75

    def seconds(self, work: Work, heads: int, dim: int = 64) -> float:
        """Estimate the seconds of a forward pass; ``heads`` counts the heads of all samples."""
        width = dim / 64.0
        pair_ns = work.masked_pairs * self.masked_pair + work.plain_pairs * self.plain_pair
        dense = (work.weighted_cells * self.cell + pair_ns) * width + work.rectangles * self.rectangle
        sparse = (work.edges * self.edge + work.nodes * self.node) * (0.5 + 0.5 * width)
        return (work.calls * self.call + heads * (dense + sparse)) * 1e-9


def path_of_costs() -> Path:
    """Path of the constants: ``$GNN_ATTENTION_COSTS``, or a file in the user's cache folder."""
    if os.environ.get(PATH_VARIABLE):
        return Path(os.environ[PATH_VARIABLE])
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "gnn_attention" / "costs.json"


@cache
def costs() -> Costs:
    """Return the constants of this machine, or the defaults; raise ValueError for a damaged file."""
    try:
        return read(path_of_costs())
    except (OSError, RuntimeError):  # There is no such file, or no home folder.
        return Costs()


def read(path: Path) -> Costs:
    """Read constants from a file; raise ValueError if it is damaged, OSError if it is unreadable."""
    defaults = asdict(Costs())
    try:
        content: Any = json.loads(path.read_text("utf-8"))
        constants = content.get("costs") if isinstance(content, dict) else content
        if not isinstance(constants, dict):
            raise ValueError(f"costs must be an object, got {checks.quote(constants)}")
        # Files of earlier versions lack some of the constants.
        constants = {name: constants.get(name, default) for name, default in defaults.items()}
        for name, constant in constants.items():
            constants[name] = checks.number(f"the constant {name!r}", constant, positive=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the constants of gnn_attention.backends.cost_model ({error}); "
            "measure them again with `python -m benchmarks calibrate`, or remove the file"
        ) from error
    return Costs(**constants)


def save(constants: Costs, path: Path | None = None) -> Path:
    """Write the constants to a file for later processes, and return the path of the file."""
    path = path or path_of_costs()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write(path, json.dumps({"costs": asdict(constants)}, indent=1) + "\n")
    costs.cache_clear()
    return path
