"""The catalogue lists every builder with its definition and an example."""

import pytest

from gnn_attention import TokenGraph, patterns
from gnn_attention.convert import catalogue, expressions


def test_every_builder_has_an_example():
    assert set(patterns.__all__) == set(catalogue.EXAMPLES)


def test_an_example_shows_its_builder():
    """An example calls its builder; all but two builders, which return a value per edge, return graphs."""
    other_values = set()
    for entry in catalogue.entries():
        name, value = entry.name, expressions.evaluate(entry.example)
        assert entry.example.startswith(f"{name}(")
        assert entry.definition.endswith((".", ":")), name
        assert ":func:" not in entry.definition, name
        if isinstance(value, TokenGraph):
            assert value.num_edges > 0, name
            assert 4 <= max(value.num_dst, value.num_src) <= 80, name
        else:
            other_values.add(name)
    assert other_values == {"edge_types", "shortest_paths"}


def test_entries_by_name():
    (entry,) = catalogue.entries(["window"])
    assert (entry.family, entry.example) == ("local", "window(64, 8)")
    with pytest.raises(ValueError, match="no builder 'windw'; did you mean 'window'"):
        catalogue.entries(["windw"])
