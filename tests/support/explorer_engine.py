"""Run the engine of the explorer's page in node, and compute the same numbers by dense float64 formulas."""

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
SCRIPT = Path(__file__).parents[1] / "explorer" / "engine.mjs"
TEXT = "Llamas do not output words"
HOSTILE = [
    *("<script>window.ran=1</script>", "<img src=x onerror=window.ran=2>"),
    "</script><script>window.ran=3</script>",
    *("<!--", "]]>", "\u202eright to left\u202c", "\u2067\u200f\u200b", "\x00\x07\x1b[31m", "\u2028\u2029"),
    *("\t\n\r ", "'\"`${window.ran=4}", "\ud83d", "javascript:window.ran=5", "&lt;b&gt;", "\u0301", ""),
]


def tool(name: str, path: str | Path | None, install: str) -> str:
    """Return the path of a tool. If it is missing, skip the test, or fail it under CI."""
    if path and Path(path).exists():
        return str(path)
    assert not os.environ.get("CI"), f"{name} is missing: {install}"
    pytest.skip(f"{name} is missing: {install}")


def needs_node() -> str:
    """Return the path of node, and require esbuild too."""
    tool("esbuild", WEB / "node_modules" / "esbuild", f"npm ci in {WEB.relative_to(WEB.parents[2])}")
    return tool("node", shutil.which("node"), "apt-get install nodejs npm")


@cache
def engine() -> Path:
    """Bundle the engine once as a module for node, and return its path."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([needs_node(), WEB / "build.mjs", "--engine", folder / "engine.mjs"], check=True)
    return folder / "engine.mjs"


def ask(page: explorer.Page, questions: list[dict[str, Any]]) -> list[Any]:
    """Return the engine's answers to questions (see ``explorer/engine.mjs``), with arrays in base64."""
    node, module = needs_node(), engine()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("data.json", "questions.json")]
        paths[0].write_text(text_of_data(page))
        paths[1].write_text(json.dumps(questions))
        process = subprocess.run([node, SCRIPT, module, *paths], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in process.stdout.split("\n")[:-1]]


def text_of_data(page: explorer.Page) -> str:
    """Return the JSON inside a page."""
    texts = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)
    assert len(texts) == 1
    return str(texts[0])


def data_of(page: explorer.Page | Path) -> Any:
    """Return the data of a page or of its file."""
    if isinstance(page, Path):
        page = explorer.Page(page.read_text(encoding="utf-8"), "", 0)
    return json.loads(text_of_data(page))


def doubles(text: str, *shape: int) -> Tensor:
    """Decode a Float64Array from base64."""
    raw = bytearray(base64.b64decode(text))
    return torch.frombuffer(raw, dtype=torch.float64).view(*shape) if raw else torch.zeros(shape).double()


def mask_of(data: Any, number: int) -> Tensor:
    """Unpack a mask of a page by the format that types.ts documents."""
    size = len(data["tokens"]) + data["room"]
    raw = base64.b64decode(data["masks"][number]["bits"])
    bits = [(byte >> (7 - bit)) & 1 for byte in raw for bit in range(8)]
    return torch.tensor(bits[: size * size], dtype=torch.bool).view(size, size)


def edges_of(data: Any, mask: int, edits: list[Any], tokens: int, layers: int, heads: int) -> Tensor:
    """Return the edges ``[layers, heads, dst, src]`` after edits, as types.ts documents them."""
    edges = mask_of(data, mask)[:tokens, :tokens].expand(layers, heads, -1, -1).clone()
    for edit in edits:
        if max(edit["src"], edit["dst"]) < tokens:
            layer, head = (slice(None) if edit[name] == "all" else edit[name] for name in ("layer", "head"))
            edges[layer, head, edit["dst"], edit["src"]] = edit["present"]
    return edges


def edit(src: int, dst: int, present: bool = False, layer: Any = "all", head: Any = "all") -> dict[str, Any]:
    return {"layer": layer, "head": head, "src": src, "dst": dst, "present": present}


