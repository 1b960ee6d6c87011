"""Jobs of heads, as edges that a head with that job would use, and which job a head's weights look like."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from gnn_attention import patterns
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.circuits.templates import Template, duplicate_token, induction, previous_token

NEAR = 4
TOKENS, NONE = "certain tokens", "none of these"
# Shares of a head's attention: of all of it for a head that rests, of what does not rest for the others.
RESTING, MOSTLY_RESTING, ENOUGH, NEARLY_ALL = 0.9, 0.6, 0.4, 0.7
# A job must have this many times what equal weights over the same senders would give.
LIFT = 2.0


class Job(NamedTuple):
    """A template, and what a head of this job looks for, in words."""

    template: Template
    looks_for: str


def back(first: int, last: int) -> Template:
    """Each token attends to those before it at some distances: ``first <= dst - src <= last``.

    >>> back(2, 2)(torch.tensor([7, 8, 9, 7])).edge_index.tolist()
    [[0, 1], [2, 3]]
    """
    return lambda tokens: (
        patterns.window(tokens.shape[-1], last + 1) - patterns.window(tokens.shape[-1], first)
    )


JOBS: Mapping[str, Job] = {
    "sink": Job(
        lambda tokens: patterns.sinks(tokens.shape[-1], 1) - patterns.window(tokens.shape[-1], 1),
        "the first token, whatever it is",
    ),
    "self": Job(lambda tokens: patterns.window(tokens.shape[-1], 1), "itself"),
    "previous token": Job(previous_token, "the token just before"),
    "two back": Job(back(2, 2), "the token two before"),
    "duplicate token": Job(duplicate_token, "earlier occurrences of its own token"),
    "induction": Job(induction, "what followed earlier occurrences of its own token"),
    "local window": Job(back(1, NEAR), f"any of the {NEAR} tokens before"),
}


class Match(NamedTuple):
    """How much of a head's attention is on some edges, of what is not on the first token; and by chance."""

    share: float
    chance: float

    @property
    def lift(self) -> float:
        return self.share / self.chance if self.chance else 0.0


def claimed_edges(name: str, tokens: Int[Tensor, "samples tokens"]) -> Bool[Tensor, "samples dst src"]:
    """The edges of a job as a mask, causal; those of the first token belong to sinks alone."""
    samples, length = tokens.shape
    mask = JOBS[name].template(tokens).mask(tokens.device).reshape(-1, length, length)
    mask = (mask & _causal(tokens)).expand(samples, -1, -1).clone()
    return mask if name == "sink" else _without_first(mask)


def edges_to(kinds: Int[Tensor, " kinds"], tokens: Int[Tensor, "samples tokens"]) -> Tensor:
    """The causal edges from tokens of some kinds, as a mask; none from the first token."""
    senders = torch.isin(tokens, kinds).unsqueeze(1)
    return _without_first(senders & _causal(tokens))


def match_of(weights: Float[Tensor, "samples dst src"], claimed: Bool[Tensor, "samples dst src"]) -> Match:
    """The share of attention on the claimed edges, of receivers that have some; the first token left out."""
    has_some = claimed.any(-1)
    free = _without_first(torch.ones_like(claimed).tril())
    able = has_some & (free & ~claimed).any(-1)
    on_claimed, on_free = ((weights * edges).sum(-1)[able].sum() for edges in (claimed, free))
    by_chance = (claimed.sum(-1) / free.sum(-1).clamp(min=1))[able]
    if not len(by_chance):
        return Match(0.0, 1.0)
    return Match(float(on_claimed / on_free.clamp(min=1e-9)), float(by_chance.mean()))


def rest(weights: Float[Tensor, "samples dst src"]) -> float:
    """The share of attention on the first token, of all receivers but the first."""
    return float(weights[:, 1:, 0].mean())


def job_of(resting: float, matches: Mapping[str, Match], by_tokens: Match) -> str:
    """The job that a head's weights look like: one of ``JOBS``, ``TOKENS`` or ``NONE``.

    A head that gives ``RESTING`` of its attention to the first token is a sink. Of the others the job with
    the largest share of what does not rest, if that is ``ENOUGH`` and ``LIFT`` times what chance would give.
    """
    if resting >= RESTING:
        return "sink"
    fitting = {name: match for name, match in matches.items() if match.lift >= LIFT}
    narrow = {name: match.share for name, match in fitting.items() if name not in ("sink", "local window")}
    best = max(narrow, key=lambda name: narrow[name], default=None)
    if best is not None and narrow[best] >= ENOUGH:
        return best
    if "local window" in fitting and fitting["local window"].share >= NEARLY_ALL:
        return "local window"
    if by_tokens.share >= ENOUGH and by_tokens.lift >= LIFT:
        return TOKENS
    return "sink" if resting >= MOSTLY_RESTING else NONE


def _causal(tokens: Tensor) -> Bool[Tensor, "dst src"]:
    length = tokens.shape[-1]
    return torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()


def _without_first(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[..., 0] = False
    return mask
