"""Shape words for signatures: ``Float[Tensor, "batch heads dst dim"]`` is a tensor whose axes have these
names.

The axis words are fixed: batch heads dst src edges tokens dim width. Annotations are strings here (every
module begins with ``from __future__ import annotations``), so they cost nothing at run time. A test run under
jaxtyping's import hook (``pytest --jaxtyping-packages=gnn_attention,beartype.beartype``) checks every one of
them; otherwise jaxtyping need not be installed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int
else:

    class _Unchecked:
        """Stands for jaxtyping's Float, Int and Bool: ``Float[Tensor, "..."]`` is then simply ``Tensor``."""

        def __class_getitem__(cls, item: object) -> type[Tensor]:
            return Tensor

    Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int", "Tensor"]
