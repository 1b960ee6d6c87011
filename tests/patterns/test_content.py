"""``patterns.content``: its builders are related, and take data by head and sample (``blocks`` too)."""

from __future__ import annotations

import pytest
import torch
from support.extras import needs

from gnn_attention import patterns
from gnn_attention.patterns import _choice, blocks, content


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(*shape, seed=0):
    return torch.randint(3, shape, generator=torch.Generator().manual_seed(seed))


class TestKin:
    @pytest.mark.parametrize("k", [0, 1, 3, 8, 20])
    def test_top_k_is_topk(self, k):
        """Without ties ``torch.topk`` of the masked logits chooses the same."""
        logits = numbers(8, 8)
        causal_logits = logits.masked_fill(~patterns.causal(8).mask(), -torch.inf)
        graphs = content.top_k(logits, k, causal=False), content.top_k(logits, k)
        for values, graph in zip((logits, causal_logits), graphs, strict=True):
            expected = torch.zeros(8, 8, dtype=torch.bool).scatter(1, values.topk(min(k, 8)).indices, True)
            assert torch.equal(graph.mask(), expected & (values > -torch.inf))

    def test_a_masked_sender_is_never_chosen(self):
        """A sender at -inf is not chosen even if too few remain; +inf is always chosen."""
        logits = torch.tensor([[-torch.inf, 3.0, torch.inf], [-torch.inf] * 3, [1.0, -torch.inf, 0.0]])
        assert content.top_k(logits, 2, causal=False).edge_index.tolist() == [[1, 2, 0, 2], [0, 0, 2, 2]]

    def test_ties_go_to_the_earlier(self):
        """Logits that differ in float64 alone are no tie."""
        logits = torch.tensor([[1.0, 1.0 + 2**-40]], dtype=torch.float64)
        assert content.top_k(logits, 1, causal=False).edge_index.tolist() == [[1], [0]]
        assert content.top_k(torch.zeros(40, 40), 3) == patterns.causal(40) & patterns.sinks(40, 3)
        assert content.nearest(torch.zeros(40, 2), 3, causal=False) == patterns.sinks(40, 3, causal=False)

    def test_nearest_on_a_line_is_a_window(self):
        """Points may be far from the origin, because differences are taken before squares."""
        points = torch.arange(12.0, dtype=torch.float64).unsqueeze(1) / 16 + 2**24
        assert content.nearest(points, 4) == patterns.window(12, 4)
        assert content.nearest(points, 3, loops=False) == patterns.window(12, 4) - patterns.window(12, 1)

    def test_nearest_in_chunks_of_rows(self, monkeypatch):
        expected = content.nearest(numbers(2, 17, 3), 4)
        monkeypatch.setattr(_choice, "SCORES_PER_CHUNK", 100)
        assert content.nearest(numbers(2, 17, 3), 4) == expected

    def test_a_hash_looks_at_directions_alone(self):
        """As in Reformer, lengths do not count, and opposite vectors never share a bucket of one round."""
        x = numbers(30, 8)
        assert content.lsh(x, 8, 2) == content.lsh(x * torch.arange(1, 31).unsqueeze(1), 8, 2)
        graph = content.lsh(torch.cat([x, -x]), 8, causal=False)
        assert not bool(graph.mask()[torch.arange(30), torch.arange(30, 60)].any())


DATA = [
    (lambda x: content.top_k(x, 2), numbers(2, 3, 7, 7)),
    (lambda x: content.top_k(x, 2, causal=False), numbers(2, 3, 5, 7)),
    (lambda x: content.nearest(x, 3), numbers(2, 3, 7, 2)),
    (lambda x: content.shared_bucket(x), labels(2, 3, 2, 7)),
    (lambda x: content.clusters(x), labels(2, 3, 7)),
    (lambda x: content.clusters(x, x[..., :4], causal=False), labels(2, 3, 7)),
    (lambda x: content.routing(x, -x, torch.eye(2), 3, causal=False), numbers(2, 3, 7, 2)),
    (lambda x: blocks.block_top_k(x[..., :2], 4, 2, local=0), numbers(2, 3, 7, 4)),
    (lambda x: blocks.moba(x, -x, 2, 2), numbers(2, 3, 7, 4)),
    (lambda x: blocks.quest(x, -x, 2, 2), numbers(2, 3, 7, 4)),
    (lambda x: blocks.tile_top_k(x, -x, 3, 1), numbers(2, 3, 7, 4)),
    (lambda x: blocks.sorted_blocks(7, x[..., 0].argsort(-1), 1), numbers(2, 3, 7, 4)),
    (lambda x: blocks.permuted_blocks(13, x[..., 0].argsort(-1), 2), numbers(2, 3, 7, 4)),
]


class TestHeadsAndSamples:
    @pytest.mark.parametrize(("build", "data"), DATA)
    def test_each_has_its_own_graph(self, build, data):
        graph, by_head, by_sample = build(data), build(data[0]), build(data[:, :1])
        assert [(g.batch, g.heads) for g in (graph, by_head, by_sample)] == [(2, 3), (None, 3), (2, None)]
        for sample in range(2):
            assert by_sample.select(sample) == build(data[sample, 0])
            for head in range(3):
                assert graph.select(sample, head) == build(data[sample, head])
        assert by_head.select(0, 2) == build(data[0, 2])
        # A graph that varies by head accepts any sample, and a graph that varies by sample any head.
        dst, src = torch.arange(by_head.num_dst).unsqueeze(1), torch.arange(by_head.num_src)
        assert torch.equal(by_head.rule(torch.tensor(9), torch.tensor(1), dst, src), by_head.mask()[1])
        assert torch.equal(by_sample.rule(torch.tensor(1), torch.tensor(9), dst, src), by_sample.mask()[1, 0])

    def test_centroids_by_head(self):
        x, centres = numbers(2, 7, 2), numbers(2, 3, 2, seed=1)
        graph = content.routing(x, x, centres, 3)
        assert graph.select(0, 1) == content.routing(x[1], x[1], centres[1], 3)

    def test_the_first_head_of_a_hash(self):
        """Each head has directions of its own, which the samples share."""
        x = numbers(2, 3, 30, 4)
        graph = content.lsh(x, 6, 2)
        assert (graph.batch, graph.heads) == (2, 3)
        assert graph.select(1, 2) == content.lsh(x[1], 6, 2).select(0, 2)
        graph = content.lsh(x[:1, :1].expand(1, 2, 30, 4), 6)
        assert graph.select(0, 0) != graph.select(0, 1)


@pytest.mark.parametrize("rounds", [1, 3])
def test_reformer_hashes_to_the_same_buckets(rounds):
    """The same seed gives the same directions, so tokens share the same buckets."""
    transformers = needs("transformers")
    sizes = {"num_attention_heads": 2, "attention_head_size": 5, "hidden_size": 10, "num_buckets": 6}
    config = transformers.ReformerConfig(**sizes, num_hashes=rounds, hash_seed=7)
    x = numbers(2, 2, 20, 5)
    reformer = needs("transformers.models.reformer.modeling_reformer")
    with torch.random.fork_rng():
        buckets = reformer.LSHSelfAttention(config)._hash_vectors(x, rounds, None).view(2, 2, rounds, 20)
    assert content.shared_bucket(buckets) == content.lsh(x, 6, rounds, seed=7)
