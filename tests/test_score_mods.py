"""What an edge adds to its logit: each score_mod against its formula written with plain numbers, and through
every kernel.
"""

from __future__ import annotations

import copy
import math
import pickle
from itertools import product

import pytest
import torch
from support.bounds import assert_exact
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import gnn_attention as ga
from gnn_attention import convert, patterns, score_mods

HEADS, NUM_DST, NUM_SRC = 4, 9, 11


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


SLOPES = score_mods.alibi_slopes(HEADS)
COUNTS = torch.arange(1.0, NUM_SRC + 1)
PAIRS = seeded(NUM_DST, NUM_SRC).abs() + 0.1
TABLE = seeded(HEADS, 7, seed=1)


def learned() -> score_mods.RelativeBias:
    module = score_mods.RelativeBias(HEADS, 3)
    module.load_state_dict({"table": TABLE.float()})
    return module


# name -> (score_mod, its formula for one edge: (score, h, dst, src) -> score)
MODS = {
    "alibi": (score_mods.alibi(SLOPES), lambda s, h, i, j: s - 2.0 ** (-2 * (h + 1)) * abs(i - j)),
    "softcap": (score_mods.softcap(1.5), lambda s, h, i, j: 1.5 * math.tanh(s / 1.5)),
    "log_multiplicity of senders": (
        score_mods.log_multiplicity(COUNTS),
        lambda s, h, i, j: s + math.log(j + 1),
    ),
    "log_multiplicity of pairs": (
        score_mods.log_multiplicity(PAIRS),
        lambda s, h, i, j: s + math.log(PAIRS[i, j]),
    ),
    "relative_bias": (
        score_mods.relative_bias(TABLE),
        lambda s, h, i, j: s + float(TABLE[h, 3 + max(-3, min(3, i - j))]),
    ),
    "RelativeBias": (learned(), lambda s, h, i, j: s + float(TABLE.float()[h, 3 + max(-3, min(3, i - j))])),
    "chain": (
        score_mods.chain(score_mods.softcap(0.5), score_mods.alibi(SLOPES)),
        lambda s, h, i, j: 0.5 * math.tanh(s / 0.5) - 2.0 ** (-2 * (h + 1)) * abs(i - j),
    ),
    "chain of nothing": (score_mods.chain(), lambda s, h, i, j: s),
}
each_mod = pytest.mark.parametrize(("mod", "formula"), MODS.values(), ids=MODS)


class TestFormulas:
    @each_mod
    def test_on_a_grid(self, mod, formula):
        """Every (b, h, dst, src), both sides of the receiver."""
        score = 2 * seeded(2, HEADS, NUM_DST, NUM_SRC, seed=2)
        b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(HEADS).view(1, -1, 1, 1)
        result = mod(score, b, h, torch.arange(NUM_DST).view(-1, 1), torch.arange(NUM_SRC)).detach()
        assert result.shape == score.shape
        assert result.dtype == score.dtype
        places = product(range(2), range(HEADS), range(NUM_DST), range(NUM_SRC))
        expected = [formula(float(score[place]), *place[1:]) for place in places]
        assert_exact(result, torch.tensor(expected, dtype=torch.float64).view_as(score))

    @each_mod
    @pytest.mark.parametrize("backend", ["dense", "reference"])
    def test_through_attend(self, mod, formula, backend):
        """Softmax over the in-edges of the changed scores, receiver by receiver."""
        graph = patterns.cross(NUM_DST, NUM_SRC) & convert.from_mask(seeded(NUM_DST, NUM_SRC, seed=9) > 0.3)
        q, k = seeded(1, HEADS, NUM_DST, 4), seeded(1, HEADS, NUM_SRC, 4, seed=1)
        v = seeded(1, HEADS, NUM_SRC, 3, seed=2)
        out = ga.attend(q, k, v, graph, score_mod=mod, backend=backend)
        mask = graph.mask()
        for head, dst in product(range(HEADS), range(NUM_DST)):
            senders = [src for src in range(NUM_SRC) if mask[dst, src]]
            logits = [
                formula(float(q[0, head, dst] @ k[0, head, src]) / 2, head, dst, src) for src in senders
            ]
            weights = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0)
            expected = sum(
                (w * v[0, head, src] for w, src in zip(weights, senders, strict=True)),
                torch.zeros(3).double(),
            )
            assert_exact(out[0, head, dst], expected)

    @each_mod
    def test_in_eager_flex_attention(self, mod, formula, monkeypatch):
        # not traced anew in each call
        monkeypatch.setattr(
            "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False
        )
        graph = patterns.cross(NUM_DST, NUM_SRC) & convert.from_mask(seeded(NUM_DST, NUM_SRC, seed=9) > 0.3)
        q, k, v = (seeded(2, HEADS, n, 16, seed=n) for n in (NUM_DST, NUM_SRC, NUM_SRC))
        with torch.no_grad():
            theirs = flex_attention(q, k, v, score_mod=mod, block_mask=convert.to_block_mask(graph, 4))
            ours = ga.attend(q, k, v, graph, score_mod=mod, backend="reference")
        assert_exact(ours, theirs)

    @each_mod
    @pytest.mark.parametrize(
        "again", [copy.deepcopy, lambda mod: pickle.loads(pickle.dumps(mod))], ids=["deepcopy", "pickle"]
    )
    def test_copies(self, mod, formula, again):
        zero, h, dst, src = torch.tensor(0), torch.tensor(1), torch.tensor(2), torch.tensor(8)
        score = torch.tensor(0.7, dtype=torch.float64)
        copied = again(mod)
        assert type(copied) is type(mod)
        assert torch.equal(copied(score, zero, h, dst, src), mod(score, zero, h, dst, src))

    @each_mod
    def test_gradients_reach_the_score(self, mod, formula):
        score = seeded(1, HEADS, 3).requires_grad_()
        dst, src = torch.tensor([0, 4, 8]), torch.tensor([1, 4, 2])
        head = torch.arange(HEADS).view(1, -1, 1)
        assert torch.autograd.gradcheck(lambda x: mod(x, torch.zeros_like(head), head, dst, src), [score])


