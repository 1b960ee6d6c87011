"""Every reader refuses a damaged file with a ValueError, one printable sentence that names the file."""

import io

import pytest
import torch
from safetensors.torch import save

from gnn_attention import model
from gnn_attention.backends import cost_model
from gnn_attention.convert import files
from gnn_attention.verify.report import Report


def pickle_checkpoint() -> bytes:
    """Return the bytes of a checkpoint that ``torch.save`` wrote."""
    stream = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, stream)
    return stream.getvalue()


RECORD = Report((), {"device": "CPU"}).to_json().encode()
BAD = [
    ("a.safetensors", b"", model.load, "expected a safetensors file"),
    ("a.safetensors", (2**40).to_bytes(8, "little") + b"{}", model.load, "expected a safetensors file"),
    ("a.safetensors", pickle_checkpoint(), model.load, "expected a safetensors file"),
    ("a.safetensors", save({"weight": torch.ones(2)}), model.load, "holds no language model"),
    ("a.edges", b"0 1\n1\n", files.load, "line 2: expected 'src dst' or 'src dst weight', got '1'"),
    ("a.adjlist", b"0 1\n1 \xff\n", files.load, "cannot be read as a graph"),
    ("a.graphml", b"<graphml><graph><node id='0'/><edge so", files.load, "ParseError"),
    ("record.json", RECORD[:-9], Report.from_file, "expected a record of verify --json"),
    (
        "record.json",
        RECORD.replace(b"[", b"[3"),
        Report.from_file,
        "expected a record of verify --json",
    ),
    ("record.json", b"[" * 100_000, Report.from_file, "expected a record of verify --json"),
    ("costs.json", b'{"costs": {"call": NaN}}', cost_model.read, "does not hold the constants"),
]


@pytest.mark.parametrize(("name", "content", "read", "match"), BAD)
def test_a_bad_file_is_named(name, content, read, match, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as refusal:
        read(path)
    message = str(refusal.value)
    assert str(tmp_path) in message
    assert message.isprintable()
    assert len(message) < 1000
