"""Sequences in one row: the same graphs elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.extras import needs

from gnn_attention import patterns

orders = st.integers(0, 9).flatmap(lambda n: st.permutations(range(n)))


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
    def test_glm(self):
        """Text of six tokens, blanks at 2 and at 4, 5, the later blank filled first: the rest is attended to
        by all.
        """
        graph = patterns.permutation([0, 1, 3, 4, 5, 2], context=3)
        senders = {0: [0, 1, 3], 1: [0, 1, 3], 3: [0, 1, 3], 4: [0, 1, 3, 4], 5: [0, 1, 3, 4, 5]}
        senders[2] = [0, 1, 2, 3, 4, 5]
        assert [row.nonzero().flatten().tolist() for row in graph.mask()] == [senders[t] for t in range(6)]