class TestAlibi:
    @pytest.mark.parametrize(
        ("num_heads", "exponents"),
        [
            (1, [8]),
            (2, [4, 8]),
            (8, [1, 2, 3, 4, 5, 6, 7, 8]),
            (16, [i / 2 for i in range(1, 17)]),
            (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
            (3, [4, 8, 2]),
            (6, [2, 4, 6, 8, 1, 3]),
        ],
    )
    def test_slopes(self, num_heads, exponents):
        """The paper's sequence for powers of two."""
        slopes = score_mods.alibi_slopes(num_heads)
        assert len(slopes) == num_heads
        for slope, exponent in zip(slopes, exponents, strict=True):
            assert_exact(slope, 2.0**-exponent)

    @pytest.mark.parametrize(
        ("num_heads", "error"), [(0, ValueError), (-4, ValueError), (2.0, TypeError), (True, TypeError)]
    )
    def test_wrong_numbers_of_heads(self, num_heads, error):
        with pytest.raises(error, match="num_heads must be"):
            score_mods.alibi_slopes(num_heads)

    def test_values_are_compared_by_content(self):
        assert score_mods.alibi((0.5, 0.25)) == score_mods.alibi((0.5, 0.25)) != score_mods.alibi((0.5, 0.5))
        assert hash(score_mods.alibi((0.5,))) == hash(score_mods.alibi((0.5,)))
        assert score_mods.softcap(2.0) == score_mods.softcap(2.0) != score_mods.softcap(3.0)


class TestSoftcap:
    @pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, math.inf])
    def test_wrong_caps(self, cap):
        with pytest.raises(ValueError, match="cap must be"):
            score_mods.softcap(cap)

    def test_bounds_and_slope(self):
        """Within (-cap, cap), odd, and of slope 1 at 0."""

        def bend(x):
            return float(
                score_mods.softcap(3.0)(torch.tensor(x, dtype=torch.float64), *[torch.tensor(0)] * 4)
            )

        assert bend(1e6) == 3.0
        assert bend(-1e6) == -3.0
        assert bend(0.0) == 0.0
        assert bend(-1.2) == -bend(1.2)
        assert_exact(bend(1e-6), 1e-6)  # 3 tanh(x / 3) = x - x^3 / 27: less by 4e-14 of it


class TestHash:
    """Dynamo asks for the hash of a value that it makes before it has filled the fields."""

    @pytest.mark.parametrize("mod", [score_mods.softcap(2.0), score_mods.alibi((0.5, 0.25))])
    def test_of_equal_and_of_unfilled_values(self, mod):
        same = type(mod)(*vars(mod).values())
        assert hash(mod) == hash(same)
        assert {mod: "found"}[same] == "found"
        assert isinstance(hash(object.__new__(type(mod))), int)

    @pytest.mark.slow
    @pytest.mark.parametrize("make", [lambda: score_mods.softcap(2.0), lambda: score_mods.alibi((0.5, 0.25))])
    def test_made_in_a_compiled_function(self, make):
        torch.compiler.reset()
        x, graph = torch.randn(1, 2, 5, 4, dtype=torch.float64), patterns.causal(5)
        compiled = torch.compile(
            lambda x: ga.attend(x, x, x, graph, score_mod=make()), fullgraph=True, backend="eager"
        )
        assert_exact(compiled(x), ga.attend(x, x, x, graph, score_mod=make()))


