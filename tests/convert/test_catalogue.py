"""The list of the zoo: every builder with its definition and an example."""

import pytest

from gnn_attention import TokenGraph, patterns
from gnn_attention.convert import catalogue, expressions


def test_every_builder_has_an_example():
    assert set(patterns.__all__) == set(catalogue.EXAMPLES)


def test_an_example_shows_its_builder():
    """Only two make values for each edge, and no graph."""
    no_graphs = set()
    for entry in catalogue.entries():
        name, made = entry.name, expressions.evaluate(entry.example)
        assert entry.example.startswith(f"{name}(")
        assert entry.definition.endswith((".", ":")), name
        assert ":func:" not in entry.definition, name
        if isinstance(made, TokenGraph):
            assert made.num_edges > 0, name
            assert 4 <= max(made.num_dst, made.num_src) <= 80, name
        else:
            no_graphs.add(name)
    assert no_graphs == {"edge_types", "shortest_paths"}


def test_entries_by_name():
    (entry,) = catalogue.entries(["window"])
    assert (entry.family, entry.example) == ("local", "window(64, 8)")
    with pytest.raises(ValueError, match="no builder 'windw'; did you mean 'window'"):
        catalogue.entries(["windw"])