def run(mask: int = 0, edits: Any = (), **options: Any) -> dict[str, Any]:
    """Return the question for a forward pass."""
    return {"ask": "run", "mask": mask, "edits": list(edits), **options}


def apply_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() * weight


def weights_of(overlap: Tensor, edges: Tensor) -> Tensor:
    """Return the softmax over the edges of each row; isolated rows are 0."""
    logits = overlap.masked_fill(~edges, -torch.inf)
    return torch.nan_to_num((logits - logits.logsumexp(-1, keepdim=True)).exp(), nan=0.0)


def dense_layer(x: Tensor, W: dict[str, Tensor], edges: Tensor) -> dict[str, Tensor]:
    """Return every number of one layer under the engine's names."""
    attended = apply_norm(x, W["attention_norm.weight"])
    q, k, v = (torch.einsum("tw,hwd->htd", attended, W[f"attention.heads.W_{name}"]) for name in "QKV")
    table, position = W["attention.score_mod.table"], torch.arange(len(x))
    reach = table.shape[1] // 2
    bias = table[:, (position[:, None] - position).clamp(-reach, reach) + reach]
    overlap = torch.einsum("hid,hjd->hij", q, k) / q.shape[-1] ** 0.5 + bias
    weights = weights_of(overlap, edges)
    z = weights @ v
    update = torch.einsum("htd,hdw->tw", z, W["attention.heads.W_O"])
    after = x + update
    inner = functional.gelu(apply_norm(after, W["mlp_norm.weight"]) @ W["mlp.0.weight"].T + W["mlp.0.bias"])
    thought = after + inner @ W["mlp.2.weight"].T + W["mlp.2.bias"]
    values = {"before": x, "heard": attended, "q": q, "k": k, "v": v, "overlap": overlap, "weights": weights}
    return values | {"z": z, "update": update, "after": after, "thought": thought}


def dense(state: dict[str, Tensor], ids: list[int], edges: Tensor) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Compute LanguageModel by dense float64 formulas; return the numbers of each layer, and the logits."""
    W = {name: tensor.double() for name, tensor in state.items()}
    x, layers = W["embedding.weight"][ids], []
    for number, layer_edges in enumerate(edges):
        prefix = f"blocks.{number}."
        parameters = {name.removeprefix(prefix): w for name, w in W.items() if name.startswith(prefix)}
        layers.append(dense_layer(x, parameters, layer_edges))
        x = layers[-1]["thought"]
    return layers, apply_norm(x, W["norm.weight"]) @ W["unembedding.weight"].T


def check_run(answer: Any, state: dict[str, Tensor], ids: list[int], edges: Tensor) -> None:
    """Assert that a run of the engine equals the dense formulas in every number."""
    assert "error" not in answer, answer
    layers, logits = dense(state, ids, edges)
    for number, (output, expected) in enumerate(zip(answer["said"]["layers"], layers, strict=True)):
        assert base64.b64decode(output["edges"]) == bytes(edges[number].flatten().int().tolist())
        for name, tensor in expected.items():
            assert_exact(doubles(output[name], *tensor.shape), tensor)
    if answer["said"]["logits"] is not None:
        assert_exact(doubles(answer["said"]["logits"], *logits.shape), logits)


def small(seed: int = 0, **sizes: int) -> tuple[lm.LanguageModel, BytePair]:
    """Return a tiny model of the shipped architecture with random tables and norms, and its tokenizer."""
    defaults = {"width": 12, "num_layers": 3, "num_heads": 2, "head_dim": 5, "mlp_width": 9, "reach": 3}
    torch.manual_seed(seed)
    model = lm.LanguageModel(lm.Config(vocabulary_size=256, **(defaults | sizes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("table", "bias")):
                parameter.add_(torch.randn_like(parameter) / 2)
    return model, BytePair()
