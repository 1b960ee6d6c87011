"""The result of an audit: the verdict, in words, as graphs and as JSON."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gnn_attention.analyse import diff, witness
from gnn_attention.analyse._walks import is_square
from gnn_attention.graph import TokenGraph

# So many leaks are listed in the text.
SHOWN = 8


@dataclass(frozen=True)
class Leak:
    """Information from ``src`` changes ``dst``, which no path of the declared graph allows.

    ``path`` holds its tokens, src first: the fewest undeclared hops, then the fewest hops. ``layer`` names
    the part in which it comes in, None if unknown. ``size`` is the gradient as a share of the largest one.
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
    """Where information flows in a module, compared with where it may.

    ``graphs`` are the declared ones, one for each layer or one for all ``layers``; ``allowed`` holds every
    pair of tokens that their paths join (each token with itself), ``flow`` every pair along which a flow was
    found. ``unused`` are the allowed pairs ``(src, dst)``, src other than dst, without a flow
    (``analyse.witness`` gives a declared path). ``poisoned`` are the pairs that only a NaN crosses.
    ``crosses_samples``: one sample of a batch influences another.

    >>> import torch
    >>> from gnn_attention import audit, patterns
    >>> print(audit(torch.nn.LayerNorm(2), patterns.causal(3), (3, 2)))
    causal(3), 1 layer: no leak, 3 of 3 allowed pairs unused
      unused, first: 0 -> 1
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
        """True if nothing leaks: all flow is along the declared graph, between tokens and between samples."""
        return not self.leaks and not self.crosses_samples

    @property
    def exact(self) -> bool:
        """True if information flows along every path of the declared graph and nowhere else."""
        return self.ok and not self.unused

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that help to find the mistake."""
        found = []
        if self.leaks:
            difference = "; ".join(diff(self.allowed, self.flow).remarks)
            found.append(f"what is allowed (first) compared with what was seen (second): {difference}")
        if self.crosses_samples:
            found.append(
                "samples of a batch influence one another (statistics over the batch, or a module that takes "
                "[T, B, width]: then give call=lambda module, x: module(x.transpose(0, 1)).transpose(0, 1))"
            )
        return tuple(found)

    def __str__(self) -> str:
        names = ", ".join(graph.name for graph in self.graphs)
        lines = [f"{names}, {self.layers} layer{'s' * (self.layers > 1)}: {self._sentence()}"]
        lines += [str(leak) for leak in self.leaks[:SHOWN]]
        lines += [f"... and {len(self.leaks) - SHOWN} more leaks"] if len(self.leaks) > SHOWN else []
        if self.unused:
            src, dst = self.unused[0]
            path = witness(self.graphs, src, dst, self.layers) if is_square(self.allowed) else None
            lines.append(f"unused, first: {' -> '.join(map(str, path or (src, dst)))}")
        if self.poisoned:
            src, dst = self.poisoned[0]
            pairs = _plural(len(self.poisoned), "pair")
            lines.append(f"NaN alone crosses {pairs}, first {src} -> {dst} (zero times NaN)")
        return "\n  ".join([*lines, *self.remarks])

    def to_json(self) -> str:
        """All of it as one JSON object, the declared graphs by name."""
        record: dict[str, Any] = {"graphs": [graph.name for graph in self.graphs]}
        record |= {name: getattr(self, name) for name in ("layers", "exact", "ok", "crosses_samples")}
        sizes = [leak.size if math.isfinite(leak.size) else str(leak.size) for leak in self.leaks]
        record["leaks"] = [vars(leak) | {"size": size} for leak, size in zip(self.leaks, sizes, strict=True)]
        rest = {name: getattr(self, name) for name in ("unused", "poisoned", "remarks")}
        return json.dumps(record | rest, indent=1)

    def _sentence(self) -> str:
        loops = self.allowed.num_dst if is_square(self.allowed) else 0
        pairs = self.allowed.num_edges - loops
        if self.exact:
            return f"exact, information flows along all {pairs} allowed pairs and nowhere else"
        faults = [_plural(len(self.leaks), "leak")] if self.leaks else []
        faults += ["samples influence one another"] if self.crosses_samples else []
        unused = f", {len(self.unused)} of {pairs} allowed pairs unused" if self.unused else ""
        return ", ".join(faults or ["no leak"]) + unused


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
