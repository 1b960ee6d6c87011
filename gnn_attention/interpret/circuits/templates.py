"""Describe motifs of attention heads as graphs, and measure how well heads match them."""

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
    """Return the graph in which each token attends to the previous one: ``src = dst - 1``.

    >>> previous_token(torch.tensor([7, 7, 8])).edge_index.tolist()
    [[0, 1], [1, 2]]
    """
    length = _read_tokens(tokens).shape[1]
    return patterns.window(length, 2) - patterns.window(length, 1)


def duplicate_token(tokens: Int[Tensor, "*batch tokens"]) -> TokenGraph:
    """Return the graph in which each token attends to all earlier equal tokens: ``src < dst``.

    >>> duplicate_token(torch.tensor([7, 8, 7, 7])).edge_index.tolist()
    [[0, 0, 2], [2, 3, 3]]
    """
    rows = _read_tokens(tokens)
    return patterns.clusters(_make_labels(tokens, rows)) - patterns.window(rows.shape[1], 1)


def induction(tokens: Int[Tensor, "*batch tokens"]) -> TokenGraph:
    """Return the graph in which each token attends to the tokens that followed earlier equal tokens.

    Its edges have ``token[src - 1] = token[dst]`` and ``1 <= src <= dst``: a token that follows an
    equal token attends to itself. Here the second 7 attends to the 8 that followed the first 7:

    >>> induction(torch.tensor([7, 8, 9, 7, 8])).edge_index.tolist()
    [[1, 2], [3, 4]]
    """
    rows = _read_tokens(tokens)
    # Nothing precedes the first token, so it is preceded here by an id that no token has.
    before = torch.cat([rows.min().expand(len(rows), 1) - 1, rows[:, :-1]], dim=1)
    return patterns.clusters(_make_labels(tokens, rows), _make_labels(tokens, before))


_BUILT_IN = (previous_token, duplicate_token, induction)
TEMPLATES: Mapping[str, Template] = {template.__name__: template for template in _BUILT_IN}


def detect(
    model: nn.Module, tokens: Int[Tensor, "*batch tokens"], template: str | Template
) -> Float[Tensor, "layers heads"]:
    """Measure how much of each head's attention lies on a template, ``[layers, heads]``.

    The model runs on the tokens. The score of a head is the total weight of a receiver's in-edges
    in the template, averaged over the receivers that have such in-edges. An edge that the model
    lacks or that was cut has weight 0; a muted edge keeps its weight.

    ``model`` is a language model, or another module with attention layers of this library that
    takes tokens. It obeys ``trace.intervene`` and ``use_graph``. ``template`` is a name in
    :data:`TEMPLATES`, or a function from tokens to a graph, which may vary by sample and head.
    Raises ValueError if layers differ in their number of heads or the graph has another size,
    TypeError if the template returns no graph. Source: Olsson et al. 2022 (arXiv 2209.11895),
    "Induction heads".

    >>> from gnn_attention import model as lm
    >>> trained, _ = lm.load_trained()
    >>> repeated = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:32].repeat(2)
    >>> scores = detect(trained, repeated, "induction")
    >>> layer, head = divmod(int(scores.argmax()), 4)
    >>> layer, head
    (1, 3)
    """
    rows = _read_tokens(tokens)
    if isinstance(template, str):
        template = TEMPLATES[checks.choice("template", template, TEMPLATES)]
    graph = checks.instance("template", template(rows), TokenGraph)
    with torch.no_grad():
        layers = record(model, rows).layers
        head_counts = sorted({layer.q.shape[1] for layer in layers})
        if len(head_counts) != 1:
            raise ValueError(f"model must have the same number of heads in all layers, got {head_counts}")
        return torch.stack([_match_heads(layer, graph) for layer in layers])


def _match_heads(layer: LayerTrace, template: TokenGraph) -> Float[Tensor, " heads"]:
    weights = layer.weights().mT
    batch_size, num_heads, _ = weights.shape
    is_same_size = template.shape4[2:] == layer.graph.shape4[2:] and template.batch in (None, batch_size)
    if not is_same_size or template.heads not in (None, num_heads):
        raise ValueError(f"template must have the tokens, samples and heads of {layer!r}, got {template!r}")
    template_weights = weights * pairs.is_edge(template, layer.edge_index, batch_size, num_heads)
    # A receiver counts even if none of its edges in the template is an edge of the model.
    in_degree = template.in_degree().to(weights.device).expand(batch_size, num_heads, -1)
    return template_weights.sum((0, 2)) / (in_degree > 0).sum((0, 2)).clamp(min=1)


def _read_tokens(tokens: Any) -> Int[Tensor, "batch tokens"]:
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be an integer tensor [T] or [B, T], got {checks.quote(tokens)}")
    if tokens.dim() not in (1, 2) or not tokens.numel():
        raise ValueError(f"tokens must have shape [T] or [B, T] and not be empty, got {list(tokens.shape)}")
    # induction() subtracts 1 from the smallest id, which a small integer type may not represent.
    return tokens.reshape(-1, tokens.shape[-1]).long()


def _make_labels(tokens: Tensor, rows: Tensor) -> Tensor:
    # patterns.clusters takes labels [T] for one sequence, or [B, 1, T] for several.
    return rows[0] if tokens.dim() == 1 else rows.unsqueeze(1)
