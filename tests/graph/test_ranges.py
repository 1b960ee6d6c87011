"""A rule that is evaluated on ranges, by interval arithmetic, never gives a wrong answer."""

import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_attention import TokenGraph, patterns
from gnn_attention.graph.edges import RuleEdges
from gnn_attention.graph.intervals import arithmetic
from gnn_attention.graph.intervals.values import ANYTHING, DIFFERENCE, DST, SRC, Box

TABLE = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3])
SORTED = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5])
FLAGS = TABLE % 2 == 0
N = len(TABLE)

# In these expressions, a and b are dst, src or expressions of both.
NUMBERS = [
    "{a} + {b}",
    "{a} - {b}",
    "7 - {a}",
    "{a} * {b}",
    "-3 * {a}",
    "{a} // 3",
    "torch.div({a}, 4, rounding_mode='floor')",
    "{a} // ({b}.abs() + 1)",
    "{a} % 4",
    "{a} % ({b}.abs() + 1)",
    "({a} - {b}).abs()",
    "-{a}",
    "torch.minimum({a}, {b})",
    "torch.maximum({a}, {b})",
    "{a}.clamp(2, 9)",
    "({a} >> 1) + ({b} << 1)",
    "{a}.abs() ^ {b}.abs()",
    "torch.where({a} <= {b}, {a}, {b} * 2)",
    "TABLE[{a}.clamp(0, N - 1)]",
    "TABLE[({a} % N) - 2]",
    "SORTED[{b}.clamp(0, N - 1)]",
    "TABLE.view(4, 4)[{a}.clamp(0, 3) * 0 + 1, {b}.clamp(0, 3)]",
    "torch.searchsorted(SORTED, {a})",
    "torch.full_like({a}, 5) + torch.zeros_like({b})",
    "{a} + torch.tensor(2)",
]
TRUTHS = [
    "{a} < {b}",
    "{a} <= {b}",
    "{a} > 3",
    "{b} <= 4",
    "{a} == {b}",
    "{a} != {b}",
    "FLAGS[{a}.clamp(0, N - 1)]",
    "{a}.new_ones((), dtype=torch.bool) & ({a} < {b}).to(torch.bool)",
    "torch.ones_like({a}, dtype=torch.bool) & ({b} == {b})",
]
LOGIC = ["{a} & {b}", "{a} | {b}", "{a} ^ {b}", "~{a}", "{a} == {b}", "torch.where({a}, {b}, ~{b})"]
LOGIC.append("torch.logical_and({a}, torch.logical_not({b}))")


def expressions(templates, operands):
    """Draw an operator of two operands as Python text."""
    operation = st.tuples(st.sampled_from(templates), operands, operands)
    return operation.map(lambda parts: f"({parts[0].format(a=parts[1], b=parts[2])})")


TOKENS = st.sampled_from(["dst", "src"])
NUMBER = st.recursive(TOKENS, lambda operands: expressions(NUMBERS, operands), max_leaves=4)
RULE = st.recursive(expressions(TRUTHS, NUMBER), lambda operands: expressions(LOGIC, operands), max_leaves=4)


def evaluate(rule, box):
    b, h = arithmetic.constant(box, 0), arithmetic.constant(box, 0)
    return RuleEdges(rule).boxes(b, h, *arithmetic.token_ranges(box))


def boxes(*corners):
    """Build boxes from ``(dst_low, dst_high, src_low, src_high)``."""
    return Box(*(torch.tensor(column) for column in zip(*corners, strict=True)))


ALL_CORNERS = [
    (top, top + size - 1, left, left + size - 1)
    for size in (1, 2, 4, 8, 16)
    for top in range(0, N, size)
    for left in range(0, N, size)
]

BYTES = torch.tensor([0, 3, 5, 250, 255, 7, 130, 200, 1, 1, 90, 100, 254, 2, 128, 127], dtype=torch.uint8)
INTS = torch.tensor(
    [2**31 - 1, -(2**31), 5, 0, 7, -1, 2**30, 3, 9, 2**31 - 2, 1, 1, 6, -9, 4, 2], dtype=torch.int32
)
LARGE = 6364136223846793005
OVERFLOWS = [
    "dst * LARGE > src",
    "(TABLE * LARGE)[dst] * TABLE[src] > 0",
    "(dst << 60) > src",
    "BYTES[dst] - BYTES[src] > 3",
    "INTS[dst] + torch.tensor(2**40) > src",
    "INTS[dst] > INTS[src]",
    "(100 * dst).to(torch.uint8) >= src",
    "dst.to(torch.bool) > src.to(torch.bool)",
    "(dst + 2**24).to(torch.float32) <= (src + 2**24).to(torch.float32)",
    "torch.ones_like(dst, dtype=torch.uint8) - 2 > src",
    "(src <= dst).where(src > 3, dst == src + 5)",
]


