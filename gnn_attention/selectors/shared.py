"""One selection for several layers."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from torch import Tensor, nn

from gnn_attention._support import checks
from gnn_attention.graph import TokenGraph


class SharedSelection(nn.Module):
    """``every`` layers in a row attend along the graph that the first of them chose, planned once.

    ``selectors``: one for each such group of layers. IndexShare of GLM-5.2 shares one selection among 4
    layers; train its indexer by the sum of the losses of all of them.

    >>> from gnn_attention.selectors import TopK
    >>> import torch
    >>> shared, chosen, x = SharedSelection([TopK(2), TopK(2)], every=2), {}, torch.randn(1, 1, 6, 4)
    >>> graphs = [shared.select(layer, x, x, chosen) for layer in range(4)]
    >>> graphs[0] is graphs[1], graphs[1] is graphs[2], len(chosen)
    (True, False, 2)
    """

    def __init__(self, selectors: Iterable[nn.Module], every: int) -> None:
        super().__init__()
        self.selectors, self.every = nn.ModuleList(selectors), checks.size("every", every, 1)

    def select(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        chosen: MutableMapping[int, TokenGraph],
        graph: TokenGraph | None = None,
    ) -> TokenGraph:
        """The graph of a layer. ``chosen`` holds those of one pass: begin each with an empty one.

        IndexError for a layer beyond the last selector.
        """
        group = checks.size("layer", layer) // self.every
        if group >= len(self.selectors):
            last = len(self.selectors) * self.every - 1
            raise IndexError(f"layer must be in 0 .. {last}, {self.every} for each selector, got {layer}")
        if group not in chosen:
            chosen[group] = self.selectors[group].select(q, k, graph)  # type: ignore[operator]
        return chosen[group]
