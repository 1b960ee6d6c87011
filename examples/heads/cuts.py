"""Edges of one head cut, as many random ones as a control, and what the model's predictions lose."""

from collections.abc import Sequence
from functools import cached_property, partial

import torch

from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.attend import attend
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.circuits.stack import Call, Forward, States
from gnn_attention.score_mods import ScoreMod


class Passages(Forward):
    """The states and predictions of a model on some passages, and what a message does to its logits."""

    @cached_property
    def last(self) -> States:
        """The last states, normed."""
        return self.stack.resumed(len(self.stack.layers) - 1, self.middle[-1])

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


def head_of(call: Call, head: int) -> Call:
    """The call of one head alone."""
    kv_head = head * call.k.shape[1] // call.q.shape[1]
    mod = None if call.score_mod is None else partial(_of_head, call.score_mod, head)
    k, v = (x[:, kv_head : kv_head + 1] for x in (call.k, call.v))
    return Call(call.q[:, head : head + 1], k, v, mod)


def _of_head(
    mod: ScoreMod, head: int, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    return mod(score, b, h + head, dst, src)


def _along(call: Call, graph: TokenGraph) -> Tensor:
    out: Tensor = attend(call.q, call.k, call.v, graph, score_mod=call.score_mod)
    return out


def matched(
    claimed: Bool[Tensor, "samples dst src"], sinks: bool, generator: torch.Generator
) -> tuple[Bool[Tensor, "samples dst src"], Bool[Tensor, "samples dst src"]]:
    """The claimed edges and as many random other ones of each receiver; neither where there are too few.

    Random edges are never those of the first token, unless ``sinks``: those of a sink are claimed.
    """
    others = torch.ones_like(claimed).tril() & ~claimed
    if not sinks:
        others[..., 0] = False
    count = claimed.sum(-1, keepdim=True)
    able = others.sum(-1, keepdim=True) >= count
    drawn = torch.rand(claimed.shape, generator=generator).to(claimed.device).masked_fill(~others, 2.0)
    return claimed & able, (drawn.argsort(-1).argsort(-1) < count) & able


def measured(
    run: Passages, layer: int, head: int, cut: Bool[Tensor, "samples dst src"], words: Int[Tensor, "..."]
) -> Float[Tensor, "measures samples"]:
    """KL divergence, fall of the words' logits and rise of the loss of each passage, one head's edges cut.

    ``words [samples, tokens, some]`` are those of each receiver; the fall is that of receivers of cut edges.
    """
    call, _, circuits = run.layer(layer)
    call, causal = head_of(call, head), patterns.causal(run.tokens.shape[1])
    left = causal - convert.from_mask(cut.unsqueeze(1))
    change = (_along(call, left) - _along(call, causal)).squeeze(1) @ circuits[head].message.right
    last = run.stack.resumed(layer, run.middle[layer] + change)
    falls = zip(run.tokens, run.predicted, run.last - last, words, cut.any(-1), strict=True)
    return torch.stack([_of_passage(run.stack.unembedding, *passage) for passage in falls], dim=1)


def _of_passage(
    unembedding: Tensor, tokens: Tensor, predicted: Tensor, lost: Tensor, words: Tensor, receives: Tensor
) -> Float[Tensor, " measures"]:
    """KL divergence, fall of the words' logits (their mean over the vocabulary 0), rise of the loss.

    From the predictions p and the fall z of each logit alone, without differences of large numbers:
    ``log E_p exp(-z)`` is what the normaliser loses, and ``KL = E_p z + log E_p exp(-z)``.
    """
    fall = lost @ unembedding.mT
    normaliser = (predicted * (-fall).expm1()).sum(-1).log1p()
    moved = ((predicted * fall).sum(-1) + normaliser).mean()
    loss = (fall[:-1].gather(1, tokens[1:].unsqueeze(1)).squeeze(1) + normaliser[:-1]).mean()
    of_words = fall.gather(1, words).mean(-1) - fall.mean(-1)
    return torch.stack([moved, of_words[receives].mean(), loss])


def lengths(messages: States, cuts: Sequence[Tensor]) -> Float[Tensor, "cuts samples"]:
    """The mean length of the messages of the edges of each cut."""
    lengths = messages.norm(dim=-1).unsqueeze(1)
    return torch.stack([(lengths * cut).sum((1, 2)) / cut.sum((1, 2)).clamp(min=1) for cut in cuts])
