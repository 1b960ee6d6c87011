"""Fixtures that keep models in float64."""

import pytest
from support.extras import needs


@pytest.fixture
def wide(monkeypatch):
    needs("support.hf_models").keep_float64(monkeypatch)


@pytest.fixture
def llama(wide):
    return needs("support.hf_models").build64("llama", "gnn_attention")
