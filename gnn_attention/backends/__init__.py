"""The table of backends: name -> how to run it and what it supports. None falls back to another."""

from gnn_attention.backends import dense, flex, mixed, reference, rows, split, tiles, triton, varlen
from gnn_attention.backends import traced_indices as traced_indices
from gnn_attention.backends.backend import Backend, RefusalError
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.capabilities import OPTIONS, Capabilities

__all__ = ["BACKENDS", "AttentionCall", "Backend", "Capabilities", "RefusalError", "support_matrix"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        *(module.BACKEND for module in (dense, tiles, rows, mixed, flex, varlen, split, triton)),
        *triton.FORM_BACKENDS,
        reference.BACKEND,
    )
}


def support_matrix() -> str:
    """The capabilities of every backend as a table in Markdown: a row for each, a column for each option.

    >>> print(*support_matrix().splitlines()[2:4], sep="\\n")
    | `dense` | all | all | yes | yes | yes | yes | yes | yes | yes | no |
    | `tiles` | all | all | yes | yes | yes | yes | yes | yes | no | no |
    """
    titles = ["backend", "devices", "dtypes", *OPTIONS, "compiled"]
    rows = [titles, ["---"] * len(titles), *map(_row, BACKENDS.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(backend: Backend) -> list[str]:
    supported = backend.capabilities
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported.dtypes)
    devices = ", ".join(device for device in supported.devices if device != "meta")
    options = [*(getattr(supported, option) for option in OPTIONS), backend.compiled]
    words = [{True: "yes", False: "no"}.get(option, f"{option} only") for option in options]
    return [f"`{backend.name}`", devices or "all", dtypes or "all", *words]
