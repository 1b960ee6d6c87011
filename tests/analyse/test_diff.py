"""The difference of two graphs has the counts of their masks, and names common mistakes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_attention import TokenGraph, analyse, patterns


def graph_of_mask(mask):
    dst, src = mask.nonzero(as_tuple=True)
    return TokenGraph.from_edges(torch.stack([src, dst]), mask.shape[0], mask.shape[1])


@st.composite
def masks(draw):
    num_dst, num_src = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    cell = st.lists(st.booleans(), min_size=num_dst * num_src, max_size=num_dst * num_src)
    first, second = (torch.tensor(draw(cell)).view(num_dst, num_src) for _ in range(2))
    later, earlier = torch.zeros_like(first), torch.zeros_like(first)
    later[:, 1:], earlier[:, :-1] = first[:, :-1], first[:, 1:]
    variants = [second, ~first, later, earlier, first.flip(0, 1), first.tril(), first.triu()]
    return [first, draw(st.sampled_from(variants + [first.T] * (num_dst == num_src)))]


COMPLEMENT = "the second is the complement of the first"
TRANSPOSED = "the second is the first transposed"
LATER, EARLIER = "every sender one token later", "every sender one token earlier"
PAST = "without its edges from later tokens (src > dst)"
KINDS = (PAST, COMPLEMENT, TRANSPOSED, LATER, EARLIER, "only in self loops")


def read_kinds(first, second):
    """Return the kinds of difference that the remarks name."""
    text = "\n".join(analyse.diff(first, second).remarks)
    return {kind for kind in KINDS if kind in text}


class TestNumbers:
    @settings(max_examples=50, deadline=None)
    @given(masks())
    def test_counts_and_first_difference(self, pair):
        a, b = pair
        difference = analyse.diff(graph_of_mask(a), graph_of_mask(b))
        assert (difference.only_first, difference.only_second) == (int((a & ~b).sum()), int((b & ~a).sum()))
        assert difference.common == int((a & b).sum())
        assert difference.equal == torch.equal(a, b)
        cells = (a ^ b).nonzero().tolist()
        if cells:
            dst, src = cells[0]
            assert (difference.example, difference.example_in) == ((src, dst), 1 if a[dst, src] else 2)
        else:
            assert (difference.example, difference.example_in, difference.remarks) == (None, None, ())
        containment = {(True, False): "the second contains the first", (False, True): "the first contains"}
        verdict_apart = "no edge in common" if not difference.common else "neither contains the other"
        verdict = containment.get((difference.only_first == 0, difference.only_second == 0), verdict_apart)
        assert difference.equal or verdict in str(difference).splitlines()[0] or not (a.any() and b.any())

    @settings(max_examples=50, deadline=None)
    @given(masks())
    def test_kinds_are_named_exactly_where_they_hold(self, pair):
        a, b = pair
        expected = set()
        if not a.any() or not b.any() or torch.equal(a, b):
            return
        variants = {LATER: torch.zeros_like(a), EARLIER: torch.zeros_like(a)}
        variants[LATER][:, 1:], variants[EARLIER][:, :-1] = a[:, :-1], a[:, 1:]
        variants[COMPLEMENT] = ~a
        if a.shape[0] == a.shape[1]:
            variants[TRANSPOSED] = a.T
            is_half = torch.equal(b, a.tril()) or torch.equal(a, b.tril())
            expected |= {PAST} if is_half else set()
        off_diagonal = ~torch.ones_like(a).tril().logical_and(torch.ones_like(a).triu())
        expected |= {"only in self loops"} if not bool(((a ^ b) & off_diagonal).any()) else set()
        expected |= {kind for kind, mask in variants.items() if torch.equal(mask, b)}
        assert read_kinds(graph_of_mask(a), graph_of_mask(b)) == expected


CAUSAL, WINDOW = patterns.causal(9), patterns.window(9, 3)
BOTH_WAYS, MEMORY = patterns.window(10, 5, causal=False), patterns.sinks(8, 2, causal=False)
MORE, WIDER = "the second has 2 more senders per receiver", patterns.window(12, 4).rows(8, 12)
ONE_IS_CAUSAL = "the {} is causal, the {} has edges from later tokens (src > dst)"
DOCUMENTS = "the second has 1 more sender per receiver from receiver 5 on", "their dst - src is in 1 .. 5"
TWO_EDGES = TokenGraph.from_edges(torch.tensor([[3, 2], [4, 7]]), 9)
LOOPS = "they differ only in self loops: the second lacks 7"
REMARKS = [
    # The fifth token belongs to another document.
    (patterns.documents([5, 5]), patterns.documents([4, 6]), DOCUMENTS),
    (patterns.causal(5), patterns.window(5, 0), ["the second has no edges"]),
    (patterns.window(10, 3), BOTH_WAYS, [ONE_IS_CAUSAL.format("first", "second")]),
    # Every token attends to a memory of two tokens.
    (patterns.causal(8) - MEMORY, patterns.causal(8) | MEMORY, [f"{MORE} everywhere"]),
    (patterns.full(7), patterns.no_self(7), [LOOPS]),
    (CAUSAL, CAUSAL - TWO_EDGES, ["their dst - src is in 1 .. 5"]),
    # In the rows of a decoding step, distances are those between positions, not between indices.
    (patterns.window(12, 3).rows(8, 12), WIDER, ["all differing edges have dst - src = 3"]),
]


class TestWords:
    @pytest.mark.parametrize(("n", "w"), [(9, 3), (5000, 4096)])
    def test_off_by_one_in_a_window(self, n, w):
        """In attention-gym, a window of w has w + 1 senders."""
        remark = f"the second has 1 more sender per receiver from receiver {w} on"
        remarks = analyse.diff(patterns.window(n, w), patterns.window(n, w + 1)).remarks
        assert remarks == (remark, f"all differing edges have dst - src = {w}")
        remarks = analyse.diff(patterns.window(n, w + 2), patterns.window(n, w)).remarks
        assert remarks[-1] == f"their dst - src is in {w} .. {w + 1}"

    @pytest.mark.parametrize(("first", "second", "remarks"), REMARKS)
    def test_remarks(self, first, second, remarks):
        assert set(remarks) <= set(analyse.diff(first, second).remarks)

    def test_graphs_that_cannot_be_compared(self):
        windows = TokenGraph.from_rule(lambda b, h, dst, src: (src <= dst) & (dst - src <= h), 9, heads=4)
        for first, second, match in [
            (WINDOW, patterns.window(12, 3), r"same tokens, got .*window\(9, 3\).*window\(12, 3\)"),
            (CAUSAL.rows(0, 3), CAUSAL.rows(2, 5), "same tokens"),
            (windows, WINDOW, r"first .* varies by head: use select\(batch, head\)"),
        ]:
            with pytest.raises(ValueError, match=match):
                analyse.diff(first, second)
        assert analyse.diff(windows.select(head=2), WINDOW).equal
