"""Normalisers: how the logits of the in-edges of a receiver become weights.

* ``"softmax"``: ``w = exp(s) / sum of exp(s)`` over the in-edges of the receiver
* ``"sparsemax"``: the point of the simplex nearest to the logits, ``w = max(s - t, 0)`` with sum 1;
  Martins & Astudillo 2016 (arXiv 1602.02068)
* ``"sigmoid"``: Ramapuram et al. 2024 (arXiv 2409.04431), whose bias is ``-log n`` for n senders
* ``"silu"``: ``s sigmoid(s)``, of HSTU; Zhai et al. 2024 (arXiv 2402.17152), divided by n there
* ``"relu"``: Wortsman et al. 2023 (arXiv 2309.08586), divided by n there
* ``"relu2"``: ``max(s, 0)^2``, of Primer; So et al. 2021 (arXiv 2109.08668)
* ``"gelu"``: ``s Phi(s)``, of an MLP; Hendrycks & Gimpel 2016 (arXiv 1606.08415)
* ``"identity"``: ``w = s``, of linear attention; Katharopoulos et al. 2020 (arXiv 2006.16236)

The last six act on each logit alone: nothing is divided, and a receiver's weights need not sum to 1.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from gnn_attention import edge_softmax
from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.edge_ops import operators
from gnn_attention.edge_ops.edge_lists import sort_by_row
from gnn_attention.graph import TokenGraph

Normaliser = str | Callable[[Tensor], Tensor]
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "relu": functional.relu,
    "relu2": lambda logits: functional.relu(logits).square(),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "identity": lambda logits: logits,
}
NAMES = ("softmax", *ELEMENTWISE, "sparsemax")


def check_normaliser(normaliser: Normaliser) -> Normaliser:
    """Return ``normaliser`` if it is one of the names above or a function."""
    if callable(normaliser):
        return normaliser
    if not isinstance(normaliser, str):
        raise TypeError(
            f"normaliser must be one of {', '.join(NAMES)}, or a function of the logits [B, H, E], "
            f"got {checks.describe_type(normaliser)}"
        )
    return checks.choice("normaliser", normaliser, NAMES)


def normalise(
    normaliser: Normaliser,
    logits: Float[Tensor, "batch heads edges"],
    edges: Sequence[Tensor],
    graph: TokenGraph,
) -> tuple[Float[Tensor, "batch heads edges"], Float[Tensor, "batch heads dst"] | None]:
    """Return the weights of edges in the order of EdgeRows, and lse for a softmax."""
    if normaliser == "softmax":
        return operators.softmax(logits, edges)
    if normaliser == "sparsemax":
        return sparsemax(logits, edges), None
    if isinstance(normaliser, str):
        return apply(normaliser, logits), None
    # A function receives the edges in the order of the graph.
    weights = apply(normaliser, operators.restore_order(logits, graph))
    return operators.sort_values(weights, graph), None


def normalise_unsorted(
    normaliser: Normaliser, logits: Float[Tensor, "... edges"], dst: Int[Tensor, " edges"], num_dst: int
) -> Float[Tensor, "... edges"]:
    """Return the weights of edges to receivers ``dst`` in any order.

    >>> normalise_unsorted("sparsemax", torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 1, 0]), 2).tolist()
    [0.75, 1.0, 0.25]
    """
    if normaliser == "softmax":
        return edge_softmax.softmax(logits, dst, num_dst, check=False)[0]
    if normaliser != "sparsemax":
        return apply(normaliser, logits)
    edges, orders = sort_by_row(dst, num_dst)
    values = operators.permute(logits.reshape(1, logits.shape[:-1].numel(), len(dst)), orders)
    return operators.permute(sparsemax(values, edges), orders[::-1]).view(logits.shape)


def apply(normaliser: Normaliser, logits: Tensor) -> Tensor:
    """Apply an elementwise normaliser or a function to logits, and check the shape of the result."""
    if isinstance(normaliser, str):
        return ELEMENTWISE[normaliser](logits)
    weights = normaliser(logits)
    if not isinstance(weights, Tensor) or weights.shape != logits.shape:
        raise ValueError(
            f"normaliser must return weights of the shape of the logits, {list(logits.shape)}, "
            f"got {checks.describe_type(weights)}"
        )
    return weights.to(logits.dtype)


def sparsemax(
    logits: Float[Tensor, "batch heads edges"], edges: Sequence[Tensor]
) -> Float[Tensor, "batch heads edges"]:
    """Project the logits of the in-edges of each receiver onto the simplex; edges as in ``operators``."""
    # Sums of large logits would lose digits.
    largest = operators.largest(logits.detach(), edges)
    values = logits - operators.spread(largest.masked_fill(largest == -torch.inf, 0.0), edges)
    support = operators.sparsemax_support(values.detach(), edges)
    size = operators.row_sums(support, edges).clamp(min=1.0)
    total = operators.row_sums(values.masked_fill(support == 0, 0.0), edges)
    threshold = (total - 1.0) / size
    return (values - operators.spread(threshold, edges)).masked_fill(support == 0, 0.0)
