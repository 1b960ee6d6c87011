"""The difference of two graphs: its numbers against the masks, its words for usual mistakes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_attention import TokenGraph, analyse, patterns


def of_mask(mask):
    dst, src = mask.nonzero(as_tuple=True)
    return TokenGraph.from_edges(torch.stack([src, dst]), mask.shape[0], mask.shape[1])


@st.composite
def masks(draw):
    num_dst, num_src = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    cell = st.lists(st.booleans(), min_size=num_dst * num_src, max_size=num_dst * num_src)
    first, second = (torch.tensor(draw(cell)).view(num_dst, num_src) for _ in range(2))
    later, earlier = torch.zeros_like(first), torch.zeros_like(first)
    later[:, 1:], earlier[:, :-1] = first[:, :-1], first[:, 1:]
    made = [second, ~first, later, earlier, first.flip(0, 1), first.tril(), first.triu()]
    return [first, draw(st.sampled_from(made + [first.T] * (num_dst == num_src)))]


COMPLEMENT = "the second is the complement of the first"
TRANSPOSED = "the second is the first transposed"
LATER, EARLIER = "every sender one token later", "every sender one token earlier"
REVERSED = "the second is the first with the tokens in reverse order"
HALVES = "src <= dst alone", "src >= dst alone"
KINDS = (COMPLEMENT, TRANSPOSED, LATER, EARLIER, REVERSED, "self loops alone", *HALVES)


def kinds(first, second):
    """Which kinds of difference the remarks name."""
    text = "\n".join(analyse.diff(first, second).remarks)
    return {kind for kind in KINDS if kind in text}


class TestNumbers:
    @settings(max_examples=50, deadline=None)
    @given(masks())
    def test_counts_and_first_difference(self, pair):
        a, b = pair
        found = analyse.diff(of_mask(a), of_mask(b))
        assert (found.only_first, found.only_second) == (int((a & ~b).sum()), int((b & ~a).sum()))
        assert found.common == int((a & b).sum())
        assert found.equal == torch.equal(a, b)
        cells = (a ^ b).nonzero().tolist()
        if cells:
            dst, src = cells[0]
            assert (found.example, found.example_in) == ((src, dst), 1 if a[dst, src] else 2)
        else:
            assert (found.example, found.example_in, found.remarks) == (None, None, ())
        assert (found.differing, found.sizes) == ((), None)

    @settings(max_examples=50, deadline=None)
    @given(masks())
    def test_kinds_are_named_exactly_where_they_hold(self, pair):
        a, b = pair
        expected = set()
        if not a.any() or not b.any() or torch.equal(a, b):
            return
        moved = {LATER: torch.zeros_like(a), EARLIER: torch.zeros_like(a)}
        moved[LATER][:, 1:], moved[EARLIER][:, :-1] = a[:, :-1], a[:, 1:]
        moved[COMPLEMENT] = ~a
        if a.shape[0] == a.shape[1]:
            moved |= {TRANSPOSED: a.T, REVERSED: a.flip(0, 1)}
            for word, half in (("src <= dst alone", torch.tril), ("src >= dst alone", torch.triu)):
                expected |= {word} if torch.equal(b, half(a)) or torch.equal(a, half(b)) else set()
        off_diagonal = ~torch.ones_like(a).tril().logical_and(torch.ones_like(a).triu())
        expected |= {"self loops alone"} if not bool(((a ^ b) & off_diagonal).any()) else set()
        expected |= {kind for kind, mask in moved.items() if torch.equal(mask, b)}
        assert kinds(of_mask(a), of_mask(b)) == expected

    @pytest.mark.parametrize(
        ("first", "second", "verdict"),
        [
            (patterns.window(9, 3), patterns.causal(9), "the second contains the first"),
            (patterns.causal(9), patterns.window(9, 3), "the first contains the second"),
            (patterns.window(9, 3), patterns.sinks(9, 2), "neither contains the other"),
            (patterns.strict_causal(9), patterns.window(9, 1), "no edge in common"),
        ],
    )
    def test_verdict(self, first, second, verdict):
        line = str(analyse.diff(first, second)).splitlines()[0]
        assert line == f"{first.name} and {second.name}: {verdict}"


CAUSAL = "with the edges src <= dst alone"


class TestWords:
    @pytest.mark.parametrize(("n", "w"), [(9, 3), (5000, 4096)])
    def test_off_by_one_in_a_window(self, n, w):
        """attention-gym's window of w attends to w + 1."""
        more = f"the second has 1 more sender per receiver from receiver {w} on"
        remarks = analyse.diff(patterns.window(n, w), patterns.window(n, w + 1)).remarks
        assert remarks == (more, f"all differing edges have dst - src = {w}")
        remarks = analyse.diff(patterns.window(n, w + 2), patterns.window(n, w)).remarks
        assert remarks[-1] == f"their dst - src is in {w} .. {w + 1}"

    @pytest.mark.parametrize(
        ("first", "second", "remarks"),
        [
            (
                patterns.window(20, 3),
                patterns.window(20, 3) | patterns.sinks(20, 2),
                ("the second has 2 more senders per receiver from receiver 4 on, fewer from receiver 3 on",),
            ),
            # the fifth token is of another document
            (
                patterns.documents([5, 5]),
                patterns.documents([4, 6]),
                (
                    "the second has 1 more sender per receiver from receiver 5 on",
                    "in the first alone, receivers concerned: 4",
                    "in the first alone, senders concerned: 0, 1, 2, 3",
                    "their dst - src is in 1 .. 5",
                ),
            ),
            (patterns.causal(5), patterns.window(5, 0), ("the second has no edges",)),
            (patterns.window(5, 0), patterns.causal(5), ("the first has no edges",)),
        ],
    )
    def test_first_remarks(self, first, second, remarks):
        assert analyse.diff(first, second).remarks[: len(remarks)] == remarks

    def test_only_one_is_causal(self):
        first, second = patterns.window(10, 3), patterns.window(10, 5, causal=False)
        remark = "the {} is causal, the {} has edges from later tokens (src > dst)"
        assert analyse.diff(first, second).remarks[0] == remark.format("first", "second")
        assert analyse.diff(second, first).remarks[0] == remark.format("second", "first")

    def test_more_everywhere(self):
        """A memory of two tokens to which every token attends."""
        first = patterns.causal(8) - patterns.sinks(8, 2, causal=False)
        second = first | patterns.sinks(8, 2, causal=False)
        assert "the second has 2 more senders per receiver everywhere" in analyse.diff(first, second).remarks
        assert "the first has 2 more senders per receiver everywhere" in analyse.diff(second, first).remarks

    def test_self_loops_are_counted(self):
        remarks = analyse.diff(patterns.full(7), patterns.no_self(7)).remarks
        assert "they differ in self loops alone: the second lacks 7" in remarks

    def test_where_it_differs(self):
        remarks = analyse.diff(patterns.causal(9), patterns.causal(9) - cells(9, [(3, 4), (2, 7)])).remarks
        ends = ("receivers concerned: 4, 7", "senders concerned: 2, 3")
        assert remarks == (*ends, "their dst - src is in 1 .. 5")

    def test_positions_are_absolute(self):
        """The rows of a decoding step: the distance counts from the tokens' own positions."""
        first, second = (patterns.window(12, w).rows(8, 12) for w in (3, 4))
        assert analyse.diff(first, second).remarks[-1] == "all differing edges have dst - src = 3"


