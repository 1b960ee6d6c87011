"""How a workload can be run: ours on every backend, and the peers. A peer that is not installed says so.

A method prepares itself for a problem once (masks, edge lists, compiled kernels: what a user would keep from
call to call) and returns the call to be timed.
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

__all__ = ["AUTO", "PEERS", "Method", "Prepared", "along_graph", "call_of", "ours", "refusal"]

AUTO = "auto"
MOST_REFERENCE_EDGES = 20_000  # the reference is the lesson, not a competitor
MOST_DENSE_CELLS = 8192**2  # beyond, "SDPA mask" stands for the dense backend, which is the same kernel


@dataclass(frozen=True, eq=False)
class Prepared:
    """``call(*inputs) -> out`` and the parameters that take a gradient as the inputs do."""

    call: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Method:
    """A way to compute attention over a problem's graph.

    ``unsupported_reason(problem)`` says why it cannot run, ``backward`` why it has no backward pass, and
    ``modules`` what must be installed. ``same`` is False for a yardstick that computes another graph.
    """

    name: str
    prepare: Callable[[Problem], Prepared]
    ours: bool = False
    modules: tuple[str, ...] = ()
    backward: str | None = None
    unsupported_reason: Callable[[Problem], str | None] = lambda problem: None
    same: bool = True


def refusal(method: Method, problem: Problem, which: str) -> dict[str, Any] | None:
    """The case of a method that is not run, with the reason; None if it can run."""
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
    """``backend="auto"`` and backends of ours; ``reason(backend, problem)`` says why one is not run."""
    yield Method(AUTO, partial(along_graph, AUTO), ours=True)
    for backend in (BACKENDS[name] for name in backends):
        refused = partial(reason, backend)
        yield Method(backend.name, partial(along_graph, backend), ours=True, unsupported_reason=refused)


def along_graph(backend: str | Backend, problem: Problem) -> Prepared:
    """``attend``, or the layer, along the problem's graph."""
    graph = problem.graph
    if problem.layer is None:
        return Prepared(lambda q, k, v: attend(q, k, v, graph, backend=backend))
    layer = MessagePassingAttention(problem.layer, backend=backend)
    return Prepared(lambda x: layer(x, graph), tuple(layer.parameters()))


def call_of(problem: Problem) -> AttentionCall:
    """The call of attention that a problem is."""
    if problem.layer is None:
        q, k, v = problem.inputs
    else:  # only its sizes count
        q = k = v = torch.empty(1, problem.heads, problem.graph.num_dst, problem.dim, device="meta")
    return AttentionCall.from_arguments(q, k, v, problem.graph)


def _core(problem: Problem, run: Callable[..., Tensor]) -> Prepared:
    """``run(q, k, v)``, or for a layer the same between one product for q, k, v and one for the output."""
    if problem.layer is None:
        return Prepared(run)
    heads, dim = problem.heads, problem.dim
    into, out = (weight.detach().clone().requires_grad_() for weight in _projections(problem))

    def layer(x: Tensor) -> Tensor:
        q, k, v = functional.linear(x, into).view(*x.shape[:2], 3, heads, dim).permute(2, 0, 3, 1, 4)
        return functional.linear(run(q, k, v).transpose(1, 2).flatten(2), out)

    return Prepared(layer, (into, out))


def _projections(problem: Problem) -> tuple[Tensor, Tensor]:
    """``W_Q, W_K, W_V`` as one ``[3 width, width]`` and ``W_O`` as ``[width, width]``, as nn.Linear keeps them."""
    layer = problem.layer
    assert layer is not None
    assert layer.W_O is not None
    into = [weight.transpose(1, 2).flatten(0, 1) for weight in (layer.W_Q, layer.W_K, layer.W_V)]
    return torch.cat(into), layer.W_O.flatten(0, 1).T.contiguous()


def _sdpa_causal(problem: Problem) -> Prepared:
    return _core(problem, partial(functional.scaled_dot_product_attention, is_causal=True))


def _sdpa_mask(problem: Problem) -> Prepared:
    mask = problem.graph.mask(problem.device)
    return _core(problem, partial(functional.scaled_dot_product_attention, attn_mask=mask))


def _flex(problem: Problem) -> Prepared:
    """Compiled, with the graph's own rule as ``mask_mod`` and our lists of tiles, never with a mask of all pairs."""
    torch._dynamo.reset()  # a kernel for each graph: past a limit of them it would run uncompiled, unseen
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask = convert.to_block_mask(problem.graph, device=problem.device)
    return _core(problem, partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=mask))


def _transformer_conv(problem: Problem) -> Prepared:
    """The ``propagate`` of TransformerConv on q, k and v."""
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
    """``sampled_addmm`` on the edges, ``sparse.softmax`` over each row and ``sparse.mm``, head by head in float32."""
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
    """What a Hugging Face model runs with ``attn_implementation="eager"``: Llama's function and a mask to add."""
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
    into, out = _projections(problem)
    with torch.no_grad():
        module.in_proj_weight.copy_(into)
        module.out_proj.weight.copy_(out)
    hidden = ~problem.graph.mask()
    run = lambda x: module(x, x, x, attn_mask=hidden, need_weights=False)[0]  # noqa: E731
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
