"""Do the arguments of the arithmetic of an edge fit together? Each check raises by name.

They read types and shapes alone, which a compiler knows too, and the values of receivers on a CPU.
"""

from collections.abc import Sequence

import torch

from gnn_attention._support.checks import described
from gnn_attention._support.shapes import Tensor


def groups(x: Tensor, num_heads: int) -> None:
    _tensor("x", x, "[batch, kv_heads, ...]")
    if x.dim() < 2:
        raise ValueError(f"x must be [batch, kv_heads, ...], got shape {list(x.shape)}")
    _integer("num_heads", num_heads)
    if num_heads != x.shape[1] and (x.shape[1] == 0 or num_heads % x.shape[1]):
        raise ValueError(f"num_heads must be a multiple of the {x.shape[1]} kv_heads of x, got {num_heads}")


def ends(q_dst: Tensor, k_src: Tensor, scale: float) -> None:
    for name, x in (("q_dst", q_dst), ("k_src", k_src)):
        floats(name, x, "[..., dim]")
        if x.dim() == 0:
            raise ValueError(f"{name} must be [..., dim], got a single number; take {name}[None]")
    q, k = list(q_dst.shape), list(k_src.shape)
    if q[-1] != k[-1]:
        raise ValueError(f"q_dst and k_src must have the same dim, their last axis, got {q[-1]} and {k[-1]}")
    if q != k and not _broadcast(q, k):
        raise ValueError(f"q_dst and k_src must be of the same edges, got {q} and {k}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat, Tensor)):
        raise TypeError(f"scale must be a number, such as dim ** -0.5, got {described(scale)}")


def edges(name: str, x: Tensor, dst: Tensor, num_dst: int) -> None:
    """Numbers ``[..., E]`` and their receivers ``dst [E]``, which are below ``num_dst``."""
    floats(name, x, "[..., E], a number for each edge")
    _tensor("dst", dst, "[E] of int64")
    if dst.dtype != torch.int64:
        raise TypeError(f"dst must be int64, got {dst.dtype}; use dst.long()")
    if dst.dim() != 1 or x.dim() == 0 or x.shape[-1] != dst.shape[0]:
        shapes = f"{list(dst.shape)}, {list(x.shape)}"
        raise ValueError(f"dst must be [E], the receiver of each edge of {name} [..., E], got {shapes}")
    _integer("num_dst", num_dst)
    on_cpu = type(dst) is Tensor and dst.device.type == "cpu"
    if on_cpu and not torch.compiler.is_compiling() and dst.shape[0]:
        low, high = (int(bound) for bound in torch.aminmax(dst))
        if low < 0 or high >= num_dst:
            expected = f"receivers in 0 .. {num_dst - 1} (num_dst={num_dst})"
            raise IndexError(f"dst must be {expected}, got {low} .. {high}")


def sinks(sink_logits: Tensor, logits: Tensor) -> None:
    floats("sink_logits", sink_logits, "broadcastable to the axes of logits before the last")
    lead, got = list(logits.shape[:-1]), list(sink_logits.shape)
    if not _broadcast(got, lead, onto=True):
        axes = "the axes of logits but its last"
        raise ValueError(f"sink_logits must be broadcastable to {lead}, {axes}, got {got}")


def head_sinks(sink_logits: Tensor, lse: Tensor) -> None:
    floats("lse", lse, "[batch, heads, dst]")
    floats("sink_logits", sink_logits, "[heads]")
    if lse.dim() != 3:
        raise ValueError(f"lse must be [batch, heads, dst], got shape {list(lse.shape)}")
    if sink_logits.dim() != 1 or sink_logits.shape[0] != lse.shape[1]:
        raise ValueError(f"sink_logits must be [heads] = [{lse.shape[1]}], got {list(sink_logits.shape)}")


def receivers(who: Tensor, lse: Tensor) -> None:
    """Which receivers have in-edges, broadcastable to ``lse``."""
    if not isinstance(who, Tensor) or who.dtype != torch.bool:
        got = who.dtype if isinstance(who, Tensor) else type(who).__name__
        raise TypeError(f"has_in_edges must be a bool tensor, graph.in_degree() > 0, got {got}")
    if not _broadcast(who.shape, lse.shape, onto=True):
        raise ValueError(
            f"has_in_edges must be broadcastable to lse {list(lse.shape)}, got {list(who.shape)}"
        )


def normalisers(lse: Tensor, logits: Tensor) -> None:
    floats("logits", logits, "[..., E]")
    floats("lse", lse, "[..., dst]")
    if lse.dim() == 0 or lse.shape[:-1] != logits.shape[:-1]:
        axes = f"the axes of logits before its last, {list(logits.shape[:-1])}"
        raise ValueError(f"lse must be [..., dst] with {axes}, got {list(lse.shape)}")


def result(name: str, out: Tensor, lse_name: str, lse: Tensor) -> None:
    floats(name, out, "[..., dst, dim]")
    floats(lse_name, lse, "[..., dst]")
    if out.dim() == 0 or out.shape[:-1] != lse.shape:
        expected, got = f"{name} [..., dst, dim] but for dim", f"{list(lse.shape)}, {list(out.shape)}"
        raise ValueError(f"{lse_name} must be [..., dst], {expected}, got {got}")


def alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.shape != other.shape:
        expected = f"the shape of {other_name}, {list(other.shape)}"
        raise ValueError(f"{name} must have {expected}, got {list(x.shape)}")


def _broadcast(shape: Sequence[int], other: Sequence[int], onto: bool = False) -> bool:
    pairs = zip(reversed(shape), reversed(other), strict=False)
    fits = all(a == b or a == 1 or (b == 1 and not onto) for a, b in pairs)
    return fits and (not onto or len(shape) <= len(other))


def floats(name: str, x: object, form: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a float tensor {form}, got {got}")


def _integer(name: str, value: object) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {described(value)}")


def _tensor(name: str, x: object, form: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {form}, got {type(x).__name__}; use torch.as_tensor")
