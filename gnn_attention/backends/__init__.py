"""The table of backends by name. No backend falls back to another."""

from gnn_attention.backends import dense, flex, message_passing, reference, rows, tiles, varlen
from gnn_attention.backends import traced as traced
from gnn_attention.backends.backend import Backend, Capabilities, RefusalError
from gnn_attention.backends.call import AttentionCall

__all__ = ["BACKENDS", "AttentionCall", "Backend", "Capabilities", "RefusalError"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        dense.BACKEND,
        tiles.BACKEND,
        rows.BACKEND,
        tiles.MIXED,
        flex.BACKEND,
        varlen.BACKEND,
        message_passing.BACKEND,
        reference.BACKEND,
    )
}
