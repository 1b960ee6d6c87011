"""Shape words for signatures: ``Float[Tensor, "batch heads dst dim"]`` names the axes of a tensor.

The words are fixed: batch heads dst src edges tokens dim width. They cost nothing at run time; tests under
jaxtyping's hook (``pytest --jaxtyping-packages=gnn_attention,beartype.beartype``) check every one.
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
