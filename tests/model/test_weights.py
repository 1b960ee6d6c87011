"""Tensors in files: the same bits come back, a file is whole or not there, and errors name it."""

from __future__ import annotations

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as theirs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import assert_refusals
from torch import Tensor

from gnn_attention.model import weights

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]

fixed = settings(derandomize=True, deadline=None, max_examples=50)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = words.filter(lambda name: name != "__metadata__")


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensor:
    """Any bits in any dtype: a NaN's payload too must come back as it was."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    values = draw(st.lists(st.integers(0, 1 if dtype is torch.bool else 255), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.uint8).view(dtype).reshape(shape)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.safetensors"


@given(st.dictionaries(names, some_tensors(), max_size=4), st.dictionaries(words, words, max_size=3))
@fixed
def test_what_is_saved_is_loaded_here_and_by_safetensors(tensors: Any, metadata: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.safetensors"
        weights.save(path, tensors, metadata)
        found, texts = weights.load(path)
        assert_same(found, tensors)
        assert_same(theirs.load_file(path), tensors)
    assert texts == metadata


def test_the_same_content_is_the_same_file(path: Path) -> None:
    """safetensors alone writes metadata in another order each time."""
    tensors, metadata = {"b": torch.ones(3), "a": torch.zeros(2)}, {str(i): "x" for i in range(20)}
    contents = set()
    for _ in range(5):
        weights.save(path, tensors, metadata)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    assert list(weights.load(path)[1]) == sorted(metadata)


def test_views_parameters_and_shared_memory_are_written_as_they_read(path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    # a lazy negation: the bits in memory are not the values
    negative = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    given = {"t": whole.T, "step": whole[:, ::2], "p": torch.nn.Parameter(whole), "n": negative, "w": whole}
    weights.save(path, given)
    found, _ = weights.load(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    assert not found["p"].requires_grad
    # writable, and neither another tensor's memory nor the file's
    found["w"].zero_()
    assert torch.equal(found["p"], whole)
    assert torch.equal(weights.load(path)[0]["w"], whole)


WRONG = [
    ({"x": torch.eye(2).to_sparse()}, None, ValueError, r"tensors\['x'\] is sparse or without data"),
    ({"x": [1.0]}, None, TypeError, r"tensors\['x'\] is a list: expected a Tensor"),
    ({}, {"width": 3}, TypeError, "'metadata'.*int"),
    ({}, {"width": "\udfff"}, ValueError, "surrogates not allowed"),
]


def test_what_cannot_be_saved(path: Path) -> None:
    assert_refusals((partial(weights.save, path, *given), error, match) for *given, error, match in WRONG)
    assert list(path.parent.iterdir()) == []


def test_a_file_of_something_else_is_named(path: Path) -> None:
    weights.save(path, {"x": torch.ones(5)}, {"a": "b"})
    whole = path.read_bytes()
    header = b'{"x": {"dtype": "\\u001b[2J", "shape": [], "data_offsets": [0, 0]}}'
    strange = len(header).to_bytes(8, "little") + header
    for content in (b"", whole[:-1], whole + b"1", strange):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"some\.safetensors: expected a safetensors file: ") as caught:
            weights.load(path)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()