def cells(n, pairs):
    return TokenGraph.from_edges(torch.tensor(pairs).t(), n)


class TestSizes:
    def test_other_lengths_compare_what_both_have(self):
        found = analyse.diff(patterns.window(9, 3), patterns.window(12, 3))
        assert (found.only_first, found.only_second, found.equal) == (0, 0, False)
        assert "the same edges among the tokens that they share" in str(found)
        assert "receivers: 9 and 12; senders: 9 and 12" in found.sizes

    def test_numbers_are_of_the_shared_corner(self):
        found = analyse.diff(patterns.cross(3, 8), patterns.causal(5))
        corner = torch.ones(5, 5).tril()[:3]
        numbers = int((corner == 0).sum()), 0, int(corner.sum())
        assert (found.only_first, found.only_second, found.common) == numbers

    def test_other_positions(self):
        found = analyse.diff(patterns.causal(9).rows(0, 3), patterns.causal(9).rows(2, 5))
        assert "the position of the first receiver: 0 and 2" in found.sizes
        assert found.only_second == 6


class TestHeads:
    windows = TokenGraph.from_rule(
        lambda b, h, dst, src: (src <= dst) & (dst - src <= h), 9, heads=4, name="windows"
    )

    def test_heads_against_one_graph(self):
        """Heads attend to 1, 2, 3 and 4 tokens; the third is the window of 3."""
        found = analyse.diff(self.windows, patterns.window(9, 3))
        assert found.differing == ((0, 0), (0, 1), (0, 3))
        widths = [sum(min(i + 1, w) for i in range(9)) for w in (1, 2, 3, 4)]
        expected = widths[3] - widths[2], 2 * widths[2] - widths[0] - widths[1]
        assert (found.only_first, found.only_second) == expected
        assert found.remarks[0] == "3 of 4 differ: head 0, head 1, head 3"
        assert found.example == (0, 1)
        assert found.example_in == 2
        assert all(remark.startswith("in head 0: ") for remark in found.remarks[1:])

    def test_one_wrong_head_of_one_sample(self):
        right = TokenGraph.from_rule(
            lambda b, h, dst, src: (src <= dst) & (b >= 0) & (h >= 0), 5, batch=2, heads=3
        )
        wrong = TokenGraph.from_rule(
            lambda b, h, dst, src: (src <= dst) ^ ((b == 1) & (h == 2)), 5, batch=2, heads=3
        )
        found = analyse.diff(right, wrong)
        assert found.differing == ((1, 2),)
        assert found.remarks[0] == "1 of 6 differ: sample 1 head 2"
        assert f"in sample 1 head 2: {COMPLEMENT}" in str(found)

    def test_equal_heads(self):
        found = analyse.diff(self.windows, self.windows | patterns.window(9, 1))
        assert found.equal
        assert (found.differing, found.remarks, found.example) == ((), (), None)

    def test_another_number_of_heads(self):
        two = TokenGraph.from_rule(self.windows.rule, 9, heads=2)
        found = analyse.diff(two, self.windows)
        assert "heads: 2 and 4" in found.sizes
        assert (found.only_first, found.only_second) == (0, 0)
