"""The engine of the explorer's page, asked through node, and a float64 dense formula of the same numbers."""

from __future__ import annotations

import atexit
import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from torch import Tensor
from torch.nn import functional

from gnn_attention import explorer
from gnn_attention import model as lm
from gnn_attention.model.tokenizer import BytePair

WEB = Path(explorer.__file__).parent / "web"
ASK = Path(__file__).parents[1] / "explorer" / "engine.mjs"
TEXT = "Llamas do not output words"
IN_CI = bool(os.environ.get("CI"))


def needs_node() -> str:
    """Node's path. Without it, or without esbuild, a local run skips; under CI that is a failure."""
    node = shutil.which("node")
    if node is not None and (WEB / "node_modules" / "esbuild").is_dir():
        return node
    missing = f"needs node, and npm ci in {WEB.relative_to(WEB.parents[2])}"
    assert not IN_CI, missing
    pytest.skip(missing)


@cache
def engine() -> Path:
    """The engine as a module for node, bundled once."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([needs_node(), WEB / "build.mjs", "--engine", folder / "engine.mjs"], check=True)
    return folder / "engine.mjs"


def ask(page: explorer.Page, questions: list[dict[str, Any]]) -> list[Any]:
    """What the engine says to each question (see ``explorer/engine.mjs``), arrays in base64."""
    node, bundled = needs_node(), engine()
    with tempfile.TemporaryDirectory() as folder:
        data, asked = Path(folder) / "data.json", Path(folder) / "questions.json"
        data.write_text(text_of_data(page))
        asked.write_text(json.dumps(questions))
        done = subprocess.run([node, ASK, bundled, data, asked], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def text_of_data(page: explorer.Page) -> str:
    """The JSON inside a page."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def data_of(page: explorer.Page) -> Any:
    return json.loads(text_of_data(page))


def doubles(text: str, *shape: int) -> Tensor:
    """A Float64Array as it came."""
    raw = bytearray(base64.b64decode(text))
    return (
        torch.frombuffer(raw, dtype=torch.float64).view(*shape)
        if raw
        else torch.zeros(shape, dtype=torch.float64)
    )


def mask_of(data: Any, number: int) -> Tensor:
    """A mask of the page, unpacked by the words of types.ts."""
    size = len(data["tokens"]) + data["room"]
    raw = base64.b64decode(data["masks"][number]["bits"])
    bits = [(byte >> (7 - place)) & 1 for byte in raw for place in range(8)]
    return torch.tensor(bits[: size * size], dtype=torch.bool).view(size, size)


def edges_of(
    data: Any, mask: int, edits: list[dict[str, Any]], tokens: int, layers: int, heads: int
) -> Tensor:
    """``[layers, heads, dst, src]``, by the words of types.ts."""
    edges = mask_of(data, mask)[:tokens, :tokens].expand(layers, heads, -1, -1).clone()
    for edit in edits:
        if max(edit["src"], edit["dst"]) < tokens:
            layer, head = (slice(None) if edit[name] == "all" else edit[name] for name in ("layer", "head"))
            edges[layer, head, edit["dst"], edit["src"]] = edit["present"]
    return edges


def edit(
    src: int, dst: int, present: bool = False, layer: int | str = "all", head: int | str = "all"
) -> dict[str, Any]:
    return {"layer": layer, "head": head, "src": src, "dst": dst, "present": present}


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() * weight


def attended(overlap: Tensor, edges: Tensor) -> Tensor:
    """Softmax over the edges of each row; a row without any is 0."""
    logits = overlap.masked_fill(~edges, -torch.inf)
    return torch.nan_to_num((logits - logits.logsumexp(-1, keepdim=True)).exp(), nan=0.0)


def dense(state: dict[str, Tensor], ids: list[int], edges: Tensor) -> tuple[list[dict[str, Tensor]], Tensor]:
    W = {name: tensor.double() for name, tensor in state.items()}
    x, layers = W["embedding.weight"][ids], []
    for number, of_layer in enumerate(edges):
        part = {
            name.removeprefix(f"blocks.{number}."): w
            for name, w in W.items()
            if name.startswith(f"blocks.{number}.")
        }
        heard = normed(x, part["attention_norm.weight"])
        q, k, v = (torch.einsum("tw,hwd->htd", heard, part[f"attention.heads.W_{name}"]) for name in "QKV")
        table = part["attention.score_mod.table"]
        reach, place = table.shape[1] // 2, torch.arange(len(ids))
        bias = table[:, (place[:, None] - place).clamp(-reach, reach) + reach]
        overlap = torch.einsum("hid,hjd->hij", q, k) / q.shape[-1] ** 0.5 + bias
        weights = attended(overlap, of_layer)
        z = weights @ v
        update = torch.einsum("htd,hdw->tw", z, part["attention.heads.W_O"])
        after = x + update
        inner = functional.gelu(
            normed(after, part["mlp_norm.weight"]) @ part["mlp.0.weight"].T + part["mlp.0.bias"]
        )
        thought = after + inner @ part["mlp.2.weight"].T + part["mlp.2.bias"]
        layers.append(
            {
                "before": x,
                "heard": heard,
                "q": q,
                "k": k,
                "v": v,
                "overlap": overlap,
                "weights": weights,
                "z": z,
            }
            | {"update": update, "after": after, "thought": thought}
        )
        x = thought
    return layers, normed(x, W["norm.weight"]) @ W["unembedding.weight"].T


def check_run(said: Any, state: dict[str, Tensor], ids: list[int], edges: Tensor) -> None:
    assert "error" not in said, said
    layers, logits = dense(state, ids, edges)
    for number, (found, wanted) in enumerate(zip(said["said"]["layers"], layers, strict=True)):
        assert base64.b64decode(found["edges"]) == bytes(edges[number].flatten().int().tolist())
        for name, tensor in wanted.items():
            assert_exact(doubles(found[name], *tensor.shape), tensor)
    if said["said"]["logits"] is not None:
        assert_exact(doubles(said["said"]["logits"], *logits.shape), logits)


def small(seed: int = 0, **sizes: int) -> tuple[lm.LanguageModel, BytePair]:
    """A tiny model of the shipped kind, with tables and norms drawn too."""
    given = {"width": 12, "num_layers": 3, "num_heads": 2, "head_dim": 5, "mlp_width": 9, "reach": 3} | sizes
    torch.manual_seed(seed)
    model = lm.LanguageModel(lm.Config(vocabulary_size=256, **given)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("table", "bias")):
                parameter.add_(torch.randn_like(parameter) / 2)
    return model, BytePair()
