"""A language model as one list of layers, that can be run again from the middle of any layer.

Cutting edges of one head changes the residual stream from that layer on: what is before is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from gnn_attention import patterns
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import AttentionInfo, attend
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.circuits.head import Circuit, each
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model import LanguageModel, foreign
from gnn_attention.score_mods import ScoreMod

States = Float[Tensor, "samples tokens width"]
# how far logits may be from the model's own, as a share of their largest: float32 over many layers
SAME = 1e-3


class Layer(NamedTuple):
    """``middle = state + attention(norm(state))``, then ``middle + compute(middle)``."""

    norm: nn.Module
    attention: MessagePassingAttention
    compute: Callable[[States], States]


class Call(NamedTuple):
    """What a layer's attention was given: q, k, v of all its heads, and what acts on a logit."""

    q: Float[Tensor, "samples heads tokens dim"]
    k: Float[Tensor, "samples kv_heads tokens dim"]
    v: Float[Tensor, "samples kv_heads tokens value_dim"]
    score_mod: ScoreMod | None

    def attended(self, graph: TokenGraph) -> tuple[Tensor, AttentionInfo]:
        """The values that arrive in every head, ``[samples, heads, dst, value_dim]``, and the weights."""
        found: tuple[Tensor, AttentionInfo] = attend(
            *self[:3], graph, score_mod=self.score_mod, return_info=True
        )
        return found

    def of(self, head: int) -> Call:
        """The call of one head alone."""
        shared = head * self.k.shape[1] // self.q.shape[1]
        mod = None if self.score_mod is None else partial(_numbered, self.score_mod, head)
        k, v = (x[:, shared : shared + 1] for x in (self.k, self.v))
        return Call(self.q[:, head : head + 1], k, v, mod)


@dataclass(frozen=True, eq=False)
class Stack:
    """Embedding, layers, last norm and unembedding of a model: our own, or one like Llama of transformers."""

    embed: Callable[[Tensor], States]
    layers: Sequence[Layer]
    norm: nn.Module
    unembedding: Float[Tensor, "vocabulary width"]

    def middles(self, tokens: Int[Tensor, "samples tokens"]) -> tuple[list[States], list[States]]:
        """The states before each layer, and those after its attention."""
        state, before, middle = self.embed(tokens), [], []
        graph = patterns.causal(tokens.shape[1])
        for layer in self.layers:
            before.append(state)
            middle.append(state + layer.attention(layer.norm(state), graph))
            state = middle[-1] + layer.compute(middle[-1])
        return before, middle

    def resumed(self, layer: int, middle: States) -> States:
        """The last states, normed, from those after the attention of a layer."""
        graph = patterns.causal(middle.shape[1])
        state = middle + self.layers[layer].compute(middle)
        for later in self.layers[layer + 1 :]:
            state = state + later.attention(later.norm(state), graph)
            state = state + later.compute(state)
        normed: Tensor = self.norm(state)
        return normed

    def call(self, layer: int, before: States) -> Call:
        """The attention call of a layer on the states before it."""
        attention, normed = self.layers[layer].attention, self.layers[layer].norm(before)
        heads: Any = attention.heads
        k, v = heads.send(normed)
        return Call(heads.receive(normed), k, v, attention.score_mod)

    def circuits(self, layer: int) -> list[Circuit]:
        """Each head, with the gain of the norm before it folded in."""
        found = self.layers[layer]
        return each(found.attention, found.norm.get_parameter("weight"))

    @cached_property
    def readout(self) -> Float[Tensor, "vocabulary width"]:
        """What a change of the last state does to the logits, up to its length; the mean over words is 0."""
        rows = self.unembedding.detach() * self.norm.get_parameter("weight").detach()
        return rows - rows.mean(0)

    @cached_property
    def spread(self) -> Float[Tensor, "width width"]:
        """``R^T R / vocabulary`` of the readout: the variance over words of a message m is ``m S m``."""
        return self.readout.mT @ self.readout / len(self.readout)


class Forward:
    """A stack's states on some passages, and its predictions on them."""

    def __init__(self, stack: Stack, tokens: Tensor) -> None:
        self.stack, self.tokens = stack, tokens.to(stack.unembedding.device)
        self.before, self.middle = stack.middles(self.tokens)
        self.last = stack.resumed(len(stack.layers) - 1, self.middle[-1])
        self._layer: tuple[int, Call, Tensor, list[Circuit]] | None = None

    @cached_property
    def predicted(self) -> Float[Tensor, "samples tokens vocabulary"]:
        """The probabilities of the token that follows."""
        logits = self.last @ self.stack.unembedding.mT
        return logits.softmax(-1)

    def layer(self, number: int) -> tuple[Call, Tensor, list[Circuit]]:
        """The call of a layer, its weights and circuits: of the last that was asked for, from memory."""
        if self._layer is None or self._layer[0] != number:
            call = self.stack.call(number, self.before[number])
            weights = call.attended(patterns.causal(self.tokens.shape[1]))[1].weight_matrix()
            self._layer = (number, call, weights, self.stack.circuits(number))
        return self._layer[1:]

    def messages(self, layer: int, head: int) -> Float[Tensor, "samples tokens width"]:
        call, _, circuits = self.layer(layer)
        values = call.of(head).v.squeeze(1)
        return values @ circuits[head].message.right


@torch.no_grad()
def of(model: Any) -> Stack:
    """The stack of a ``LanguageModel``, or of a causal model of transformers with the parts of Llama.

    NotImplementedError for another model, and for one whose own logits are others (other norms, factors).
    """
    if isinstance(model, LanguageModel):
        layers = [Layer(block.attention_norm, block.attention, block.compute) for block in model.blocks]
        return Stack(model.embedding, layers, model.norm, model.unembedding.weight)
    body = getattr(model, "model", None)
    blocks = getattr(body, "layers", ())
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    if not len(blocks) or not all(hasattr(block, part) for block in blocks for part in parts):
        expected = "a LanguageModel, or a causal model of transformers with the parts of Llama"
        raise NotImplementedError(f"model must be {expected}, got {quoted(type(model).__name__)}")
    layers = [_llama_layer(model, number, block) for number, block in enumerate(blocks)]
    stack = Stack(body.embed_tokens, layers, body.norm, model.lm_head.weight)  # type: ignore[union-attr]
    _check_same(model, stack)
    return stack


def _llama_layer(model: nn.Module, number: int, block: Any) -> Layer:
    attention = foreign.layer_of(model, number)
    return Layer(block.input_layernorm, attention, partial(_computed, block))


def _computed(block: Any, middle: States) -> States:
    update: Tensor = block.mlp(block.post_attention_layernorm(middle))
    return update


def _check_same(model: Any, stack: Stack) -> None:
    tokens = torch.arange(8, device=stack.unembedding.device).expand(1, -1)
    own = model(tokens, use_cache=False).logits
    ours = stack.resumed(0, stack.middles(tokens)[1][0]) @ stack.unembedding.mT
    error = float((own - ours).abs().max() / own.abs().max())
    if not error < SAME:
        what = f"{type(model).__name__} has logits that its norms, attention and MLPs alone do not give"
        raise NotImplementedError(
            f"{what} (they differ by {error:.1e} of the largest): no way to cut its heads"
        )


def _numbered(
    mod: ScoreMod, head: int, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    return mod(score, b, h + head, dst, src)
