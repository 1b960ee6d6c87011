"""Cut edges of one head, and as many random ones as a control, and measure the model's predictions."""

import torch

from examples.heads.stack import Forward
from gnn_attention import convert, patterns
from gnn_attention._support.shapes import Bool, Float, Int, Tensor


def draw_control(
    claimed: Bool[Tensor, "samples dst src"], sinks: bool, generator: torch.Generator
) -> tuple[Bool[Tensor, "samples dst src"], Bool[Tensor, "samples dst src"]]:
    """Return the claimed edges, and as many random other in-edges of each receiver.

    A receiver with too few other edges has no edge in either mask. Random edges come from the first token
    only if ``sinks`` is true: then the edges from the first token are the claimed ones.
    """
    candidates = torch.ones_like(claimed).tril() & ~claimed
    if not sinks:
        candidates[..., 0] = False
    count = claimed.sum(-1, keepdim=True)
    has_enough = candidates.sum(-1, keepdim=True) >= count
    order = torch.rand(claimed.shape, generator=generator).to(claimed.device).masked_fill(~candidates, 2.0)
    return claimed & has_enough, (order.argsort(-1).argsort(-1) < count) & has_enough


def measure_cut(
    run: Forward, layer: int, head: int, cut: Bool[Tensor, "samples dst src"], words: Int[Tensor, "..."]
) -> Float[Tensor, "measures samples"]:
    """Cut edges of one head, and return three measures of each passage.

    They are the KL divergence of the predictions, the fall of the logits of ``words [samples, tokens,
    words]`` at the receivers of the cut edges, and the rise of the loss.
    """
    call, _, circuits = run.layer(layer)
    call, causal = call.for_head(head), patterns.causal(run.tokens.shape[1])
    graph = causal - convert.from_mask(cut.unsqueeze(1))
    change = (call.attend(graph)[0] - call.attend(causal)[0]).squeeze(1) @ circuits[head].message.right
    last = run.stack.resume(layer, run.middle[layer] + change)
    passages = zip(run.tokens, run.probabilities, run.last - last, words, cut.any(-1), strict=True)
    return torch.stack([_measure_passage(run.stack.unembedding, *passage) for passage in passages], dim=1)


def _measure_passage(
    unembedding: Tensor, tokens: Tensor, probabilities: Tensor, change: Tensor, words: Tensor, is_cut: Tensor
) -> Float[Tensor, " measures"]:
    """Return the KL divergence, the fall of the words' logits minus the mean fall, and the rise of the loss.

    Only the probabilities p and the fall z of each logit are used, without differences of large numbers: the
    logarithm of the normaliser rises by ``log E_p exp(-z)``, and ``KL = E_p z + log E_p exp(-z)``.
    """
    fall = change @ unembedding.mT
    normaliser = (probabilities * (-fall).expm1()).sum(-1).log1p()
    divergence = ((probabilities * fall).sum(-1) + normaliser).mean()
    loss = (fall[:-1].gather(1, tokens[1:].unsqueeze(1)).squeeze(1) + normaliser[:-1]).mean()
    word_fall = fall.gather(1, words).mean(-1) - fall.mean(-1)
    return torch.stack([divergence, word_fall[is_cut].mean(), loss])
