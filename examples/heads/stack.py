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

    def attended(self, graph: TokenGraph) -> tuple[Tensor, Any]:
        """The values that arrive in every head, ``[samples, heads, dst, value_dim]``, and the weights."""
        options = {"score_mod": self.score_mod, "return_info": True}
        out, info = attend(self.q, self.k, self.v, graph, **options)  # type: ignore[arg-type]
        return out, info

    def of(self, head: int) -> Call:
        """The call of one head alone."""
        kv_head = head * self.k.shape[1] // self.q.shape[1]
        mod = None if self.score_mod is None else partial(_of_head, self.score_mod, head)
        k, v = (x[:, kv_head : kv_head + 1] for x in (self.k, self.v))
        return Call(self.q[:, head : head + 1], k, v, mod)


def _of_head(
    mod: ScoreMod, head: int, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    return mod(score, b, h + head, dst, src)


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


class Forward:
    """A stack's states on some passages, its predictions, and what a message does to its logits."""

    def __init__(self, stack: Stack, tokens: Int[Tensor, "samples tokens"]) -> None:
        self.stack, self.tokens = stack, tokens.to(stack.unembedding.device)
        self.before, self.middle = stack.middles(self.tokens)
        self.last = stack.resumed(len(stack.layers) - 1, self.middle[-1])
        self._layer: tuple[int, Call, Tensor, list[Circuit]] | None = None

    @cached_property
    def predicted(self) -> Float[Tensor, "samples tokens vocabulary"]:
        """The probabilities of the token that follows."""
        return (self.last @ self.stack.unembedding.mT).softmax(-1)

    @cached_property
    def readout(self) -> Float[Tensor, "vocabulary width"]:
        """What a change of the last state does to the logits, up to its length; the mean over words is 0."""
        rows = self.stack.unembedding.detach() * self.stack.norm.get_parameter("weight").detach()
        return rows - rows.mean(0)

    @cached_property
    def spread(self) -> Float[Tensor, "width width"]:
        """``R^T R / vocabulary`` of the readout R: the variance over words of a message m is ``m S m``."""
        return self.readout.mT @ self.readout / len(self.readout)

    def layer(self, number: int) -> tuple[Call, Float[Tensor, "samples heads dst src"], list[Circuit]]:
        """The call of a layer, its weights and its circuits; those of the last layer asked for are cached."""
        if self._layer is None or self._layer[0] != number:
            norm, attention, _ = self.stack.layers[number]
            heads: Any = attention.heads
            normed = norm(self.before[number])
            k, v = heads.send(normed)
            call = Call(heads.receive(normed), k, v, attention.score_mod)
            _, info = call.attended(patterns.causal(self.tokens.shape[1]))
            circuits = each(attention, norm.get_parameter("weight"))
            self._layer = (number, call, info.weight_matrix(), circuits)
        return self._layer[1:]

    def messages(self, layer: int, head: int) -> Float[Tensor, "samples tokens width"]:
        """The message of each token in one head."""
        call, _, circuits = self.layer(layer)
        return call.of(head).v.squeeze(1) @ circuits[head].message.right


@torch.no_grad()
def of(model: Any) -> Stack:
    """The stack of a ``LanguageModel``, or of a causal model of transformers with the parts of Llama.

    Norms, attention and MLPs alone must make its logits, without other factors. NotImplementedError for
    another model.
    """
    if isinstance(model, LanguageModel):
        layers = [Layer(block.attention_norm, block.attention, block.compute) for block in model.blocks]
        return Stack(model.embedding, layers, model.norm, model.unembedding.weight)
    body = getattr(model, "model", None)
    blocks = getattr(body, "layers", ())
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    if not len(blocks) or not all(hasattr(block, part) for block in blocks for part in parts):
        raise NotImplementedError(
            "model must be a LanguageModel, or a causal model of transformers with the parts of Llama, "
            f"got {quote(type(model).__name__)}"
        )
    layers = [
        Layer(block.input_layernorm, foreign.layer_of(model, number), partial(_llama_mlp, block))
        for number, block in enumerate(blocks)
    ]
    return Stack(body.embed_tokens, layers, body.norm, model.lm_head.weight)  # type: ignore[union-attr]


def _llama_mlp(block: Any, middle: States) -> States:
    update: Tensor = block.mlp(block.post_attention_layernorm(middle))
    return update
