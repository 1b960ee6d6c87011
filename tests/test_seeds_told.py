"""What notebooks say about claims of the texts: numbers are computed here anew, and must stand there once.

``test_notebooks`` compares the outputs of a notebook with a new run. Here the text around them is read too: a
number or a word that was changed in it is not found.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.seeds import drawn
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gnn_attention as ga
from gnn_attention import MergedHeads, StandardHeads, patterns

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
HALVES = {0.25: "a quarter", 0.5: "half"}


@cache
def cells_of(notebook: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))[
        "cells"
    ]
    return cells


def outputs(cells: list[dict[str, Any]]) -> str:
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", ()))


def tagged(notebook: str, tag: str) -> list[dict[str, Any]]:
    return [cell for cell in cells_of(notebook) if tag in cell["metadata"].get("tags", ())]


def prose(notebook: str) -> str:
    """The text, with its lines joined."""
    texts = ("".join(cell["source"]) for cell in cells_of(notebook) if cell["cell_type"] == "markdown")
    return re.sub(r"\s+", " ", " ".join(texts).replace("*", ""))


def assert_told(text: str, *wanted: str) -> None:
    for words in wanted:
        assert text.count(words) == 1, f"{words!r} stands {text.count(words)} times"


@cache
def trained() -> tuple[Any, Any]:
    model, vocabulary = ga.model.load_trained()
    return model.double().requires_grad_(False), vocabulary


def with_heads(change: Any, text: Tensor) -> float:
    """The loss of the trained model on a text, with other pattern and message matrices: full squares."""
    model = trained()[0]
    owners = list(model.layers)
    old = [layer.heads for layer in owners]
    try:
        for layer in owners:
            merged = MergedHeads.of(layer.heads).double().requires_grad_(False)
            merged.pattern.data, merged.message.data = change(layer.heads)
            layer.heads = merged
        return float(functional.cross_entropy(model(text)[0, :-1], text[0, 1:]))
    finally:
        for layer, heads in zip(owners, old, strict=True):
            layer.heads = heads


def truncated(matrices: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(matrices)
    return (u[..., :rank] * s[:, None, :rank]) @ vh[:, :rank]


def squares(heads: StandardHeads, W_K: Tensor, W_V: Tensor) -> tuple[Tensor, Tensor]:
    return heads.W_Q @ W_K.mT, W_V @ heads.W_O


def thin(heads: StandardHeads, rank: int) -> tuple[Tensor, Tensor]:
    W_P, W_M = squares(heads, heads.W_K, heads.W_V)
    return truncated(W_P, rank), truncated(W_M, rank)


def shared(heads: StandardHeads, groups: int) -> tuple[Tensor, Tensor]:
    each = heads.num_heads // groups
    means = [
        W.reshape(groups, each, *W.shape[1:]).mean(1).repeat_interleave(each, 0)
        for W in (heads.W_K, heads.W_V)
    ]
    return squares(heads, *means)


def latent(heads: StandardHeads, numbers: int) -> tuple[Tensor, Tensor]:
    together = torch.cat([*heads.W_K, *heads.W_V], dim=1)
    basis = torch.linalg.eigh(together @ together.T).eigenvectors[:, -numbers:]
    return squares(heads, *(basis @ basis.T @ W for W in (heads.W_K, heads.W_V)))


@pytest.mark.slow
def test_other_decompositions_are_as_good_as_it_says() -> None:
    """S1.26: numbers of parameters by counting, surprises by full squares, what each keeps in a cache."""
    notebook, vocabulary = "08_why_thin_factors", trained()[1]
    source = "".join(tagged(notebook, "S1.26")[0]["source"])
    python = next(
        ast.literal_eval(node.value) for node in ast.parse(source).body if isinstance(node, ast.Assign)
    )
    text, heads = torch.tensor([vocabulary.encode(python)]), trained()[0].layers[0].heads
    n, d, width = heads.num_heads, heads.head_dim, heads.width
    full = with_heads(lambda own: squares(own, own.W_K, own.W_V), text)
    none = with_heads(lambda own: squares(own, own.W_K, 0 * own.W_V), text)
    told = outputs(tagged(notebook, "S1.26"))
    whole = 4 * n * width * d
    assert_told(
        told, f"all {whole:,} parameters of a layer: surprise {full:.2f}; no attention at all: {none:.2f}"
    )
    lost, counts = {}, {}
    for budget, sizes in {"three quarters": (24, 2, 42), "five eighths": (20, 1, 21)}.items():
        designs = (
            ("thinner", thin, 4 * n * width * sizes[0]),
            ("grouped", shared, 2 * n * width * d + 2 * sizes[1] * width * d),
            ("through a latent", latent, 2 * n * width * d + sizes[2] * (width + 2 * n * d)),
        )
        for (name, change, count), size in zip(designs, sizes, strict=True):
            loss = with_heads(lambda own, change=change, size=size: change(own, size), text)
            lost[budget, name], counts[budget, name] = loss - full, count
            assert_told(told, f"{budget}: {name} ({size}), {count:,} parameters: surprise {loss:.2f}")
    gone = 1 - counts["three quarters", "thinner"] / whole
    assert_told(prose(notebook), f"{HALVES[gone]} of the parameters can go almost unnoticed")
    assert lost["three quarters", "thinner"] < 0.05 < 0.3 < lost["three quarters", "grouped"]
    assert_told(
        prose(notebook),
        rf"thinner heads keep $2 \cdot {n} \cdot 24$ numbers for each token, two groups keep $2 \cdot "
        rf"2 \cdot {d}$, the latent 42",
        "thinner heads are the best bargain by far",
    )


def test_three_messages_are_as_long_as_it_says() -> None:
    """S1.27: value, message and what the edge carries, from the matrices alone."""
    notebook, (model, vocabulary) = "03_four_perspectives", trained()
    tokens = torch.tensor([vocabulary.encode("Llamas do not output words")])
    pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces(tokens[0])]
    head = int(
        re.findall(r"layer 1, head (\d): '␣out' listens most to '␣not'", outputs(cells_of(notebook)))[0]
    )
    dst, src = pieces.index("␣out"), pieces.index("␣not")
    block = model.blocks[1]
    x, heads = block.attention_norm(model.states(tokens)[2][0]), block.attention.heads
    table = block.attention.score_mod.table
    far = table.shape[1] // 2 + dst - torch.arange(dst + 1)
    logits = (x[: dst + 1] @ heads.W_K[head]) @ (x[dst] @ heads.W_Q[head]) * heads.scale + table[head, far]
    value = x[src] @ heads.W_V[head]
    message = value @ heads.W_O[head]
    weighted = logits.softmax(0)[src] * value
    carried = logits.softmax(0)[src] * message
    assert_told(
        outputs(tagged(notebook, "S1.27")),
        f"{len(value):4} numbers, {value.norm():5.2f} long: v_j = x_j W_V, a value: the outgoing "
        "message of the seven steps",
        f"{len(weighted):4} numbers, {weighted.norm():5.2f} long: w_ij v_j, a weighted value: what PyG's "
        "message() returns",
        f"{len(message):4} numbers, {message.norm():5.2f} long: x_j W_M, the re-projected value: "
        "Patterns and Messages",
        f"{len(carried):4} numbers, {carried.norm():5.2f} long: w_ij x_j W_M, what the edge adds to "
        "the receiver: `carried`",
    )
    assert_told(
        prose(notebook),
        "The second and the fourth have the weight of the edge in them",
        "A third has four meanings",
    )


def test_a_token_is_cached_before_it_is_scored() -> None:
    """S1.28: the t-th token hears t senders, itself among them, with the share that the full pass gives."""
    notebook, (model, vocabulary) = "08_why_thin_factors", trained()
    tokens = torch.tensor(vocabulary.encode("Llamas do not output words"))
    block = model.blocks[0]
    x, heads, table = (
        block.attention_norm(model.embedding(tokens)),
        block.attention.heads,
        block.attention.score_mod.table,
    )
    away = table.shape[1] // 2 + torch.arange(len(x))[:, None] - torch.arange(len(x))
    logits = (x @ heads.W_Q) @ (x @ heads.W_K).mT * heads.scale + table[:, away.clamp(0, table.shape[1] - 1)]
    weights = logits.masked_fill(~patterns.causal(len(x)).mask(), -torch.inf).softmax(-1)
    told, own = outputs(tagged(notebook, "S1.28")), weights.diagonal(dim1=1, dim2=2).mean(0)
    for t, piece in enumerate(vocabulary.pieces(tokens)):
        shape = [heads.num_heads, t + 1, heads.width]
        name = piece.replace(" ", "␣")
        assert_told(
            told,
            f"{name!r:>8}: patterns {shape}, messages {shape}, of its listening {own[t]:.0%} is to itself",
        )
    assert_told(
        prose(notebook),
        "the new token is projected to its pattern and its message, which are added to the cache "
        "first, so that the token will hear itself: every node has a self loop.",
    )


class Counted(TorchDispatchMode):
    """Counts the operators that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def in_float64() -> Iterator[None]:
    """What a notebook makes without saying of which dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_S3_4_a_loop_over_queries_or_one_product() -> None:
    """The notebook's own functions, counted: what grows with edges, with queries, or not at all."""
    notebook = "05_matrix_multiplication_is_message_passing"
    names: dict[str, Any] = {"torch": torch, "math": math, "ga": ga}
    for cell in cells_of(notebook):
        for node in ast.parse("".join(cell["source"])).body if cell["cell_type"] == "code" else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("by_"):
                exec(compile(ast.Module([node], []), notebook, "exec"), names)
    counts: dict[str, list[int]] = {}
    for n in (8, 16, 32):
        graph = patterns.causal(n)
        q, k, v = (drawn(n, 4, seed=seed).double() for seed in range(3))
        expected = ga.attend(*(part[None, None] for part in (q, k, v)), graph, backend="dense")[0, 0]
        for way in ("by_edges_in_python", "by_queries", "by_matrices", "by_gather_and_scatter"):
            _ = graph.mask(), graph.edge_index
            with Counted() as mode:
                found = names[way](q, k, v, graph)
            assert_exact(found, expected)
            counts.setdefault(way, []).append(mode.count)
    growth = {way: (seen[2] - seen[1]) / max(seen[1] - seen[0], 1) for way, seen in counts.items()}
    assert counts["by_matrices"][0] == counts["by_matrices"][2] < 15
    assert counts["by_gather_and_scatter"][0] == counts["by_gather_and_scatter"][2] < 20
    assert growth["by_queries"] == 2  # with n
    assert growth["by_edges_in_python"] > 3.5  # with the edges, n (n + 1) / 2
    twice = 1024**2 / patterns.causal(1024).num_edges
    assert round(twice, 2) == 2
    assert_told(
        prose(notebook),
        "one large product beats every loop, although it computes twice as much as is needed",
        "The first visits every edge, the second every query. The third has no loop: it computes the "
        "full table and removes the pairs without an edge. The fourth gathers and scatters",
    )


