"""Whether the arguments of the arithmetic of an edge fit together: each check raises by name.

They read types and shapes, which a compiler knows too, and the numbers of receivers on a CPU.
"""

from collections.abc import Sequence

import torch

from gnn_attention._support.checks import describe_type, instance
from gnn_attention._support.shapes import Tensor


def axes(**tensors: tuple[Tensor, str]) -> None:
    """Floats whose axes have one size each: ``lse=(lse, "... dst")``; ``...`` are the same leading axes."""
    sizes: dict[str, object] = {}
    for name, (x, form) in tensors.items():
        floats(name, x, f"[{form}]")
        words = form.removeprefix("... ").split()
        lead = x.dim() - len(words)
        if lead < 0 or (lead and not form.startswith("...")):
            raise ValueError(f"{name} must be [{form}], got {list(x.shape)}")
        for word, size in zip(("...", *words), (x.shape[:lead], *x.shape[lead:]), strict=True):
            if sizes.setdefault(word, size) != size:
                expected = f"[{form}] with {word} = {sizes[word]}, as in {next(iter(tensors))}"
                raise ValueError(f"{name} must be {expected}, got {list(x.shape)}")


def groups(x: Tensor, num_heads: int) -> None:
    instance("x", x, Tensor)
    if not hasattr(num_heads, "__index__"):
        raise TypeError(f"num_heads must be an integer, got {describe_type(num_heads)}")
    if x.dim() < 2:
        raise ValueError(f"x must be [batch, kv_heads, ...], got {describe_type(x)}")
    if num_heads != x.shape[1] and (x.shape[1] == 0 or num_heads % x.shape[1]):
        raise ValueError(f"num_heads must be a multiple of the {x.shape[1]} kv_heads of x, got {num_heads}")


def ends(q_dst: Tensor, k_src: Tensor, scale: float) -> None:
    floats("q_dst", q_dst, "[..., dim]")
    floats("k_src", k_src, "[..., dim]")
    q, k = list(q_dst.shape), list(k_src.shape)
    pairs = zip(reversed(q), reversed(k), strict=False)
    if not q or q[-1:] != k[-1:] or not all(a == b or 1 in (a, b) for a, b in pairs):
        raise ValueError(f"q_dst and k_src must have the same dim and edges, got {q} and {k}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat, Tensor)):
        raise TypeError(f"scale must be a number, such as dim ** -0.5, got {describe_type(scale)}")


def edges(name: str, x: Tensor, dst: Tensor, num_dst: int) -> None:
    """Numbers ``[..., E]`` and their receivers ``dst [E]``, which are below ``num_dst``."""
    floats(name, x, "[..., E], a number for each edge")
    # Dynamo cannot ask a symbolic number for its attributes.
    if not isinstance(num_dst, (int, torch.SymInt)) and not hasattr(num_dst, "__index__"):
        raise TypeError(f"num_dst must be an integer, got {describe_type(num_dst)}")
    if not isinstance(dst, Tensor) or dst.dtype != torch.int64:
        raise TypeError(f"dst must be int64, got {describe_type(dst)}; use dst.long()")
    if dst.dim() != 1 or x.shape[-1:] != dst.shape:
        shapes = f"{list(dst.shape)}, {list(x.shape)}"
        raise ValueError(f"dst must be [E], the receiver of each edge of {name} [..., E], got {shapes}")
    has_numbers = type(dst) is Tensor and dst.device.type == "cpu" and not torch.compiler.is_compiling()
    if has_numbers and dst.shape[0]:
        low, high = (int(bound) for bound in torch.aminmax(dst))
        if low < 0 or high >= num_dst:
            raise IndexError(f"dst must be receivers in 0 .. {num_dst - 1}, got {low} .. {high}")


def sinks(sink_logits: Tensor, logits: Tensor) -> None:
    floats("sink_logits", sink_logits, "broadcastable to the axes of logits before the last")
    _check_broadcasts("sink_logits", sink_logits, logits.shape[:-1])


def receivers(has_in_edges: Tensor, lse: Tensor) -> None:
    """Which receivers have in-edges, broadcastable to ``lse``."""
    if not isinstance(has_in_edges, Tensor) or has_in_edges.dtype != torch.bool:
        got = describe_type(has_in_edges)
        raise TypeError(f"has_in_edges must be a bool tensor, graph.in_degree() > 0, got {got}")
    _check_broadcasts("has_in_edges", has_in_edges, lse.shape)


def floats(name: str, x: object, form: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a float tensor {form}, got {got}")


def _check_broadcasts(name: str, x: Tensor, shape: Sequence[int]) -> None:
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    if x.dim() > len(shape) or not all(size in (1, wanted) for size, wanted in pairs):
        raise ValueError(f"{name} must be broadcastable to {list(shape)}, got {list(x.shape)}")
