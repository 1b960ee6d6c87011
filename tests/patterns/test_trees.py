"""Trees over tokens: kin, refusals, and the same graphs elsewhere."""

from __future__ import annotations

import networkx
import pytest
import torch
from support.extras import needs
from support.refusals import assert_refusals
from support.zoo.trees import parents

from gnn_attention import TokenGraph, patterns

FORESTS = [[-1], [-1, 0, 0, 1], [-1, -1, 0, 1, 1, 4], [-1, 0, 1, 2], [-1, -1, -1]]


class TestTreeDecoding:
    @pytest.mark.parametrize("forest", FORESTS, ids=str)
    @pytest.mark.parametrize("prompt", [0, 1, 4])
    def test_the_prompt_is_the_trunk(self, forest, prompt):
        graph = patterns.tree_decoding(prompt, forest)
        size = len(forest)
        mask = graph.mask()
        assert torch.equal(mask[:prompt, :prompt], patterns.causal(prompt).mask())
        assert bool(mask[prompt:, :prompt].all())
        assert not bool(mask[:prompt, prompt:].any())
        assert torch.equal(mask[prompt:, prompt:], patterns.tree(forest).mask())
        step = graph.rows(prompt, prompt + size)
        assert (step.num_dst, step.num_src, step.dst_offset) == (size, prompt + size, prompt)

    def test_it_is_a_prefix_tree_of_single_tokens(self):
        assert patterns.tree_decoding(3, [-1, 0, 0, 1]) == patterns.prefix_tree(
            [3, 1, 1, 1, 1], [-1, 0, 1, 1, 2]
        )
        assert patterns.tree_decoding(0, [-1, 0, 0, 1]) == patterns.tree([-1, 0, 0, 1])
        assert patterns.tree_decoding(5, []) == patterns.causal(5)

    def test_a_single_branch_is_ordinary_decoding(self):
        assert patterns.tree_decoding(4, [-1, 0, 1]) == patterns.causal(7)

    def test_drafts_may_stand_in_any_order(self):
        graph = patterns.tree_decoding(1, [1, -1])
        assert graph.mask().tolist() == [[True, False, False], [True, True, True], [True, False, True]]

    @pytest.mark.parametrize("prompt", [0, 1, 6])
    def test_attention_gym(self, prompt):
        """Its receivers are the tree alone; its tree has one root."""
        forest = [-1, 0, 1, 1, 3, 3, 0]
        masks = needs("attn_gym.masks")
        rule = masks.generate_jetspec_tree_causal_mask_mod(
            prompt, masks.build_tree_ancestor_matrix(forest, device="cpu")
        )
        theirs = TokenGraph.from_rule(rule, len(forest), prompt + len(forest))
        ours = patterns.tree_decoding(prompt, forest).rows(prompt, prompt + len(forest))
        assert torch.equal(theirs.mask(), ours.mask())

    def test_medusa(self):
        """Its choices are paths of ranks; a choice attends to the root, its own prefixes and itself, and the
        whole cache.
        """
        choices = sorted([(0,), (0, 0), (1,), (0, 1), (1, 0), (0, 0, 0)], key=lambda path: (len(path), path))
        nodes = [(), *choices]
        table = [[node == path[: len(node)] for node in nodes] for path in nodes]
        above = [nodes.index(path[:-1]) if path else -1 for path in nodes]
        step = patterns.tree_decoding(2, above).rows(2, 2 + len(nodes))
        assert step.mask().tolist() == [[True] * 2 + row for row in table]


class TestPrefixTree:
    def test_its_smallest_cases(self):
        assert patterns.prefix_tree([4], [-1]) == patterns.causal(4)
        assert patterns.prefix_tree([3, 0, 2], [-1, -1, -1]) == patterns.documents([3, 0, 2])
        assert patterns.prefix_tree([2, 3], [-1, 0]) == patterns.causal(5)
        assert patterns.prefix_tree([1] * 9, parents(9)) == patterns.tree(parents(9))
        assert patterns.prefix_tree([], []).num_dst == 0

    def test_several_prompts(self):
        """Two groups side by side are two graphs of their own."""
        graph = patterns.prefix_tree([2, 1, 2, 3, 2], [-1, 0, 0, -1, 3])
        one, other = patterns.shared_prefix(2, [1, 2]).mask(), patterns.shared_prefix(3, [2]).mask()
        assert torch.equal(graph.mask(), torch.block_diag(one, other).bool())

    def test_a_parent_may_stand_after_its_child(self):
        graph = patterns.prefix_tree([1, 2], [1, -1])
        assert graph.mask().tolist() == [[True, True, True], [False, True, False], [False, True, True]]

    def test_attention_gym(self):
        """Its map names for each document the prompt before it, a prompt itself."""
        sizes, prompts = [3, 2, 2, 4, 1, 3], [0, 0, 0, 3, 3, 3]
        offsets = torch.tensor([0, *sizes]).cumsum(0)
        masks = needs("attn_gym.masks")
        theirs = TokenGraph.from_rule(
            masks.generate_shared_prefix_mask_mod(offsets, torch.tensor(prompts)), sum(sizes)
        )
        up = [-1 if prompt == number else prompt for number, prompt in enumerate(prompts)]
        assert theirs == patterns.prefix_tree(sizes, up)


