"""A language model as a list of layers, which can be run again from the middle of any layer.

Cutting edges of one head changes the residual stream from its layer on, so earlier layers run only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from gnn_attention import patterns
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention.attend import attend
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.circuits import Circuit, each
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model import LanguageModel, foreign
from gnn_attention.score_mods import ScoreMod

States = Float[Tensor, "samples tokens width"]


class Layer(NamedTuple):
    """A layer computes ``middle = state + attention(norm(state))``, then ``middle + compute(middle)``."""

    norm: nn.Module
    attention: MessagePassingAttention
    compute: Callable[[States], States]


class Call(NamedTuple):
    """The inputs of a layer's attention: queries, keys and values of its heads, and its score_mod."""

    q: Float[Tensor, "samples heads tokens dim"]
    k: Float[Tensor, "samples kv_heads tokens dim"]
    v: Float[Tensor, "samples kv_heads tokens value_dim"]
    score_mod: ScoreMod | None

    def attend(self, graph: TokenGraph) -> tuple[Tensor, Any]:
        """Return the output of each head, ``[samples, heads, dst, value_dim]``, and the attention info."""
        options = {"score_mod": self.score_mod, "return_info": True}
        out, info = attend(self.q, self.k, self.v, graph, **options)  # type: ignore[arg-type]
        return out, info

    def for_head(self, head: int) -> Call:
        """Return the call of a single head."""
        kv_head = head * self.k.shape[1] // self.q.shape[1]
        mod = self.score_mod
        k, v = (x[:, kv_head : kv_head + 1] for x in (self.k, self.v))
        head_mod = None if mod is None else lambda score, b, h, dst, src: mod(score, b, h + head, dst, src)
        return Call(self.q[:, head : head + 1], k, v, head_mod)


@dataclass(frozen=True, eq=False)
class Stack:
    """The embedding, layers, last norm and unembedding of a model."""

    embed: Callable[[Tensor], States]
    layers: Sequence[Layer]
    norm: nn.Module
    unembedding: Float[Tensor, "vocabulary width"]

    def run(self, tokens: Int[Tensor, "samples tokens"]) -> tuple[list[States], list[States]]:
        """Return the states before each layer, and those after its attention."""
        state, before, middle = self.embed(tokens), [], []
        graph = patterns.causal(tokens.shape[1])
        for layer in self.layers:
            before.append(state)
            middle.append(state + layer.attention(layer.norm(state), graph))
            state = middle[-1] + layer.compute(middle[-1])
        return before, middle

    def resume(self, layer: int, middle: States) -> States:
        """Return the last normed states, computed from the states after the attention of a layer."""
        graph = patterns.causal(middle.shape[1])
        state = middle + self.layers[layer].compute(middle)
        for next_layer in self.layers[layer + 1 :]:
            state = state + next_layer.attention(next_layer.norm(state), graph)
            state = state + next_layer.compute(state)
        normed: Tensor = self.norm(state)
        return normed


class Forward:
    """The states and predictions of a stack on some passages, and the effect of a message on its logits."""

    def __init__(self, stack: Stack, tokens: Int[Tensor, "samples tokens"]) -> None:
        self.stack = stack
        self.tokens = tokens.to(stack.unembedding.device)
        self.before, self.middle = stack.run(self.tokens)
        self.last = stack.resume(len(stack.layers) - 1, self.middle[-1])
        self._layer: tuple[int, Call, Tensor, list[Circuit]] | None = None

    @cached_property
    def probabilities(self) -> Float[Tensor, "samples tokens vocabulary"]:
        """The predicted probabilities of the next token."""
        return (self.last @ self.stack.unembedding.mT).softmax(-1)

    @cached_property
    def readout(self) -> Float[Tensor, "vocabulary width"]:
        """The matrix that maps a change of the last state to logits with mean 0, up to the norm's factor."""
        rows = self.stack.unembedding.detach() * self.stack.norm.get_parameter("weight").detach()
        return rows - rows.mean(0)

    @cached_property
    def covariance(self) -> Float[Tensor, "width width"]:
        """``C = R^T R / vocabulary`` of the readout R; a message m gives logits of variance ``m C m``."""
        return self.readout.mT @ self.readout / len(self.readout)

    def layer(self, number: int) -> tuple[Call, Float[Tensor, "samples heads dst src"], list[Circuit]]:
        """Return the call of a layer, its weights and its circuits; the result for one layer is cached."""
        if self._layer is None or self._layer[0] != number:
            norm, attention, _ = self.stack.layers[number]
            heads: Any = attention.heads
            normed = norm(self.before[number])
            k, v = heads.send(normed)
            call = Call(heads.receive(normed), k, v, attention.score_mod)
            _, info = call.attend(patterns.causal(self.tokens.shape[1]))
            circuits = each(attention, norm.get_parameter("weight"))
            self._layer = (number, call, info.weight_matrix(), circuits)
        return self._layer[1:]

    def messages(self, layer: int, head: int) -> Float[Tensor, "samples tokens width"]:
        """Return the message of each token in one head."""
        call, _, circuits = self.layer(layer)
        return call.for_head(head).v.squeeze(1) @ circuits[head].message.right


@torch.no_grad()
def from_model(model: Any) -> Stack:
    """Return the stack of a ``LanguageModel``, or of a causal Hugging Face model with the modules of Llama.

    Its logits must come from norms, attention and MLPs without other factors. NotImplementedError for models
    without these modules.
    """
    if isinstance(model, LanguageModel):
        layers = [Layer(block.attention_norm, block.attention, block.compute) for block in model.blocks]
        return Stack(model.embedding, layers, model.norm, model.unembedding.weight)
    body = getattr(model, "model", None)
    blocks = getattr(body, "layers", ())
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    if not len(blocks) or not all(hasattr(block, name) for block in blocks for name in names):
        name = quote(type(model).__name__)
        raise NotImplementedError(f"model must be a LanguageModel or have the modules of Llama, got {name}")
    layers = [
        Layer(block.input_layernorm, foreign.layer_of(model, number), partial(_llama_mlp, block))
        for number, block in enumerate(blocks)
    ]
    return Stack(body.embed_tokens, layers, body.norm, model.lm_head.weight)  # type: ignore[union-attr]


def _llama_mlp(block: Any, middle: States) -> States:
    update: Tensor = block.mlp(block.post_attention_layernorm(middle))
    return update
