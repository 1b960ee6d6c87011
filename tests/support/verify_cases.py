"""The graphs and features of ``gnn-attention verify`` for backends: all of them in float64, a covering choice
in other dtypes.
"""

from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS
from gnn_attention.verify.groups import checks_of

SMALL = [name for name, case in GRAPHS.items() if "97" not in name and case.sizes[0] == BATCH]


def checked(backends, graph, dtype, features):
    """What came of the checks of some backends; AssertionError if one failed."""
    values = {"dtype": [dtype], "graph": [graph], "option": features, "size": ["inputs x1"]}
    outcomes = [check() for check in checks_of("attend", values, "cpu", backends)]
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
