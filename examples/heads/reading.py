"""What each head looks for and says, in words, and whether cutting those edges shows it.

Half of the passages is read: the job of a head (:mod:`jobs`) from its weights, the tokens it looks for from
its pattern x the mean state of each token there (in the first layer, the embedding), what it says from its
messages x unembedding. On the other half the sentence is tested. The edges that it names are cut in that head
alone, the softmax renormalised, and the model is run on from there: how far do its predictions move (the KL
divergence), and how far do the logits fall that the head is said to raise? The control is the same number of
random other edges of the same receivers, never those of the first token, which in most heads are a place to
rest. p is that of a sign-flip test over passages, Holm's over all rows and both claims.
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
# A mean state is made of at least so many tokens: fewer say more about the place than about the token.
SEEN = 2
# A message is a copy if it raises its own token by so many standard deviations over the vocabulary.
COPIES = 1.0
LEVEL = 0.05


class Effect(NamedTuple):
    """What cutting the claimed edges does, and random ones; ``p`` of their difference, and Holm's."""

    claimed: float
    control: float
    p: float
    p_holm: float


class Reading(NamedTuple):
    """One head: its job, its sentence in two halves, and the test of each.

    ``looks`` is the KL divergence (nats a token) of the predictions from those of the whole head; ``says``
    how far the logits said fall at the receivers (a sink says nothing: there it is minus the length of the
    messages, claimed to be shorter); ``loss`` how far the loss rises, for which nothing is claimed.
    ``passages`` had edges to cut. ``rests``: the share of attention on the first token; ``share``: of the
    rest, on the edges of the job; ``distance``: where the pattern of a mean token is largest. ``senders``
    raise the logits most, of the ``receivers`` above all; ``raised``: what the mean message says.
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
        """True where both halves of the sentence pass at 5 %, Holm's correction over all rows made."""
        return max(self.looks.p_holm, self.said.p_holm) <= LEVEL

    def __str__(self) -> str:
        wrong = [name for name, p in (("looks for", self.looks), ("says", self.said)) if p.p_holm > LEVEL]
        verdict = "holds" if self.holds else f"WRONG or not shown ({', '.join(wrong)})"
        text = (
            f"layer {self.layer}, head {self.head}, {self.job}: looks for {self.looks_for}, says {self.says}"
        )
        return f"{text}: {verdict}"


class _Sentence(NamedTuple):
    """What was read off the first half; ``said``: "copy", "against" or "words"; ``kinds`` of senders."""

    job: str
    said: str
    kinds: Tensor
    receivers: Tensor
    words: Tensor
    rests: float
    share: float
    distance: int


def passages(ids: Sequence[int], samples: int = 32, length: int = 48) -> Int[Tensor, "samples tokens"]:
    """Forward of a text's tokens, spread evenly over it, half to read and half to test.

    A text too short for that gives fewer, and not below 12 shorter ones. ValueError below 192 tokens.
    """
    samples, length = checks.size("samples", samples, 12), checks.size("length", length, 16)
    if len(ids) < 12 * 16:
        raise ValueError(f"the text must have at least {12 * 16} tokens, 12 passages of 16, got {len(ids)}")
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
    """The sentence of each head with the effect of cutting its edges, in the order of layers and heads.

    Args:
        model: a ``LanguageModel``, or a causal model of transformers with the parts of Llama.
        tokens: passages ``[samples, T]`` (:func:`passages`): every second one is for the test. A head is run
            on ``samples / 2`` passages of T tokens twice; T x T weights of a layer are made, so keep T small.
        word: how a token is written.
        heads: pairs (layer, head); all unless given. p-values are corrected over these.
        seed: of the random edges.
        progress: shows on stderr how many heads are done.

    Raises TypeError or ValueError for tokens that are no such passages, NotImplementedError for another
    model, IndexError for a head that it does not have.

    Sources: Elhage et al. 2021; Olsson et al. 2022 (arXiv 2209.11895); Xiao et al. 2023 (arXiv 2309.17453),
    sinks; Holm 1979.

    >>> from gnn_attention import model as lm
    >>> trained, vocabulary = lm.load_trained()
    >>> text = torch.randint(300, 1000, (12, 16), generator=torch.Generator().manual_seed(0))
    >>> [reading] = readings(trained, text, heads=[(0, 2)])
    >>> reading.job, reading.looks_for
    ('previous token', 'the token just before')
    """
    _check(tokens)
    layers = stack.of(model)
    chosen = _chosen(layers, heads)
    read, tested = (Forward(layers, tokens[first::2]) for first in (0, 1))
    tests: list[tuple[_Sentence, Tensor]] = []
    for layer, head in tqdm(chosen, "heads", mininterval=5.0, disable=not progress):
        sentence = _read(read, layer, head)
        # Each head has its own generator: its random edges do not depend on which others are read.
        generator = torch.Generator().manual_seed(2**20 * seed + 2**10 * layer + head)
        tests.append((sentence, _tested(tested, layer, head, sentence, generator)))
    return _rows(chosen, tests, word)


