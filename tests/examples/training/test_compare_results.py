"""Rows, table and plot of a comparison, and its folder."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from support.bounds import assert_exact
from support.extras import needs

from examples.training import compare_results, compare_store
from examples.training.compare_results import Mean, Outcome, rows, table


def made(graph, losses, edges=4.0, induction=0.5):
    rest = (1.0, induction, 0.01, 100.0, 4)
    return [Outcome(graph, graph, seed, edges, loss, *rest) for seed, loss in enumerate(losses)]


class TestRows:
    def test_means_and_standard_errors(self):
        # by hand: of n numbers the root of the sum of squares about the mean, over n (n - 1)
        first, second = rows(made("a", [2.0, 2.5, 3.0, 2.5]) + made("b", [3.0, 3.0, 3.0, 4.0]))
        for found, mean, squares in (
            (first.loss, 2.5, 0.5),
            (second.loss, 3.25, 0.75),
            (second.difference, 0.75, 1.25),
        ):
            assert_exact([found.mean, found.error], [mean, (squares / 12) ** 0.5], largest=4.0)
        assert first.difference is None

    def test_differences_are_taken_seed_by_seed(self):
        """Seeds far apart, graphs always the same step apart: only the mean is uncertain."""
        _, second = rows(made("a", [1.0, 2.0, 4.0]) + made("b", [1.25, 2.25, 4.25]))
        assert second.loss.error > 0.8
        assert_exact([second.difference.mean, second.difference.error], [0.25, 0.0], largest=4.25)
        mixed = made("a", [1.0, 2.0, 4.0])[::-1] + made("b", [1.25, 2.25, 4.25])[::-1]
        assert rows(mixed)[1].difference == second.difference

    def test_the_table(self):
        """An error over seeds, none of one seed."""
        losses = made("causal", [2.0, 2.2], 8.5) + made("window(4)", [2.1, 2.1], 3.625, induction=None)
        lines = table(rows(losses)).splitlines()
        assert lines[0].split("  ")[0] == "graph"
        assert " ".join(lines[1].split()) == "causal 8.5 2.1000 ± 0.1000 - 0.50 ± 0.00 10.0 100 4"
        assert " ".join(lines[2].split()) == "window(4) 3.6 2.1000 ± 0.0000 +0.0000 ± 0.1000 - 10.0 100 4"
        assert len(set(map(len, lines))) == 1
        (one,) = rows(made("a", [2.0]))
        assert one.loss == Mean(2.0, None)
        assert "±" not in table([one])


class TestPlot:
    FOUND = rows(
        made("causal", [2.0, 2.2], 32.5)
        + made("window(4)", [2.3, 2.3], 3.6)
        + made("window(8)", [2.25, 2.35], 7.0)
    )

    @pytest.fixture(autouse=True)
    def pictures(self):
        needs("matplotlib")

    def test_points_bars_and_names(self):
        (axes,) = compare_results.plot(self.FOUND, "title", "facts").axes
        assert axes.get_xscale() == "log"
        markers = [line for line in axes.lines if line.get_marker() in "os"]
        points = {tuple(point) for line in markers for point in line.get_xydata().tolist()}
        assert points == {(row.edges_per_token, row.loss.mean) for row in self.FOUND}
        ends = [segment[:, 1].tolist() for bars in axes.collections for segment in bars.get_segments()]
        wanted = [[row.loss.mean - row.loss.error, row.loss.mean + row.loss.error] for row in self.FOUND]
        assert_exact(list(chain(*sorted(ends))), list(chain(*sorted(wanted))))
        names = {row.graph: (row.edges_per_token, row.loss.mean) for row in self.FOUND}
        assert {text.get_text(): text.xy for text in axes.texts} == names
        assert axes.get_title(loc="left") == "title\nfacts"

    def test_names_do_not_overlap_and_stay_inside(self):
        figure = compare_results.plot(self.FOUND, "title", "facts")
        boxes = [text.get_window_extent() for text in figure.axes[0].texts]
        assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)

    def test_one_graph_whose_name_is_no_formula(self):
        name = "file:a$x^$b.edges"
        (axes,) = compare_results.plot(rows(made(name, [2.0])), "title", "facts").axes
        assert [text.get_text() for text in axes.texts] == [name]


def test_two_at_once_do_not_share_a_folder(tmp_path):
    """Both began in an empty one: what the first finishes makes it its own."""
    one, other = (compare_store.Store(tmp_path, {"steps": steps}) for steps in (1, 2))
    (outcome,) = made("causal", [2.0])
    one.add(outcome)
    with pytest.raises(ValueError, match="holds a comparison with steps 1, not 2"):
        other.add(replace(outcome, seed=1))
    assert (one.find("causal", outcome.key, 0), one.find("causal", outcome.key, 1)) == (outcome, None)
