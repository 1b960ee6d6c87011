"""Describe what each head looks for and says in a sentence, and test the sentence by cutting edges.

One half of the passages gives the sentence: the job (:mod:`jobs`) follows from the head's weights, the tokens
it looks for from its pattern and the mean state of each token, what it says from its messages and the
unembedding. The other half tests it: the edges that the sentence names are cut in this head alone, and the
later layers run again. The test measures the KL divergence of the predictions and the fall of the logits that
the head is said to raise. The control cuts as many random other in-edges of the same receivers, but none from
the first token, to which most heads attend when they have nothing to do. The p-values come from a sign-flip
test over passages, with Holm's correction over all heads and both halves of the sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from examples.heads import cuts, jobs, signs, stack
from examples.heads.stack import Forward, Stack, States
from gnn_attention._support import checks
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.circuits import Circuit, top_tokens

DISTANCES = (1, 2, 4, 8, 16, 32)
SENDERS, RECEIVERS, WORDS = 6, 3, 5
# The mean state of a token that is seen only once says more about its position than about the token.
MIN_COUNT = 2
# A head copies if its messages raise the sender's own logit by this many standard deviations of all logits.
COPY_THRESHOLD = 1.0
LEVEL = 0.05


class Effect(NamedTuple):
    """The effect of cutting the claimed edges and of the control, with the p-value of their difference."""

    claimed: float
    control: float
    p: float
    p_holm: float


class Reading(NamedTuple):
    """The job of a head, the two halves of its sentence (``looks_for`` and ``says``), and their tests.

    Attributes:
        looks: the test of ``looks_for``, the KL divergence of the predictions in nats per token.
        said: the test of ``says``, the fall of the said logits at the receivers; for a sink, which says
            nothing, minus the mean length of the messages.
        loss: the rise of the loss, about which the sentence claims nothing.
        passages: number of passages that had edges to cut.
        rests: share of the attention on the first token.
        share: share of the remaining attention on the edges of the job; for a sink, the same as ``rests``.
        distance: ``dst - src`` at which the pattern is largest for mean states.
        senders: tokens that receive most attention beyond their frequency.
        receivers: tokens that attend most to the first of the ``senders``.
        raised: tokens whose logits the mean message raises most.
    """

    layer: int
    head: int
    job: str
    looks_for: str
    says: str
    looks: Effect
    said: Effect
    loss: Effect
    passages: int
    rests: float
    share: float
    distance: int
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    raised: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if both corrected p-values are at most 5 %."""
        return max(self.looks.p_holm, self.said.p_holm) <= LEVEL

    def __str__(self) -> str:
        tests = {"looks for": self.looks, "says": self.said}
        failures = ", ".join(name for name, effect in tests.items() if effect.p_holm > LEVEL)
        verdict = "holds" if self.holds else f"WRONG or not shown ({failures})"
        return (
            f"layer {self.layer}, head {self.head}, {self.job}: looks for {self.looks_for}, "
            f"says {self.says}: {verdict}"
        )


class _Sentence(NamedTuple):
    """The description of a head; ``message_kind`` is "copy", "against" (its own token) or "words"."""

    job: str
    message_kind: str
    senders: Tensor
    receivers: Tensor
    words: Tensor
    first_share: float
    share: float
    distance: int


