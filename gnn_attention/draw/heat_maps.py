"""Pictures of attention weights: a table of numbers for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gnn_attention._support import checks
from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.attend import AttentionInfo
from gnn_attention.draw import _axes
from gnn_attention.draw.pictures import LARGEST_MASK, Labels, side_names
from gnn_attention.graph import TokenGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A picture has a table for each head.
MOST_HEADS = 64


def weights(
    weights: Any,
    heads: int | Sequence[int] | None = None,
    graph: TokenGraph | None = None,
    ax: Axes | None = None,
    labels: Labels = None,
    src_labels: Labels = None,
    title: str = "attention weights",
) -> Figure:
    """The heat map of attention weights: a row for each receiver, a column for each sender.

    ``weights``: a table ``[dst, src]``, ``[heads, dst, src]`` or ``[1, heads, dst, src]``, a tensor or NumPy
    array, with the ``graph`` whose non-edges are grey; ``(edge_index, weights [E, heads])``, as the layer
    returns them, with the ``graph``; the ``AttentionInfo`` of a call of ``attend`` with one sample; or a
    layer of ``trace.record``. Several heads (up to 64) are drawn side by side in one scale; ``heads``
    chooses one or some of them. Weight 0 is white, a negative number orange, NaN and -inf grey.
    ``labels`` name the receivers, and the senders too where there are as many. TypeError, ValueError or
    IndexError for other arguments, and ValueError for +inf and above 4096 tokens a side.

    >>> picture = weights(torch.tensor([[1.0, torch.nan], [0.25, 0.75]]), labels=["the", "cat"])
    >>> picture.axes[0].get_title("left"), picture.axes[1].get_ylabel()
    ('attention weights', 'weight')
    """
    graph = weights.call.graph if isinstance(weights, AttentionInfo) else graph
    tables = _read_tables(weights, graph)
    numbers = _choose_heads(heads, len(tables), ax)
    tables = tables[numbers]
    num_dst, num_src = tables.shape[1:]
    src_labels = labels if src_labels is None and num_dst == num_src else src_labels
    names = side_names("labels", labels, f"{num_dst} receivers", num_dst)
    src_names = side_names("src_labels", src_labels, f"{num_src} senders", num_src)
    if len(numbers) > 1:
        made, grid = _axes.grid(len(numbers), names, src_names)
        _axes.headline(made, title)
    else:
        made, axes = _axes.of(ax, 6.6, _axes.mask_height(num_dst, num_src), names, src_names)
        grid = [axes]
    image = _axes.heat(grid, tables)
    for head, axes in zip(numbers, grid, strict=True):
        _axes.title(axes, f"head {head}" if len(numbers) > 1 else title)
    if ax is None and image is not None:
        made.colorbar(image, ax=grid, label="weight", shrink=0.8, fraction=0.05)
    offsets = (graph.dst_offset, graph.src_offset) if graph else (0, 0)
    dst, src = (names, num_dst, offsets[0]), (src_names, num_src, offsets[1])
    _axes.write_tokens(grid, dst, src)
    legend = _axes.squares({_axes.FAINT: "no edge"}) if bool(tables.isnan().any()) else ()
    return _axes.finish(made, ax, legend)


def _choose_heads(heads: int | Sequence[int] | None, count: int, ax: Axes | None) -> list[int]:
    numbers = range(count) if heads is None else [heads] if isinstance(heads, int) else heads
    numbers = [checks.index("heads", head, count) for head in numbers]
    if not 1 <= len(numbers) <= MOST_HEADS or (ax is not None and len(numbers) > 1):
        most = f"1 to {MOST_HEADS} heads" if ax is None else "one head into axes of your own"
        raise ValueError(f"weights() draws {most}, got {len(numbers)}: choose with heads=")
    return numbers


def _read_tables(weights: Any, graph: TokenGraph | None) -> Float[Tensor, "heads dst src"]:
    """The weights in float64, NaN where there is no edge."""
    if isinstance(weights, AttentionInfo):
        tables = weights.weight_matrix()
    elif isinstance(weights, tuple) and len(weights) == 2 and graph is not None:
        (src, dst), by_edge = weights
        if by_edge.shape[:-1] != dst.shape:
            raise ValueError(f"weights must be [{len(dst)}, heads], got {list(by_edge.shape)}")
        tables = by_edge.new_zeros(by_edge.shape[-1], graph.num_dst, graph.num_src)
        tables[:, dst, src] = by_edge.detach().mT
    elif isinstance(weights, Tensor):
        tables = weights
    elif hasattr(weights, "__array__") and weights.__array__().dtype.kind in "fiub":
        tables = torch.from_numpy(weights.__array__().astype("float64", order="C"))
    elif hasattr(weights, "dense"):  # a LayerTrace, which stands above this package
        no_edge = weights["attn.hook_attn_scores"] == -torch.inf
        tables = weights["attn.hook_pattern"].masked_fill(no_edge, torch.nan)
    else:
        raise TypeError(
            "weights must be a tensor, an array of numbers, an AttentionInfo, a LayerTrace (run.layers[0]), "
            f"or a pair (edge_index, weights) with graph=, got {checks.described(weights)}"
        )
    tables = tables.detach().cpu().double()
    tables = tables[0] if tables.dim() == 4 and len(tables) == 1 else tables
    if tables.dim() not in (2, 3) or max(tables.shape[-2:]) > LARGEST_MASK:
        raise ValueError(
            "weights must be [dst, src] or [heads, dst, src] of one sample and at most "
            f"{LARGEST_MASK} tokens a side, got {list(tables.shape)}: choose a sample: weights[b], of an "
            "AttentionInfo weight_matrix()[b], of a LayerTrace ['attn.hook_pattern'][b]"
        )
    tables = tables.unsqueeze(0) if tables.dim() == 2 else tables
    if graph is not None and tables.shape[1:] != (graph.num_dst, graph.num_src):
        raise ValueError(f"weights must fit {graph!r}, got {list(tables.shape)}")
    if graph is not None:
        tables = tables.masked_fill(~graph.mask().cpu().view(-1, *tables.shape[1:]), torch.nan)
    if bool(tables.isposinf().any()):
        raise ValueError("weights must be below +inf, got +inf in a table: -inf or NaN is drawn as no edge")
    return tables.masked_fill(tables.isneginf(), torch.nan)
