"""Sequences in one row: kin, refusals, and the same graphs elsewhere."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.extras import needs
from support.refusals import assert_refusals
from torch.nn.attention.flex_attention import noop_mask

from gnn_attention import TokenGraph, patterns

orders = st.integers(0, 9).flatmap(lambda n: st.permutations(range(n)))


class TestSharedPrefix:
    def test_its_smallest_cases(self):
        assert patterns.shared_prefix(4, []) == patterns.causal(4)
        assert patterns.shared_prefix(2, [3]) == patterns.causal(5)
        assert patterns.shared_prefix(0, [2, 0, 3]) == patterns.documents([2, 0, 3])

    def test_each_answer_hears_what_it_would_hear_alone(self):
        """Cut out prompt and one answer: a causal graph."""
        graph, prompt = patterns.shared_prefix(3, [2, 4, 1]), range(3)
        for answer in (range(3, 5), range(5, 9), range(9, 10)):
            tokens = list(chain(prompt, answer))
            assert torch.equal(graph.mask()[tokens][:, tokens], patterns.causal(len(tokens)).mask())
            assert int(graph.mask()[list(answer)].sum()) == int(graph.mask()[list(answer)][:, tokens].sum())

    def test_it_saves_the_prompts_that_documents_repeat(self):
        prompt, sizes = 5, [2, 4, 1]
        repeated = patterns.documents([prompt + size for size in sizes])
        assert (
            repeated.num_edges - patterns.shared_prefix(prompt, sizes).num_edges
            == 2 * patterns.causal(prompt).num_edges
        )

    def test_attention_gym(self):
        offsets, prompt = torch.tensor([0, 3, 5, 9, 10]), torch.zeros(4, dtype=torch.int64)
        masks = needs("attn_gym.masks")
        theirs = TokenGraph.from_rule(masks.generate_shared_prefix_mask_mod(offsets, prompt), 10)
        assert theirs == patterns.shared_prefix(3, [2, 4, 1])


class TestBlocks:
    @pytest.mark.parametrize("block", [1, 2, 5, 9, 20])
    def test_block_causal_is_causal_between_and_full_within(self, block):
        sizes = [len(range(start, min(start + block, 9))) for start in range(0, 9, block)]
        graph = patterns.block_causal(9, block)
        assert graph == patterns.causal(9) | patterns.documents(sizes, causal=False)
        assert graph == patterns.bidirectional_groups([i // block for i in range(9)])

    def test_block_causal_ends_are_causal_and_full(self):
        assert patterns.block_causal(7, 1) == patterns.causal(7)
        assert patterns.block_causal(7, 7) == patterns.full(7)

    def test_groups_at_the_start_are_a_prefix_and_none_are_causal(self):
        assert patterns.bidirectional_groups([5, 5, 5, -1, -1]) == patterns.prefix(5, 3)
        assert (
            patterns.bidirectional_groups([-1, -1, -2])
            == patterns.bidirectional_groups([3, 1, 2])
            == patterns.causal(3)
        )

    @given(st.lists(st.integers(-2, 3), max_size=9))
    def test_hugging_face_overlay(self, groups):
        masking = needs("transformers.masking_utils")
        rule = masking.or_masks(
            masking.causal_mask_function,
            masking.blockwise_overlay(torch.tensor([groups])),
        )
        assert TokenGraph.from_rule(rule, len(groups)) == patterns.bidirectional_groups(groups)

    def test_the_callers_list_is_not_held(self):
        groups = torch.tensor([-1, 0, 0])
        graph = patterns.bidirectional_groups(groups)
        groups[:] = -1
        assert graph == patterns.prefix(3, 0) | patterns.documents([1, 2], causal=False)


class TestOrders:
    @given(orders, st.integers(0, 12))
    def test_a_relabelled_prefix(self, order, context):
        """Written down in the order of generation it is a prefix graph, without a context a causal one."""
        mask = patterns.permutation(order, context).mask()
        assert torch.equal(mask[order][:, order], patterns.prefix(len(order), context).mask())
        assert torch.equal(
            patterns.permutation(order).mask()[order][:, order], patterns.causal(len(order)).mask()
        )

    @given(orders, st.integers(0, 12))
    def test_content_and_query_differ_in_the_token_itself(self, order, context):
        content, query = patterns.permutation(order, context), patterns.permutation(order, context, "query")
        targets = torch.zeros(len(order), dtype=torch.bool)
        targets[order[context:]] = True
        assert torch.equal((content ^ query).mask(), torch.diag(targets))
        assert content & query == query

    def test_left_to_right_and_right_to_left(self):
        assert patterns.permutation(range(6)) == patterns.causal(6)
        assert patterns.permutation(range(6), stream="query") == patterns.strict_causal(6)
        assert patterns.permutation(range(5, -1, -1)) == patterns.causal(6).T
        assert patterns.permutation([], context=3).num_dst == 0

    def test_names_spell_out_what_is_not_the_default(self):
        assert patterns.permutation([1, 0], 1).name == "permutation([1, 0], context=1)"
        assert patterns.permutation([1, 0], stream="query").name == "permutation([1, 0], stream='query')"
        assert patterns.permutation(range(40)).name == "permutation([40 positions])"
        assert patterns.fill_in_the_middle(4, 1, 2, "spm").name == "fill_in_the_middle(4, 1, 2, order='spm')"

    @pytest.mark.parametrize(("start", "stop"), [(2, 5), (0, 3), (4, 9), (3, 3), (0, 9), (0, 0)])
    def test_filling_in_is_an_order(self, start, stop):
        before, inside, after = range(start), range(start, stop), range(stop, 9)
        psm, spm = (
            patterns.fill_in_the_middle(9, start, stop),
            patterns.fill_in_the_middle(9, start, stop, order="spm"),
        )
        assert psm == patterns.permutation([*before, *after, *inside])
        assert spm == patterns.permutation([*after, *before, *inside])
        rows = slice(start, stop)
        assert torch.equal(psm.mask()[rows], spm.mask()[rows])  # the middle attends to the same

    def test_a_middle_at_the_end_changes_nothing(self):
        assert patterns.fill_in_the_middle(7, 4, 7) == patterns.causal(7)
        assert patterns.fill_in_the_middle(7, 3, 3) == patterns.causal(7)


class TestXLNet:
    @given(orders, st.integers(0, 12))
    def test_the_authors_two_indices(self, order, context):
        """A given token counts as -1; who is predicted compares itself strictly; a given token can never be
        hidden.
        """
        n, given_tokens = len(order), set(order[:context])
        index = [-1 if i in given_tokens else order.index(i) for i in range(n)]
        own = [0 if i in given_tokens else index[i] for i in range(n)]
        hidden = [[own[i] <= index[j] and j not in given_tokens for j in range(n)] for i in range(n)]
        assert (~patterns.permutation(order, context, "query").mask()).tolist() == hidden

    @pytest.mark.parametrize(
        ("order", "context"), [([3, 1, 0, 4, 2], 0), ([3, 1, 0, 4, 2], 2), ([0, 1, 2], 0)]
    )
    def test_hugging_face_streams(self, order, context):
        """Given the query stream as ``perm_mask`` (True = hidden), its layers run on these two graphs."""
        content, query = patterns.permutation(order, context), patterns.permutation(order, context, "query")
        seen = attention_masks_of_xlnet(~query.mask())
        assert torch.equal(seen["attn_mask_g"], ~query.mask())
        assert torch.equal(seen["attn_mask_h"], ~content.mask())


def attention_masks_of_xlnet(perm_mask):
    """The masks of both streams (True = hidden) as the first layer of a small XLNet receives them."""
    n, seen = len(perm_mask), {}
    transformers = needs("transformers")
    config = transformers.XLNetConfig(vocab_size=8, d_model=4, n_layer=1, n_head=1, d_inner=4, attn_type="bi")
    model = transformers.XLNetModel(config).eval()

    def listen(layer, args, kwargs):
        seen.update({name: kwargs[name][:, :, 0, 0] > 0 for name in ("attn_mask_h", "attn_mask_g")})

    model.layer[0].register_forward_pre_hook(listen, with_kwargs=True)
    with torch.no_grad():
        model(
            torch.arange(n)[None],
            perm_mask=perm_mask.float()[None],
            target_mapping=torch.eye(n)[None],
            use_mems=False,
        )
    return seen


class TestElsewhere:
    @pytest.mark.parametrize("p", [0, 1, 4, 30])
    def test_attention_gym_prefix(self, p):
        masks = needs("attn_gym.masks")
        assert TokenGraph.from_rule(masks.generate_prefix_lm_mask(p), 17) == patterns.prefix(17, p)

    @pytest.mark.parametrize("sizes", [[2, 5, 1], [4], [3, 0, 2]], ids=str)
    def test_attention_gym_documents(self, sizes):
        offsets, n = torch.tensor([0, *sizes]).cumsum(0), sum(sizes)
        masks = needs("attn_gym.masks")
        assert TokenGraph.from_rule(
            masks.generate_doc_mask_mod(masks.causal_mask, offsets), n
        ) == patterns.documents(sizes)
        assert TokenGraph.from_rule(
            masks.generate_packed_causal_doc_mask_mod(offsets), n
        ) == patterns.documents(sizes)
        both = TokenGraph.from_rule(masks.generate_doc_mask_mod(noop_mask, offsets), n)
        assert both == patterns.documents(sizes, causal=False)

    @pytest.mark.parametrize(("source", "target"), [(3, 4), (0, 4), (3, 0)])
    def test_unilm(self, source, target):
        """Every token attends to the source; in the target's own square there is a triangle."""
        mask = torch.zeros(source + target, source + target, dtype=torch.bool)
        mask[:, :source] = True
        mask[source:, source:] = torch.ones(target, target, dtype=torch.bool).tril()
        assert torch.equal(mask, patterns.prefix(source + target, source).mask())

    def test_glm(self):
        """Text of six tokens, blanks at 2 and at 4, 5, the later blank filled first: the rest is attended to
        by all.
        """
        graph = patterns.permutation([0, 1, 3, 4, 5, 2], context=3)
        heard = {
            0: [0, 1, 3],
            1: [0, 1, 3],
            3: [0, 1, 3],
            4: [0, 1, 3, 4],
            5: [0, 1, 3, 4, 5],
            2: [0, 1, 2, 3, 4, 5],
        }
        assert [row.nonzero().flatten().tolist() for row in graph.mask()] == [
            heard[token] for token in range(6)
        ]


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (
                    lambda: patterns.documents(3),
                    TypeError,
                    r"lengths must be a sequence of sizes, got 3; for a single one give \[3\]",
                ),
                (lambda: patterns.shared_prefix(-1, []), ValueError, "prompt must be at least 0, got -1"),
                (
                    lambda: patterns.shared_prefix(2, 3),
                    TypeError,
                    r"answers must be .*got 3; for a single one give \[3\]",
                ),
                (
                    lambda: patterns.shared_prefix(2, [1, -3]),
                    ValueError,
                    "each of answers must be at least 0, got -3",
                ),
                (lambda: patterns.block_causal(4, 0), ValueError, "block must be at least 1, got 0"),
                (lambda: patterns.block_causal(-4, 1), ValueError, "at least 0, got -4"),
                (lambda: patterns.bidirectional_groups(4), TypeError, "groups must be a sequence .*got 4"),
                (
                    lambda: patterns.bidirectional_groups([0, 1.5]),
                    TypeError,
                    "each of groups must be an integer, got 1.5",
                ),
                (lambda: patterns.permutation(3), TypeError, "order must be a sequence of positions, got 3"),
                (
                    lambda: patterns.permutation([0, 2]),
                    ValueError,
                    r"order must hold each of 0 \.\. 1 once, in any order, got \[0, 2\]",
                ),
                (lambda: patterns.permutation([0, 0]), ValueError, r"each of 0 \.\. 1 once"),
                (lambda: patterns.permutation([-1, 0]), ValueError, r"each of 0 \.\. 1 once"),
                (
                    lambda: patterns.permutation([0, True]),
                    TypeError,
                    "each of order must be an integer, got the bool True",
                ),
                (lambda: patterns.permutation([0], -1), ValueError, "context must be at least 0, got -1"),
                (
                    lambda: patterns.permutation([0], 0, "both"),
                    ValueError,
                    "stream must be one of 'content', 'query', got 'both'",
                ),
                (
                    lambda: patterns.fill_in_the_middle(4, 3, 2),
                    IndexError,
                    r"0 <= start <= stop <= n = 4, got start 3 and stop 2",
                ),
                (lambda: patterns.fill_in_the_middle(4, 1, 5), IndexError, "n = 4, got start 1 and stop 5"),
                (
                    lambda: patterns.fill_in_the_middle(4, -1, 2),
                    ValueError,
                    "start must be at least 0, got -1",
                ),
                (
                    lambda: patterns.fill_in_the_middle(4, 1, 2, "mps"),
                    ValueError,
                    "order must be one of 'psm', 'spm', got 'mps'",
                ),
            ]
        )