class TestFamily:
    @pytest.mark.parametrize("forest", FORESTS, ids=str)
    def test_the_tree_with_a_circle_for_each_set_of_siblings(self, forest):
        """Cliques of a parent with its children, and of the roots."""
        relatives = networkx.Graph([(i, i) for i in range(len(forest))])
        for parent in range(-1, len(forest)):
            circle = [child for child, up in enumerate(forest) if up == parent] + [parent] * (parent >= 0)
            relatives.add_edges_from(networkx.complete_graph(circle).edges)
        adjacency = networkx.to_numpy_array(relatives, nodelist=range(len(forest)))
        assert patterns.family(forest).mask().tolist() == (adjacency > 0).tolist()

    @pytest.mark.parametrize("levels", [1, 2, 3, 4])
    def test_a_tree_is_crossed_in_two_layers_for_each_level_less_one(self, levels):
        """The binary tree of this depth: so many layers, and not one less."""
        graph = patterns.family([-1, *((child - 1) // 2 for child in range(1, 2 ** (levels + 1) - 1))])
        assert bool((graph ** (2 * levels - 1)).mask().all())
        assert not bool((graph ** (2 * levels - 2)).mask().all())


class TestHierarchicalDocument:
    def test_it_is_the_family_of_its_anchors(self):
        """Document 0; section 1 with the sentences 2 (words 3, 4) and 5 (word 6); section 7 with the empty
        sentence 8.
        """
        graph = patterns.hierarchical_document([[2, 1], [0]])
        assert graph == patterns.family([-1, 0, 1, 2, 2, 1, 5, 0, 7])

    def test_words_hear_their_sentence_alone(self):
        graph = patterns.hierarchical_document([[3, 2], [4]])
        assert graph.in_degree().tolist() == [3, 5, 6, 4, 4, 4, 5, 3, 3, 4, 6, 5, 5, 5, 5]

    def test_its_levels_as_the_authors_keep_them(self):
        """Three labels a token (sentence, section, document), None where it takes no part: it attends to who
        shares one.
        """
        labels = [(None, None, 0)]
        sentence = 0
        for number, sizes in enumerate(document := [[2, 1], [3], []]):
            labels.append((None, number, 0))
            for words in sizes:
                labels.append((sentence, number, None))
                labels += [(sentence, None, None)] * words
                sentence += 1
        table = [
            [any(x is not None and x == y for x, y in zip(i, j, strict=True)) for j in labels] for i in labels
        ]
        assert patterns.hierarchical_document(document).mask().tolist() == table

    def test_a_document_may_be_given_by_tuples_and_tensors(self):
        expected = patterns.hierarchical_document([[1, 2], [3]])
        assert patterns.hierarchical_document(((1, 2), (3,))) == expected
        assert patterns.hierarchical_document([torch.tensor([1, 2]), iter([3])]) == expected

    def test_long_documents_are_not_spelt_out(self):
        assert patterns.hierarchical_document([[1]] * 40).name == "hierarchical_document([40 sections])"


class TestRefusals:
    def test_wrong_arguments(self):
        assert_refusals(
            [
                (lambda: patterns.tree(3), TypeError, "parents must be a sequence of positions .*got 3"),
                (lambda: patterns.tree_decoding(-1, [-1]), ValueError, "prompt must be at least 0, got -1"),
                (
                    lambda: patterns.tree_decoding(2, 0),
                    TypeError,
                    "parents must be a sequence of positions .*got 0",
                ),
                (
                    lambda: patterns.tree_decoding(2, [-1, 2]),
                    IndexError,
                    r"parents\[1\] must be -1 \(a root\) or in 0 \.\. 1, got 2",
                ),
                (lambda: patterns.tree_decoding(2, [-2]), IndexError, r"parents\[0\] must be -1 .*got -2"),
                (
                    lambda: patterns.tree_decoding(2, [-1, 1]),
                    ValueError,
                    "must form a forest, but token 1 is on or below a cycle",
                ),
                (
                    lambda: patterns.tree_decoding(2, [0.5]),
                    TypeError,
                    r"parents\[0\] must be an integer, got 0.5",
                ),
                (
                    lambda: patterns.prefix_tree(2, [-1]),
                    TypeError,
                    "lengths must be a sequence of sizes, got 2",
                ),
                (
                    lambda: patterns.prefix_tree([2], -1),
                    TypeError,
                    "parents must be a sequence of positions .*got -1",
                ),
                (
                    lambda: patterns.prefix_tree([2, -1], [-1, 0]),
                    ValueError,
                    "each of lengths must be at least 0, got -1",
                ),
                (lambda: patterns.prefix_tree([2, 1], [-1]), ValueError, "for each of the 2 lengths, got 1"),
                (
                    lambda: patterns.prefix_tree([2, 1], [-1, 5]),
                    IndexError,
                    r"parents\[1\] must be -1 .*got 5",
                ),
                (lambda: patterns.prefix_tree([2, 1], [1, 0]), ValueError, "must form a forest"),
                (
                    lambda: patterns.family([1, 0]),
                    ValueError,
                    "must form a forest, but token 0 is on or below a cycle",
                ),
                (lambda: patterns.family([3]), IndexError, r"parents\[0\] must be -1 .*got 3"),
                (
                    lambda: patterns.family(None),
                    TypeError,
                    "parents must be a sequence of positions .*got None",
                ),
                (
                    lambda: patterns.hierarchical_document(3),
                    TypeError,
                    "sections must be a list of lists .*got 3",
                ),
                (
                    lambda: patterns.hierarchical_document([3]),
                    TypeError,
                    r"sections\[0\] must be a list of sentence lengths, got 3",
                ),
                (
                    lambda: patterns.hierarchical_document([[1], [-2]]),
                    ValueError,
                    r"each of sections\[1\] must be at least 0, got -2",
                ),
                (
                    lambda: patterns.hierarchical_document([[True]]),
                    TypeError,
                    r"each of sections\[0\] must be an integer, got the bool",
                ),
            ]
        )
