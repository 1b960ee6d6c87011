"""Edges of one head cut, as many random ones as a control, and what the model's predictions lose."""

from collections.abc import Sequence

import torch

from examples.heads.stack import Forward, States
from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Bool, Float, Int, Tensor


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
    run: Forward, layer: int, head: int, cut: Bool[Tensor, "samples dst src"], words: Int[Tensor, "..."]
) -> Float[Tensor, "measures samples"]:
    """KL divergence, fall of the words' logits and rise of the loss of each passage, one head's edges cut.

    ``words [samples, tokens, some]`` are those of each receiver; the fall is that of receivers of cut edges.
    """
    call, _, circuits = run.layer(layer)
    call, causal = call.of(head), patterns.causal(run.tokens.shape[1])
    left = causal - convert.from_mask(cut.unsqueeze(1))
    lost = (call.attended(left)[0] - call.attended(causal)[0]).squeeze(1)
    change = lost @ circuits[head].message.right
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