def test_the_students_learned_what_it_says() -> None:
    """S4.15: the sizes by arithmetic; the sentence after the table, read from the table."""
    notebook = "08_why_thin_factors"
    width, heads, groups, d = 4096, 32, 8, 128
    thin_size, merged_size = 2 * width * d * (heads + groups), 2 * heads * width**2
    text = prose(notebook)
    assert_told(
        outputs(cells_of(notebook)),
        f"a layer of Llama 3 8B: {thin_size:,} in thin factors, {merged_size:,} merged",
    )
    assert_told(
        text, f"would have {merged_size / 1e9:.2f} billion numbers in place of {thin_size / 1e6:.0f} million"
    )
    line = re.compile(r"(\d+) examples, +(\w+ \w+): middle error (\S+) on what was seen, (\S+) on new ones")
    table = {
        (int(count), name): (float(seen), float(new))
        for count, name, seen, new in line.findall(outputs(tagged(notebook, "S4.15")))
    }
    assert set(table) == {(c, name) for c in (16, 32, 64) for name in ("thin factors", "merged squares")}
    for count in (16, 32):
        seen, new = table[count, "merged squares"]
        assert seen < 0.1
        assert new > 1  # "worse than one that says nothing", in the middle one of three
    assert table[32, "thin factors"][1] < 0.05
    assert max(table[64, name][1] for name in ("thin factors", "merged squares")) < 0.05
    assert_told(
        text,
        "With 16 examples, and with 32 in two cases of three, the square student fits what it has "
        "seen, and on new examples it is worse than one that says nothing",
        "The thin student can express few, and with 32 examples it has found the right one. With 64 "
        "both get there.",
    )


