"""Attention-head motifs as graphs: a template of the edges, and how well heads match it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gnn_attention import patterns
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.trace import pairs, record
from gnn_attention.interpret.trace.layer import LayerTrace

Template = Callable[[Tensor], TokenGraph]


def previous_token(tokens: Int[Tensor, "*batch tokens"]) -> TokenGraph:
    """Each token attends to the one before it: ``src = dst - 1``, whatever the tokens are.

    >>> previous_token(torch.tensor([7, 7, 8])).edge_index.tolist()
    [[0, 1], [1, 2]]
    """
    length = _as_rows(tokens).shape[1]
    return patterns.window(length, 2) - patterns.window(length, 1)


def duplicate_token(tokens: Int[Tensor, "*batch tokens"]) -> TokenGraph:
    """Each token attends to its earlier equals: ``token[src] = token[dst]``, ``src < dst``.

    >>> duplicate_token(torch.tensor([7, 8, 7, 7])).edge_index.tolist()
    [[0, 0, 2], [2, 3, 3]]
    """
    rows = _as_rows(tokens)
    return patterns.clusters(_labels(tokens, rows)) - patterns.window(rows.shape[1], 1)


def induction(tokens: Int[Tensor, "*batch tokens"]) -> TokenGraph:
    """Each token attends to what followed its earlier equals: ``token[src - 1] = token[dst]``.

    ``1 <= src <= dst``: a token that follows its equal attends to itself.

    >>> induction(torch.tensor([7, 8, 9, 7, 8])).edge_index.tolist()  # 7 to the 8 that followed 7, 8 to 9
    [[1, 2], [3, 4]]
    """
    rows = _as_rows(tokens)
    # Before the first token stands one that equals no other.
    before = torch.cat([rows.min().expand(len(rows), 1) - 1, rows[:, :-1]], dim=1)
    return patterns.clusters(_labels(tokens, rows), _labels(tokens, before))


TEMPLATES: Mapping[str, Template] = {
    make.__name__: make for make in (previous_token, duplicate_token, induction)
}


def detect(
    model: nn.Module, tokens: Int[Tensor, "*batch tokens"], template: str | Template
) -> Float[Tensor, "layers heads"]:
    """How much of each head's attention lies on the edges of a template, ``[layers, heads]``.

    It is the mean, over the receivers that have in-edges in the template, of the weight that they give to
    them, when the model runs on the tokens. An edge that was cut or was never there counts 0; a muted one
    keeps its weight.

    ``model`` is a language model, or any module of our attention layers that takes tokens; inside
    ``trace.intervene`` or ``use_graph`` it runs with these interventions, or along that graph. ``template``
    is one of :data:`TEMPLATES` by name, or a function like them; it may differ by sample (and head) as the
    tokens do. Raises ValueError for layers of different numbers of heads or a template over other tokens,
    TypeError for another template. Source: Olsson et al. 2022 (arXiv 2209.11895), "Induction heads".

    >>> from gnn_attention import model as lm
    >>> trained, _ = lm.load_trained()
    >>> repeated = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:32].repeat(2)
    >>> scores = detect(trained, repeated, "induction")
    >>> divmod(int(scores.argmax()), 4)  # layer and head
    (1, 3)
    """
    rows = _as_rows(tokens)
    if isinstance(template, str):
        template = TEMPLATES[checks.choice("template", template, TEMPLATES)]
    graph = checks.instance("template", template(rows), TokenGraph)
    with torch.no_grad():
        layers = record(model, rows).layers
        counts = sorted({layer.q.shape[1] for layer in layers})
        if len(counts) != 1:
            raise ValueError(f"model must have layers with one number of heads, got {counts}")
        return torch.stack([_score(layer, graph) for layer in layers])


def _score(layer: LayerTrace, template: TokenGraph) -> Float[Tensor, " heads"]:
    weights = layer.weights().mT
    batch, heads, _ = weights.shape
    tokens = template.shape4[2:] == layer.graph.shape4[2:]
    if not tokens or template.batch not in (None, batch) or template.heads not in (None, heads):
        raise ValueError(f"template must fit tokens, samples and heads of {layer!r}, got {template!r}")
    matched = weights * pairs.is_edge(template, layer.edge_index, batch, heads)
    # Receivers whose edges of the template are no edges of the graph count, with weight 0.
    receivers = (template.in_degree().to(weights.device).expand(batch, heads, -1) > 0).sum((0, 2))
    return matched.sum((0, 2)) / receivers.clamp(min=1)


def _as_rows(tokens: Any) -> Int[Tensor, "batch tokens"]:
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be an integer tensor [T] or [B, T], got {checks.quote(tokens)}")
    if tokens.dim() not in (1, 2) or not tokens.numel():
        raise ValueError(f"tokens must be [T] or [B, T] and not empty, got {list(tokens.shape)}")
    # Small integers would wrap round below their least.
    return tokens.reshape(-1, tokens.shape[-1]).long()


def _labels(tokens: Tensor, rows: Tensor) -> Tensor:
    # As the builders take them: [T] for one sequence, [B, 1 head, T] for several.
    return rows[0] if tokens.dim() == 1 else rows.unsqueeze(1)
