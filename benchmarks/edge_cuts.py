"""First-order effects of edges against true cuts and mutes: ``python -m benchmarks.edge_cuts [RECORD]``.

Some tokens of Python; of all layers, heads and edges 2,000 at random and the 2,000 of the largest effects.
Each is cut, then muted, alone: many as the samples of one batch, which begins at the layer of the cut and the
first receiver that it can change. The record holds Spearman's rank correlations with the true changes of the
mean loss, for the shipped model and, with ``--model smollm2``, for SmolLM2 (some 10 CPU minutes).
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
AT_ONCE = 50  # samples of a batch
TEXT = (
    "def read(self, size=-1):\n    data = self.file.read(size)\n    if not data:\n        raise EOFError\n"
    * 4
)


def changing(edges: torch.Tensor, way: str, layer: int) -> Backend:
    """In call number ``layer`` sample i + 1 has its edge ``edges[i]`` (head, src, dst) cut or muted; the first none."""
    calls: list[int] = []

    def run(call: AttentionCall) -> tuple[torch.Tensor, None]:
        in_layer, first = len(calls) == layer, call.graph.dst_offset
        calls.append(1)
        k, v = (per_query_head(x, call.q.shape[1]) for x in (call.k, call.v))
        dst, src = torch.arange(call.q.shape[2])[:, None], torch.arange(k.shape[2])
        logits = call.apply_score_mod(call.q @ k.mT * call.scale, dst, src)
        logits = logits.masked_fill(~call.graph.mask(), -torch.inf)
        head, sender, receiver = edges.T
        at = torch.arange(1, len(edges) + 1), head, receiver - first, sender
        if in_layer and way == "cut":
            logits[at] = -torch.inf
        weights = logits.softmax(-1).nan_to_num(0.0)
        if in_layer and way == "mute":
            weights[at] = 0.0
        return weights @ v, None

    return Backend("changing", run)


def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What the mean loss changes by in each sample after the first; ``logits`` of the last tokens."""
    words = targets[:, -logits.shape[1] :].expand(len(logits), -1)
    each = functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none").view_as(words)
    return (each[1:] - each[0]).sum(1) / targets.shape[1]


class Trained:
    """The shipped model, in float64."""

    def __init__(self) -> None:
        self.model, vocabulary = language_models.load_trained()
        self.model.double()
        self.ids = torch.tensor([vocabulary.encode(TEXT)[: TOKENS["trained"] + 1]])

    def logits(self, edges: torch.Tensor, way: str, layer: int) -> torch.Tensor:
        """Of all tokens, for the model as it is and each of its changes."""
        self.model.backend = changing(edges, way, layer)
        logits: torch.Tensor = self.model(self.ids[:, :-1].expand(len(edges) + 1, -1))
        self.model.backend = "auto"
        return logits


class SmolLM2:
    """SmolLM2 from the changed layer and receiver on: what comes before is that of one run."""

    def __init__(self) -> None:
        self.model, tokenizer = lm.load("smollm2")
        self.model.requires_grad_(False)
        self.ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, : TOKENS["smollm2"] + 1]
        self.layers = self.model.model.layers
        # its name in transformers before 5.24, and after
        names = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        with torch.no_grad():
            out = self.model(self.ids[:, :-1], use_cache=True, output_hidden_states=True)
        self.states, self.cache = out.hidden_states, out.past_key_values

    def logits(self, edges: torch.Tensor, way: str, layer: int) -> torch.Tensor:
        """Of the tokens from the first receiver on."""
        # optional
        from transformers import DynamicCache

        first, samples = int(edges[:, 2].min()), len(edges) + 1
        pairs = ((x.keys[:, :, :first], x.values[:, :, :first]) for x in self.cache.layers)
        before = [tuple(part.expand(samples, -1, -1, -1) for part in pair) for pair in pairs]
        self.model.model.layers = self.layers[layer:]
        try:
            with huggingface.attending(changing(edges, way, 0)):
                logits: torch.Tensor = self.model(
                    inputs_embeds=self.states[layer][:, first:].expand(samples, -1, -1),
                    **({self.cache_name: DynamicCache(before)} if first else {}),
                    use_cache=bool(first),
                ).logits
        finally:
            self.model.model.layers = self.layers
        return logits


MODELS: dict[str, Callable[[], Any]] = {"trained": Trained, "smollm2": SmolLM2}


def batches(edges: torch.Tensor) -> Iterator[torch.Tensor]:
    """Positions of edges (layer, head, src, dst) of one layer, receivers in order."""
    for layer in range(int(edges[:, 0].max()) + 1):
        own = (edges[:, 0] == layer).nonzero().flatten()
        yield from torch.split(own[edges[own, 3].argsort()], AT_ONCE)


@torch.no_grad()
def measured(model: Any, edges: torch.Tensor, way: str) -> torch.Tensor:
    """The change of the mean loss by each edge (layer, head, src, dst)."""
    targets = model.ids[:, 1:]
    changes = torch.zeros(len(edges), dtype=torch.float64)
    for number, part in enumerate(batches(edges)):
        logits = model.logits(edges[part, 1:], way, int(edges[part[0], 0]))
        changes[part] = losses(logits, targets).double()
        print(f"edges {way}, batch {number}", file=sys.stderr, flush=True)
    return changes


def correlations(name: str, count: int) -> dict[str, Any]:
    """Of one model, by way and choice."""
    model = MODELS[name]()
    ids, targets = model.ids[:, :-1], model.ids[0, 1:]
    effects = attribute(model.model, ids, lambda logits: functional.cross_entropy(logits[0], targets))
    src, dst = effects.edge_index(0)
    result: dict[str, Any] = {"tokens": ids.shape[1], "edges": count, "correlations": {}}
    for way in WAYS:
        scores = torch.stack([effects.scores(layer, way) for layer in effects.layers])
        result["of"] = scores.numel()
        drawn = torch.randperm(scores.numel(), generator=torch.Generator().manual_seed(0))[:count]
        for choice, chosen in (("random", drawn), ("top", scores.abs().flatten().topk(count).indices)):
            layer, head, edge = torch.unravel_index(chosen, scores.shape)
            true = measured(model, torch.stack([layer, head, src[edge], dst[edge]], 1), way)
            result["correlations"][f"{way}, {choice}"] = rank_correlation(scores.flatten()[chosen], true)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models asked for; other models in the record stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", nargs="?", type=Path, help="file to write; other models in it stay")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: trained")
    parser.add_argument("--edges", type=int, default=EDGES, help="of each choice (default %(default)s)")
    args = parser.parse_args(arguments)
    models = {name: correlations(name, args.edges) for name in args.model or ["trained"]}
    if args.record and args.record.exists():
        models = json.loads(args.record.read_text(encoding="utf-8"))["models"] | models
    print(json.dumps(models, indent=1))
    if args.record:
        write(args.record, {"bench": "edge-cuts", "models": models})


if __name__ == "__main__":
    main()
