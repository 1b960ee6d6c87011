"""The graphs and features of ``gnn-attention verify`` for backends: all of them in float64, a covering choice
in other dtypes.
"""

from gnn_attention.verify.attend_checks import attend_checks
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.check import Settings

SMALL = [name for name in GRAPHS if "97" not in name]


def checked(backends, graph, dtype, features, size=1.0):
    """What came of the checks of some backends; AssertionError if one failed."""
    chosen = Settings(
        dtypes=(dtype,), graphs=(graph,), features=tuple(features), sizes=(size,), backends=backends
    )
    outcomes = [check() for check in attend_checks(chosen)]
    assert not [(x.backend, x.dtype, x.name, x.message) for x in outcomes if not (x.passed or x.skipped)]
    return outcomes


def check_graph(backends, graph, every=1, dtypes=("float32",)):
    """Every feature, or every third, in float64; in each other dtype one, which is another for the next graph
    and dtype.
    """
    number, features = list(GRAPHS).index(graph), list(FEATURES)
    outcomes = checked(backends, graph, "float64", features[number % every :: every])
    for turn, dtype in enumerate(dtypes):
        outcomes += checked(backends, graph, dtype, [features[(number + 3 * turn) % len(features)]])
    assert {x.backend for x in outcomes if x.passed} == {backend.name for backend in backends}
