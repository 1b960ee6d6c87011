"""How a workload can be run: ours on every backend, and the peers. A peer that is not installed says so, it
is no error.

A method prepares itself for a problem once (masks, edge lists, compiled kernels: what a user would keep from
call to call) and returns the call to be timed. ``bytes_needed`` is an estimate of the peak beyond the inputs,
made before anything is run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.workloads import CAUSAL, EAGER, FLEX, MASKED, MHA, PYG, SPARSE, Problem
from gnn_attention import convert
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.dispatch import explain
from gnn_attention.layer import MessagePassingAttention

__all__ = ["AUTO", "PEERS", "Method", "Prepared", "attended", "call_of", "of_backend", "ours", "peers"]

AUTO = "auto"
MOST_REFERENCE_EDGES = 20_000  # the reference is the lesson, not a competitor
MOST_DENSE_CELLS = 8192**2  # beyond, "SDPA mask" stands for the dense backend, which is the same kernel
# Seconds, and times the estimate of auto, above which a backend of ours is not timed: so many times that no
# plausible error of the cost model hides one that would have beaten auto. The model that chooses must not
# choose its rivals as well.
WORTH_A_WAIT, MOST_TIMES_AUTO = 1.0, 12.0


@dataclass(frozen=True, eq=False)
class Prepared:
    """``call(*inputs) -> out`` and the parameters that take a gradient as the inputs do."""

    call: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Method:
    """A way to compute attention over a problem's graph.

    ``same`` is False for a yardstick that computes another graph.
    """

    name: str
    prepare: Callable[[Problem], Prepared]
    ours: bool = False
    modules: tuple[str, ...] = ()
    backward: str | None = None  # why there is no backward pass
    bytes_needed: Callable[[Problem, bool], float] | None = None
    seconds_needed: Callable[[Problem, bool], float] | None = None
    unsupported_reason: Callable[[Problem], str | None] | None = None
    keeps: bool = False  # something of the first call at full size: a plan, a compiled kernel
    same: bool = True

    def missing(self) -> str | None:
        """The first module that is not installed."""
        for name in self.modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                return f"{name} is not installed ({type(error).__name__})"
        return None


def ours(backends: Sequence[str] | None = None) -> list[Method]:
    """``backend="auto"`` and every backend of the table, or those named."""
    names = list(BACKENDS) if backends is None else list(backends)
    automatic = Method(AUTO, partial(attended, AUTO), ours=True, keeps=True)
    return [automatic, *(_explicit(BACKENDS[name]) for name in names if name != AUTO)]


def _explicit(backend: Backend) -> Method:
    return of_backend(backend, partial(_refusal, backend))


def of_backend(backend: Backend, unsupported_reason: Callable[[Problem], str | None]) -> Method:
    """``attend`` on one backend."""
    return Method(
        backend.name,
        partial(attended, backend),
        ours=True,
        bytes_needed=partial(_backend_bytes, backend),
        unsupported_reason=unsupported_reason,
        keeps=True,
    )


def attended(backend: str | Backend, problem: Problem) -> Prepared:
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
    else:  # a stand-in: only its sizes count
        q = k = v = torch.empty(1, problem.heads, problem.graph.num_dst, problem.dim, device="meta")
    return AttentionCall.checked(q, k, v, problem.graph)


def _backend_bytes(backend: Backend, problem: Problem, both: bool) -> float:
    return 0.0 if backend.bytes_needed is None else float(backend.bytes_needed(call_of(problem)))


def _refusal(backend: Backend, problem: Problem) -> str | None:
    if backend.name == "reference" and problem.graph.num_edges > MOST_REFERENCE_EDGES:
        return f"the reference is not timed above {MOST_REFERENCE_EDGES} edges"
    without_mask = problem.graph.is_full() or problem.graph.is_causal()
    if backend.name == "dense" and problem.cells > MOST_DENSE_CELLS and not without_mask:
        return (
            f"the dense backend is not timed above {MOST_DENSE_CELLS} pairs: 'SDPA mask' is the same kernel"
        )
    return backend.unsupported_reason(call_of(problem)) or _far_behind(backend, problem)


def _far_behind(backend: Backend, problem: Problem) -> str | None:
    """Why a backend is not worth minutes: the cost model has it far behind the one that auto takes. flex
    visits what tiles do.
    """
    found = explain(problem.graph, problem.heads, problem.dim)
    seconds = {name: estimate for name, _, _, estimate in found.rows}
    mine, best = seconds["tiles" if backend.name == "flex" else backend.name], seconds[found.choice]
    if mine is None or best is None or mine < WORTH_A_WAIT or mine < MOST_TIMES_AUTO * best:
        return None
    times = f"{mine / best:.0f} times that of {found.choice}, which auto takes"
    return f"the cost model says {mine:.1f} s forward, {times}: not timed"


def peers(names: Sequence[str]) -> list[Method]:
    """The peers of these names."""
    return [PEERS[name] for name in names]


def _core(problem: Problem, run: Callable[..., Tensor]) -> Prepared:
    """``run(q, k, v)`` as it is, or between the projections of a layer: one matrix for q, k, v and one for
    the output.
    """
    if problem.layer is None:
        return Prepared(run)
    heads, dim = problem.heads, problem.dim
    into, out = (weight.detach().clone().requires_grad_() for weight in _projections(problem))

    def layer(x: Tensor) -> Tensor:
        q, k, v = functional.linear(x, into).view(*x.shape[:2], 3, heads, dim).permute(2, 0, 3, 1, 4)
        return functional.linear(run(q, k, v).transpose(1, 2).flatten(2), out)

    return Prepared(layer, (into, out))


def _projections(problem: Problem) -> tuple[Tensor, Tensor]:
    """``W_Q, W_K, W_V`` as one ``[3 width, width]`` and ``W_O`` as ``[width, width]``, as nn.Linear keeps
    weights.
    """
    assert problem.layer is not None
    assert problem.layer.W_O is not None
    into = [
        weight.transpose(1, 2).flatten(0, 1)
        for weight in (problem.layer.W_Q, problem.layer.W_K, problem.layer.W_V)
    ]
    return torch.cat(into), problem.layer.W_O.flatten(0, 1).T.contiguous()


def _sdpa_causal(problem: Problem) -> Prepared:
    return _core(problem, partial(functional.scaled_dot_product_attention, is_causal=True))


def _sdpa_mask(problem: Problem) -> Prepared:
    return _core(
        problem,
        partial(functional.scaled_dot_product_attention, attn_mask=problem.graph.mask(problem.device)),
    )


def _flex(problem: Problem) -> Prepared:
    """Compiled, with the graph's own rule as ``mask_mod`` and our lists of tiles, which never take tokens x
    tokens.
    """
    torch._dynamo.reset()  # a kernel for each graph: past a limit of them it would run uncompiled, unseen
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    mask = convert.to_block_mask(problem.graph, device=problem.device)
    return _core(problem, partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=mask))


def _transformer_conv(problem: Problem) -> Prepared:
    """Its ``propagate`` on q, k and v alone; for a layer the module without its skip connection, and an
    output matrix.
    """
    nn_module = importlib.import_module("torch_geometric.nn")
    heads, dim, edges = problem.heads, problem.dim, problem.graph.edges_on(problem.device)
    conv = nn_module.TransformerConv(heads * dim, dim, heads=heads, root_weight=False, bias=False)
    if problem.layer is None:
        return Prepared(partial(_propagate, conv, edges))
    into, out = (weight.detach() for weight in _projections(problem))
    last = nn.Parameter(out.clone())
    with torch.no_grad():
        for linear, weight in zip((conv.lin_query, conv.lin_key, conv.lin_value), into.chunk(3), strict=True):
            linear.weight.copy_(weight)
    parameters = [linear.weight for linear in (conv.lin_query, conv.lin_key, conv.lin_value)]
    return Prepared(lambda x: functional.linear(conv(x[0], edges), last).unsqueeze(0), (*parameters, last))


def _propagate(conv: Any, edges: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    query, key, value = (x[0].transpose(0, 1) for x in (q, k, v))
    out: Tensor = conv.propagate(
        edges, size=(len(key), len(query)), query=query, key=key, value=value, edge_attr=None
    )
    return out.transpose(0, 1).unsqueeze(0)


def _torch_sparse(problem: Problem) -> Prepared:
    """Head by head: ``sampled_addmm`` on the edges, ``sparse.softmax`` over each row, ``sparse.mm``; in
    float32.
    """
    edges, zeros = (
        problem.graph.edges_on(problem.device).flip(0),
        torch.zeros(problem.graph.num_edges, device=problem.device),
    )
    pattern = torch.sparse_coo_tensor(edges, zeros, problem.shape).coalesce().to_sparse_csr()

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.sparse.sampled_addmm(pattern, q.contiguous(), k.T, beta=0.0, alpha=problem.dim**-0.5)
        out: Tensor = torch.sparse.mm(torch.sparse.softmax(logits.to_sparse_coo(), dim=1), v)
        return out

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = zip(*(x[0].float() for x in (q, k, v)), strict=True)
        return torch.stack([one_head(*head) for head in heads]).unsqueeze(0).to(q.dtype)

    return Prepared(run)


def _eager(problem: Problem) -> Prepared:
    """What a Hugging Face model runs with ``attn_implementation="eager"``: Llama's function and a mask that
    is added.
    """
    eager = importlib.import_module("transformers.models.llama.modeling_llama").eager_attention_forward
    mask = convert.to_sdpa_mask(problem.graph, dtype=torch.float32).view(1, 1, *problem.shape)
    module = nn.Identity()
    module.num_key_value_groups = 1  # type: ignore[assignment]
    module.eval()
    return Prepared(partial(_eager_forward, eager, module, mask, problem.dim**-0.5))


def _eager_forward(
    eager: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    mask: Tensor,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    return eager(module, q, k, v, mask, scaling=scale)[0].transpose(1, 2)


def _multihead(problem: Problem) -> Prepared:
    module = nn.MultiheadAttention(problem.heads * problem.dim, problem.heads, bias=False, batch_first=True)
    into, out = _projections(problem)
    with torch.no_grad():
        module.in_proj_weight.copy_(into)
        module.out_proj.weight.copy_(out)
    hidden = ~problem.graph.mask()
    return Prepared(partial(_self_attention, module, hidden), tuple(module.parameters()))


def _self_attention(module: nn.MultiheadAttention, hidden: Tensor, x: Tensor) -> Tensor:
    out: Tensor = module(x, x, x, attn_mask=hidden, need_weights=False)[0]
    return out


# Fitted to measurements on two cores; they only have to separate gigabytes from megabytes and minutes from
# seconds.


def _mask_bytes(problem: Problem, both: bool) -> float:
    return float(problem.cells * (1 + problem.grad_out.element_size()))


def _mask_seconds(problem: Problem, both: bool) -> float:
    return problem.cells * problem.heads * problem.dim * (86e-12 if both else 28e-12)


def _logit_bytes(problem: Problem, both: bool) -> float:
    return problem.cells * (5 + 4.0 * problem.heads * (3 if both else 2))


def _logit_seconds(problem: Problem, both: bool) -> float:
    return 2.5 * _mask_seconds(problem, both)


def _message_bytes(problem: Problem, both: bool) -> float:
    """Keys, queries and values of every edge, and their products."""
    return (
        problem.graph.num_edges
        * problem.heads
        * problem.dim
        * problem.grad_out.element_size()
        * (6.0 if both else 4.0)
    )


def _sparse_bytes(problem: Problem, both: bool) -> float:
    return problem.graph.num_edges * (800.0 if both else 400.0)


def _sparse_seconds(problem: Problem, both: bool) -> float:
    return problem.graph.num_edges * problem.heads * (320e-9 if both else 55e-9)


def _not_causal(problem: Problem) -> str | None:
    return None if problem.graph.is_causal() else "the graph is not causal"


PEERS = {
    method.name: method
    for method in (
        Method(CAUSAL, _sdpa_causal, unsupported_reason=_not_causal),
        Method(MASKED, _sdpa_mask, bytes_needed=_mask_bytes, seconds_needed=_mask_seconds),
        Method(FLEX, _flex, backward="FlexAttention has no backward pass on a CPU", keeps=True),
        Method(PYG, _transformer_conv, modules=("torch_geometric.nn",), bytes_needed=_message_bytes),
        Method(SPARSE, _torch_sparse, bytes_needed=_sparse_bytes, seconds_needed=_sparse_seconds),
        Method(
            EAGER,
            _eager,
            modules=("transformers.models.llama.modeling_llama",),
            bytes_needed=_logit_bytes,
            seconds_needed=_logit_seconds,
        ),
        Method(MHA, _multihead, bytes_needed=_logit_bytes, seconds_needed=_mask_seconds),
    )
}
