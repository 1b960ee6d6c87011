"""Malformed graphs: rules, edge lists, masks, graphs of other libraries, builders, algebra, expressions and
files.
"""

# mypy: disable-error-code="arg-type, list-item"
from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import torch

from gnn_attention import algebra, analyse, convert, patterns
from gnn_attention.convert import catalogue, expressions
from gnn_attention.convert import files as convert_files
from gnn_attention.graph import TokenGraph, tiling
from tests.guarantees.malformed.case import Case, Of, Subject

__all__ = ["cases"]

EDGES = [[0, 0, 1], [0, 1, 1]]
LARGE = list(range(2000))


def _edges(graph: TokenGraph) -> list[list[int]]:
    return graph.edge_index.tolist()


GRAPH = Subject("a graph", lambda: patterns.window(2, 2), _edges, lambda _: EDGES)
RULE = Subject("from_rule", lambda: None, lambda _: _edges(TokenGraph.from_rule(_causal, 2)), lambda _: EDGES)
LIST = Subject(
    "from_edges", lambda: torch.tensor(EDGES), lambda e: _edges(TokenGraph.from_edges(e, 2)), lambda _: EDGES
)
MASK = Subject(
    "from_mask",
    lambda: torch.ones(2, 2).tril().bool(),
    lambda m: _edges(convert.from_mask(m)),
    lambda _: EDGES,
)


def _causal(b: Any, h: Any, dst: Any, src: Any) -> Any:
    return src <= dst


def _made(rule: Any, *sizes: Any, **more: Any) -> Any:
    return lambda _: TokenGraph.from_rule(rule, *(sizes or (3,)), **more)


def _of_rules() -> list[Case]:
    of = Of(RULE)
    return [
        of.type("a rule text", "^rule must", "got str", _made("causal")),
        of.type(
            "a rule of two parameters", "^rule must", r"got \(dst, src\)", _made(lambda dst, src: src <= dst)
        ),
        of.type("a builtin for a rule", "^rule must|must take", "builtin|got", _made(max)),
        of.type(
            "a rule that returns numbers",
            "the rule of",
            "torch.int64",
            _made(lambda b, h, dst, src: dst - src),
        ),
        of.type("a rule that returns True", "the rule of", "got a bool", _made(lambda b, h, dst, src: True)),
        of.type(
            "a rule of another shape",
            "the rule of",
            r"got \[5\]",
            _made(lambda b, h, dst, src: torch.ones(5).bool()),
        ),
        of.type(
            "a rule that multiplies matrices",
            "the rule of",
            "broadcasting",
            _made(lambda b, h, dst, src: dst @ src > 0),
        ),
        of.type(
            "a rule that asks Python",
            "the rule of",
            "broadcasting",
            _made(lambda b, h, dst, src: dst if src <= dst else src),
        ),
        of.value("fewer than no receivers", "^num_dst must", "got -1", _made(_causal, -1)),
        of.type("half a sender", "^num_src must", "got 2.5", _made(_causal, 2, 2.5)),
        of.value("no heads", "^heads must", "got 0", _made(_causal, 2, heads=0)),
        of.type("a batch text", "^batch must", "'2'", _made(_causal, 2, batch="2")),
    ]


