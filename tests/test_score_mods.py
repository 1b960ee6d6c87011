"""Each score_mod equals its formula for one edge, written with Python numbers, and runs on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from support.inputs import randn
from support.refusals import assert_errors
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode

import gnn_attention as ga
from gnn_attention import convert, patterns, score_mods

HEADS, NUM_DST, NUM_SRC = 4, 9, 11
IS_NEW_TORCH = TorchVersion(torch.__version__) >= "2.13"
NO_COMPILE = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"

SLOPES = score_mods.alibi_slopes(HEADS)
COUNTS = torch.arange(1.0, NUM_SRC + 1)
PAIRS = randn(NUM_DST, NUM_SRC).abs() + 0.1
TABLE = randn(HEADS, 7, seed=1)


def make_mod() -> score_mods.RelativeBias:
    module = score_mods.RelativeBias(HEADS, 3)
    module.load_state_dict({"table": TABLE.float()})
    return module


# Each name has a score_mod and its formula for one edge, a function (score, h, dst, src) -> score.
MODS = {
    "alibi": (score_mods.alibi(SLOPES), lambda s, h, i, j: s - 2.0 ** (-2 * (h + 1)) * abs(i - j)),
    "softcap": (score_mods.softcap(1.5), lambda s, h, i, j: 1.5 * math.tanh(s / 1.5)),
    "counts of senders": (score_mods.log_multiplicity(COUNTS), lambda s, h, i, j: s + math.log(j + 1)),
    "counts of pairs": (score_mods.log_multiplicity(PAIRS), lambda s, h, i, j: s + math.log(PAIRS[i, j])),
    "relative_bias": (
        score_mods.relative_bias(TABLE),
        lambda s, h, i, j: s + float(TABLE[h, 3 + max(-3, min(3, i - j))]),
    ),
    "RelativeBias": (make_mod(), lambda s, h, i, j: s + float(TABLE.float()[h, 3 + max(-3, min(3, i - j))])),
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
        """The formula holds at all (b, h, dst, src), with senders on both sides of receivers."""
        score = 2 * randn(2, HEADS, NUM_DST, NUM_SRC, seed=2)
        b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(HEADS).view(1, -1, 1, 1)
        result = mod(score, b, h, torch.arange(NUM_DST).view(-1, 1), torch.arange(NUM_SRC)).detach()
        assert result.shape == score.shape
        assert result.dtype == score.dtype
        indices = product(range(2), range(HEADS), range(NUM_DST), range(NUM_SRC))
        expected = [formula(float(score[index]), *index[1:]) for index in indices]
        assert_exact(result, torch.tensor(expected, dtype=torch.float64).view_as(score))

    @each_mod
    def test_in_eager_flex_attention(self, mod, formula, monkeypatch):
        # Otherwise FlexAttention traces the score_mod again in every call.
        monkeypatch.setattr(NO_COMPILE, True, raising=False)
        graph = patterns.cross(NUM_DST, NUM_SRC) & convert.from_mask(randn(NUM_DST, NUM_SRC, seed=9) > 0.3)
        q, k, v = (randn(2, HEADS, n, 16, seed=n) for n in (NUM_DST, NUM_SRC, NUM_SRC))
        with torch.no_grad():
            theirs = flex_attention(q, k, v, score_mod=mod, block_mask=convert.to_block_mask(graph, 4))
            ours = ga.attend(q, k, v, graph, score_mod=mod, backend="reference")
        assert_exact(ours, theirs)


class TestAlibi:
    def test_slopes(self):
        """Powers of two have the paper's slopes; other numbers add every second slope of the next power."""
        half = [i / 2 for i in range(1, 17)]
        for exponents in ([8], half[1::2], half, [*half[1::2], *half[:8:2]], [2, 4, 6, 8, 1, 3]):
            for slope, exponent in zip(score_mods.alibi_slopes(len(exponents)), exponents, strict=True):
                assert_exact(slope, 2.0**-exponent)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: score_mods.softcap(2.0),
        lambda: score_mods.alibi((0.5, 0.25)),
        lambda: score_mods.chain(score_mods.softcap(2.0), score_mods.alibi((0.5, 0.25))),
    ],
)
def test_made_in_a_compiled_function(make):
    torch.compiler.reset()
    x, graph = torch.randn(1, 2, 5, 4, dtype=torch.float64), patterns.causal(5)
    run = lambda x: ga.attend(x, x, x, graph, score_mod=make())  # noqa: E731
    assert_exact(torch.compile(run, fullgraph=True, backend="eager")(x), run(x))