def test_the_pictures_of_the_cache_have_true_shapes() -> None:
    """Illustrations 4 and 5: what is projected and appended, compared, and summed, each of its true shape."""
    n, d, drawn_products = 11, 12, []
    heads, x = StandardHeads(d, 1, 4).double(), drawn(n, d)
    merged = MergedHeads.of(heads, side="sender")
    P, M, new = merged.patterns(x[None])[0, 0], merged.messages(x[None])[0, 0], x[-1:]
    plt = SimpleNamespace(subplots=lambda *sizes, **options: (None, torch.zeros(2, 2)), show=lambda: None)
    names = {"n": n, "width": d, "plt": plt, "GREY": "", "BLUE": "", "ORANGE": "", "GREEN": ""}
    names["draw_product"] = lambda ax, factors, title: drawn_products.append(factors)
    exec("".join(tagged("08_why_thin_factors", "S1.14")[0]["source"]), names)
    alpha = (new @ P.T * heads.scale).softmax(-1)
    true = {"$x_q$": new, r"$W_P^\top$": heads.pattern_matrix().full()[0].T, r"cached $P^\top$": P.T}
    true |= {r"$W_M$": heads.message_matrix().full()[0], r"$\alpha$": alpha, "cached M": M}
    results = {"p, appended": P[-1:], "m, appended": M[-1:], r"$\alpha$": new @ P.T, "o": alpha @ M}
    assert [factors[-1][0] for factors in drawn_products] == list(results)
    for (left, right, sign, result), product in zip(drawn_products, results.values(), strict=True):
        assert sign == "="
        for label, rows, columns, _ in (left, right):
            assert true[label].shape == (rows, columns)
        assert_exact(true[left[0]] @ true[right[0]], product)
        assert product.shape == result[1:3]