def _of_lists() -> list[Case]:
    of = Of(LIST)
    return [
        of.type("floats", "^edge_index must", "torch.float32", lambda e: TokenGraph.from_edges(e.float(), 2)),
        of.type("bools", "^edge_index must", "torch.bool", lambda e: TokenGraph.from_edges(e.bool(), 2)),
        of.type(
            "unsigned",
            "^edge_index must",
            "torch.uint8",
            lambda e: TokenGraph.from_edges(e.to(torch.uint8), 2),
        ),
        of.type(
            "a numpy array", "^edge_index must", "got ndarray", lambda e: TokenGraph.from_edges(e.numpy(), 2)
        ),
        of.type("lists", "^edge_index must", "got list", lambda e: TokenGraph.from_edges(e.tolist(), 2)),
        of.value("one axis", "^edge_index must", r"\[3\]", lambda e: TokenGraph.from_edges(e[0], 2)),
        of.value(
            "columns", "^edge_index must", r"\[3, 2\].*pairs.t\(\)", lambda e: TokenGraph.from_edges(e.t(), 2)
        ),
        of.value(
            "a single number", "^edge_index must", r"got \[\]", lambda e: TokenGraph.from_edges(e[0, 0], 2)
        ),
        of.value(
            "without values", "^edge_index must", "meta", lambda e: TokenGraph.from_edges(e.to("meta"), 2)
        ),
        of.index(
            "a negative edge",
            r"^edge_index\[0, 0\] = -1",
            "no sender",
            lambda e: TokenGraph.from_edges(e - 1, 2),
        ),
        of.index(
            "out of range",
            r"^edge_index\[1, 1\] = 1",
            "no receiver",
            lambda e: TokenGraph.from_edges(e, 1, 2),
        ),
        of.value(
            "twice",
            "1 duplicate",
            "coalesce=True",
            lambda e: TokenGraph.from_edges(torch.cat([e, e[:, :1]], 1), 2),
        ),
        of.type("a size text", "^num_dst must", "'2'", lambda e: TokenGraph.from_edges(e, "2")),
        of.type(
            "a long list for a size", "^num_dst must", r"\.\.\.", lambda e: TokenGraph.from_edges(e, LARGE)
        ),
        of.value(
            "positions of no edge",
            "1 -> 0 is no edge",
            "edges",
            lambda e: TokenGraph.from_edges(e, 2).positions_of(e.flip(0)),
        ),
    ]


def _of_masks() -> list[Case]:
    of = Of(MASK)
    return [
        of.type("a list", "^mask must", "got list", lambda m: convert.from_mask(m.tolist())),
        of.type("integers", "^mask must", "torch.int64", lambda m: convert.from_mask(m.long())),
        of.value("one axis", "^mask must", r"got \[2\]", lambda m: convert.from_mask(m[0])),
        of.value(
            "five axes", "^mask must", r"\[1, 1, 1, 2, 2\]", lambda m: convert.from_mask(m[None, None, None])
        ),
        of.value(
            "no heads", "heads and batch of a mask", r"\[0, 2, 2\]", lambda m: convert.from_mask(m[None][:0])
        ),
        of.value("zeros and ones", "mask.bool", "zeros and ones", lambda m: convert.from_mask(m.float())),
        of.value("NaN", "additive mask", "NaN", lambda m: convert.from_mask(m.float() * torch.nan)),
        of.value("another meaning", "^meaning must", "got 'yes'", lambda m: convert.from_mask(m, "yes")),
        of.type(
            "an additive bool", "meaning='additive'", "torch.bool", lambda m: convert.from_mask(m, "additive")
        ),
        of.value("without values", "^mask must", "meta", lambda m: convert.from_mask(m.to("meta"))),
    ]


NETWORKX = Subject(
    "networkx",
    lambda: nx.DiGraph([("a", "b")]),
    lambda g: _edges(convert.from_networkx(g, ["a", "b"])),
    lambda _: [[0], [1]],
)
PYG = Subject(
    "from_pyg", lambda: torch.tensor(EDGES), lambda e: _edges(convert.from_pyg(e, 2)), lambda _: EDGES
)
CROSS = patterns.cross(2, 3)