class TestHash:
    """Score_mods have a hash even without fields, because Dynamo hashes an object before it sets them."""

    @pytest.mark.parametrize("mod", [score_mods.softcap(2.0), score_mods.alibi((0.5, 0.25))])
    def test_equal_and_unfinished_objects(self, mod):
        same = type(mod)(*vars(mod).values())
        assert hash(mod) == hash(same)
        assert {mod: "value"}[same] == "value"
        assert isinstance(hash(object.__new__(type(mod))), int)


class TestRelativeBias:
    def test_it_starts_at_zero_and_is_trained(self):
        module = score_mods.RelativeBias(2, 1).double()
        assert module.table.shape == (2, 3)
        assert not module.table.any()
        q, k, v = (randn(1, 2, 5, 4, seed=seed) for seed in range(3))
        expected = ga.attend(q, k, v, patterns.causal(5))
        out = ga.attend(q, k, v, patterns.causal(5), score_mod=module)
        assert_exact(out, expected)
        (out * randn(1, 2, 5, 4, seed=3)).sum().backward()
        # Causal edges have no later senders.
        assert bool((module.table.grad[:, 0] == 0).all())
        assert bool((module.table.grad[:, 1:] != 0).all())
        nn.init.ones_(module.table)
        module.reset_parameters()
        assert not module.table.any()


ERRORS = r"""
alibi_slopes(0) -> ValueError: num_heads must be at least 1, got 0
alibi(0.5) -> TypeError: slopes must be a list or alibi_slopes
softcap(0.0) -> ValueError: cap must be positive, got 0.0
softcap(True) -> TypeError: cap must be a number, got True
log_multiplicity([1.0]) -> TypeError: multiplicity must be a Tensor, got .* of type list
log_multiplicity(torch.ones(2, 3, 4)) -> ValueError: \[src\] or \[dst, src\], got \[2, 3, 4\]
relative_bias(torch.zeros(2, 4)) -> ValueError: table must be .*2 \* reach \+ 1\], got \[2, 4\]
relative_bias(torch.zeros(2, 3).long()) -> TypeError: table must be a float tensor
RelativeBias(2, 1.5) -> TypeError: reach must be an integer, got 1.5
chain(softcap(2.0), 3) -> TypeError: every link must be a score_mod, got int
"""


def test_wrong_arguments_are_named():
    assert_errors(ERRORS, {**vars(score_mods), "torch": torch})


A, B = randn(2, HEADS, NUM_DST, 3, seed=5), randn(2, HEADS, NUM_SRC, 3, seed=6)


def attention_gym(name: str, *numbers: object) -> Callable[..., Tensor]:
    return lambda *indices: getattr(needs("attn_gym.mods." + name.split(".")[0]), name.split(".")[1])(
        *numbers
    )(*indices)


