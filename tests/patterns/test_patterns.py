"""The zoo: every builder against an independent predicate and its theorems, and its kin elsewhere.

The table of theorems is ``tests/support/zoo``: a new builder is one new row there.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import networkx
import pytest
import torch
from support.extras import needs
from support.refusals import assert_refusals
from support.zoo import ROWS, SIZES
from support.zoo.trees import parents

from gnn_attention import TokenGraph, convert, patterns

each_size = pytest.mark.parametrize("n", SIZES)


@cache
def built(row):
    """The row's graph at each of its sizes."""
    return {n: row.build(n) for n in row.sizes}


def square(row):
    """Those with as many receivers as senders."""
    return [(n, graph) for n, graph in built(row).items() if graph.num_dst == graph.num_src]


@cache
def table(row, n):
    num_dst, num_src = row.nodes(n)
    return [[bool(row.edge(n, dst, src)) for src in range(num_src)] for dst in range(num_dst)]


def reach(mask):
    """From which tokens each has received, with one more layer each time, the own state carried along, until
    nothing changes.
    """
    heard = torch.eye(len(mask))
    while True:
        yield heard > 0
        further = (heard + mask.float() @ heard > 0).float()
        if torch.equal(further, heard):
            return
        heard = further


def layers_are_claimed_where_a_size_is_square(row):
    square = [n for n in row.sizes if len(set(row.nodes(n))) == 1]
    assert (row.layers is not None) == bool(square)


def edges(row):
    for n, graph in built(row).items():
        assert ((graph.num_dst, graph.num_src), graph.heads, graph.batch) == (row.nodes(n), None, None)
        assert graph.mask().tolist() == table(row, n), n


def counts(row):
    for n, graph in built(row).items():
        assert graph.num_edges == row.count(n), n
        assert graph.in_degree().tolist() == [row.degree(n, dst) for dst in range(graph.num_dst)], n


def causal_or_not(row):
    """A causal graph holds ``src <= dst`` alone; the others break it where there is room."""
    for n, graph in built(row).items():
        src, dst = graph.edge_index
        if row.causal:
            assert bool((src <= dst).all()), n
        elif n == row.sizes[-1]:
            assert bool((src > dst).any()), n


def symmetric_or_not(row):
    for n, graph in built(row).items():
        if row.symmetric:
            assert graph == graph.T, n
        elif n == row.sizes[-1] and graph.num_dst == graph.num_src:
            assert graph != graph.T, n


def acyclic_or_not(row):
    for n, graph in square(row):
        digraph = convert.to_networkx(graph)
        digraph.remove_edges_from(list(networkx.selfloop_edges(digraph)))
        if row.causal if row.acyclic is None else row.acyclic:
            assert networkx.is_directed_acyclic_graph(digraph), n
        elif n == row.sizes[-1]:
            assert not networkx.is_directed_acyclic_graph(digraph), n


def layers_to_full_reach(row):
    for n, graph in square(row):
        may = torch.ones(graph.num_dst, graph.num_dst, dtype=torch.bool)
        may = may.tril() if row.causal else may
        full_from = [layers for layers, heard in enumerate(reach(graph.mask())) if bool(heard[may].all())]
        assert (full_from[0] if full_from else None) == row.layers(n), n


def the_name_builds_it(row):
    if row.named_at is not None:
        graph = row.build(row.named_at)
        assert eval(graph.name, {name: getattr(patterns, name) for name in patterns.__all__}) == graph


def rows_are_the_same_rows(row):
    for n, graph in built(row).items():
        start = graph.num_dst // 2
        assert graph.rows(start, graph.num_dst).mask().tolist() == table(row, n)[start:], n


THEOREMS = (
    layers_are_claimed_where_a_size_is_square,
    edges,
    counts,
    causal_or_not,
    symmetric_or_not,
    acyclic_or_not,
    layers_to_full_reach,
    the_name_builds_it,
    rows_are_the_same_rows,
)


class TestTheorems:
    def test_every_builder_has_a_row(self):
        assert {row.name.split()[0].strip(",") for row in ROWS} == set(patterns.__all__)

    def test_rows_have_names_of_their_own(self):
        assert len({row.name for row in ROWS}) == len(ROWS)

    @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
    def test_all_of_a_row(self, row):
        for theorem in THEOREMS:
            theorem(row)


