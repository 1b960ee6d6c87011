"""Bound how much one token can change the last state of another, by gains along all walks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.edge_softmax import per_query_head
from gnn_attention.heads import StandardHeads
from gnn_attention.heads.arrays import repeat_for_query_heads
from gnn_attention.interpret.trace import LayerTrace, record
from gnn_attention.model.foreign import heads_of
from gnn_attention.score_mods import RelativeBias

# Names of the norm, attention, norm and MLP of a block: in this library, in Llama, in GPT-2.
MODULES = (
    ("attention_norm", "attention", "mlp_norm", "mlp"),
    ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ("ln_1", "attn", "ln_2", "mlp"),
)
# Relative to the largest entry. In a model of another structure the difference is about 1.
AGREEMENT = 1e-3
TOKENS_PER_CHUNK = 8
Sizes = Float[Tensor, "dst src"]


@torch.no_grad()
def influence_bound(model: nn.Module, *inputs: Any, **options: Any) -> Sizes:
    """Return an upper bound of the spectral norm of ``d last[dst] / d first[src]`` for every pair of tokens.

    ``first`` are the states before the first block, and ``last`` those after the last block, before a
    final norm. The bound is a theorem about the Jacobian at the inputs of ``model(*inputs, **options)``, not
    about finite changes. With weights ``w`` and results ``z`` of each head, a block ``y = x +
    attention(n(x))``, ``y + mlp(m(y))`` has the gains
    ``|d(y + mlp(m(y)))| * (1 [dst = src] + |dn| * sum over heads of``

        ``w (|W_V W_O| + scale |q_dst| |W_K| |(v_src - z_dst) W_O|)``  along an edge, and
        ``scale |W_Q| |sum over src of w k_src (v_src - z) W_O|``      from a receiver to itself ``)``

    with spectral norms (the Frobenius norm for the last sum) and exact derivatives at each token. The product
    of the blocks' matrices, in float64, sums the products of gains over all walks, and is 0 if there is none.
    Most of the time is spent on the MLP's Jacobian at each token and layer.

    ``model`` is a model of ``gnn_attention.model``, or a Hugging Face model with the blocks of Llama or GPT-2
    and attention ``"gnn_attention"``, in eval mode; graphs of ``use_graph`` apply. NotImplementedError for
    other blocks, heads with qk_norm, and a score_mod that is no additive bias; ValueError for several texts.
    Sources: the chain rule; arXiv 2406.04267 (walks), 2006.04710.

    >>> from gnn_attention import model as lm, patterns
    >>> model, vocabulary = lm.load_trained()
    >>> tokens = torch.tensor([vocabulary.encode("Llamas do not output words")])
    >>> bound = influence_bound(model, tokens, patterns.window(tokens.shape[1], 2))
    >>> bool(bound[4, 2] > 0), bound[4, 1].item()  # two layers of a window of two reach two tokens back
    (True, 0.0)
    """
    blocks = [
        (block, x) for block in model.modules() for x in MODULES if all(hasattr(block, name) for name in x)
    ]
    states: list[dict[str, Tensor]] = [{} for _ in blocks]
    with ExitStack() as stack:
        for (block, names), state in zip(blocks, states, strict=True):
            for name in (names[0], names[2]):
                hook = partial(_save, state, name)
                stack.enter_context(getattr(block, name).register_forward_pre_hook(hook))
            stack.enter_context(block.register_forward_hook(partial(_save, state, "after")))
        calls = record(model, *inputs, **options).layers
    if not blocks or len(blocks) != len(calls):
        raise NotImplementedError(f"{type(model).__name__} has blocks unlike those of Llama and GPT-2")
    gains = [_gains(*block, state, call) for block, state, call in zip(blocks, states, calls, strict=True)]
    return reduce(lambda walks, layer: layer @ walks, gains)


def _save(state: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, *output: Any) -> None:
    value = (output or inputs)[0]
    state[name] = value[0] if isinstance(value, tuple) else value


def _gains(block: nn.Module, names: tuple[str, ...], state: dict[str, Tensor], call: LayerTrace) -> Sizes:
    norm, attention, mlp_norm, mlp = (getattr(block, name) for name in names)
    x, y = state[names[0]], state[names[2]]
    if len(x) != 1 or call._left_padding is not None:
        raise ValueError(f"influence_bound takes one sequence, without padding on its left, got {len(x)}")
    compute: Callable[[Tensor], Tensor] = lambda y: y + mlp(mlp_norm(y))  # noqa: E731
    _check(block, torch.stack([y, state["after"]]), torch.stack([x + call.update, compute(y)]))
    update = _attention_gains(attention, norm(x), call) * _token_gains(norm, x[0])
    gains = _token_gains(compute, y[0]).unsqueeze(1) * (update + torch.eye(len(update)).to(update))
    # Products over 30 layers are beyond float32.
    return gains.cpu().double()


def _check(module: nn.Module, result: Tensor, expected: Tensor) -> None:
    if not bool((result - expected).abs().max() <= AGREEMENT * result.abs().max()):
        raise NotImplementedError(f"{type(module).__name__} does not compute what it does in Llama and GPT-2")


def _token_gains(function: Callable[[Tensor], Tensor], states: Float[Tensor, "tokens width"]) -> Tensor:
    """Return the spectral norm of the derivative of a function of one state, at each state."""
    jacobian = torch.func.vmap(torch.func.jacrev(function))
    squares = [(J := jacobian(chunk)) @ J.mT for chunk in torch.split(states, TOKENS_PER_CHUNK)]
    return torch.cat([torch.linalg.eigvalsh(square)[:, -1].sqrt() for square in squares])


def _attention_gains(attention: Any, states: Float[Tensor, "batch tokens width"], call: LayerTrace) -> Sizes:
    """Return the gains of the update with respect to the normed states."""
    heads: Any = attention.heads if hasattr(attention, "heads") else heads_of(attention)
    mod = call.call.score_mod
    is_supported = isinstance(heads, StandardHeads) and heads.q_norm is None
    if not is_supported or not (mod is None or isinstance(mod, RelativeBias)):
        raise NotImplementedError(f"influence_bound does not support {heads} with score_mod {mod}")
    q, (k, v) = heads.receive(states)[0] * heads.scale, heads.send(states)
    k, v = (per_query_head(x, heads.num_heads)[0] for x in (k, v))
    _check(attention, call.overlap()[0] * call.call.scale, q @ k.mT)
    W_K, W_V = (repeat_for_query_heads(matrix, heads.num_heads) for matrix in (heads.W_K, heads.W_V))
    weights = call.dense(call.weights())[0]
    return sum(map(_head_gains, weights, q, k, v, heads.W_Q * heads.scale, W_K, W_V, heads.W_O))  # type: ignore[return-value]


def _head_gains(w: Sizes, q: Tensor, k: Tensor, v: Tensor, *matrices: Tensor) -> Sizes:
    (W_Q, W_K, W_V, W_O), norm = matrices, partial(torch.linalg.matrix_norm, ord=2)
    z: Tensor = w @ v
    distance = torch.cdist(z @ W_O, v @ W_O, compute_mode="donot_use_mm_for_euclid_dist")
    edge_gains: Tensor = w * (norm(W_V @ W_O) + q.norm(dim=-1, keepdim=True) * norm(W_K) * distance)
    spread = (w.unsqueeze(1) * k.mT) @ v - (w @ k).unsqueeze(2) * z.unsqueeze(1)
    loop_gain = (spread @ (W_O @ W_O.mT) * spread).sum((1, 2)).clamp(min=0.0).sqrt()
    edge_gains += (norm(W_Q) * loop_gain).diag()
    return edge_gains