def _read(run: Forward, layer: int, head: int) -> _Sentence:
    _, weights, circuits = run.layer(layer)
    mine, tokens = weights[:, head], run.tokens
    kinds, receivers, distance = _looked_for(run, layer, circuits[head])
    matches = {name: jobs.match_of(mine, jobs.claimed_edges(name, tokens)) for name in jobs.JOBS}
    by_tokens = jobs.match_of(mine, jobs.edges_to(kinds, tokens))
    job = jobs.job_of(jobs.rest(mine), matches, by_tokens)
    share = jobs.rest(mine) if job == "sink" else matches.get(job, by_tokens).share
    claimed = _claimed(job, kinds, tokens)
    said, words = _said(run, run.messages(layer, head), mine, claimed)
    return _Sentence(job, said, kinds, receivers, words, jobs.rest(mine), share, distance)


def _claimed(job: str, kinds: Tensor, tokens: Tensor) -> Bool[Tensor, "samples dst src"]:
    return jobs.claimed_edges(job, tokens) if job in jobs.JOBS else jobs.edges_to(kinds, tokens)


def _looked_for(run: Forward, layer: int, circuit: Circuit) -> tuple[Tensor, Tensor, int]:
    """Senders that patterns give most beyond their number, receivers of the first, and the distance."""
    kinds, counts, states = _mean_states(run.tokens, run.before[layer])
    near = [distance for distance in DISTANCES if distance < run.tokens.shape[1]]
    found = [circuit.pattern_at(distance) for distance in near]
    logits = sum(states @ P.left @ (states @ P.right.mT).mT for P in found) / len(found) * circuit.heads.scale
    weights = (logits + counts.log()).softmax(-1)
    # The attention beyond that of equal logits.
    senders = (weights.mean(0) - counts / counts.sum()).topk(min(SENDERS, len(kinds))).indices
    receivers = weights[:, senders[0]].topk(min(RECEIVERS, len(kinds))).indices
    return kinds[senders], kinds[receivers], _distance(run, layer, circuit, states.mean(0))


def _distance(run: Forward, layer: int, circuit: Circuit, state: Tensor) -> int:
    """dst - src at which a mean token's logit for a mean token is largest."""
    mod = run.layer(layer)[0].of(circuit.head).score_mod
    zero, logits = torch.tensor(0), []
    for distance in range(run.tokens.shape[1] if circuit.heads.rotary is not None or mod is not None else 1):
        P = circuit.pattern_at(distance)
        logit = (state @ P.left) @ (P.right @ state) * circuit.heads.scale
        logits.append(float(logit if mod is None else mod(logit, zero, zero, zero + distance, zero)))
    return max(range(len(logits)), key=logits.__getitem__)


def _mean_states(tokens: Tensor, before: States) -> tuple[Tensor, Tensor, Float[Tensor, "kinds width"]]:
    """The tokens seen often enough, how often, and the mean of their states, of root mean square 1 each."""
    states = before[:, 1:] / before[:, 1:].pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-9)
    kinds, which, counts = torch.unique(tokens[:, 1:], return_inverse=True, return_counts=True)
    means = states.new_zeros(len(kinds), states.shape[-1])
    means = means.index_add(0, which.flatten(), states.flatten(0, 1)) / counts.unsqueeze(1)
    often = counts >= min(SEEN, int(counts.max()))
    return kinds[often], counts[often], means[often]


def _said(
    run: Forward, messages: States, weights: Tensor, claimed: Bool[Tensor, "samples dst src"]
) -> tuple[str, Int[Tensor, " words"]]:
    """Whether messages raise or lower their own token, and the words that the mean one raises.

    A message counts with the attention that the claimed edges give it, less the mean: what a cut takes away.
    """
    given = (weights * claimed).sum(1)
    centred = messages - messages[:, 1:].mean((0, 1))
    mean = (given.unsqueeze(-1) * centred).sum((0, 1)) / given.sum().clamp(min=1e-9)
    own = _raise_of(run, centred, run.tokens) - _raise_of(run, centred, run.tokens.roll(1, 0))
    copies = float((given * own).sum() / given.sum().clamp(min=1e-9))
    kind = "copy" if copies >= COPIES else "against" if copies <= -COPIES else "words"
    # Only words of the text: among all, those with long rows that are in no text would come first.
    seen = torch.unique(run.tokens)
    return kind, seen[top_tokens(mean, run.readout[seen], min(WORDS, len(seen))).tokens]