class TestKin:
    """Relations between builders."""

    def test_cross_is_bipartite(self):
        graph = patterns.cross(2, 5)
        assert graph.mask().tolist() == [[True] * 5] * 2
        assert graph.edge_index.tolist() == [[0, 1, 2, 3, 4] * 2, [0] * 5 + [1] * 5]
        assert patterns.cross(5, 2) == graph.T

    def test_reach_of_a_window_grows_by_its_width(self):
        """After k rounds a window of w reaches as far as a window of k (w - 1) + 1."""
        assert patterns.window(12, 4) ** 3 == patterns.window(12, 10)

    def test_dilated_windows_tile_a_window(self):
        """The windows of the four residues, each shifted, make up one causal graph: dilated(n, w, 1) is a
        window.
        """
        assert patterns.dilated(20, 7, 1) == patterns.window(20, 7)
        assert patterns.dilated(20, 3, 4).num_edges == sum(patterns.window(5, 3).num_edges for _ in range(4))

    def test_both_sides_are_the_two_causal_halves(self):
        for one_sided, both in [
            (patterns.window(9, 3), patterns.window(9, 3, causal=False)),
            (patterns.dilated(9, 2, 3), patterns.dilated(9, 2, 3, causal=False)),
            (patterns.documents([4, 5]), patterns.documents([4, 5], causal=False)),
            (patterns.tree(parents(9)), patterns.tree(parents(9), causal=False)),
            (patterns.global_tokens(9, [4]), patterns.global_tokens(9, [4], causal=False)),
        ]:
            assert one_sided | one_sided.T == both
            assert both & patterns.causal(9) == one_sided

    def test_complements(self):
        assert ~patterns.causal(7) == patterns.strict_causal(7).T
        assert ~patterns.no_self(7) == patterns.window(7, 1)
        assert patterns.full(7) == patterns.causal(7) | patterns.causal(7).T

    def test_documents_are_a_disjoint_sum(self):
        """Block-diagonal: each block is the causal graph of its length."""
        sizes = [3, 0, 1, 4]
        blocks = torch.block_diag(*(torch.ones(size, size).tril() for size in sizes))
        assert torch.equal(patterns.documents(sizes).mask(), blocks.bool())
        assert patterns.documents([5]) == patterns.causal(5)
        assert patterns.documents([]).num_dst == patterns.documents([0, 0]).num_dst == 0

    def test_prefix_ends_are_causal_and_full(self):
        assert patterns.prefix(6, 1) == patterns.causal(6)
        assert patterns.prefix(6, 4) == patterns.documents([4, 1, 1], causal=False) | patterns.causal(6)
        assert patterns.prefix(6, 6) == patterns.prefix(6, 9) == patterns.full(6)

    def test_streaming_llm(self):
        """Sinks and window: the in-degree is bounded by s + w, and reaches it."""
        graph = patterns.window(40, 8) | patterns.sinks(40, 4)
        assert graph.in_degree().tolist() == [min(i + 1, 12) for i in range(40)]

    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [(3, [0, 1, 2]), ([5, 2, 5], [2, 5]), (torch.tensor([1, 4]), [1, 4]), (range(2), [0, 1]), (0, [])],
    )
    def test_forms_of_global_tokens(self, tokens, expected):
        assert patterns.global_tokens(6, tokens, causal=False) == patterns.global_tokens(
            6, expected, causal=False
        )
        column = patterns.global_tokens(6, tokens, causal=False).mask().all(0)
        assert column.nonzero().flatten().tolist() == expected

    def test_global_tokens_from_a_generator(self):
        assert patterns.global_tokens(6, (t for t in (1, 2))) == patterns.global_tokens(6, [1, 2])

    @pytest.mark.parametrize(
        "build",
        [
            lambda n, heads: patterns.bigbird(n, 2, num_random=1, heads=heads),
            lambda n, heads: patterns.bigbird_etc(n, 2, 1, num_random=1, heads=heads),
            lambda n, heads: patterns.duo_attention(n, heads, [0], 2),
            lambda n, heads: patterns.fibottention(n, heads),
            lambda n, heads: patterns.longnet(n, [4], [2], heads=heads),
            lambda n, heads: patterns.sparse_fixed(n, 4, 1, heads=heads),
            lambda n, heads: patterns.sparse_strided(n, 4, heads=heads),
        ],
    )
    @each_size
    def test_a_graph_of_one_head_is_still_a_graph_by_head(self, build, n):
        """One head is the first of several, and counts and degrees keep their axis."""
        for heads in (1, 3):
            graph = build(n, heads)
            assert graph.mask().shape == (heads, graph.num_dst, graph.num_src)
            assert graph.num_edges == sum(graph.select(head=head).num_edges for head in range(heads))
            assert graph.in_degree().shape == (heads, graph.num_dst)
        if "fibottention" not in graph.name:  # whose heads reach further one after another
            assert build(n, 1).select(head=0) == graph.select(head=0)

    def test_a_chain_is_causal_and_a_star_has_depth_one(self):
        assert patterns.tree([-1, 0, 1, 2]) == patterns.causal(4)
        assert patterns.tree([-1, -1, -1]) == patterns.window(3, 1)
        assert patterns.tree([-1, 0, 0, 0]).in_degree().tolist() == [1, 2, 2, 2]

    def test_parents_may_stand_after_their_children(self):
        """The definition is the path to the root, whatever the order of the tokens: 0 hangs on 2, 2 on 1."""
        graph = patterns.tree([2, -1, 1])
        assert graph.edge_index.t().tolist() == [[0, 0], [1, 0], [2, 0], [1, 1], [1, 2], [2, 2]]

    def test_a_deep_tree_needs_no_deep_stack(self):
        n = 5000
        graph = patterns.tree([-1, *range(n - 1)])
        assert graph.rows(n - 1, n).num_edges == n
        assert graph.rows(0, 1).num_edges == 1

    @pytest.mark.parametrize("sequence", [tuple, torch.tensor], ids=["tuple", "tensor"])
    def test_sequences_of_any_kind(self, sequence):
        assert patterns.documents(sequence([2, 1])) == patterns.documents([2, 1])
        tree = patterns.tree(sequence([-1, 0, 0]))
        assert tree == patterns.tree([-1, 0, 0])
        assert tree.name == "tree([-1, 0, 0])"

    def test_long_arguments_are_not_spelt_out(self):
        assert len(patterns.documents([1] * 50).name) < 40
        assert len(patterns.tree([-1] * 50).name) < 40
        assert len(patterns.global_tokens(90, range(50)).name) < 40

    def test_the_callers_list_is_not_held(self):
        sizes, up, tokens = [2, 3], [-1, 0], [1]
        graphs = patterns.documents(sizes), patterns.tree(up), patterns.global_tokens(4, tokens)
        before = [graph.edge_index.clone() for graph in graphs]
        sizes[0], up[1], tokens[0] = 0, -1, 3
        for graph, edges in zip(graphs, before, strict=True):
            assert torch.equal(graph.rows(0, graph.num_dst).edge_index, edges)


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: patterns.causal(-1), ValueError, "at least 0, got -1"),
                (lambda: patterns.full(True), TypeError, "must be an integer, got the bool True"),
                (lambda: patterns.causal(2.0), TypeError, "must be an integer, got 2.0 of type float"),
                (lambda: patterns.cross(2, "3"), TypeError, "num_src must be an integer, got '3'"),
                (lambda: patterns.cross(2, -3), ValueError, "num_src must be at least 0, got -3"),
                (lambda: patterns.window(4, -1), ValueError, "w must be at least 0, got -1"),
                (lambda: patterns.window(4, 1.5), TypeError, "w must be an integer, got 1.5"),
                (lambda: patterns.window(4, True), TypeError, "w must be an integer, got the bool True"),
                (lambda: patterns.dilated(4, -1, 2), ValueError, "w must be at least 0, got -1"),
                (lambda: patterns.dilated(4, 2, 0), ValueError, "dilation must be at least 1, got 0"),
                (lambda: patterns.prefix(4, -2), ValueError, "p must be at least 0, got -2"),
                (lambda: patterns.prefix(4, None), TypeError, "p must be an integer, got None"),
                (
                    lambda: patterns.documents([2, -1]),
                    ValueError,
                    "each of lengths must be at least 0, got -1",
                ),
                (
                    lambda: patterns.documents([2, 1.0]),
                    TypeError,
                    "each of lengths must be an integer, got 1.0",
                ),
                (lambda: patterns.documents(3), TypeError, "lengths must be"),
                (lambda: patterns.sinks(4, -1), ValueError, "s must be at least 0, got -1"),
                (lambda: patterns.sinks(4, False), TypeError, "s must be an integer, got the bool False"),
                (
                    lambda: patterns.global_tokens(4, [4]),
                    IndexError,
                    r"tokens must be positions in 0 \.\. 3, got 4",
                ),
                (
                    lambda: patterns.global_tokens(4, [-1]),
                    IndexError,
                    r"tokens must be positions in 0 \.\. 3, got -1",
                ),
                (
                    lambda: patterns.global_tokens(4, 5),
                    IndexError,
                    r"tokens must be positions in 0 \.\. 3, got 4",
                ),
                (lambda: patterns.global_tokens(4, -1), ValueError, "tokens must be at least 0, got -1"),
                (
                    lambda: patterns.global_tokens(4, True),
                    TypeError,
                    "tokens must be an integer, got the bool True",
                ),
                (
                    lambda: patterns.global_tokens(4, [True]),
                    TypeError,
                    "tokens must be an integer, got the bool True",
                ),
                (lambda: patterns.global_tokens(4, [1.7]), TypeError, "tokens must be an integer, got 1.7"),
                (lambda: patterns.global_tokens(4, "12"), TypeError, "tokens must be an integer, got '1'"),
                (lambda: patterns.global_tokens(-1, []), ValueError, "must be at least 0, got -1"),
                (
                    lambda: patterns.global_tokens(True, []),
                    TypeError,
                    "must be an integer, got the bool True",
                ),
                (
                    lambda: patterns.tree([-1, 2]),
                    IndexError,
                    r"parents\[1\] must be -1 \(a root\) or in 0 \.\. 1, got 2",
                ),
                (lambda: patterns.tree([-2]), IndexError, r"parents\[0\] must be -1 .*got -2"),
                (
                    lambda: patterns.tree([0]),
                    ValueError,
                    "must form a forest, but token 0 is on or below a cycle",
                ),
                (
                    lambda: patterns.tree([-1, 2, 1, 1]),
                    ValueError,
                    "must form a forest, but token 1 is on or below a cycle",
                ),
                (lambda: patterns.tree([-1, 0.5]), TypeError, r"parents.* must be an integer, got 0.5"),
                (
                    lambda: patterns.tree([-1, False]),
                    TypeError,
                    r"parents.* must be an integer, got the bool False",
                ),
            ]
        )

    @pytest.mark.parametrize(
        ("name", "others"),
        [
            *(
                (name, ())
                for name in (
                    "full",
                    "self_loops",
                    "causal",
                    "anti_causal",
                    "strict_causal",
                    "no_self",
                    "log_sparse",
                )
            ),
            *(
                (name, (2,))
                for name in (
                    "window",
                    "prefix",
                    "block_causal",
                    "sinks",
                    "strides",
                    "sparse_strided",
                    "chunked",
                )
            ),
            *(
                (name, (2, 1))
                for name in ("dilated", "band", "segment_recurrence", "summary_tokens", "sparse_fixed")
            ),
            *((name, (2, 1)) for name in ("sink_window", "h_matrix_level", "tglobal", "etc")),
            *(
                (name, (2,))
                for name in (
                    "butterfly",
                    "butterfly_factor",
                    "bigbird",
                    "random_senders",
                    "side_nodes",
                    "isab",
                )
            ),
            ("longnet", ([2], [1])),
            ("duo_attention", (1, [0], 2)),
        ],
    )
    def test_the_number_of_tokens_is_named_as_the_builder_names_it(self, name, others):
        for wrong, error in ((-1, ValueError), (2.0, TypeError), (None, TypeError), ("4", TypeError)):
            with pytest.raises(error, match=r"^n must be"):
                getattr(patterns, name)(wrong, *others)

    def test_cross_needs_both_sizes(self):
        with pytest.raises(TypeError, match="num_src must be an integer, got None"):
            patterns.cross(3, None)

    @pytest.mark.parametrize("wrong", [None, "x", {}, [None], [[0, 1], [0]]])
    def test_labels_that_are_no_numbers(self, wrong):
        """What torch cannot read either is said in our words."""
        for build, argument in (
            (patterns.clusters, "dst_labels"),
            (patterns.shared_bucket, "buckets"),
            (lambda order: patterns.sorted_blocks(4, order, 2), "order"),
            (lambda order: patterns.permuted_blocks(4, order, 2), "permutation"),
        ):
            with pytest.raises(TypeError, match=f"{argument} must be"):
                build(wrong)


