"""The data of ``meanflow``: random closed curves, a graph of neighbours, a distance of samples, a figure."""

from __future__ import annotations

from math import tau
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gnn_attention import TokenGraph
from gnn_attention._support import atomic_files
from gnn_attention._support.shapes import Float, Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Float[Tensor, "curves points two"]
HARMONICS = 6
DRAWN_CURVES = 8
SUFFIXES = (".png", ".svg", ".pdf")


def ring(points: int, reach: int) -> TokenGraph:
    """Return the graph in which each point of a closed curve attends to ``reach`` points on either side.

    >>> ring(8, 1).mask()[0].int().tolist()
    [1, 1, 0, 0, 0, 0, 0, 1]
    """

    def rule(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return (src - dst + reach) % points <= 2 * reach

    return TokenGraph.from_rule(rule, points, name=f"ring({points}, {reach})")


def angles(points: int) -> Float[Tensor, " points"]:
    """Return the angles of the points of a closed curve, from 0 to below 2 pi."""
    return torch.arange(points) * (tau / points)


def draw_curves(count: int, points: int) -> Curves:
    """Draw closed curves whose radius is smooth, random, and mostly near its minimum or its maximum.

    The radius at angle a is ``1.2 + 0.48 tanh(3 f(a))`` with ``f = sum over k <= 6 of
    (c_k cos(k a) + s_k sin(k a)) / sqrt(6)``, where c_k and s_k are Gaussian of mean 0 and variance 1.

    >>> radius = draw_curves(5, 64).norm(dim=-1)
    >>> bool((radius > 0.71).all() and (radius < 1.69).all())
    True
    """
    phase = torch.arange(1, HARMONICS + 1)[:, None] * angles(points)
    cosine, sine = torch.randn(2, count, HARMONICS) / HARMONICS**0.5
    radius = 1.2 + 0.48 * torch.tanh(3 * (cosine @ phase.cos() + sine @ phase.sin()))
    return radius[..., None] * torch.stack([angles(points).cos(), angles(points).sin()], -1)


def energy_distance(a: Curves, b: Curves) -> float:
    """Compute ``2 E|x - y| - E|x - x'| - E|y - y'|`` for curves x of a and y of b; 0 only for equal samples.

    ``|x - y|`` is the root of the mean squared distance of corresponding points. Means are over all pairs,
    so that the result for two finite samples of the same distribution is positive.

    Source: Székely and Rizzo 2013, Energy statistics (doi 10.1016/j.jspi.2013.03.018).

    >>> energy_distance(torch.zeros(3, 2, 2), torch.ones(1, 2, 2))
    2.8284270763397217
    """
    x, y = a.flatten(1), b.flatten(1)
    distance = 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()
    return float(distance / a.shape[1] ** 0.5)


def figure_for(path: str | None) -> Figure | None:
    """Return an empty figure that can be saved to ``path``, or None without a path.

    ValueError if the path cannot be written or names no format, ModuleNotFoundError without matplotlib.
    """
    if path is None:
        return None
    atomic_files.check_output_path("--out", path)
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"--out {path}: expected a file that ends in one of {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"figures need matplotlib ({error}): pip install matplotlib") from None
    return Figure(figsize=(10, 6), layout="constrained")


def draw_rows(figure: Figure, rows: dict[str, Curves]) -> None:
    """Draw the first curves of each kind in a row."""
    for axes, (name, curves) in zip(figure.subplots(len(rows), DRAWN_CURVES), rows.items(), strict=True):
        axes[0].set_title(name, loc="left", fontsize=9)
        for axis, curve in zip(axes, curves, strict=False):
            axis.plot(*torch.cat([curve, curve[:1]]).T, ".-", markersize=2, linewidth=0.7)
            axis.set(xlim=(-2.2, 2.2), ylim=(-2.2, 2.2), aspect="equal")
            axis.set_axis_off()