def check_answers(text, corners=ALL_CORNERS):
    """Compare the answer for every box of a 16 x 16 mask with all of its pairs."""
    rule = eval(f"lambda b, h, dst, src: {text}", globals())
    tokens = torch.arange(N)
    mask = rule(0, 0, tokens.view(-1, 1), tokens).expand(N, N)
    answer = evaluate(rule, boxes(*corners))
    for i, corner in enumerate(corners):
        check_answer(answer, i, mask, corner, text)


def check_answer(answer, i, mask, corner, description):
    top, bottom, left, right = corner
    edges = mask[top : bottom + 1, left : right + 1]
    assert bool(answer.any_true[i]) or not edges.any(), description
    assert not bool(answer.all_true[i]) or edges.all(), description
    gap = torch.arange(top, bottom + 1).view(-1, 1) - torch.arange(left, right + 1)
    if answer.axes[i] == 0:
        assert edges.all() or not edges.any(), description
    elif answer.axes[i] == DST:
        assert (edges == edges[:, :1]).all(), description
    elif answer.axes[i] == SRC:
        assert (edges == edges[:1]).all(), description
    elif answer.axes[i] == DIFFERENCE:
        assert all(len(set(edges[gap == k].tolist())) == 1 for k in gap.unique()), description


class TestSound:
    @pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
    def test_no_answer_is_wrong(self, count):
        settings(max_examples=count, deadline=None)(given(RULE)(lambda text: check_answers(text)))()

    @pytest.mark.parametrize("text", [*TRUTHS, *(f"{number} <= {n}" for number in NUMBERS for n in (-20, 5))])
    def test_each_operator(self, text):
        check_answers(text.format(a="dst", b="src"))

    @pytest.mark.parametrize("text", OVERFLOWS)
    def test_where_numbers_end(self, text):
        """Integers overflow in torch, each dtype at its own limits."""
        # Boxes that are evaluated together are refused together.
        for size in (1, 4, 16):
            check_answers(text, [corner for corner in ALL_CORNERS if corner[1] - corner[0] + 1 == size])


class TestUnknown:
    """A rule that ranges do not support has an unknown answer, not a wrong one."""

    def test_one_unknown_operand_leaves_the_other(self):
        """In ``odd & window`` the pairs that the window excludes stay excluded."""

        def odd(b, h, dst, src):
            return torch.sin((dst + src).double()) > 0

        answer = evaluate(odd, boxes((32, 39, 0, 7)))
        assert (bool(answer.any_true), bool(answer.all_true), int(answer.axes)) == (True, False, ANYTHING)
        graph = TokenGraph.from_rule(odd, 64) & patterns.window(64, 8)
        assert not bool(evaluate(graph.edges.contains, boxes((32, 39, 0, 7))).any_true)
        assert bool(evaluate(graph.rule, boxes((32, 39, 32, 39))).any_true)

    @pytest.mark.parametrize(
        "rule",
        [
            lambda b, h, dst, src: dst < 3 if dst > src else dst > 3,
            lambda b, h, dst, src: dst.float() < src.float(),
            lambda b, h, dst, src: dst % (src - 3) == 0,
            lambda b, h, dst, src: dst + src,
            lambda b, h, dst, src: dst[0] < src,
            lambda b, h, dst, src: TABLE.view(4, 4)[dst % 4, src % 4] > 3,
            lambda b, h, dst, src: (dst < 3) * 2 > src,
            lambda b, h, dst, src: 1 / 0,
        ],
    )
    def test_unknown(self, rule):
        answer = evaluate(rule, boxes((0, 7, 0, 7)))
        assert (bool(answer.any_true), bool(answer.all_true), int(answer.axes)) == (True, False, ANYTHING)


class TestInPlace:
    """``|=``, ``&=`` and ``^=`` change the object, as they change a tensor."""

    @pytest.mark.parametrize("update", [operator.ior, operator.iand, operator.ixor])
    def test_all_names_see_it(self, update):
        def rule(b, h, dst, src):
            first = src <= dst
            update(first, src < 9)
            return first

        graph = TokenGraph.from_rule(rule, 600)
        assert graph.num_edges == int(graph.mask().sum()) != patterns.causal(600).num_edges

    def test_numbers_that_change_in_place_are_unknown(self):
        def rule(b, h, dst, src):
            gap = dst - src
            alias = gap
            alias += 3
            return gap == 0

        graph = TokenGraph.from_rule(rule, 600)
        assert graph.num_edges == int(graph.mask().sum()) == 597


class TestTables:
    @pytest.mark.parametrize("kind", ["tensor", "array"])
    def test_a_table_that_is_overwritten(self, kind):
        """Tables may be buffers that every batch overwrites."""
        array = np.zeros(1200, dtype=np.int64)
        table = torch.from_numpy(array) if kind == "array" else torch.zeros(1200, dtype=torch.int64)

        def rule(b, h, dst, src):
            return table[dst] == table[src]

        assert TokenGraph.from_rule(rule, 1200).num_edges == 1200**2
        (array if kind == "array" else table)[600:] = 1
        assert TokenGraph.from_rule(rule, 1200).num_edges == 2 * 600**2