def _turned() -> Any:
    """A sparse tensor whose columns come first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout a beta
        return torch.eye(2).to_sparse_csc()


def _of_others() -> list[Case]:
    of, pyg, out = Of(NETWORKX), Of(PYG), Of(GRAPH)
    return [
        of.type(
            "no graph",
            "^graph must be a networkx graph",
            "got list",
            lambda g: convert.from_networkx([("a", "b")]),
        ),
        of.value(
            "labels without an order", "^order is needed", "'a', 'b'", lambda g: convert.from_networkx(g)
        ),
        of.value(
            "an order that lacks a node",
            "^order must hold every node",
            r"\['b'\]",
            lambda g: convert.from_networkx(g, ["a"]),
        ),
        of.value(
            "an order that repeats one",
            "^order must hold",
            "repeated",
            lambda g: convert.from_networkx(g, ["a", "b", "b"]),
        ),
        of.type("an order that is a number", "^order must", "got 2", lambda g: convert.from_networkx(g, 2)),
        pyg.type("a text", "expected a torch_geometric", "got str", lambda e: convert.from_pyg("edges", 2)),
        pyg.type(
            "a dense mask",
            "expected a torch_geometric",
            "torch.bool",
            lambda e: convert.from_pyg(torch.ones(2, 2).bool()),
        ),
        pyg.value(
            "a list without sizes",
            "num_dst and num_src are needed",
            "does not know",
            lambda e: convert.from_pyg(e),
        ),
        pyg.value(
            "a CSC adjacency", "adj_t must be COO or CSR", "sparse_csc", lambda e: convert.from_pyg(_turned())
        ),
        pyg.value(
            "another size",
            "^num_dst=3 contradicts",
            "has 2",
            lambda e: convert.from_pyg(torch.eye(2).to_sparse(), 3),
        ),
        out.value("labels of other nodes", "^labels must", "got 1", lambda g: convert.to_networkx(g, ["a"])),
        out.type("networkx of no graph", "^graph must", "got 3", lambda g: convert.to_networkx(3)),
        out.value("an unknown form", "^kind must", "'list'", lambda g: convert.to_pyg(g, "list")),
        out.value(
            "a Data of two kinds", "a Data has one kind", r"cross\(2, 3\)", lambda g: convert.to_pyg(CROSS)
        ),
        out.type("an SDPA mask of no graph", "^graph must", "got 3", lambda g: convert.to_sdpa_mask(3)),
        out.type(
            "an SDPA mask of integers",
            "^dtype must",
            "torch.int64",
            lambda g: convert.to_sdpa_mask(g, torch.int64),
        ),
        out.value("blocks of 0", "^block(_size)? must", "got 0", lambda g: convert.to_block_mask(g, 0)),
        out.value(
            "packed documents of a cross",
            "varlen kernels",
            r"cross\(2, 3\)",
            lambda g: convert.to_varlen(CROSS),
        ),
        out.value(
            "a window of strides",
            "is no window",
            "strides",
            lambda g: convert.to_window(patterns.strides(9, 3)),
        ),
        out.value("tiles of -1", "^block must", "got -1", lambda g: tiling.tiles(g, -1)),
    ]


BUILT = Subject("patterns", lambda: None, lambda _: patterns.window(4, 2).num_edges, lambda _: 7)


def _of_patterns() -> list[Case]:
    of, p = Of(BUILT), patterns
    return [
        of.value("fewer than no tokens", "^n must", "got -1", lambda _: p.causal(-1)),
        of.type("half a token", "^n must", "got 2.5", lambda _: p.full(2.5)),
        of.type("a size text", "^w must", "'2'", lambda _: p.window(4, "2")),
        of.value("a window of -2", "^w must", "got -2", lambda _: p.window(4, -2)),
        of.value("a step of 0", "^dilation must", "got 0", lambda _: p.dilated(4, 2, 0)),
        of.type("one document length", "^lengths must", "got 4", lambda _: p.documents(4)),
        of.value("a negative document", "lengths", "-1", lambda _: p.documents([3, -1])),
        of.value("chunks of 0", "^chunk must", "got 0", lambda _: p.chunked(4, 0)),
        of.value("a prefix of -1", "^p must", "got -1", lambda _: p.prefix(4, -1)),
        of.type("a parent number", "^parents must", "got 3", lambda _: p.tree(3)),
        of.index("a parent that is no token", "^parents", "got 7", lambda _: p.tree([-1, 7])),
        of.type("a shape number", "^shape must", "got 4", lambda _: p.axial(4)),
        of.value("a kernel of 0", "kernel", "got 0", lambda _: p.natten((4, 4), 0)),
        of.value("a probability of 2", "^p must", "got 2", lambda _: p.erdos_renyi(4, 2)),
        of.value(
            "a method that is none", "^method must", "'luck'", lambda _: p.expander(4, 2, method="luck")
        ),
        of.type("logits in a list", "^logits must", "got list", lambda _: p.top_k([[1.0]], 1)),
        of.value("logits NaN", "^logits must", "NaN", lambda _: p.top_k(torch.full((2, 2), torch.nan), 1)),
        of.type(
            "buckets of floats", "^buckets must", "torch.float32", lambda _: p.shared_bucket(torch.ones(1, 4))
        ),
        of.type(
            "long lists of unlike lengths",
            "^buckets must",
            r"\.\.\.",
            lambda _: p.shared_bucket([LARGE, LARGE[1:]]),
        ),
        of.value("an order that is none", "order", "got|twice|every", lambda _: p.permutation([0, 0, 1])),
        of.type("a memory of no graph", "^graph must", "got 4", lambda _: p.memory_tokens(4, 2)),
        of.value(
            "an unknown alignment", "^align must", "'middle'", lambda _: p.causal_aligned(2, 3, "middle")
        ),
        of.index("a media position beyond", "media", "9", lambda _: p.media_cross(4, [9], 2)),
        of.value(
            "an unknown builder", "no builder 'windw'", "window", lambda _: catalogue.entries(["windw"])
        ),
    ]


def _by_head(heads: int) -> TokenGraph:
    return TokenGraph.from_rule(lambda b, h, dst, src: src + h <= dst, 2, heads=heads)


def _of_algebra() -> list[Case]:
    of, a, other = Of(GRAPH), algebra, patterns.causal(3)
    return [
        of.value("a union of unlike sizes", r"^graphs joined by \|", r"causal\(3\)", lambda g: g | other),
        of.value(
            "a difference of unlike heads",
            "^graphs joined by -",
            "heads 3",
            lambda g: _by_head(2) - _by_head(3),
        ),
        of.value(
            "hops that do not meet", "^graphs joined by @ must meet", "3 receivers", lambda g: g @ other
        ),
        of.value("a negative power", "the power of a graph must", "got -1", lambda g: g**-1),
        of.type("half a power", "the power of a graph must", "got 0.5", lambda g: g**0.5),
        of.value("a power of a cross", "^only a square graph", r"cross\(2, 3\)", lambda g: CROSS**2),
        of.index("rows beyond the end", r"^rows\(1, 3\)", "num_dst = 2", lambda g: g.rows(1, 3)),
        of.index("rows backwards", r"^rows\(2, 1\)", "start <= stop", lambda g: g.rows(2, 1)),
        of.value("rows before the start", "^start must", "got -1", lambda g: g.rows(-1, 1)),
        of.type("rows of a float", "^stop must", "got 1.0", lambda g: g.rows(0, 1.0)),
        of.index(
            "a head that is none", r"^head must be in 0 \.\. 1", "got 2", lambda g: _by_head(2).select(head=2)
        ),
        of.type("a head text", "^head must", "'0'", lambda g: g.select(head="0")),
        of.value(
            "one list where heads differ", "no single edge list", "head", lambda g: _by_head(2).edge_index
        ),
        of.type("a mask elsewhere", "^device must", "got 3", lambda g: g.mask(3.5)),
        of.type(
            "a union with a number", "union takes graphs|must be a TokenGraph", "got", lambda g: a.union(g, 3)
        ),
        of.value("a union of nothing", "union", "got none|at least one", lambda g: a.union()),
        of.value("heads of other sizes", "per_head", r"causal\(3\)", lambda g: a.per_head(g, other)),
        of.index("a token that is none", "tokens", "2", lambda g: a.restrict(g, [2])),
        of.value("a token twice", "tokens", "twice", lambda g: a.restrict(g, [0, 0])),
        of.type("an order of floats", "order", "'a'", lambda g: a.relabel(g, ["a", 1])),
        of.value("more hops than none", "^hops must", "got -1", lambda g: a.closure(g, -1)),
        of.value("an unknown link", "^link must", "'deaf'", lambda g: a.extend(g, 1, link="deaf")),
        of.index("a token without ancestors", "token", "5", lambda g: a.ancestry(g, 5)),
        of.index("a walk from nowhere", "src", "7", lambda g: analyse.layers_between(g, 7, 0)),
        of.type("a walk along no graph", "^graphs must", "got 3", lambda g: analyse.layers_between(3, 0, 0)),
        of.type(
            "a difference to a number",
            "^second must be a TokenGraph",
            "got int",
            lambda g: analyse.diff(g, 3),
        ),
        of.type("a summary of a text", "must be a TokenGraph", "got 'g'", lambda g: analyse.summary("g")),
    ]


TEXT = Subject(
    "expressions", lambda: None, lambda _: expressions.parse("window(4, 2)").num_edges, lambda _: 7
)


@dataclass(frozen=True, eq=False)
class _Folder:
    """A folder with three files, which goes with the object."""

    path: Path


def _folder() -> _Folder:
    path = Path(tempfile.mkdtemp())
    (path / "good.edges").write_text("# tokens 2\n0 0\n0 1\n1 1\n", encoding="utf-8")
    (path / "bad.edges").write_text("0 1\n0 x\n", encoding="utf-8")
    (path / "loose.edges").write_text("0 9\n", encoding="utf-8")
    folder = _Folder(path)
    weakref.finalize(folder, shutil.rmtree, path, True)
    return folder


FILES = Subject(
    "graph_files", _folder, lambda o: _edges(convert_files.read(o.path / "good.edges")), lambda _: EDGES
)


def _of_texts() -> list[Case]:
    of, e, files, f = Of(TEXT), expressions.parse, Of(FILES), convert_files
    return [
        of.type("a number", "an expression is a string", "got 3", lambda _: e(3)),
        of.value("half an expression", "^column 7", "not an expression", lambda _: e("window(4,")),
        of.value(
            "an unknown builder", "^column 1, 'windw", "did you mean 'window'", lambda _: e("windw(4, 2)")
        ),
        of.value("an import", "^column 1", "no builder '__import__'", lambda _: e("__import__('os')")),
        of.value("an attribute", "^column 1", "is not part|no method", lambda _: e("causal(3).__class__")),
        of.value("too few arguments", "^column 1", "'w'.*window", lambda _: e("window(4)")),
        of.value("a huge number", "^column 8", "add up to at most", lambda _: e("causal(99999999999)")),
        of.value("a value", "is .*, an int|is 3", "expected a graph", lambda _: e("3")),
        of.value(
            "deep brackets", r"^column \d+", "inside one another", lambda _: e("~" * 4000 + "causal(2)")
        ),
        of.value(
            "a long text", "the expression has", "at most", lambda _: e("causal(2) | " * 20000 + "causal(2)")
        ),
        files.value("an unknown ending", "graph.png", r"\.edges", lambda o: f.read(o.path / "graph.png")),
        files.value(
            "a word for a token", "bad.edges .*line 2", "'x'", lambda o: f.read(o.path / "bad.edges")
        ),
        files.value(
            "too few tokens", "loose.edges", "num_tokens|tokens", lambda o: f.read(o.path / "loose.edges", 3)
        ),
        files.type("a path number", "^path must", "got 3", lambda o: f.read(3)),
        files.type("no graph to write", "^graph must", "got int", lambda o: f.write(3, o.path / "new.edges")),
        files.value(
            "a cross to write",
            "a file holds a graph",
            r"cross\(2, 3\)",
            lambda o: f.write(CROSS, o.path / "new.edges"),
        ),
    ]


def cases() -> list[Case]:
    """Of graphs, wherever they come from."""
    parts = (_of_rules, _of_lists, _of_masks, _of_others, _of_patterns, _of_algebra, _of_texts)
    return [case for part in parts for case in part()]
