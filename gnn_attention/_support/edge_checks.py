"""Check the arguments of functions on edges; each error names the argument.

All checks read types and shapes. In eager mode on a CPU, they also read the values of receivers.
"""

from collections.abc import Sequence

import torch

from gnn_attention._support.checks import describe_type, instance
from gnn_attention._support.shapes import Tensor


def axes(**tensors: tuple[Tensor, str]) -> None:
    """Check float tensors such as ``lse=(lse, "... dst")``: axes of the same name must have the same size."""
    sizes: dict[str, object] = {}
    for name, (x, axis_names) in tensors.items():
        floats(name, x, f"[{axis_names}]")
        names = axis_names.removeprefix("... ").split()
        num_leading = x.dim() - len(names)
        if num_leading < 0 or (num_leading and not axis_names.startswith("...")):
            raise ValueError(f"{name} must be [{axis_names}], got {list(x.shape)}")
        for axis, size in zip(("...", *names), (x.shape[:num_leading], *x.shape[num_leading:]), strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{name} must be [{axis_names}] with {axis} = {sizes[axis]}, "
                    f"as in {next(iter(tensors))}, got {list(x.shape)}"
                )


def query_heads(x: Tensor, num_heads: int) -> None:
    instance("x", x, Tensor)
    if not hasattr(num_heads, "__index__"):
        raise TypeError(f"num_heads must be an integer, got {describe_type(num_heads)}")
    if x.dim() < 2:
        raise ValueError(f"x must be [batch, kv_heads, ...], got {describe_type(x)}")
    if num_heads != x.shape[1] and (x.shape[1] == 0 or num_heads % x.shape[1]):
        raise ValueError(f"num_heads must be a multiple of the {x.shape[1]} kv_heads of x, got {num_heads}")


def logit_inputs(q_dst: Tensor, k_src: Tensor, scale: float) -> None:
    floats("q_dst", q_dst, "[..., dim]")
    floats("k_src", k_src, "[..., dim]")
    q, k = list(q_dst.shape), list(k_src.shape)
    size_pairs = zip(reversed(q), reversed(k), strict=False)
    if not q or q[-1:] != k[-1:] or not all(a == b or 1 in (a, b) for a, b in size_pairs):
        raise ValueError(f"q_dst and k_src must have the same dim and edges, got {q} and {k}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat, Tensor)):
        raise TypeError(f"scale must be a number, such as dim ** -0.5, got {describe_type(scale)}")


def edges(name: str, x: Tensor, dst: Tensor, num_dst: int) -> None:
    """Check ``x [..., E]`` and the receivers ``dst [E]`` of its edges, which must be below ``num_dst``."""
    floats(name, x, "[..., E], a number for each edge")
    # Dynamo does not support hasattr for a symbolic integer.
    if not isinstance(num_dst, (int, torch.SymInt)) and not hasattr(num_dst, "__index__"):
        raise TypeError(f"num_dst must be an integer, got {describe_type(num_dst)}")
    if not isinstance(dst, Tensor) or dst.dtype != torch.int64:
        raise TypeError(f"dst must be int64, got {describe_type(dst)}; use dst.long()")
    if dst.dim() != 1 or x.shape[-1:] != dst.shape:
        raise ValueError(
            f"dst must be [E], the receivers of {name} [..., E], got {list(dst.shape)} and {list(x.shape)}"
        )
    is_eager = type(dst) is Tensor and not torch.compiler.is_compiling()
    if is_eager and dst.device.type == "cpu" and dst.shape[0]:
        low, high = (int(bound) for bound in torch.aminmax(dst))
        if low < 0 or high >= num_dst:
            raise IndexError(f"dst must be receivers in 0 .. {num_dst - 1}, got {low} .. {high}")


def sinks(sink_logits: Tensor, logits: Tensor) -> None:
    floats("sink_logits", sink_logits, "broadcastable to the axes of logits before the last")
    _check_broadcasts("sink_logits", sink_logits, logits.shape[:-1])


def in_edge_mask(has_in_edges: Tensor, lse: Tensor) -> None:
    if not isinstance(has_in_edges, Tensor) or has_in_edges.dtype != torch.bool:
        raise TypeError(
            f"has_in_edges must be bool, as graph.in_degree() > 0 is, got {describe_type(has_in_edges)}"
        )
    _check_broadcasts("has_in_edges", has_in_edges, lse.shape)


def floats(name: str, x: object, shape: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        dtype_or_type = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a float tensor {shape}, got {dtype_or_type}")


def floats_like(name: str, x: Tensor, shape: str, q: Tensor) -> None:
    floats(name, x, shape)
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device, {q.device}, got {x.device}; use {name}.to(q.device)")


def _check_broadcasts(name: str, x: Tensor, shape: Sequence[int]) -> None:
    size_pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    if x.dim() > len(shape) or not all(size in (1, expected) for size, expected in size_pairs):
        raise ValueError(f"{name} must be broadcastable to {list(shape)}, got {list(x.shape)}")
