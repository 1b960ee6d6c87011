"""The list of the zoo: every builder with its definition and an example."""

from gnn_attention import patterns
from gnn_attention.convert import catalogue, expressions


def test_every_builder_has_an_example():
    assert set(patterns.__all__) == set(catalogue.EXAMPLES)


def test_an_example_shows_its_builder():
    for name in patterns.__all__:
        (entry,) = catalogue.entries([name])
        assert entry.example.startswith(f"{name}(")
        assert entry.definition.endswith((".", ":")), name
        assert ":func:" not in entry.definition, name
        if entry.edges_per_token is not None:
            graph = expressions.parse(entry.example)
            assert graph.num_edges > 0, name
            assert 4 <= max(graph.num_dst, graph.num_src) <= 80, name


def test_only_values_for_each_edge_are_no_graphs():
    no_graphs = {entry.name for entry in catalogue.entries() if entry.edges_per_token is None}
    assert no_graphs == {"edge_types", "shortest_paths"}


def test_edges_per_token():
    """Window: a triangle of 8, then 8 for each; two kinds of heads are averaged."""
    (entry,) = catalogue.entries(["window"])
    assert entry.example == "window(64, 8)"
    assert entry.edges_per_token == (36 + 56 * 8) / 64
    (entry,) = catalogue.entries(["duo_attention"])
    one, other = (expressions.parse(entry.example).select(0, head).num_edges for head in (1, 0))
    assert entry.edges_per_token == (one + 3 * other) / (4 * 64)