def _raise_of(run: Forward, messages: States, tokens: Tensor) -> Float[Tensor, "samples tokens"]:
    """How far each message raises one token, in standard deviations over the vocabulary."""
    spread = ((messages @ run.spread) * messages).sum(-1).clamp(min=1e-20).sqrt()
    return (messages * run.readout[tokens]).sum(-1) / spread


def _tested(
    run: Forward, layer: int, head: int, sentence: _Sentence, generator: torch.Generator
) -> Float[Tensor, "cuts measures samples"]:
    """KL, fall of the logits said and rise of the loss of each passage, for claimed and random edges.

    NaN where a passage has no edges to cut.
    """
    claimed = _claimed(sentence.job, sentence.kinds, run.tokens)
    pair = cuts.matched(claimed, sentence.job == "sink", generator)
    weights = run.layer(layer)[1]
    strongest = (weights[:, head] * pair[0]).argmax(-1)
    senders = run.tokens.gather(1, strongest).unsqueeze(-1)
    words = sentence.words.expand(*run.tokens.shape, -1) if sentence.said == "words" else senders
    measured = torch.stack([cuts.measured(run, layer, head, cut, words) for cut in pair])
    if sentence.job == "sink":
        measured[:, 1] = -cuts.lengths(run.messages(layer, head), pair)
    elif sentence.said == "against":
        measured[:, 1] = -measured[:, 1]
    return measured.masked_fill(~pair[0].any((1, 2)), torch.nan)


def _rows(
    chosen: Sequence[tuple[int, int]], tests: Sequence[tuple[_Sentence, Tensor]], word: Callable[[int], str]
) -> list[Reading]:
    measured = torch.stack([numbers for _, numbers in tests]).double()
    differences = measured[:, 0] - measured[:, 1]
    p = [[signs.flip_test(of_measure) for of_measure in of_head] for of_head in differences]
    # The loss is shown, not claimed: its p-values are a family of their own.
    looks, said, loss = zip(*p, strict=True)
    claims = signs.holm([*looks, *said])
    holm = zip(claims[: len(p)], claims[len(p) :], signs.holm(loss), strict=True)
    means = measured.nanmean(-1).mT.tolist()
    effects = [
        [Effect(pair[0], pair[1], raw, corrected) for pair, raw, corrected in zip(*parts, strict=True)]
        for parts in zip(means, p, holm, strict=True)
    ]
    counts = (~measured[:, 0, 0].isnan()).sum(-1).tolist()
    rows = zip(chosen, (sentence for sentence, _ in tests), effects, counts, strict=True)
    return [_worded(*row, word) for row in rows]


def _worded(
    place: tuple[int, int], sentence: _Sentence, effects: list[Effect], count: int, word: Callable[[int], str]
) -> Reading:
    tokens = sentence.kinds, sentence.receivers, sentence.words
    senders, receivers, raised = (tuple(word(int(token)) for token in some) for some in tokens)
    known = jobs.JOBS.get(sentence.job)
    by_tokens = f"tokens such as {_listed(senders)} (most when at {_listed(receivers)})"
    says = {"copy": "that token itself", "against": "anything but that token", "words": _listed(raised)}
    looks, said, loss = effects
    return Reading(
        layer=place[0],
        head=place[1],
        job=sentence.job,
        looks_for=by_tokens if known is None else known.looks_for,
        says="next to nothing" if sentence.job == "sink" else says[sentence.said],
        looks=looks,
        said=said,
        loss=loss,
        passages=count,
        rests=sentence.rests,
        share=sentence.share,
        distance=sentence.distance,
        senders=senders,
        receivers=receivers,
        raised=raised,
    )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words))


def _chosen(stack: Stack, heads: Iterable[tuple[int, int]] | None) -> list[tuple[int, int]]:
    counts = [layer.attention.heads.num_heads for layer in stack.layers]
    every = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
    if heads is None:
        return every
    chosen = sorted({(int(layer), int(head)) for layer, head in heads})
    if unknown := [pair for pair in chosen if pair not in every]:
        sizes = f"{len(counts)} layers of {counts[0]} heads"
        raise IndexError(f"heads must be pairs (layer, head) of {sizes}, got {unknown[0]}")
    if not chosen:
        raise ValueError("heads must be at least one pair (layer, head), got none")
    return chosen


def _check(tokens: object) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2:
        raise TypeError(f"tokens must be passages [samples, T] of int64, got {checks.quote(tokens)}")
    if len(tokens) < 2 or tokens.shape[1] < 3:
        raise ValueError(f"tokens must be 2 passages of 3 tokens at least, got {list(tokens.shape)}")
