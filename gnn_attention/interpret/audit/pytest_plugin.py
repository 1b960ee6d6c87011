"""The audit as a pytest fixture.

``pytest -p gnn_attention.interpret.audit.pytest_plugin``, or its name in ``pytest_plugins`` of conftest.py::

    def test_my_model_stays_within_its_window(audited):
        audited(MyModel(), patterns.window(32, 8), (32, 16), layers=2)
"""

from collections.abc import Callable
from typing import Any

import pytest

from gnn_attention.interpret.audit.api import audit
from gnn_attention.interpret.audit.report import Verdict


@pytest.fixture
def audited() -> Callable[..., Verdict]:
    """:func:`gnn_attention.audit` that fails the test with the verdict's text where information leaks.

    ``audited(module, graph, input_shape, ..., exact=False)`` takes the arguments of ``audit``; with
    ``exact=True`` an allowed pair that is not used fails the test too. Returns the verdict.
    """

    def check(*arguments: Any, exact: bool = False, **options: Any) -> Verdict:
        verdict = audit(*arguments, **options)
        if not (verdict.exact if exact else verdict.ok):
            pytest.fail(str(verdict), pytrace=False)
        return verdict

    return check
