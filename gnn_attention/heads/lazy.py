"""Heads that take their widths from the first states, as PyG's layers do with ``-1``."""

from __future__ import annotations

import threading
from typing import NoReturn

from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from gnn_attention._support.shapes import Tensor
from gnn_attention.heads.standard import StandardHeads

__all__ = ["LazyHeads"]

WIDE = {"W_Q": 1, "W_K": 1, "W_V": 1, "W_O": 2, "b_O": 0}  # the axis that is as wide as a state
OF_SENDERS = ("W_K", "W_V")
_meeting = threading.Lock()


class LazyHeads(LazyModuleMixin, StandardHeads):
    """:class:`StandardHeads` whose ``width`` and ``source_width`` are those of the first states that reach
    their layer.

    For ``to_hetero`` and wherever each kind of node has a width of its own. The layer's first call makes the
    parameters, in the dtype and on the device that the module was moved to, and these heads are plain
    :class:`StandardHeads` from then on. As with all lazy modules of torch, call the layer once before an
    optimizer, a compiler or an export sees it; loading a state that has the parameters fixes the widths too.

    Sources: torch.nn.LazyLinear; torch_geometric.nn.Linear with ``in_channels=-1``.

    >>> heads = LazyHeads(num_heads=2, head_dim=4)
    >>> heads
    LazyHeads(widths unknown, num_heads=2, head_dim=4)
    >>> heads.meet(width=8, source_width=6)
    >>> heads
    StandardHeads(8, num_heads=2, head_dim=4)
    """

    cls_to_become = StandardHeads

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
    ) -> None:
        """Raises as :class:`StandardHeads` does; both widths are left open."""
        super().__init__(1, num_heads, head_dim, value_dim, num_kv_heads, bias)
        parameters = self.named_parameters(recurse=False)
        self._sizes = {name: tuple(part.shape) for name, part in parameters if name in WIDE}
        for name in self._sizes:
            self.register_parameter(name, UninitializedParameter())  # type: ignore[arg-type]

    def meet(self, width: int, source_width: int) -> None:
        """Become :class:`StandardHeads` of these widths, drawn from torch's generator unless they were loaded
        before.

        Of several threads that come at once the first decides the widths, and the others wait until the
        parameters are there.
        """
        with _meeting:
            if isinstance(self, LazyHeads):  # else another thread was first
                self._become(width, source_width)

    def _become(self, width: int, source_width: int) -> None:
        """Change the class last, when all parameters are there: other threads no longer wait then."""
        loaded = not self.has_uninitialized_params()
        for name, sizes in self._sizes.items():
            own = source_width if name in OF_SENDERS else width
            if isinstance(part := self._parameters[name], UninitializedParameter):
                shape = (own if axis == WIDE[name] else size for axis, size in enumerate(sizes))
                part.materialize(tuple(shape))
        del self._sizes
        if not loaded:
            self.reset_parameters()
        self._infer_parameters(self, ())

    def initialize_parameters(self) -> None:
        """Nothing is left to do for torch after :meth:`meet`."""

    def reset_parameters(self) -> None:
        """Draw the parameters, once they are there."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self._sizes["W_Q"][0] if hasattr(self, "_sizes") else super().num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self._sizes["W_K"][0] if hasattr(self, "_sizes") else super().num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a query and a key."""
        return self._sizes["W_Q"][2] if hasattr(self, "_sizes") else super().head_dim

    @property
    def width(self) -> int:
        """ValueError: not known yet."""
        self._unknown()

    @property
    def source_width(self) -> int:
        """ValueError: not known yet."""
        self._unknown()

    def receive(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """ValueError: there are no parameters yet."""
        self._unknown()

    def send(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ValueError: there are no parameters yet."""
        self._unknown()

    def extra_repr(self) -> str:
        """The sizes that are known."""
        return f"widths unknown, num_heads={self.num_heads}, head_dim={self.head_dim}"

    def _unknown(self) -> NoReturn:
        advice = "call it once, or meet(width, source_width)"
        raise ValueError(f"LazyHeads have no widths before their layer's first call: {advice}")
