"""Compare first-order effects of edges with real cuts and mutes: ``python -m examples.edge_cuts [RECORD]``.

The text is some tokens of Python. Of the edges of all layers and heads, 2,000 random ones and the 2,000
with the largest effects are each cut, then muted, alone. The samples of one batch have one changed edge
each, and a batch starts at the layer of these edges and at their first receiver. The record holds
Spearman's rank correlations with the true changes of the mean loss, for the shipped model and, with
``--model smollm2``, for SmolLM2 (about 10 CPU minutes).
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.records import rank_correlation, write
from gnn_attention import huggingface, lm
from gnn_attention import model as language_models
from gnn_attention.backends import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.edge_softmax import per_query_head
from gnn_attention.interpret.trace import attribute

TOKENS = {"trained": 48, "smollm2": 32}
EDGES, WAYS = 2000, ("cut", "mute")
BATCH_SIZE = 50
TEXT = (
    "def read(self, size=-1):\n    data = self.file.read(size)\n    if not data:\n        raise EOFError\n"
    * 4
)


def backend_with_changes(edges: torch.Tensor, way: str, layer: int) -> Backend:
    """Build a backend whose call ``layer`` cuts or mutes ``edges[i]`` (head, src, dst) of sample i + 1."""
    num_calls = 0

    def run(call: AttentionCall) -> tuple[torch.Tensor, None]:
        nonlocal num_calls
        is_changed_layer = num_calls == layer
        num_calls += 1
        k, v = (per_query_head(x, call.q.shape[1]) for x in (call.k, call.v))
        dst, src = torch.arange(call.q.shape[2])[:, None], torch.arange(k.shape[2])
        logits = call.apply_score_mod(call.q @ k.mT * call.scale, dst, src)
        logits = logits.masked_fill(~call.graph.mask(), -torch.inf)
        head, sender, receiver = edges.T
        index = torch.arange(1, len(edges) + 1), head, receiver - call.graph.dst_offset, sender
        if is_changed_layer and way == "cut":
            logits[index] = -torch.inf
        weights = logits.softmax(-1).nan_to_num(0.0)
        if is_changed_layer and way == "mute":
            weights[index] = 0.0
        return weights @ v, None

    return Backend("changing", run)


def loss_changes(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the change of the mean loss in each sample after the first."""
    # The logits may cover only the last tokens, because earlier losses are the same in all samples.
    ids = targets[:, -logits.shape[1] :].expand(len(logits), -1)
    losses = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
    return (losses[1:] - losses[0]).sum(1) / targets.shape[1]


class Trained:
    """The shipped model, in float64."""

    def __init__(self) -> None:
        self.model, vocabulary = language_models.load_trained()
        self.model.double()
        self.ids = torch.tensor([vocabulary.encode(TEXT)[: TOKENS["trained"] + 1]])

    def logits(self, edges: torch.Tensor, way: str, layer: int) -> torch.Tensor:
        """Return the logits of all tokens, first of the unchanged model, then of each changed one."""
        self.model.backend = backend_with_changes(edges, way, layer)
        logits: torch.Tensor = self.model(self.ids[:, :-1].expand(len(edges) + 1, -1))
        self.model.backend = "auto"
        return logits


class SmolLM2:
    """SmolLM2, computed from the changed layer and receiver on; earlier states come from a single run."""

    def __init__(self) -> None:
        self.model, tokenizer = lm.load("smollm2")
        self.model.requires_grad_(False)
        self.ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, : TOKENS["smollm2"] + 1]
        self.layers = self.model.model.layers
        # transformers renamed the argument in 5.24.
        names = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        with torch.no_grad():
            out = self.model(self.ids[:, :-1], use_cache=True, output_hidden_states=True)
        self.states, self.cache = out.hidden_states, out.past_key_values

    def logits(self, edges: torch.Tensor, way: str, layer: int) -> torch.Tensor:
        """Return the logits of the tokens from the first changed receiver on."""
        from transformers import DynamicCache

        first, samples = int(edges[:, 2].min()), len(edges) + 1
        pairs = ((x.keys[:, :, :first], x.values[:, :, :first]) for x in self.cache.layers)
        prefix = [tuple(tensor.expand(samples, -1, -1, -1) for tensor in pair) for pair in pairs]
        self.model.model.layers = self.layers[layer:]
        try:
            with huggingface.attending(backend_with_changes(edges, way, 0)):
                logits: torch.Tensor = self.model(
                    inputs_embeds=self.states[layer][:, first:].expand(samples, -1, -1),
                    **({self.cache_name: DynamicCache(prefix)} if first else {}),
                    use_cache=bool(first),
                ).logits
        finally:
            self.model.model.layers = self.layers
        return logits


MODELS: dict[str, Callable[[], Any]] = {"trained": Trained, "smollm2": SmolLM2}


def batches(edges: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield indices into ``edges`` (layer, head, src, dst): each batch has one layer, sorted by receiver."""
    for layer in set(edges[:, 0].tolist()):
        index = (edges[:, 0] == layer).nonzero().flatten()
        yield from torch.split(index[edges[index, 3].argsort()], BATCH_SIZE)


@torch.no_grad()
def measure_changes(model: Any, edges: torch.Tensor, way: str) -> torch.Tensor:
    """Return the change of the mean loss by each edge (layer, head, src, dst)."""
    targets = model.ids[:, 1:]
    changes = torch.zeros(len(edges), dtype=torch.float64)
    for number, index in enumerate(batches(edges)):
        logits = model.logits(edges[index, 1:], way, int(edges[index[0], 0]))
        changes[index] = loss_changes(logits, targets).double()
        print(f"edges {way}, batch {number}", file=sys.stderr, flush=True)
    return changes


def correlations(name: str, count: int) -> dict[str, Any]:
    """Correlate estimated with true effects in one model, for cuts and mutes of random and top edges."""
    model = MODELS[name]()
    ids, targets = model.ids[:, :-1], model.ids[0, 1:]
    effects = attribute(model.model, ids, lambda logits: functional.cross_entropy(logits[0], targets))
    src, dst = effects.edge_index(0)
    result: dict[str, Any] = {"tokens": ids.shape[1], "edges": count, "correlations": {}}
    for way in WAYS:
        scores = torch.stack([effects.scores(layer, way) for layer in effects.layers])
        result["of"] = scores.numel()
        random = torch.randperm(scores.numel(), generator=torch.Generator().manual_seed(0))[:count]
        for choice, index in (("random", random), ("top", scores.abs().flatten().topk(count).indices)):
            layer, head, edge = torch.unravel_index(index, scores.shape)
            changes = measure_changes(model, torch.stack([layer, head, src[edge], dst[edge]], 1), way)
            result["correlations"][f"{way}, {choice}"] = rank_correlation(scores.flatten()[index], changes)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models named by ``--model``; other models in the record are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", nargs="?", type=Path, help="file to write; other models in it are kept")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: trained")
    parser.add_argument("--edges", type=int, default=EDGES, help="random and top edges (default %(default)s)")
    args = parser.parse_args(arguments)
    models = {name: correlations(name, args.edges) for name in args.model or ["trained"]}
    if args.record and args.record.exists():
        models = json.loads(args.record.read_text(encoding="utf-8"))["models"] | models
    print(json.dumps(models, indent=1))
    if args.record:
        write(args.record, {"bench": "edge-cuts", "models": models})


if __name__ == "__main__":
    main()
