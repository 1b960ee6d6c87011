"""Random draws: the same from their number alone, right by two definitions, able to find faults."""

from functools import lru_cache

import pytest
import torch
from support.faults import WRONG_BACKENDS

from gnn_attention import Backend
from tests.guarantees import Draw, equality
from tests.guarantees.draws import DTYPES
from tests.guarantees.problems import problem_of

pytestmark = pytest.mark.slow  # a guarantee is measured: by default those of test_guarantees alone


@pytest.fixture(autouse=True, scope="module")
def _problems_made_once():
    """The truth about a draw is the same for every test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equality, "problem_of", lru_cache(problem_of))
        yield


def test_a_draw_is_its_number():
    first, again = Draw(12), Draw(12)
    assert first.numbers == again.numbers
    assert str(first) == str(again)
    assert torch.equal(first.mask, again.mask)
    assert len({str(Draw(number)).split(":", 1)[1] for number in range(50)}) == 50


def test_draws_cover_what_there_is():
    draws = [Draw(number) for number in range(400)]
    assert {draw.kind for draw in draws} == {"family", "mixed", "rows", "list", "table"}
    assert {draw.numbers.dtype for draw in draws} == set(DTYPES)
    assert {
        (draw.graph.num_dst == 0, draw.graph.num_src == 0, draw.numbers.batch == 0) for draw in draws
    } >= {
        (True, True, False),
        (True, False, False),
        (False, False, True),
    }
    assert any(draw.graph.heads for draw in draws)
    assert any(draw.graph.batch for draw in draws)
    assert any(draw.graph.num_dst > draw.graph.num_src for draw in draws)


@pytest.mark.parametrize("first", range(0, 400, 200))
def test_the_definition_and_the_library_agree_on_who_hears_whom(first):
    """The table read off plain Python, pair by pair, against the graph's own mask."""
    for number in range(first, first + 200):
        draw = Draw(number)
        mask = draw.graph.mask()
        mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
        assert torch.equal(mask.expand_as(draw.mask), draw.mask), draw


def test_the_order_of_edges_is_that_of_a_bias():
    for number in range(100):
        draw = Draw(number)
        if draw.edges is not None:
            assert draw.graph.edge_index.t().tolist() == [list(edge) for edge in draw.edges], draw


def test_every_backend_is_equal_to_the_formula():
    """The first draws; ``test_equality`` composes others."""
    tally = equality.run(range(20))
    assert tally.mismatches == ()
    assert tally.judged > 4 * tally.cases


WERE_WRONG = {
    911: "a merge whose shares did not sum to 1 by the rounding of a large lse",
    1212: "the same, of three parts, through a merged layer",
    1993: "the same, of a row of one edge in each part",
    2111: "the same, with a learned table",
    2366: "the same, with one channel",
    3480: "the same, inside mixed",
    922: "a share of the sink that a sigmoid near 1 had no derivative for",
    3293: "float16 rounded twice by the kernel of torch",
    3417: "sinks that were added to a rounded result",
    4037: "taken for one: lse of hundreds in float32",
    1713: "taken for one: SDPA's luck with a softcap, in a layer",
    6937: "the same",
}


@pytest.mark.parametrize("number", WERE_WRONG, ids=str)
def test_draws_that_were_wrong(number):
    assert equality.run([number]).mismatches == ()


@pytest.mark.parametrize("fault", WRONG_BACKENDS)
def test_planted_faults_are_found(fault):
    """Within 80 draws; the backend without a fault passes them all."""
    wrong = Backend(fault, WRONG_BACKENDS[fault])
    assert any(
        isinstance(found, equality.Mismatch)
        for number in range(80)
        for _, found in equality.case(number, [wrong])
    )


def test_what_a_backend_raises_is_a_mismatch_and_a_refusal_is_none():
    def broken(call):
        raise RuntimeError("no such luck")

    ((_, found),) = equality.case(5, [Backend("broken", broken)])
    assert "RuntimeError: no such luck" in found.message
    refusing = Backend("refuses", broken, unsupported_reason=lambda call: "not today")
    ((_, refused),) = equality.case(5, [refusing])
    assert refused is None
