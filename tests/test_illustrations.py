"""The illustrations of patterns and messages have true formulas and sizes, and are those of their script."""

import json
import re
from xml.etree.ElementTree import canonicalize, fromstring

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from notebooks.illustrations import FOLDER, LONG, files

PICTURES = {name.removesuffix(".svg"): fromstring(text) for name, text in files().items()}


def read(element):
    """Return the drawn texts of an element; subscripts follow an underscore."""
    texts = (text.iter() for text in element.iter("{http://www.w3.org/2000/svg}text"))
    return " ".join("".join("_" * (p.get("dy") == "4") + (p.text or "") for p in t) for t in texts)


def test_files_and_outputs_of_notebooks_are_up_to_date():
    assert {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.svg")} == files()
    books = [json.loads(path.read_text()) for path in FOLDER.parents[1].glob("notebooks/0[59]_*.ipynb")]
    outputs = [out for book in books for cell in book["cells"] for out in cell.get("outputs", ())]
    svgs = ["".join(out.get("data", {}).get("image/svg+xml", "")) for out in outputs]
    assert set(map(canonicalize, filter(None, svgs))) == set(map(canonicalize, files().values()))


@pytest.mark.parametrize("name", PICTURES)
def test_formulas_compute_what_the_library_computes(name):
    """Each formula is evaluated as it is drawn, where a space between two matrices is a product."""
    torch.manual_seed(0)
    X, heads = torch.randn(5, 12, dtype=torch.float64), ga.StandardHeads(12, 4, head_dim=2).double()
    form = ga.FactoredHeads.of(heads, side="sender" if name[:5] in ("cache", "score") else "receiver")
    P, M = form.patterns(X[None])[0], form.messages(X[None])[0]
    after, (_, w) = ga.MessagePassingAttention(heads)(X, ga.patterns.full(5), return_attention_weights=True)
    alpha = w[-5:].T[:, None]
    names = dict(heads.named_parameters()) | {"X": X, "x_q": X[-1:], "x′": X[-1:] + after[-1:], "α": alpha}
    names |= {"W_P": heads.pattern_matrix().full(), "W_M": heads.message_matrix().full(), "P": P, "M": M}
    names |= {"softmax": torch.nn.Softmax(-1), "Σ_heads": lambda o: o.sum(0), "d": 2, "o": alpha @ M}
    names |= {"q": X[-1:] @ heads.W_Q, "K": X @ heads.W_K, "V": X @ heads.W_V, "p": P[:, -1:], "m": M[:, -1:]}
    for box in PICTURES[name].findall(".//*[@data-formula]"):
        assert read(box) == box.get("data-formula")
        left, right = read(box).replace("ᵀ", ".mT").replace("√d", "d**0.5").split(" = ")
        value = eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " @ ", right), names.copy())
        assert_exact(value, names.setdefault(left, value).expand_as(value))


@pytest.mark.parametrize("name", PICTURES)
def test_sizes_are_those_of_llama_and_vectors_can_be_seen(name):
    text, shapes = read(PICTURES[name]), {"W_O": [128, 4096], "W_P": [4096, 4096], "W_M": [4096, 4096]}
    assert "width 4096, 32 heads, 8 key-value heads, head width d 128." in text
    for matrix, transpose, *shape in re.findall(r"(W_\w)(ᵀ?):? (\d+) × (\d+)", text):
        assert list(map(int, shape)) == shapes.get(matrix, [4096, 128])[:: -1 if transpose else 1]
    for rect in PICTURES[name].findall(".//*[@data-numbers]"):
        numbers, width, height = (float(rect.get(key)) for key in ("data-numbers", "width", "height"))
        assert height * 358 / 560 >= 6  # where a phone has 358 for the picture
        assert width == numbers * LONG / 4096 or numbers == 1 or "scale is broken" in text
