"""Shape annotations: ``Float[Tensor, "batch heads dst dim"]`` names the axes of a tensor.

Axes are called batch, heads, dst, src, edges, tokens, dim, width. Annotations cost nothing at run
time; ``pytest --jaxtyping-packages=gnn_attention,beartype.beartype`` checks all of them.
"""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int
else:

    class _Unchecked:
        def __class_getitem__(cls, item: object) -> type[Tensor]:
            return Tensor

    Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int", "Tensor"]