def test_the_flow_of_each_form_keeps_two_columns_apart() -> None:
    """Illustrations 1 and 6: which matrices stand in the column of weights, and which in that of messages."""
    source = ast.parse("".join(tagged("04_three_forms", "S1.3")[0]["source"]))
    flows = {}
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "draw_flow":
            _, title, *columns = node.args
            boxes = [
                [box.value for box in column.elts if isinstance(box, ast.Constant)] for column in columns
            ]
            flows[title.value] = [
                (re.findall(r"W_(\w)", " ".join(column)), {"p", "M"} & set(column)) for column in boxes
            ]
    assert flows == {
        "standard": [(["Q", "K"], set()), (["V", "O"], set())],
        "factored": [(["Q", "K"], {"p"}), (["V", "O"], {"M"})],
        "merged": [(["P"], {"p"}), (["M"], {"M"})],
    }
    # softmax(p X^T / sqrt d): the root stands inside, and the pattern is compared with all states
    boxes_of_weights = [node.value for node in ast.walk(source) if isinstance(node, ast.Constant)]
    softmax, compared = (
        next(text for text in boxes_of_weights if isinstance(text, str) and text.startswith(start))
        for start in ("softmax", r"$p\,")
    )
    assert re.fullmatch(r"softmax\(.*sqrt\{d\}.*\)", softmax)
    assert r"p\,X^\top" in compared


