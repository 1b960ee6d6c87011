"""Heads that take their widths from the first states, as PyG's layers do with ``-1``."""

import threading
from typing import Any, NoReturn

from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from gnn_attention.heads.standard import StandardHeads

__all__ = ["LazyHeads"]

# The axis of each parameter that is as wide as a state.
WIDE = {"W_Q": 1, "W_K": 1, "W_V": 1, "W_O": 2, "b_O": 0}
OF_SENDERS = ("W_K", "W_V")
_lock = threading.Lock()


class LazyHeads(LazyModuleMixin, StandardHeads):
    """:class:`StandardHeads` whose widths are those of the first states that reach their layer.

    For ``to_hetero`` and wherever each kind of node has its own width. The layer's first call makes the
    parameters, in the dtype and on the device that the module was moved to. As with all lazy modules of
    torch, call the layer once before an optimizer, a compiler or an export uses it; a state fixes widths too.

    Sources: torch.nn.LazyLinear; torch_geometric.nn.Linear with ``in_channels=-1``.

    >>> heads = LazyHeads(num_heads=2, head_dim=4)
    >>> heads.meet(width=8, source_width=6)
    >>> heads
    StandardHeads(8, num_heads=2, head_dim=4)
    """

    cls_to_become = StandardHeads

    def __init__(self, num_heads: int, head_dim: int, *sizes: Any, **options: Any) -> None:
        """Arguments and errors are those of :class:`StandardHeads` after ``width``."""
        super().__init__(1, num_heads, head_dim, *sizes, **options)
        parameters = self.named_parameters(recurse=False)
        self._sizes = {name: tuple(part.shape) for name, part in parameters if name in WIDE}
        for name in self._sizes:
            self.register_parameter(name, UninitializedParameter())  # type: ignore[arg-type]

    def meet(self, width: int, source_width: int) -> None:
        """Become :class:`StandardHeads` of these widths, drawn from torch's generator unless loaded before.

        The first of several threads decides the widths; the others wait until the parameters are there.
        """
        with _lock:
            if not isinstance(self, LazyHeads):
                return
            loaded = not self.has_uninitialized_params()
            for name, sizes in self._sizes.items():
                if isinstance(part := self._parameters[name], UninitializedParameter):
                    own = source_width if name in OF_SENDERS else width
                    part.materialize((*sizes[: WIDE[name]], own, *sizes[WIDE[name] + 1 :]))
            if not loaded:
                self.reset_parameters()
            # This is last: other threads no longer wait once the class has changed.
            del self._sizes
            self._infer_parameters(self, ())

    def initialize_parameters(self) -> None:
        """Nothing is left to do for torch after :meth:`meet`."""

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._sizes[name] if hasattr(self, "_sizes") else tuple(getattr(self, name).shape)

    num_heads = property(lambda self: self._shape("W_Q")[0])
    num_kv_heads = property(lambda self: self._shape("W_K")[0])
    head_dim = property(lambda self: self._shape("W_Q")[2])

    def _unknown(self, *arguments: Any) -> NoReturn:
        """ValueError: there are no parameters yet."""
        advice = "call it once, or meet(width, source_width)"
        raise ValueError(f"LazyHeads have no widths before their layer's first call: {advice}")

    width = source_width = property(_unknown)
    receive = send = _unknown  # type: ignore[assignment]

    def extra_repr(self) -> str:
        """The sizes."""
        return f"widths unknown, num_heads={self.num_heads}, head_dim={self.head_dim}"