@pytest.fixture(scope="module")
def masking():
    return needs("transformers.masking_utils")


class TestHuggingFace:
    """The predicates of transformers.masking_utils are rules, and name the same graphs."""

    @each_size
    def test_causal_and_bidirectional(self, masking, n):
        assert TokenGraph.from_rule(masking.causal_mask_function, n) == patterns.causal(n)
        assert TokenGraph.from_rule(masking.bidirectional_mask_function, n) == patterns.full(n)

    @each_size
    @pytest.mark.parametrize("w", [1, 3, 40])
    def test_sliding_window(self, masking, n, w):
        """``sliding_window=w`` attends to w tokens, itself included; the bidirectional one counts without it:
        w on each side.
        """
        assert TokenGraph.from_rule(masking.sliding_window_causal_mask_function(w), n) == patterns.window(
            n, w
        )
        overlay = TokenGraph.from_rule(masking.sliding_window_overlay(w), n)
        assert overlay & patterns.causal(n) == patterns.window(n, w)
        both = TokenGraph.from_rule(masking.sliding_window_bidirectional_mask_function(w), n)
        assert both == patterns.window(n, w + 1, causal=False)

    @pytest.mark.parametrize("size", [1, 4, 5])
    def test_chunks_are_documents_of_one_length(self, masking, size):
        rule = masking.chunked_causal_mask_function(size, torch.tensor([0]))
        sizes = [len(range(start, min(start + size, 17))) for start in range(0, 17, size)]
        assert TokenGraph.from_rule(rule, 17) == patterns.documents(sizes)

    def test_packed_sequences_are_documents(self, masking):
        owner = torch.tensor([[0, 0, 0, 1, 2, 2]])
        rule = masking.packed_sequence_mask_function(owner)
        assert TokenGraph.from_rule(rule, 6) == patterns.documents([3, 1, 2], causal=False)
        causal = masking.and_masks(masking.causal_mask_function, rule)
        assert TokenGraph.from_rule(causal, 6) == patterns.documents([3, 1, 2])

    def test_a_bidirectional_block_at_the_start_is_a_prefix(self, masking):
        group = torch.tensor([[0, 0, 0, -1, -1, -1]])
        rule = masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(group))
        assert TokenGraph.from_rule(rule, 6) == patterns.prefix(6, 3)

    def test_their_rules_and_ours_combine(self, masking):
        theirs = TokenGraph.from_rule(masking.sliding_window_overlay(2), 9)
        assert theirs & patterns.documents([4, 5]) == patterns.window(9, 2) & patterns.documents([4, 5])

    def test_padding_by_sample(self, masking):
        """Right padding: a rule that reads b; the graph says so by its batch size."""
        real = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
        rule = masking.and_masks(masking.causal_mask_function, masking.padding_mask_function(real))
        graph = TokenGraph.from_rule(rule, 4, batch=2)
        for sample in range(2):
            assert graph.select(sample) == patterns.causal(4) & TokenGraph.from_rule(
                lambda b, h, dst, src, sample=sample: real[sample, src] & (dst >= 0), 4
            )


