"""The result of an audit: a verdict, which can be printed or written as JSON."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gnn_attention.analyse import diff, witness
from gnn_attention.analyse._walks import is_square
from gnn_attention.graph import TokenGraph

# The text of a verdict lists at most this many leaks.
MAX_LISTED_LEAKS = 8


@dataclass(frozen=True)
class Leak:
    """Information flows from ``src`` to ``dst``, but no path of the declared graph leads there.

    ``path`` lists the tokens that carry the information, src first, with as few undeclared hops as
    possible. ``layer`` names the submodule where the leak enters, or is None if that is unknown.
    ``witnesses`` names the detectors that saw the leak. ``size`` is gradient / largest gradient.
    """

    src: int
    dst: int
    path: tuple[int, ...]
    layer: str | None
    witnesses: tuple[str, ...]
    size: float

    def __str__(self) -> str:
        via = f" through {' -> '.join(map(str, self.path))}" if len(self.path) > 2 else ""
        where = "" if self.layer is None else f", comes in at {self.layer}"
        return f"{self.src} -> {self.dst}{via}{where} (seen by {', '.join(self.witnesses)})"


@dataclass(frozen=True)
class Verdict:
    """Where information flows in a module, compared with where it may flow.

    ``graphs`` are the declared graphs, one for each layer or one for all ``layers``. ``allowed``
    has an edge src -> dst if a declared path leads from src to dst or if src = dst. ``flow`` has an
    edge for every flow that was found. ``unused`` lists the allowed pairs ``(src, dst)`` with src
    != dst that have no flow (``analyse.witness`` finds their declared paths). ``poisoned`` lists
    the pairs that only a NaN crosses. ``crosses_samples`` is True if one sample of a batch
    influences another.

    >>> import torch
    >>> from gnn_attention import audit, patterns
    >>> print(audit(torch.nn.LayerNorm(2), patterns.causal(3), (3, 2)))
    causal(3), 1 layer: no leak, 3 of 3 allowed pairs unused
      the first unused pair: 0 -> 1
    """

    graphs: tuple[TokenGraph, ...]
    layers: int
    allowed: TokenGraph
    flow: TokenGraph
    leaks: tuple[Leak, ...]
    unused: tuple[tuple[int, int], ...]
    poisoned: tuple[tuple[int, int], ...]
    crosses_samples: bool

    @property
    def ok(self) -> bool:
        """True if information flows only along the declared graph, and within samples."""
        return not self.leaks and not self.crosses_samples

    @property
    def exact(self) -> bool:
        """True if information flows along every path of the declared graph and nowhere else."""
        return self.ok and not self.unused

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that help to find the mistake."""
        remarks = []
        if self.leaks:
            difference = "; ".join(diff(self.allowed, self.flow).remarks)
            remarks.append(f"allowed pairs (first) compared with flows (second): {difference}")
        if self.crosses_samples:
            remarks.append(
                "samples of a batch influence one another (statistics over the batch, or a module that takes "
                "[T, B, width]: then pass call=lambda module, x: module(x.transpose(0, 1)).transpose(0, 1))"
            )
        return tuple(remarks)

    def __str__(self) -> str:
        names = ", ".join(graph.name for graph in self.graphs)
        lines = [f"{names}, {self.layers} layer{'s' * (self.layers > 1)}: {self._summary()}"]
        lines += [str(leak) for leak in self.leaks[:MAX_LISTED_LEAKS]]
        if len(self.leaks) > MAX_LISTED_LEAKS:
            lines.append(f"... and {len(self.leaks) - MAX_LISTED_LEAKS} more leaks")
        if self.unused:
            src, dst = self.unused[0]
            path = witness(self.graphs, src, dst, self.layers) if is_square(self.allowed) else None
            lines.append(f"the first unused pair: {' -> '.join(map(str, path or (src, dst)))}")
        if self.poisoned:
            src, dst = self.poisoned[0]
            pairs = _pluralize(len(self.poisoned), "pair")
            lines.append(f"only NaN crosses {pairs}, first {src} -> {dst} (zero times NaN is NaN)")
        return "\n  ".join([*lines, *self.remarks])

    def to_json(self) -> str:
        """Return the verdict as one JSON object, with the declared graphs by name."""
        record: dict[str, Any] = {"graphs": [graph.name for graph in self.graphs]}
        record |= {name: getattr(self, name) for name in ("layers", "exact", "ok", "crosses_samples")}
        # JSON has no infinity.
        sizes = [leak.size if math.isfinite(leak.size) else str(leak.size) for leak in self.leaks]
        record["leaks"] = [vars(leak) | {"size": size} for leak, size in zip(self.leaks, sizes, strict=True)]
        record |= {name: getattr(self, name) for name in ("unused", "poisoned", "remarks")}
        return json.dumps(record, indent=1)

    def _summary(self) -> str:
        num_loops = self.allowed.num_dst if is_square(self.allowed) else 0
        num_pairs = self.allowed.num_edges - num_loops
        if self.exact:
            return f"exact, information flows along all {num_pairs} allowed pairs and nowhere else"
        faults = [_pluralize(len(self.leaks), "leak")] if self.leaks else []
        faults += ["samples influence one another"] if self.crosses_samples else []
        unused = f", {len(self.unused)} of {num_pairs} allowed pairs unused" if self.unused else ""
        return ", ".join(faults or ["no leak"]) + unused


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
