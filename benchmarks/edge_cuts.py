"""First-order effects of edges against true cuts of one edge: ``python -m benchmarks.edge_cuts [RECORD]``.

The shipped model, some tokens of its own text; 2,000 random edges and the 2,000 of the largest effects; each
is cut alone, many as the samples of one batch. The record holds Spearman's rank correlations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gnn_attention import model as lm
from gnn_attention._support import atomic_files
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.interpret.trace import attribute

TOKENS, EDGES, BATCH = 48, 2000, 50
TEXT = (
    "def read(self, size=-1):\n    data = self.file.read(size)\n    if not data:\n        raise EOFError\n"
    * 4
)


def cutting(cuts: torch.Tensor) -> Backend:
    """Sample i lacks the edge ``cuts[i]`` (layer, head, src, dst); layers count by their calls."""
    calls: list[int] = []

    def run(call: AttentionCall) -> tuple[torch.Tensor, None]:
        here = (cuts[:, 0] == len(calls)).nonzero().flatten()
        calls.append(1)
        tokens = torch.arange(call.q.shape[2])
        logits = call.modified(call.q @ call.k.mT * call.scale, tokens[:, None], tokens)
        logits = logits.masked_fill(~call.graph.mask(), -torch.inf)
        _, head, src, dst = cuts[here].T
        logits[here, head, dst, src] = -torch.inf
        return logits.softmax(-1).nan_to_num(0.0) @ call.v, None

    return Backend("cutting", run)


def rank_correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    ranks = torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def measured(model: Any, ids: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """The change of the mean loss by each cut."""
    found = []
    with torch.no_grad():
        for part in torch.split(cuts, BATCH):
            # the first sample lacks nothing
            part = torch.cat([part.new_tensor([[-1, 0, 0, 0]]), part])
            model.backend = cutting(part)
            logits = model(ids.expand(len(part), -1))
            losses = functional.cross_entropy(
                logits[:, :-1].mT, ids[:, 1:].expand(len(part), -1), reduction="none"
            )
            found.append((losses.mean(1) - losses[0].mean())[1:])
    model.backend = "auto"
    return torch.cat(found)


def main() -> None:
    model, vocabulary = lm.load_trained()
    model = model.double()
    ids = torch.tensor([vocabulary.encode(TEXT)[:TOKENS]])
    a = attribute(model, ids, lambda logits: functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    record: dict[str, Any] = {
        "bench": "edge-cuts",
        "tokens": ids.shape[1],
        "edges": EDGES,
        "correlations": {},
    }
    scores = torch.stack([a.scores(layer) for layer in a.layers])
    top = scores.abs().flatten().topk(EDGES).indices
    drawn = torch.randperm(scores.numel(), generator=torch.Generator().manual_seed(0))[:EDGES]
    for name, chosen in (("random", drawn), ("top", top)):
        layer, head, edge = torch.unravel_index(chosen, scores.shape)
        src, dst = a.edge_index(0)[:, edge]
        true = measured(model, ids, torch.stack([layer, head, src, dst], 1))
        record["correlations"][f"cut, {name}"] = round(rank_correlation(scores.flatten()[chosen], true), 4)
    print(json.dumps(record, indent=1))
    if len(sys.argv) > 1:
        atomic_files.write(Path(sys.argv[1]), json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
