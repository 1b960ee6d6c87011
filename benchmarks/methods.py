"""The methods that run a workload: every backend of this library, and the peers.

A method is prepared for a problem once: masks, edge lists and compiled kernels, which a user would keep from call to
call, are not part of the time. A peer that is not installed is reported as missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import CAUSAL, EAGER, FLEX, MASKED, MHA, PYG, SPARSE, Problem
from gnn_attention import MessagePassingAttention, attend, convert
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import AttentionCall

__all__ = ["AUTO", "PEERS", "Method", "Prepared", "call_of", "ours", "prepare_ours", "refusal"]

AUTO = "auto"
MOST_REFERENCE_EDGES = 20_000  # the reference backend is written to be read, not to be fast
MOST_DENSE_CELLS = 8192**2  # above, only "SDPA mask" is timed, which is the kernel of the dense backend


@dataclass(frozen=True, eq=False)
class Prepared:
    """A function ``call(*inputs) -> out``, and the parameters whose gradients are computed too."""

    call: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Method:
    """A way to compute attention over a problem's graph.

    ``unsupported_reason(problem)`` says why the method cannot run, ``backward`` says why it has no backward pass, and
    ``modules`` lists the modules that it imports. ``same`` is False for a method that computes another graph.
    """

    name: str
    prepare: Callable[[Problem], Prepared]
    ours: bool = False
    modules: tuple[str, ...] = ()
    backward: str | None = None
    unsupported_reason: Callable[[Problem], str | None] = lambda problem: None
    same: bool = True


def refusal(method: Method, problem: Problem, which: str) -> dict[str, Any] | None:
    """Return the status and reason of a method that cannot run, or None if it can."""
    for name in method.modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return {"status": "missing", "reason": f"{name} is not installed ({type(error).__name__})"}
    reason = (method.backward if which != "forward" else None) or method.unsupported_reason(problem)
    return None if reason is None else {"status": "refused", "reason": reason}


def _refusal(backend: Backend, problem: Problem) -> str | None:
    graph = problem.graph
    if backend.name == "reference" and graph.num_edges > MOST_REFERENCE_EDGES:
        return f"the reference is not timed above {MOST_REFERENCE_EDGES} edges"
    without_mask = graph.is_full() or graph.is_causal()
    if backend.name == "dense" and graph.num_dst * graph.num_src > MOST_DENSE_CELLS and not without_mask:
        return (
            f"the dense backend is not timed above {MOST_DENSE_CELLS} pairs: 'SDPA mask' is the same kernel"
        )
    return backend.unsupported_reason(call_of(problem))


def ours(
    backends: Sequence[str] = tuple(BACKENDS), reason: Callable[[Backend, Problem], str | None] = _refusal
) -> Iterator[Method]:
    """Yield ``backend="auto"``, then our backends; ``reason(backend, problem)`` says why one is not run."""
    yield Method(AUTO, partial(prepare_ours, AUTO), ours=True)
    for backend in (BACKENDS[name] for name in backends):
        reason_of_backend = partial(reason, backend)
        prepare = partial(prepare_ours, backend)
        yield Method(backend.name, prepare, ours=True, unsupported_reason=reason_of_backend)


def prepare_ours(backend: str | Backend, problem: Problem) -> Prepared:
    """Prepare ``attend``, or the layer, along the problem's graph."""
    graph = problem.graph
    if problem.layer is None:
        return Prepared(lambda q, k, v: attend(q, k, v, graph, backend=backend))
    layer = MessagePassingAttention(problem.layer, backend=backend)
    return Prepared(lambda x: layer(x, graph), tuple(layer.parameters()))


def call_of(problem: Problem) -> AttentionCall:
    """Return the problem as an :class:`AttentionCall`; for a layer, its tensors have sizes but no values."""
    if problem.layer is None:
        q, k, v = problem.inputs
    else:
        q = k = v = torch.empty(1, problem.heads, problem.graph.num_dst, problem.dim, device="meta")
    return AttentionCall.from_arguments(q, k, v, problem.graph)


def _core(problem: Problem, run: Callable[..., Tensor]) -> Prepared:
    """Prepare ``run(q, k, v)``; for a layer, add one product before it for q, k, v and one after it."""
    if problem.layer is None:
        return Prepared(run)
    heads, dim = problem.heads, problem.dim
    W_in, W_out = (weight.detach().clone().requires_grad_() for weight in _projections(problem))

    def layer(x: Tensor) -> Tensor:
        q, k, v = functional.linear(x, W_in).view(*x.shape[:2], 3, heads, dim).permute(2, 0, 3, 1, 4)
        return functional.linear(run(q, k, v).transpose(1, 2).flatten(2), W_out)

    return Prepared(layer, (W_in, W_out))