DISTANCES = torch.arange(2 * NUM_DST * NUM_SRC).view(2, NUM_DST, NUM_SRC) % 5
TYPES = torch.stack([DISTANCES, DISTANCES // 2], -1)
# FlexAttention calls a score_mod with single numbers.
SINGLE_NUMBER_MODS = {
    "a product of vectors": lambda s, b, h, dst, src: s + torch.dot(A[b, h, dst], B[b, h, src]),
    "a sum": lambda s, b, h, dst, src: s + (2 * A[b, h, dst]).sum() * B[b, h, src, 0],
    "in a chain": score_mods.chain(lambda s, b, h, i, j: s + torch.dot(A[b, h, i], B[b, h, j])),
    "mla": attention_gym("latent_attention.generate_mla_rope_score_mod", A, B[:, :1], HEADS, 0.5),
    "graphormer": attention_gym(
        "graphormer.generate_graphormer_edge_bias", randn(HEADS, 2, 5), TYPES, DISTANCES.clamp(max=2)
    ),
    "alibi": attention_gym("alibi.generate_alibi_bias", HEADS),
    "activation": attention_gym("activation.generate_activation_score_mod", torch.nn.functional.softplus),
}


@pytest.mark.parametrize("mod", SINGLE_NUMBER_MODS.values(), ids=SINGLE_NUMBER_MODS)
def test_score_mods_of_single_numbers(mod, monkeypatch):
    """All backends agree with FlexAttention, and their gradients with those of a loop over pairs."""
    monkeypatch.setattr(NO_COMPILE, True)
    rule = lambda b, h, dst, src: (dst - src).abs() < 4  # noqa: E731
    graph = ga.TokenGraph.from_rule(rule, NUM_DST, NUM_SRC)
    q, k, v = inputs = draw_inputs()
    block_mask = create_block_mask(rule, None, None, NUM_DST, NUM_SRC, device="cpu")
    # FlexAttention of torch 2.9 cannot index a table with a mix of tensors, numbers and slices.
    theirs = flex_attention(*inputs, score_mod=mod, block_mask=block_mask) if IS_NEW_TORCH else None
    for x in inputs:
        x.requires_grad_()
    scores = q @ k.mT * 8**-0.5
    pairs = [torch.tensor(pair) for pair in product(*map(range, scores.shape))]
    logits = torch.stack([mod(scores[tuple(pair)], *pair) for pair in pairs]).view(scores.shape)
    expected = logits.masked_fill(~graph.mask(), -torch.inf).softmax(-1) @ v
    if theirs is not None:
        assert_exact(expected, theirs)
    direction = randn(2, HEADS, NUM_DST, 8, seed=3)
    gradients = torch.autograd.grad((expected * direction).sum(), inputs)
    for backend in ("reference", "dense", "tiles", "rows", "auto"):
        out = ga.attend(*inputs, graph, score_mod=mod, backend=backend)
        assert_exact(out, expected)
        grads = torch.autograd.grad((out * direction).sum(), inputs)
        assert_exact(list(grads), list(gradients))


class LowRank(nn.Module):
    """A learned table that is the product of two factors, the second of which starts at zero."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(A[0, 0].clone()), nn.Parameter(torch.zeros_like(B[0, 0]))

    def forward(self, s, b, h, dst, src):
        return s + (self.a[dst] * self.b[src]).sum()


def softmax_with(table, q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5 + table).softmax(-1) @ v


FULL = patterns.cross(NUM_DST, NUM_SRC)


def draw_inputs():
    return [randn(2, HEADS, n, 8, seed=n + i) for i, n in enumerate((NUM_DST, NUM_SRC, NUM_SRC))]


def test_tables_that_start_at_zero():
    """The score_mod is mapped over pairs even while its table is zero, when tensors of indices would do."""
    mod, inputs = LowRank(), draw_inputs()
    for scale in (0.0, 1.0):
        with torch.no_grad():
            mod.b.copy_(scale * B[0, 0])
        out = ga.attend(*inputs, FULL, score_mod=mod)
        assert_exact(out, softmax_with(scale * A[0, 0] @ B[0, 0].mT, *inputs))


def count_flops(call, q):
    with FlopCounterMode(display=False):
        return call(q)


CONTEXTS = {
    "flops": count_flops,
    "vmap": lambda call, q: torch.func.vmap(lambda x: call(x[None])[0])(q),
    "jvp": lambda call, q: torch.func.jvp(call, (q,), (q,))[1],
}


@pytest.mark.parametrize("run", CONTEXTS.values(), ids=CONTEXTS)
def test_score_mods_of_single_numbers_in_modes_and_transforms(run):
    q, k, v = draw_inputs()
    k, v = k[:1].clone(), v[:1].clone()
    mod = lambda s, b, h, dst, src: s + (A[0, 0][dst] * B[0, 0][src]).sum()  # noqa: E731
    table = A[0, 0] @ B[0, 0].mT
    out = run(lambda x: ga.attend(x, k, v, FULL, score_mod=mod), q)
    assert_exact(out, run(lambda x: softmax_with(table, x, k, v), q))


class Products(nn.Module):
    """A score_mod that is a module."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(A[0, 0].clone())

    def forward(self, s, b, h, dst, src):
        return s + torch.dot(self.a[dst], B[0, 0][src])


def add_product_of_tables(s, b, h, dst, src):
    return s + torch.dot(A[0, 0][dst], B[0, 0][src])


def add_product(a, s, b, h, dst, src, *, by):
    return s + torch.dot(a[dst], by[src])


product_by_keyword = partial(add_product, A[0, 0], by=B[0, 0])
PROGRAM_MODS = {
    "function": add_product_of_tables,
    "module": Products(),
    "partial": product_by_keyword,
    "chain of a chain": score_mods.chain(score_mods.chain(product_by_keyword)),
}


class AttentionModule(nn.Module):
    def __init__(self, mod):
        super().__init__()
        self.mod = mod

    def forward(self, q, k, v):
        return ga.attend(q, k, v, FULL, score_mod=self.mod)


@pytest.mark.parametrize("kind", PROGRAM_MODS)
def test_score_mods_of_single_numbers_are_exported(kind):
    """An exported program takes any batch size, also one that eager calls map in several pieces."""
    inputs, module = tuple(draw_inputs()), AttentionModule(PROGRAM_MODS[kind])
    sizes = {0: torch.export.Dim("batch", max=1000)}
    program = torch.export.export(module, inputs, dynamic_shapes=(sizes, sizes, sizes))
    larger_batch = [x.repeat(2, 1, 1, 1) for x in inputs]
    assert_exact(program.module()(*larger_batch), module(*larger_batch))


@pytest.mark.slow
@pytest.mark.skipif(not IS_NEW_TORCH, reason="earlier compilers call it with tensors")
@pytest.mark.parametrize("kind", PROGRAM_MODS)
def test_score_mods_of_single_numbers_are_compiled(kind):
    torch.compiler.reset()
    inputs, module = draw_inputs(), AttentionModule(PROGRAM_MODS[kind])
    program = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_exact(program(*inputs), module(*inputs))
    with pytest.raises(Exception, match=r"strict=True\) cannot map a score_mod over pairs"):
        torch.export.export(module, tuple(inputs), strict=True)


ROW, GRID = randn(NUM_SRC), randn(NUM_SRC, NUM_SRC)
TENSOR_MODS = {
    "tables": lambda s, b, h, dst, src: s.tanh() + ROW[src] * GRID[dst, src] + ROW.max(),
    "blocks": lambda s, b, h, dst, src: torch.where(dst // 2 == src // 2, s, s - 1),
    "vectors": lambda s, b, h, dst, src: s + (GRID[dst] * GRID[src]).sum(-1),
    "a stack": lambda s, b, h, dst, src: torch.stack([s, s + 1], -1).amax(-1),
}


@pytest.mark.parametrize("name", TENSOR_MODS)
def test_score_mods_whose_operators_work_number_by_number_are_called_once(name):
    """Only score_mods that make a vector from a pair are mapped over the pairs."""
    mod, axes = TENSOR_MODS[name], set()

    def counting_mod(s, *indices):
        axes.add(s.dim())
        return mod(s, *indices)

    q, k, v = draw_inputs()
    out = ga.attend(q, k, v, FULL, score_mod=counting_mod, backend="dense")
    assert (0 in axes) == (name in ("vectors", "a stack"))
    pairs = [torch.tensor(pair) for pair in product(*map(range, (2, HEADS, NUM_DST, NUM_SRC)))]
    scores = q @ k.mT * 8**-0.5
    logits = torch.stack([mod(scores[tuple(pair)], *pair) for pair in pairs]).view(scores.shape)
    assert_exact(out, logits.softmax(-1) @ v)


@dataclass(frozen=True, slots=True)
class Shift:
    number: float

    def __call__(self, s, b, h, dst, src):
        return s + self.number * (src == 0)


def test_a_score_mod_without_weak_references():
    q, k, v = draw_inputs()
    out = ga.attend(q, k, v, FULL, score_mod=Shift(2.0))
    assert_exact(out, softmax_with(2.0 * (torch.arange(NUM_SRC) == 0), q, k, v))


def test_random_numbers_of_the_first_call_are_those_of_the_second():
    mod = lambda s, b, h, dst, src: s + torch.rand(s.shape).double()  # noqa: E731
    inputs, results = draw_inputs(), []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(ga.attend(*inputs, FULL, score_mod=mod))
    assert torch.equal(*results)


def test_the_error_of_a_score_mod_is_its_own():
    q = randn(1, HEADS, 5, 8)
    message = "score_mod must be made of tensor operators"
    for mod in (lambda s, b, h, i, j: s if i > j else -s, lambda s, b, h, i, j: s + [0.0, 1.0][j]):
        with pytest.raises(TypeError, match=message):
            ga.attend(q, q, q, patterns.causal(5), score_mod=mod)
    for mod, error in (
        (lambda s, b, h, dst, src: s + A[7, h, dst, 0], IndexError),
        (lambda s, b, h, dst, src: 1 / 0, ZeroDivisionError),
        (lambda s, b, h, dst, src: dst, TypeError),
    ):
        with pytest.raises(error):
            ga.attend(q, q, q, patterns.causal(5), score_mod=mod)