class TestFlexAttention:
    """Conventions of FlexAttention's published masks: predicates over (b, h, q_idx, kv_idx)."""

    @pytest.mark.parametrize("w", [0, 1, 5])
    def test_attention_gym_counts_the_distance(self, w):
        """Its ``sliding_window(w)`` keeps ``q_idx - kv_idx <= w``: w + 1 tokens."""

        def sliding_window(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx <= w)

        assert TokenGraph.from_rule(sliding_window, 17) == patterns.window(17, w + 1)

    @pytest.mark.parametrize(("left", "right"), [(3, 0), (2, 2), (0, 0)])
    def test_flash_attention_counts_both_sides(self, left, right):
        """Its ``window_size=(left, right)`` is inclusive on both sides."""

        def flash(b, h, q_idx, kv_idx):
            return (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)

        expected = (
            patterns.window(17, left + 1) if right == 0 else patterns.window(17, left + 1, causal=False)
        )
        assert TokenGraph.from_rule(flash, 17) == expected

    def test_prefix_lm(self):
        def prefix_lm(b, h, q_idx, kv_idx):
            return (kv_idx < 4) | (q_idx >= kv_idx)

        assert TokenGraph.from_rule(prefix_lm, 9) == patterns.prefix(9, 4)

    def test_documents(self):
        sizes = [2, 0, 5, 1]
        offsets = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        document_id = torch.cat(
            [torch.full((stop - start,), i) for i, (start, stop) in enumerate(pairwise(offsets))]
        )

        def document_causal(b, h, q_idx, kv_idx):
            return (document_id[q_idx] == document_id[kv_idx]) & (q_idx >= kv_idx)

        assert TokenGraph.from_rule(document_causal, 8) == patterns.documents(sizes)