def _projections(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return ``W_Q, W_K, W_V`` as one ``[3 width, width]``, and ``W_O``, in the layout of nn.Linear."""
    layer = problem.layer
    assert layer is not None
    assert layer.W_O is not None
    projections = [weight.transpose(1, 2).flatten(0, 1) for weight in (layer.W_Q, layer.W_K, layer.W_V)]
    return torch.cat(projections), layer.W_O.flatten(0, 1).T.contiguous()


def _sdpa_causal(problem: Problem) -> Prepared:
    return _core(problem, partial(functional.scaled_dot_product_attention, is_causal=True))


def _sdpa_mask(problem: Problem) -> Prepared:
    mask = problem.graph.mask(problem.device)
    return _core(problem, partial(functional.scaled_dot_product_attention, attn_mask=mask))


def _flex(problem: Problem) -> Prepared:
    """Compile FlexAttention with the graph's rule as ``mask_mod`` and our list of tiles, not with a dense mask."""
    # Each graph compiles a kernel, and past its limit dynamo would silently fall back to eager code.
    torch._dynamo.reset()
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask = convert.to_block_mask(problem.graph, device=problem.device)
    return _core(problem, partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=mask))


def _transformer_conv(problem: Problem) -> Prepared:
    """Call ``propagate`` of TransformerConv with q, k and v."""
    conv_class = importlib.import_module("torch_geometric.nn").TransformerConv
    heads, dim, edges = problem.heads, problem.dim, problem.graph.edges_on(problem.device)
    conv = conv_class(heads * dim, dim, heads=heads, root_weight=False, bias=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (q, k, v))
        sizes = (len(key), len(query))
        out: Tensor = conv.propagate(edges, size=sizes, query=query, key=key, value=value, edge_attr=None)
        return out.transpose(0, 1).unsqueeze(0)

    return _core(problem, run)


def _torch_sparse(problem: Problem) -> Prepared:
    """Run ``sampled_addmm`` on the edges, ``sparse.softmax`` and ``sparse.mm``, head by head in float32."""
    graph, device = problem.graph, problem.device
    edges, zeros = graph.edges_on(device).flip(0), torch.zeros(graph.num_edges, device=device)
    pattern = torch.sparse_coo_tensor(edges, zeros, (graph.num_dst, graph.num_src)).coalesce().to_sparse_csr()

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.sparse.sampled_addmm(pattern, q.contiguous(), k.T, beta=0.0, alpha=problem.dim**-0.5)
        out: Tensor = torch.sparse.mm(torch.sparse.softmax(logits.to_sparse_coo(), dim=1), v)
        return out

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = zip(*(x[0].float() for x in (q, k, v)), strict=True)
        return torch.stack([one_head(*head) for head in heads]).unsqueeze(0).to(q.dtype)

    return Prepared(run)


def _eager(problem: Problem) -> Prepared:
    """Run Llama's function with an additive mask, as Hugging Face does for ``attn_implementation="eager"``."""
    eager = importlib.import_module("transformers.models.llama.modeling_llama").eager_attention_forward
    mask = convert.to_sdpa_mask(problem.graph, dtype=torch.float32)[None, None]
    module: Any = nn.Identity().eval()
    module.num_key_value_groups = 1

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = eager(module, q, k, v, mask, scaling=problem.dim**-0.5)[0]
        return out.transpose(1, 2)

    return Prepared(run)


def _multihead(problem: Problem) -> Prepared:
    module = nn.MultiheadAttention(problem.heads * problem.dim, problem.heads, bias=False, batch_first=True)
    W_in, W_out = _projections(problem)
    with torch.no_grad():
        module.in_proj_weight.copy_(W_in)
        module.out_proj.weight.copy_(W_out)
    is_masked = ~problem.graph.mask()
    run = lambda x: module(x, x, x, attn_mask=is_masked, need_weights=False)[0]  # noqa: E731
    return Prepared(run, tuple(module.parameters()))


def _not_causal(problem: Problem) -> str | None:
    return None if problem.graph.is_causal() else "the graph is not causal"


def _peers() -> Iterator[Method]:
    yield Method(CAUSAL, _sdpa_causal, unsupported_reason=_not_causal)
    yield Method(MASKED, _sdpa_mask)
    yield Method(FLEX, _flex, backward="FlexAttention has no backward pass on a CPU")
    yield Method(PYG, _transformer_conv, modules=("torch_geometric.nn",))
    yield Method(SPARSE, _torch_sparse)
    yield Method(EAGER, _eager, modules=("transformers.models.llama.modeling_llama",))
    yield Method(MHA, _multihead)


PEERS = {method.name: method for method in _peers()}