class TestLogMultiplicity:
    @pytest.mark.parametrize("backend", ["dense", "reference"])
    def test_a_sender_that_counts_m_times_is_m_senders(self, backend):
        multiplicity = torch.tensor([3, 1, 2])
        q, k, v = seeded(1, 2, 4, 4), seeded(1, 2, 3, 4, seed=1), seeded(1, 2, 3, 4, seed=2)
        many = [x.repeat_interleave(multiplicity, dim=2) for x in (k, v)]
        expected = ga.attend(q, *many, patterns.cross(4, 6), backend=backend)
        mod = score_mods.log_multiplicity(multiplicity)
        assert_exact(ga.attend(q, k, v, patterns.cross(4, 3), score_mod=mod, backend=backend), expected)

    def test_multiplicity_zero_is_no_edge(self):
        q, k, v = seeded(1, 2, 4, 4), seeded(1, 2, 3, 4, seed=1), seeded(1, 2, 3, 4, seed=2)
        mod = score_mods.log_multiplicity(torch.tensor([1.0, 0.0, 1.0]))
        expected = ga.attend(
            q, k, v, patterns.cross(4, 3) - convert.from_mask(torch.tensor([[False, True, False]] * 4))
        )
        for backend in ("dense", "reference"):
            assert_exact(ga.attend(q, k, v, patterns.cross(4, 3), score_mod=mod, backend=backend), expected)

    @pytest.mark.parametrize("shape", [(), (2, 3, 4)])
    def test_wrong_shapes(self, shape):
        with pytest.raises(ValueError, match="multiplicity must be"):
            score_mods.log_multiplicity(torch.ones(shape))


class TestRelativeBias:
    def test_both_directions(self):
        """Column = dst - src, the middle one is distance 0; beyond the reach the last column of that side."""
        mod = score_mods.relative_bias(torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]]))
        zero = torch.tensor(0)
        for dst, src in product(range(6), range(6)):
            value = float(mod(torch.tensor(0.0), zero, zero, torch.tensor(dst), torch.tensor(src)))
            assert value == max(-2, min(2, dst - src))

    @pytest.mark.parametrize("shape", [(2, 4), (2, 0), (3,), (1, 2, 3)])
    def test_wrong_tables(self, shape):
        with pytest.raises(ValueError, match=r"table must be .*2 \* reach \+ 1"):
            score_mods.relative_bias(torch.zeros(shape))

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ((0, 2), ValueError, "num_heads must be at least 1, got 0"),
            ((2, -1), ValueError, "reach must be at least 0, got -1"),
            ((2, 1.5), TypeError, "reach must be an integer, got 1.5"),
        ],
    )
    def test_wrong_sizes(self, arguments, error, match):
        with pytest.raises(error, match=match):
            score_mods.RelativeBias(*arguments)

    def test_the_learned_one_starts_at_zero_and_learns(self):
        module = score_mods.RelativeBias(2, 1).double()
        assert module.table.shape == (2, 3)
        assert not module.table.any()
        q, k, v = (seeded(1, 2, 5, 4, seed=seed) for seed in range(3))
        plain = ga.attend(q, k, v, patterns.causal(5))
        out = ga.attend(q, k, v, patterns.causal(5), score_mod=module)
        assert_exact(out, plain)
        (out * seeded(1, 2, 5, 4, seed=3)).sum().backward()
        assert bool((module.table.grad[:, 0] == 0).all())  # causal: no sender stands after its receiver
        assert bool((module.table.grad[:, 1:] != 0).all())

    def test_reset(self):
        module = score_mods.RelativeBias(2, 1)
        nn.init.ones_(module.table)
        module.reset_parameters()
        assert not module.table.any()


class TestChain:
    def test_a_learned_link_is_trained_with_the_layer(self):
        """A module with the chain has the parameters of its links."""

        class Holder(nn.Module):
            def __init__(self):
                super().__init__()
                self.score_mod = score_mods.chain(score_mods.RelativeBias(2, 1), score_mods.softcap(2.0))

        holder = Holder().double()
        assert [parameter.shape for parameter in holder.parameters()] == [(2, 3)]
        assert all(parameter.dtype == torch.float64 for parameter in holder.parameters())
        assert len(holder.state_dict()) == 1

    def test_links_are_functions(self):
        with pytest.raises(TypeError, match="score_mod"):
            score_mods.chain(score_mods.softcap(2.0), 3)
