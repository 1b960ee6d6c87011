"""The safetensors format both ways against the safetensors library, and everything a bad file can hold."""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extras import needs
from torch import Tensor

from gnn_attention.model import weights

DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

fixed = settings(derandomize=True, deadline=None, max_examples=50)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = words.filter(lambda name: name != "__metadata__")
metadata_maps = st.dictionaries(words, words, max_size=3)


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensor:
    """Any bits in any dtype: a NaN's payload too must come back as it was."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    values = draw(st.lists(st.integers(0, 1 if dtype is torch.bool else 255), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.uint8).view(dtype).reshape(shape)


tensor_maps = st.dictionaries(names, some_tensors(), max_size=4)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def tensor(start: Any, stop: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.safetensors"


@given(tensor_maps, metadata_maps)
@fixed
def test_what_is_saved_is_loaded(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.safetensors"
        weights.save(path, tensors, metadata)
        found, found_metadata = weights.load(path)
    assert_same(found, tensors)
    assert list(found) == list(tensors)
    assert found_metadata == metadata


@given(tensor_maps, metadata_maps)
@fixed
def test_the_library_reads_what_we_write(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    theirs, safe_open = needs("safetensors.torch"), needs("safetensors").safe_open
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.safetensors"
        weights.save(path, tensors, metadata)
        assert_same(theirs.load_file(path), tensors)
        with safe_open(path, "pt") as file:
            assert (file.metadata() or {}) == metadata


@given(tensor_maps, metadata_maps)
@fixed
def test_we_read_what_the_library_writes(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    theirs = needs("safetensors.torch")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.safetensors"
        theirs.save_file(tensors, path, metadata or None)  # of two empty ones, safetensors 0.8.0 writes no valid JSON
        found, found_metadata = weights.load(path)
    assert_same(found, tensors)
    assert found_metadata == metadata


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_on_disk_are_those_of_the_format(path: Path, name: str) -> None:
    weights.save(path, {"x": torch.ones(2, 1, dtype=DTYPES[name])})
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    size = 2 * DTYPES[name].itemsize
    assert json.loads(raw[8 : 8 + length]) == {"x": {"dtype": name, "shape": [2, 1], "data_offsets": [0, size]}}
    assert len(raw) == 8 + length + size
    one = {"F16": "003c", "BF16": "803f", "F32": "0000803f", "F64": "000000000000f03f", "I64": "01" + "00" * 7}
    assert raw[8 + length :].hex() == 2 * one.get(name, {"I32": "01000000", "U8": "01", "BOOL": "01"}.get(name, ""))


def test_every_tensor_starts_at_a_multiple_of_its_item(path: Path) -> None:
    tensors = {name: torch.zeros(3, dtype=dtype) for name, dtype in sorted(DTYPES.items(), key=lambda item: item[0])}
    weights.save(path, tensors)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert list(header) == list(tensors)
    for name, fields in header.items():
        assert (8 + length + fields["data_offsets"][0]) % DTYPES[name].itemsize == 0


def test_views_parameters_and_shared_memory_are_written_as_they_read(path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    negative = torch.tensor([1 + 2j, 3 - 4j]).conj().imag  # a lazy negation: the bits in memory are not the values
    weights.save(path, {"t": whole.T, "step": whole[:, ::2], "p": torch.nn.Parameter(whole), "n": negative, "w": whole})
    found, _ = weights.load(path)
    assert torch.equal(found["t"], whole.T)
    assert torch.equal(found["step"], whole[:, ::2])
    assert torch.equal(found["p"], whole)
    assert not found["p"].requires_grad
    assert found["n"].tolist() == [-2.0, 4.0]
    found["w"].zero_()  # writable, and no other tensor's memory
    assert torch.equal(found["p"], whole)


def test_the_default_device_and_dtype_do_not_matter(path: Path) -> None:
    tensors = {"x": torch.ones(2), "empty": torch.empty(0, 3)}
    with torch.device("meta"):
        weights.save(path, tensors)
        found, _ = weights.load(path)
    assert_same(found, tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_another_device_are_loaded_on_the_cpu(path: Path) -> None:
    weights.save(path, {"x": torch.ones(2, device="cuda")})
    assert weights.load(path)[0]["x"].device.type == "cpu"


def test_a_big_endian_machine_swaps_the_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.tensor([1.0, -2.5], dtype=torch.float64)
    weights.save(path, {"x": expected})
    little = path.read_bytes()
    swapped = torch.tensor([list(expected.view(torch.uint8).reshape(2, 8).flip(1).reshape(-1))], dtype=torch.uint8)
    monkeypatch.setattr(sys, "byteorder", "big")
    # To that machine's memory the swapped bytes are the same two numbers.
    weights.save(path, {"x": swapped.view(torch.float64).reshape(2)})
    assert path.read_bytes() == little
    assert torch.equal(weights.load(path)[0]["x"].view(torch.uint8), swapped.reshape(-1))


def test_no_tensors_make_a_file_too(path: Path) -> None:
    weights.save(path, {})
    assert weights.load(path) == ({}, {})
    assert needs("safetensors.torch").load_file(path) == {}


def test_saving_replaces_the_file_and_leaves_nothing_else(path: Path) -> None:
    weights.save(path, {"x": torch.zeros(2)})
    weights.save(str(path), {"x": torch.ones(2)})
    assert weights.load(str(path))[0]["x"].tolist() == [1.0, 1.0]
    assert list(path.parent.iterdir()) == [path]


def test_a_save_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights.save(path, {"x": torch.zeros(2)})
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        weights.save(path, {"x": torch.ones(2)})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_mode_is_that_of_any_new_file(path: Path) -> None:
    weights.save(path, {})
    (path.parent / "plain").write_bytes(b"")
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "match"),
    [
        (
            {"x": torch.zeros(1, dtype=torch.complex64)},
            None,
            ValueError,
            r"tensors\['x'\] is torch.complex64: expected",
        ),
        ({"x": torch.zeros(1, dtype=torch.int16)}, None, ValueError, r"tensors\['x'\] is torch.int16: expected one of"),
        ({"x": torch.eye(2).to_sparse()}, None, ValueError, r"tensors\['x'\] is sparse, nested or without data"),
        ({"x": torch.zeros(1, device="meta")}, None, ValueError, r"tensors\['x'\] is sparse, nested or without data"),
        ({"__metadata__": torch.zeros(1)}, None, ValueError, "tensors has the name '__metadata__'"),
        ({"a\ud800": torch.zeros(1)}, None, ValueError, r"holds '\\ud800', a lone surrogate"),
        ({"x": [1.0]}, None, TypeError, r"tensors\['x'\] is a list: expected a Tensor"),
        ({1: torch.zeros(1)}, None, TypeError, "tensors has the name 1: expected a str"),
        ([torch.zeros(1)], None, TypeError, "tensors is a list: expected a mapping"),
        ({}, {"width": 3}, TypeError, "metadata has 'width': 3: expected a str for a str"),
        ({}, {"width": "\udfff"}, ValueError, r"holds '\\udfff', a lone surrogate"),
        ({}, ["width"], TypeError, "metadata is a list: expected a mapping"),
    ],
)
def test_what_cannot_be_saved(path: Path, tensors: Any, metadata: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        weights.save(path, tensors, metadata)
    assert list(path.parent.iterdir()) == []


def test_a_header_beyond_the_bound_is_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MAX_HEADER", 64)
    with pytest.raises(ValueError, match=r"need a header of \d+ bytes: expected at most 64"):
        weights.save(path, {"x" * 100: torch.zeros(1)})
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "the file has 0 bytes: expected 8 or more"),
        (b"1234567", "the file has 7 bytes: expected 8 or more"),
        (bytes(8), r"the header begins with b'': expected b'\{'"),
        (b"\x03" + bytes(7) + b"{}", "the header's length is given as 3 bytes: expected at most 2"),
        (b"\xff" * 8 + b"{}", "the header's length is given as 18446744073709551615 bytes: expected at most 2"),
    ],
)
def test_a_bad_beginning(path: Path, raw: bytes, match: str) -> None:
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=rf"some\.safetensors: {match}"):
        weights.load(path)


def test_a_header_beyond_the_bound_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)  # a hole: it takes no space on the disk
    with pytest.raises(ValueError, match="given as 100000001 bytes: expected at most 100000000"):
        weights.load(path)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"[]", r"the header begins with b'\[': expected b'\{'"),
        (b" {}", r"the header begins with b' ': expected b'\{'"),
        (b"{", "the header is no JSON object of this format: Expecting property name"),
        (b"{}x", "the header is no JSON object of this format: Extra data"),
        (b'{"\xff": 1}', "the header is no JSON object of this format: 'utf-8' codec can't decode"),
        (b'{"\\ud800": {}}', "the header is no JSON object of this format: .* a lone surrogate"),
        (b'{"x": ' + b"[" * 100_000, "recursion"),
        (b'{"x": ' + b"9" * 5000 + b"}", "the header is no JSON object of this format: Exceeds the limit"),
        (b'{"x": {}, "x": {}}', "the name 'x' is there twice"),
        (b'{"x": {"dtype": "U8", "dtype": "U8"}}', "the name 'dtype' is there twice"),
        ({"__metadata__": []}, r"__metadata__ is \[\]: expected a JSON object"),
        ({"__metadata__": None}, "__metadata__ is None: expected a JSON object"),
        ({"__metadata__": {"width": 3}}, "__metadata__ has 'width': 3: expected a string"),
    ],
)
def test_a_bad_header(path: Path, header: Any, match: str) -> None:
    with pytest.raises(ValueError, match=rf"some\.safetensors: .*{match}"):
        weights.load(write(path, header))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ([], r"described by \[\]: expected dtype, shape and data_offsets"),
        ({"dtype": "U8", "shape": [4]}, "described by .*: expected dtype, shape and data_offsets"),
        (tensor(0, 4) | {"extra": 1}, "described by .*: expected dtype, shape and data_offsets"),
        (tensor(0, 4, dtype="F8_E4M3"), "dtype 'F8_E4M3': expected one of F64, F32"),
        (tensor(0, 4, dtype=["U8"]), r"dtype \['U8'\]: expected one of"),
        (tensor(0, 4, shape=4), "shape 4: expected a list of counts"),
        (tensor(0, 4, shape=[-4]), r"shape \[-4\]: expected a list of counts"),
        (tensor(0, 4, shape=[-2, -2]), r"shape \[-2, -2\]: expected a list of counts"),
        (tensor(0, 4, shape=[4.0]), r"shape \[4.0\]: expected a list of counts"),
        (tensor(0, 4, shape=[4, True]), r"shape \[4, True\]: expected a list of counts"),
        (tensor(0, 0, shape=[0, 2**63]), "shape .*: expected a product below"),
        (tensor(0, 0, shape=[2**62, 0, 2]), "shape .*: expected a product below"),
        (tensor(0, 4) | {"data_offsets": [0]}, r"data_offsets \[0\]: expected two counts"),
        (tensor(0, 4) | {"data_offsets": [0, 4.0]}, r"data_offsets \[0, 4.0\]: expected two counts"),
        (tensor(0, 4) | {"data_offsets": [-1, 3]}, r"data_offsets \[-1, 3\]: expected two counts"),
        (tensor(4, 0, shape=[4]), "data_offsets 4 to 0: expected 4 bytes"),
        (tensor(0, 4, shape=[3]), "data_offsets 0 to 4: expected 3 bytes"),
        (tensor(0, 4, dtype="F64", shape=[]), "data_offsets 0 to 4: expected 8 bytes"),
    ],
)
def test_a_bad_description_of_a_tensor(path: Path, fields: Any, match: str) -> None:
    with pytest.raises(ValueError, match=rf"some\.safetensors: tensor 'W_Q': {match}"):
        weights.load(write(path, {"W_Q": fields}, b"\x01" * 4))


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"x": tensor(0, 5)}, "tensor 'x' ends at byte 5 of the data: expected at most 4"),
        ({"x": tensor(1, 4)}, "tensor 'x' leaves a hole: it starts at byte 1 of the data, not at 0"),
        ({"x": tensor(0, 1), "y": tensor(3, 4)}, "tensor 'y' leaves a hole: it starts at byte 3 of the data, not at 1"),
        ({"x": tensor(0, 3), "y": tensor(2, 4)}, "tensor 'y' overlaps: it starts at byte 2 of the data, not at 3"),
        ({"x": tensor(0, 4), "y": tensor(0, 4)}, "tensor 'y' overlaps: it starts at byte 0 of the data, not at 4"),
        ({"x": tensor(0, 3)}, "the data have 4 bytes: expected 3, where the last tensor ends"),
        ({}, "the data have 4 bytes: expected 0, where the last tensor ends"),
        ({"x": tensor(0, 4, dtype="BOOL")}, "tensor 'x' is BOOL and holds the byte 2: expected 0 and 1 alone"),
    ],
)
def test_bytes_that_are_not_covered_as_they_should(path: Path, header: Any, match: str) -> None:
    with pytest.raises(ValueError, match=rf"some\.safetensors: {match}"):
        weights.load(write(path, header, b"\x00\x01\x01\x02"))


def test_a_long_name_does_not_flood_the_message(path: Path) -> None:
    with pytest.raises(ValueError, match="tensor 'xxx") as caught:
        weights.load(write(path, {"x" * 100_000: ["y" * 100_000]}))
    assert len(str(caught.value)) < 1000


def test_the_header_may_name_tensors_in_another_order_than_the_data(path: Path) -> None:
    write(path, {"b": tensor(1, 3), "empty": tensor(1, 1), "a": tensor(0, 1)}, b"\x01\x02\x03")
    found, _ = weights.load(path)
    assert {name: values.tolist() for name, values in found.items()} == {"b": [2, 3], "empty": [], "a": [1]}
    assert list(found) == ["b", "empty", "a"]
    assert_same(needs("safetensors.torch").load_file(path), found)


@pytest.mark.parametrize("shape", [[0], [0, 2**62], [2**31, 0, 2**31], [1] * 70 + [0]])
def test_an_empty_tensor_may_have_any_shape_that_fits(path: Path, shape: list[int]) -> None:
    found, _ = weights.load(write(path, {"x": tensor(0, 0, dtype="F64", shape=shape)}))
    assert list(found["x"].shape) == shape


def test_a_file_that_is_not_there_is_an_oserror(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"some\.safetensors"):
        weights.load(path)


def test_a_pickle_is_refused(path: Path) -> None:
    torch.save({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="the header's length is given as"):
        weights.load(path)


def spoilt(valid: bytes, dice: random.Random, cut: bool) -> bytes:
    raw = bytearray(valid[: dice.randrange(1, len(valid))] if cut else valid)
    for _ in range(dice.randrange(4) if cut else dice.randrange(1, 4)):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw)


def test_mutated_and_cut_files_are_refused_or_read(path: Path) -> None:
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    weights.save(path, tensors, {"width": "6"})
    dice, valid, refusals = random.Random(0), path.read_bytes(), []
    for case in range(300):
        path.write_bytes(spoilt(valid, dice, cut=case % 4 == 0))
        try:
            found, metadata = weights.load(path)
        except ValueError as error:
            refusals.append(str(error))
        else:
            weights.save(path, found, metadata)
            assert_same(weights.load(path)[0], found)
    assert 75 <= len(refusals) < 300  # every cut file, and some of the others
    assert all("some.safetensors: " in refusal for refusal in refusals)
