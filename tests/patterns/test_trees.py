"""Trees over tokens: the same graphs elsewhere."""

from __future__ import annotations

import networkx
import pytest

from gnn_attention import patterns

FORESTS = [[-1], [-1, 0, 0, 1], [-1, -1, 0, 1, 1, 4], [-1, 0, 1, 2], [-1, -1, -1]]


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


class TestHierarchicalDocument:
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