def passages(ids: Sequence[int], samples: int = 32, length: int = 48) -> Int[Tensor, "samples tokens"]:
    """Return ``samples`` passages of ``length`` tokens, spread evenly over a text.

    A short text gives fewer passages, and then 12 shorter ones. ValueError for fewer than 192 tokens.
    """
    samples, length = checks.size("samples", samples, 12), checks.size("length", length, 16)
    if len(ids) < 12 * 16:
        raise ValueError(f"ids must have at least 192 tokens, for 12 passages of 16 tokens, got {len(ids)}")
    samples = min(samples, max(12, len(ids) // length)) // 2 * 2
    length = min(length, len(ids) // samples)
    starts = [number * (len(ids) - length) // (samples - 1) for number in range(samples)]
    return torch.tensor([list(ids[start : start + length]) for start in starts])


@torch.no_grad()
def readings(
    model: object,
    tokens: Int[Tensor, "samples tokens"],
    word: Callable[[int], str] = str,
    heads: Iterable[tuple[int, int]] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> list[Reading]:
    """Return the reading of each head, in the order of layers and heads.

    Args:
        model: a ``LanguageModel``, or a causal Hugging Face model with the modules of Llama.
        tokens: passages ``[samples, T]`` (:func:`passages`); every second one serves the test. Each layer
            stores T x T weights for every passage and head, so T should be small.
        word: returns the text of a token.
        heads: pairs (layer, head); by default all. The p-values are corrected over these heads.
        seed: seed of the random edges.
        progress: whether to show the number of finished heads on stderr.

    Raises TypeError or ValueError for wrong ``tokens``, NotImplementedError for an unsupported model, and
    IndexError for a head that the model does not have.

    Sources: Elhage et al. 2021; Olsson et al. 2022 (arXiv 2209.11895); Xiao et al. 2023 (arXiv 2309.17453),
    sinks; Holm 1979.

    >>> from gnn_attention import model as lm
    >>> trained, vocabulary = lm.load_trained()
    >>> text = torch.randint(300, 1000, (12, 16), generator=torch.Generator().manual_seed(0))
    >>> [reading] = readings(trained, text, heads=[(0, 2)])
    >>> reading.job, reading.looks_for
    ('previous token', 'the token just before')
    """
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2:
        raise TypeError(f"tokens must be passages [samples, T] of int64, got {checks.quote(tokens)}")
    if len(tokens) < 2 or tokens.shape[1] < 3:
        raise ValueError(f"tokens must be at least 2 passages of 3 tokens, got {list(tokens.shape)}")
    layers = stack.from_model(model)
    selected = _select_heads(layers, heads)
    described = Forward(layers, tokens[::2])
    tested = Forward(layers, tokens[1::2])
    tests: list[tuple[_Sentence, Tensor]] = []
    for layer, head in tqdm(selected, "heads", mininterval=5.0, disable=not progress):
        sentence = _describe(described, layer, head)
        # Each head has its own generator: its random edges do not depend on the selection of heads.
        generator = torch.Generator().manual_seed(2**20 * seed + 2**10 * layer + head)
        tests.append((sentence, _test(tested, layer, head, sentence, generator)))
    return _make_readings(selected, tests, word)


def _describe(run: Forward, layer: int, head: int) -> _Sentence:
    _, weights, circuits = run.layer(layer)
    weights, tokens = weights[:, head], run.tokens
    senders, receivers, distance = _find_tokens(run, layer, circuits[head])
    matches = {name: jobs.match(weights, jobs.claimed_edges(name, tokens)) for name in jobs.JOBS}
    token_match = jobs.match(weights, jobs.edges_to(senders, tokens))
    first_share = jobs.first_token_share(weights)
    job = jobs.choose_job(first_share, matches, token_match)
    share = first_share if job == "sink" else matches.get(job, token_match).share
    claimed = _claimed_edges(job, senders, tokens)
    kind, words = _describe_messages(run, run.messages(layer, head), weights, claimed)
    return _Sentence(job, kind, senders, receivers, words, first_share, share, distance)


def _claimed_edges(job: str, senders: Tensor, tokens: Tensor) -> Bool[Tensor, "samples dst src"]:
    return jobs.claimed_edges(job, tokens) if job in jobs.JOBS else jobs.edges_to(senders, tokens)


def _find_tokens(run: Forward, layer: int, circuit: Circuit) -> tuple[Tensor, Tensor, int]:
    """Return the senders that the pattern prefers, the receivers that prefer the first, and the distance."""
    tokens, counts, states = _mean_states(run.tokens, run.before[layer])
    distances = [distance for distance in DISTANCES if distance < run.tokens.shape[1]]
    patterns = [circuit.pattern_at(distance) for distance in distances]
    logits = sum(states @ P.left @ (states @ P.right.mT).mT for P in patterns) / len(patterns)
    weights = (logits * circuit.heads.scale + counts.log()).softmax(-1)
    # Equal logits would give each token the share of its frequency, which is no preference.
    senders = (weights.mean(0) - counts / counts.sum()).topk(min(SENDERS, len(tokens))).indices
    receivers = weights[:, senders[0]].topk(min(RECEIVERS, len(tokens))).indices
    return tokens[senders], tokens[receivers], _distance(run, layer, circuit, states.mean(0))


def _distance(run: Forward, layer: int, circuit: Circuit, state: Tensor) -> int:
    """Return ``dst - src`` at which the logit is largest if both tokens have this state."""
    mod = run.layer(layer)[0].for_head(circuit.head).score_mod
    zero, logits = torch.tensor(0), []
    for distance in range(run.tokens.shape[1] if circuit.heads.rotary is not None or mod is not None else 1):
        P = circuit.pattern_at(distance)
        logit = (state @ P.left) @ (P.right @ state) * circuit.heads.scale
        logits.append(float(logit if mod is None else mod(logit, zero, zero, zero + distance, zero)))
    return max(range(len(logits)), key=logits.__getitem__)


def _mean_states(tokens: Tensor, before: States) -> tuple[Tensor, Tensor, Float[Tensor, "kinds width"]]:
    """Return the tokens seen often enough, their counts, and the mean of their states, each of RMS 1."""
    states = before[:, 1:] / before[:, 1:].pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-9)
    kinds, inverse, counts = torch.unique(tokens[:, 1:], return_inverse=True, return_counts=True)
    means = states.new_zeros(len(kinds), states.shape[-1])
    means = means.index_add(0, inverse.flatten(), states.flatten(0, 1)) / counts.unsqueeze(1)
    is_frequent = counts >= min(MIN_COUNT, int(counts.max()))
    return kinds[is_frequent], counts[is_frequent], means[is_frequent]


def _describe_messages(
    run: Forward, messages: States, weights: Tensor, claimed: Bool[Tensor, "samples dst src"]
) -> tuple[str, Int[Tensor, " words"]]:
    """Return whether messages raise or lower their sender's own token, and the words that they raise.

    Each message, minus the mean message, is weighted by the attention on its claimed edges, because a cut
    removes this sum.
    """
    attention = (weights * claimed).sum(1)
    centred = messages - messages[:, 1:].mean((0, 1))
    mean = (attention.unsqueeze(-1) * centred).sum((0, 1)) / attention.sum().clamp(min=1e-9)
    # The token at the same position of another passage shows what messages do to any token.
    raises = _standard_raise(run, centred, run.tokens) - _standard_raise(run, centred, run.tokens.roll(1, 0))
    copying = float((attention * raises).sum() / attention.sum().clamp(min=1e-9))
    kind = "copy" if copying >= COPY_THRESHOLD else "against" if copying <= -COPY_THRESHOLD else "words"
    # Rare tokens of the vocabulary, with long rows, would come first: only tokens of the text are ranked.
    candidates = torch.unique(run.tokens)
    return kind, candidates[top_tokens(mean, run.readout[candidates], min(WORDS, len(candidates))).tokens]


def _standard_raise(run: Forward, messages: States, tokens: Tensor) -> Float[Tensor, "samples tokens"]:
    """Return the rise of one logit by each message, in standard deviations over the vocabulary."""
    deviation = ((messages @ run.covariance) * messages).sum(-1).clamp(min=1e-20).sqrt()
    return (messages * run.readout[tokens]).sum(-1) / deviation


def _test(
    run: Forward, layer: int, head: int, sentence: _Sentence, generator: torch.Generator
) -> Float[Tensor, "cuts measures samples"]:
    """Return the measures of each passage with the claimed and with random edges cut.

    A passage without edges to cut has NaN.
    """
    claimed = _claimed_edges(sentence.job, sentence.senders, run.tokens)
    pair = cuts.draw_control(claimed, sentence.job == "sink", generator)
    weights = run.layer(layer)[1]
    strongest = (weights[:, head] * pair[0]).argmax(-1)
    senders = run.tokens.gather(1, strongest).unsqueeze(-1)
    words = sentence.words.expand(*run.tokens.shape, -1) if sentence.message_kind == "words" else senders
    measures = torch.stack([cuts.measure_cut(run, layer, head, cut, words) for cut in pair])
    if sentence.job == "sink":
        lengths = run.messages(layer, head).norm(dim=-1).unsqueeze(1)
        for index, cut in enumerate(pair):
            measures[index, 1] = -(lengths * cut).sum((1, 2)) / cut.sum((1, 2)).clamp(min=1)
    elif sentence.message_kind == "against":
        measures[:, 1] = -measures[:, 1]
    return measures.masked_fill(~pair[0].any((1, 2)), torch.nan)


def _make_readings(
    heads: Sequence[tuple[int, int]], tests: Sequence[tuple[_Sentence, Tensor]], word: Callable[[int], str]
) -> list[Reading]:
    measures = torch.stack([measures for _, measures in tests]).double()
    differences = measures[:, 0] - measures[:, 1]
    p = [[signs.flip_test(measure) for measure in head] for head in differences]
    # The sentence claims nothing about the loss, whose p-values are corrected separately.
    looks, said, loss = zip(*p, strict=True)
    claims = signs.holm([*looks, *said])
    holm = zip(claims[: len(p)], claims[len(p) :], signs.holm(loss), strict=True)
    means = measures.nanmean(-1).mT.tolist()
    effects = [
        [Effect(pair[0], pair[1], raw, corrected) for pair, raw, corrected in zip(*rows, strict=True)]
        for rows in zip(means, p, holm, strict=True)
    ]
    counts = (~measures[:, 0, 0].isnan()).sum(-1).tolist()
    rows = zip(heads, (sentence for sentence, _ in tests), effects, counts, strict=True)
    return [_reading(*row, word) for row in rows]


def _reading(
    pair: tuple[int, int], sentence: _Sentence, effects: list[Effect], count: int, word: Callable[[int], str]
) -> Reading:
    tokens = (sentence.senders, sentence.receivers, sentence.words)
    senders, receivers, raised = (tuple(word(int(token)) for token in group) for group in tokens)
    quoted = [", ".join(map(repr, words)) for words in (senders, receivers, raised)]
    job = jobs.JOBS.get(sentence.job)
    says = {"copy": "that token itself", "against": "anything but that token", "words": quoted[2]}
    looks, said, loss = effects
    return Reading(
        layer=pair[0],
        head=pair[1],
        job=sentence.job,
        looks_for=job.looks_for if job else f"tokens such as {quoted[0]} (most when at {quoted[1]})",
        says="next to nothing" if sentence.job == "sink" else says[sentence.message_kind],
        looks=looks,
        said=said,
        loss=loss,
        passages=count,
        rests=sentence.first_share,
        share=sentence.share,
        distance=sentence.distance,
        senders=senders,
        receivers=receivers,
        raised=raised,
    )


def _select_heads(stack: Stack, heads: Iterable[tuple[int, int]] | None) -> list[tuple[int, int]]:
    counts = [layer.attention.heads.num_heads for layer in stack.layers]
    pairs = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
    if heads is None:
        return pairs
    selected = sorted({(int(layer), int(head)) for layer, head in heads})
    if unknown := [pair for pair in selected if pair not in pairs]:
        raise IndexError(
            f"heads must be pairs (layer, head) of {len(counts)} layers of {counts[0]} heads, "
            f"got {unknown[0]}"
        )
    if not selected:
        raise ValueError("heads must have at least one pair (layer, head), got none")
    return selected
