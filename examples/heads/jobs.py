"""The jobs of heads, each as the edges that a head with this job uses, and the choice of a head's job."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from gnn_attention import patterns
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.circuits.templates import Template, duplicate_token, induction, previous_token

WINDOW = 4
TOKENS, NONE = "certain tokens", "none of these"
# A head is a sink if it gives this share of its attention to the first token,
SINK_SHARE = 0.9
# or this share, and no other job fits.
WEAK_SINK_SHARE = 0.6
# A job needs this share of the remaining attention; a local window, with its many edges, needs more.
JOB_SHARE = 0.4
WINDOW_SHARE = 0.7
# A job's share must be this many times the share that equal weights would give.
MIN_LIFT = 2.0


class Job(NamedTuple):
    """The edges of a job, and a phrase that says what a head with this job looks for."""

    template: Template
    looks_for: str


def at_distances(first: int, last: int) -> Template:
    """Return the template of the edges with ``first <= dst - src <= last``.

    >>> at_distances(2, 2)(torch.tensor([7, 8, 9, 7])).edge_index.tolist()
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
    "two back": Job(at_distances(2, 2), "the token two before"),
    "duplicate token": Job(duplicate_token, "earlier occurrences of its own token"),
    "induction": Job(induction, "what followed earlier occurrences of its own token"),
    "local window": Job(at_distances(1, WINDOW), f"any of the {WINDOW} tokens before"),
}


class Match(NamedTuple):
    """The share of a head's attention on some edges, without the first token, and that of equal weights."""

    share: float
    chance: float

    @property
    def lift(self) -> float:
        return self.share / self.chance if self.chance else 0.0


def claimed_edges(name: str, tokens: Int[Tensor, "samples tokens"]) -> Bool[Tensor, "samples dst src"]:
    """Return the causal edges of a job as a mask; only a sink has edges from the first token."""
    samples, length = tokens.shape
    mask = JOBS[name].template(tokens).mask(tokens.device).reshape(-1, length, length).tril()
    mask = mask.expand(samples, -1, -1)
    return mask if name == "sink" else _without_first(mask)


def edges_to(kinds: Int[Tensor, " kinds"], tokens: Int[Tensor, "samples tokens"]) -> Tensor:
    """Return the causal edges from the tokens in ``kinds`` as a mask, without those from the first token."""
    senders = torch.isin(tokens, kinds).unsqueeze(1)
    return _without_first(senders.expand(-1, tokens.shape[1], -1).tril())


def match(weights: Float[Tensor, "samples dst src"], claimed: Bool[Tensor, "samples dst src"]) -> Match:
    """Compare the attention on the claimed edges with that on all edges but those from the first token.

    Only receivers that have both claimed and other edges are counted.
    """
    candidates = _without_first(torch.ones_like(claimed).tril())
    receivers = claimed.any(-1) & (candidates & ~claimed).any(-1)
    claimed_weight, weight = ((weights * edges).sum(-1)[receivers].sum() for edges in (claimed, candidates))
    chance = (claimed.sum(-1) / candidates.sum(-1).clamp(min=1))[receivers]
    if not len(chance):
        return Match(0.0, 1.0)
    return Match(float(claimed_weight / weight.clamp(min=1e-9)), float(chance.mean()))


def first_token_share(weights: Float[Tensor, "samples dst src"]) -> float:
    """Return the mean weight of the first token over all receivers after it."""
    return float(weights[:, 1:, 0].mean())


def choose_job(first_share: float, matches: Mapping[str, Match], token_match: Match) -> str:
    """Return the job that fits a head's weights: one of ``JOBS``, ``TOKENS`` or ``NONE``.

    A head that gives ``SINK_SHARE`` of its attention to the first token is a sink. Any other head has the job
    with the largest share of its remaining attention, if this share and its lift are large enough.
    """
    if first_share >= SINK_SHARE:
        return "sink"
    shares = {name: match.share for name, match in matches.items() if match.lift >= MIN_LIFT}
    narrow = {name: share for name, share in shares.items() if name not in ("sink", "local window")}
    best = max(narrow, key=lambda name: narrow[name], default=None)
    if best is not None and narrow[best] >= JOB_SHARE:
        return best
    if shares.get("local window", 0.0) >= WINDOW_SHARE:
        return "local window"
    if token_match.share >= JOB_SHARE and token_match.lift >= MIN_LIFT:
        return TOKENS
    return "sink" if first_share >= WEAK_SINK_SHARE else NONE


def _without_first(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[..., 0] = False
    return mask
