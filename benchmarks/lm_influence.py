"""Measure influence in SmolLM2 along a graph, and predict it from the graph and from statistics of the heads.

    python -m benchmarks.lm_influence --out tests/records/DATE-influence.json
    python -m benchmarks.lm_influence --graph sinks --out tests/records/DATE-influence-sinks.json

The influence ``|d last state[dst] / d embedding[src]|`` is measured in float64 on one text, with random
vector-Jacobian products. The prediction comes from another text: for each layer and kind of edge, the mean energy
that an edge passes on through its value (``(w / rms)^2 |W_O W_V|^2``), through its key and, to the receiver itself,
through its query; these energies are then summed over walks. The kind of an edge is its distance, or its sender if
this is one of the first four tokens (the pair, if both ends are).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gnn_attention as ga
from benchmarks.records import environment, rank_correlation, write
from gnn_attention import analyse, patterns
from gnn_attention.attend import AttentionInfo, run_attention
from gnn_attention.backends import Backend
from gnn_attention.huggingface import attending

T, WINDOW, SINKS = 512, 32, 4
KINDS = T + SINKS + SINKS**2
GRAPHS = {
    "window": patterns.window(T, WINDOW),
    "sinks": patterns.window(T, WINDOW) | patterns.sinks(T, SINKS),
    "strided": patterns.sparse_strided(T, WINDOW),
}
MEASURED, STATISTICS = (Path("/usr/share/common-licenses") / name for name in ("GPL-3", "Artistic"))
norm = torch.linalg.matrix_norm


def kinds(graph: ga.TokenGraph) -> Any:
    src, dst = graph.edge_index
    if graph is not GRAPHS["sinks"]:
        return dst - src
    far = torch.where(src < SINKS, T + src, dst - src)
    return far.where((dst >= SINKS) | (src >= SINKS), T + SINKS + SINKS * src + dst)


def measure(model: Any, graph: ga.TokenGraph, ids: Any, receivers: list[int], projections: int) -> Any:
    model = model.double().requires_grad_(False)
    x = model.get_input_embeddings()(ids)[0]
    with ga.use_graph(model, graph):
        run = lambda rows: model.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]  # noqa: E731
        return analyse.jacobian_norms(run, x, receivers, projections)


@torch.no_grad()
def statistics(model: Any, graph: ga.TokenGraph, ids: Any) -> tuple[Any, Any]:
    """Return energies by kind of edge ``[layers, KINDS]`` and through the query ``[layers]``; the residual has 1."""
    calls: dict[int, Any] = {}
    inverse: dict[int, Any] = {}
    hooks = []
    for number, layer in enumerate(model.model.layers):

        def save_inverse_rms(module: Any, inputs: Any, number: int = number) -> None:
            inverse[number] = (inputs[0][0].double().square().mean(-1) + 1e-5).rsqrt()

        hooks.append(layer.input_layernorm.register_forward_pre_hook(save_inverse_rms))

    def recording_backend(module: Any) -> Backend:
        def run(call: Any) -> Any:
            call = replace(call, with_lse=True)
            out, lse = run_attention(call, "auto")
            calls[module.layer_idx] = (AttentionInfo(call, lse).weights(), call.q, call.k, call.v, out)
            return out, lse

        return Backend("recording", run)

    with ga.use_graph(model, graph), attending(recording_backend):
        model.model(ids)
    for hook in hooks:
        hook.remove()
    energies = [_energies(layer, calls[i], inverse[i], graph) for i, layer in enumerate(model.model.layers)]
    return torch.stack([edge for edge, _ in energies]), torch.stack([query for _, query in energies])


def _energies(layer: Any, call: Any, inverse: Any, graph: ga.TokenGraph) -> tuple[Any, Any]:
    (src, dst), module, kind = graph.edge_index, layer.self_attn, kinds(graph)
    w, q, k, v, out = (x[0].double() for x in call)
    heads, groups, dim, width = len(q), len(k), q.shape[-1], module.o_proj.weight.shape[0]
    gamma = layer.input_layernorm.weight.double()
    W_Q, W_K, W_V = (
        (p.weight.double() * gamma).view(-1, dim, width)
        for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    W_O = module.o_proj.weight.double().view(width, heads, dim)
    energy, by_query = torch.zeros_like(w), torch.zeros(T, dtype=torch.float64)
    for h in range(heads):
        g = h * groups // heads
        difference = v[g][src] - out[h][dst]
        square = W_O[:, h].T @ W_O[:, h]
        # The difference energy is |W_O difference|^2, and the squares below are |W_O covariance|^2.
        difference_energy = (difference @ square * difference).sum(-1)
        by_key = difference_energy * q[h][dst].square().sum(-1) * norm(W_K[g]) ** 2 / dim / dim
        energy[h] = (w[h] * inverse[src]) ** 2 * (norm(W_O[:, h] @ W_V[g]) ** 2 + by_key) / width
        covariance = _by_receiver(dst, w[h][:, None] * difference).mT @ _by_receiver(dst, k[g][src])
        squares = (square @ covariance * covariance).sum((1, 2))
        by_query += squares * norm(W_Q[h]) ** 2 / dim / dim / width * inverse**2
    sums = torch.zeros(KINDS, dtype=torch.float64).index_add(0, kind, energy.sum(0))
    return sums / torch.bincount(kind, minlength=KINDS).clamp(min=1), by_query[WINDOW:].mean()


def _by_receiver(dst: Any, rows: Any) -> Any:
    """Pad rows of edges, which are sorted by receiver, with zeros to ``[T, largest in-degree, dim]``."""
    degree = torch.bincount(dst, minlength=T)
    table = torch.zeros(T, int(degree.max()), rows.shape[1], dtype=rows.dtype)
    table[dst, torch.arange(len(dst)) - (degree.cumsum(0) - degree)[dst]] = rows
    return table


def predict(graph: ga.TokenGraph, energy: Any, by_query: Any, receivers: list[int]) -> Any:
    share = (energy / (1 + by_query)[:, None])[:, kinds(graph)]
    # The share of the residual is that of the last token, which has the most in-edges.
    residual = 1 / (1 + share[:, graph.edge_index[1] == T - 1].sum(1))
    weights = [row * r / (1 - r) for row, r in zip(share, residual, strict=True)]
    return analyse.influence(graph, len(share), residual.tolist(), weights, receivers).sqrt()


def mean_by_distance(rows: Any, receivers: list[int]) -> Any:
    rows_by_distance = [
        torch.nn.functional.pad(row[: r + 1].flip(0), (0, T - 1 - r), value=torch.nan)
        for row, r in zip(rows, receivers, strict=True)
    ]
    return torch.stack(rows_by_distance).nanmean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--graph", choices=GRAPHS, default="window")
    parser.add_argument("--step", type=int, default=33, help="distance between measured receivers")
    parser.add_argument("--projections", type=int, default=2)
    options = parser.parse_args()
    model, tokenizer = ga.lm.load("smollm2")
    texts = [torch.tensor([tokenizer.encode(path.read_text())[:T]]) for path in (STATISTICS, MEASURED)]
    receivers = list(range(T - 1, WINDOW, -options.step))
    graph = GRAPHS[options.graph]
    prediction = predict(graph, *statistics(model, graph, texts[0]), receivers)
    measurement = measure(model, graph, texts[1], receivers, options.projections)
    distance = torch.tensor(receivers)[:, None] - torch.arange(T)
    is_causal = distance >= 0
    pairs = measurement[is_causal], prediction[is_causal]
    command = f"python -m benchmarks.lm_influence --graph {options.graph} --step {options.step}"
    means = [mean_by_distance(rows, receivers) for rows in (measurement, prediction)]
    log_ratio = (means[1] / means[0]).log10()
    record = {
        "bench": "influence", "model": "smollm2", "graph": graph.name, "receivers": receivers,
        "command": f"{command} --projections {options.projections}", "environment": environment("cpu"),
        "projections": options.projections, "texts": [MEASURED.name, STATISTICS.name],
        "orders": float((means[0].max() / means[0].min()).log10()),
        "spearman_by_distance": rank_correlation(*means), "spearman_by_pair": rank_correlation(*pairs),
        "spearman_by_pair_of_distance_alone": rank_correlation(pairs[0], -distance[is_causal]),
        "largest_error_in_orders": float((log_ratio - log_ratio.median()).abs().max()),
        "measured": means[0].tolist(), "predicted": means[1].tolist(),
    }  # fmt: skip
    write(options.out, record)
    print({name: value for name, value in record.items() if isinstance(value, float)})


if __name__ == "__main__":
    main()