def test_diffusion_has_as_many_numbers_as_it_says() -> None:
    """S4.24: an entry for each edge and head, in a table of receivers and (head, sender)."""
    n = len(trained()[1].encode("Llamas do not output words"))
    edges, heads = n * (n + 1) // 2, trained()[0].config.num_heads
    notebook = "03_four_perspectives"
    told = f"{edges * heads} numbers of {n * n * heads} are not zero: {edges} edges, {heads} heads"
    assert_told(outputs(tagged(notebook, "S4.24")), told)
    assert_told(
        prose(notebook),
        "Hold the weights fixed, and what is left is diffusion on a graph: a linear map of the states, "
        "which a sparse product computes, and which mixes but never creates.",
        "Everything that is not linear in attention is in the choice of the weights.",
    )


def test_the_graphs_that_break_the_symmetry() -> None:
    """S4.25: a graph is the same under every order of its tokens only if all pairs, or none, are edges."""
    notebook = "05_matrix_multiplication_is_message_passing"
    lines = outputs(tagged(notebook, "S4.25")).strip().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["tree([-1, 0, 0, 1, 1, 2])", "causal(6)", "full(6)"]
    for line in lines:
        name, _, verdict = line.partition(": ")
        mask = eval(f"patterns.{name}", {"patterns": patterns}).mask()
        orders = (list(order) for order in itertools.permutations(range(6)))
        same = all(torch.equal(mask[order][:, order], mask) for order in orders)
        word = "the same graph" if same else "another graph"
        assert verdict == f"{word} when its tokens are shuffled"
    assert_told(
        prose(notebook),
        "Shuffle the tokens, and shuffle the graph with them: the updates come out shuffled, and "
        "nothing else changes.",
        "The graph is what breaks the symmetry, unless it is the full one",
    )


def test_every_word_of_the_glossary_stands_in_its_row() -> None:
    """S4.1: each view's words for one part, in the dictionary of the notebook, and the shape each opens."""
    notebook = "03_four_perspectives"
    rows = [re.split(r" {2,}", line) for line in outputs(tagged(notebook, "S0.10")).strip().splitlines()]
    wanted = [
        [
            term.name,
            term.hook or "-",
            *(getattr(term, view.replace(" ", "_")) or "-" for view in ga.trace.VIEWS),
        ]
        for term in ga.trace.GLOSSARY
    ]
    assert rows == [["here", "TransformerLens", *ga.trace.VIEWS], *wanted]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9]*.ipynb")), ids=lambda path: path.stem[:2])
def test_S0_11_applications_illustrations_experiments(path: Path) -> None:
    """In every chapter a picture that it drew, numbers that it printed, an assert, three exercises."""
    apart = {"exercise", "check"}
    code = [cell for cell in cells_of(path.stem) if cell["cell_type"] == "code"]
    shown = [cell for cell in code if not apart & set(cell["metadata"].get("tags", ()))]
    kinds = [kind for cell in shown for output in cell["outputs"] for kind in output.get("data", ())]
    assert "image/png" in kinds
    assert re.search(r"\d", outputs(shown))
    nodes = (node for cell in shown for node in ast.walk(ast.parse("".join(cell["source"]))))
    assert any(isinstance(node, ast.Assert) for node in nodes)
    solutions = (NOTEBOOKS / "solutions" / f"{path.stem}.py").read_text(encoding="utf-8")
    checks = [cell for cell in code if "check" in cell["metadata"].get("tags", ())]
    assert 3 <= len(checks) == len(re.findall(r"(?m)^answer = ", solutions))
