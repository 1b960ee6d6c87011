"""Compare ``influence_bound`` with the exact Jacobians of the shipped model over 20 graphs.

    python -m benchmarks.influence_bound --out tests/records/DATE-influence-bound.json

A pair of tokens is *violated* if the exact spectral norm of its block of the Jacobian is above the bound.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import environment, write
from examples.bounds import influence_bound
from gnn_attention import TokenGraph, model, patterns

T = 40
TEXT = Path("/usr/share/common-licenses/GPL-3")


def graphs() -> list[TokenGraph]:
    return [
        patterns.causal(T), patterns.strict_causal(T), patterns.full(T), patterns.no_self(T),
        patterns.prefix(T, 12), patterns.documents([10, 14, 16]), patterns.documents([20, 20], causal=False),
        patterns.tree([-1, *(token // 2 for token in range(T - 1))]), patterns.window(T, 3),
        patterns.window(T, 8), patterns.window(T, 16), patterns.window(T, 5, causal=False),
        patterns.dilated(T, 6, 3), patterns.window(T, 4) | patterns.sinks(T, 1),
        patterns.window(T, 8) | patterns.sinks(T, 4), patterns.log_sparse(T), patterns.random_senders(T, 6),
        patterns.erdos_renyi(T, 0.1), patterns.window(T, 2), patterns.watts_strogatz(T, 4, 0.2),
    ]  # fmt: skip


def exact_norms(lm: Any, tokens: Any, graph: TokenGraph) -> Any:
    """Return the spectral norm of each block of the Jacobian."""
    width = lm.config.width
    # The batch has a copy of the sequence for each output channel, so one pass gives all rows of a block.
    x = lm.embedding(tokens).detach().repeat(width, 1, 1).requires_grad_()
    state = x
    for block in lm.blocks:
        state = block(state, graph)
    rows = [torch.autograd.grad(row.diagonal().sum(), x, retain_graph=True)[0] for row in state.unbind(1)]
    return torch.stack([torch.linalg.matrix_norm(row.transpose(0, 1), 2) for row in rows])


def measure(lm: Any, tokens: Any, graph: TokenGraph) -> dict[str, Any]:
    bound, norms = influence_bound(lm, tokens, graph), exact_norms(lm, tokens, graph)
    is_reachable = bound > 0
    slack = bound[is_reachable] / norms[is_reachable]
    return {
        "graph": graph.name, "pairs": int(is_reachable.sum()), "violations": int((norms > bound).sum()),
        "least_slack": float(slack.min()), "median_slack": float(slack.median()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=TEXT)
    options = parser.parse_args()
    lm, vocabulary = model.load_trained()
    tokens = torch.tensor([vocabulary.encode(options.text.read_text(encoding="utf-8"))[:T]])
    lm = lm.double().requires_grad_(False)
    rows = [measure(lm, tokens, graph) for graph in graphs()]
    record: dict[str, Any] = {"bench": "influence-bound", "command": "python -m benchmarks.influence_bound"}
    record |= {name: sum(row[name] for row in rows) for name in ("pairs", "violations")}
    record |= {"model": "trained", "tokens": T, "text": options.text.name, "graphs": rows}
    record["environment"] = environment("cpu")
    write(options.out, record)
    print(record["pairs"], "pairs,", record["violations"], "violations")


if __name__ == "__main__":
    main()
