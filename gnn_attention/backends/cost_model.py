"""What attention costs on this machine: a few constants, by which ``backend="auto"`` estimates times.

The time of a pass is a sum over what a backend visits: calls of a kernel, rectangles, cells (pairs inside
them), edges, nodes. The constants below were measured on two cores of a current server CPU;
``python -m benchmarks calibrate`` measures those of another machine and saves them in a file.
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

VARIABLE = "GNN_ATTENTION_COSTS"  # names the file of constants, if it is not the usual one


@dataclass(frozen=True)
class Work:
    """What one head of one sample visits in one pass over a graph."""

    calls: int = 0
    rectangles: int = 0
    cells: int = 0
    weighted_cells: float = 0.0  # one of a high rectangle, which costs less, counts for less than one
    edges: int = 0
    nodes: int = 0
    masked_pairs: int = 0
    plain_pairs: int = 0

    @property
    def pairs(self) -> int:
        """The pairs of a receiver and a sender that dense kernels visit, edges or not."""
        return self.cells + self.masked_pairs + self.plain_pairs

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Work)))


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of a forward pass for a head of 64 channels in float32; a training step takes 3.5 times it.

    ``call``: one kernel call, whatever its size. ``rectangle``: one of its rectangles. ``cell``: a pair
    inside a rectangle. ``edge`` and ``node``: of a listed graph. ``masked_pair`` and ``plain_pair``: of
    scaled_dot_product_attention with a mask, and without one (of a causal graph half of the pairs count).
    """

    call: float = 60_000.0
    rectangle: float = 500.0
    cell: float = 2.6
    edge: float = 7.5
    node: float = 170.0
    masked_pair: float = 2.0
    plain_pair: float = 1.75

    def seconds(self, work: Work, heads: int, dim: int = 64) -> float:
        """The estimate for a forward pass with this many heads (times samples), of ``dim`` channels."""
        wide = dim / 64.0
        pairs = work.masked_pairs * self.masked_pair + work.plain_pairs * self.plain_pair
        dense = (work.weighted_cells * self.cell + pairs) * wide + work.rectangles * self.rectangle
        sparse = (work.edges * self.edge + work.nodes * self.node) * (0.5 + 0.5 * wide)
        return (work.calls * self.call + heads * (dense + sparse)) * 1e-9


def path_of_costs() -> Path:
    """The file of this machine's constants: ``$GNN_ATTENTION_COSTS``, else in the user's cache folder."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "gnn_attention" / "costs.json"


@cache
def costs() -> Costs:
    """The constants of this machine if measured, else the defaults; ValueError for a damaged file."""
    try:
        return read(path_of_costs())
    except (OSError, RuntimeError):  # no such file, or no home folder
        return Costs()


def read(path: Path) -> Costs:
    """The constants in a file; ValueError that names it if they are missing, OSError if it cannot be read.

    A constant that the file lacks, as those of earlier versions do, takes its default.
    """
    default = asdict(Costs())
    try:
        found: Any = json.loads(path.read_text("utf-8"))
        found = found.get("costs") if isinstance(found, dict) else found
        if not isinstance(found, dict):
            raise ValueError(f"costs must be an object, got {checks.quote(found)}")
        found = {**default, **found}
        measured = {
            name: checks.number(f"the constant {name!r}", found[name], positive=True) for name in default
        }
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the constants of gnn_attention.backends.cost_model ({error}); "
            "measure them again with `python -m benchmarks calibrate`, or remove the file"
        ) from error
    return Costs(**measured)


def save(measured: Costs, path: Path | None = None) -> Path:
    """Write the constants for the next processes, whole or not at all."""
    path = path or path_of_costs()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write(path, json.dumps({"costs": asdict(measured)}, indent=1) + "\n")
    costs.cache_clear()
    return path
