"""The graphs and features of ``gnn-attention verify`` for backends: all of them in float64, a covering choice
in other dtypes.
"""

from itertools import takewhile

from gnn_attention import verify
from gnn_attention.verify.cases import FEATURES, GRAPHS

SMALL = [name for name in GRAPHS if "97" not in name]


def checked(backends, graph, dtype, features, size="inputs x1"):
    """What came of the checks of some backends; AssertionError if one failed."""
    checks = verify.checks("cpu", [dtype], backends, [graph], features, forms=[])
    calls = takewhile(lambda check: check.group == "attend", checks)
    outcomes = [check() for check in calls if size in check.name]
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
