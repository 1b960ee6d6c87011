"""Malformed graphs: rules, lists, masks, graphs of other libraries, builders, algebra, texts and files."""

# mypy: disable-error-code="arg-type, list-item"
from __future__ import annotations

import shutil
import tempfile
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
        of.type("^rule must", "got str", _made("causal")),
        of.type("^rule must", r"got \(dst, src\)", _made(lambda dst, src: src <= dst)),
        of.type("^rule must|must take", "builtin|got", _made(max)),
        of.type("the rule of", "torch.int64", _made(lambda b, h, dst, src: dst - src)),
        of.type("the rule of", "got a bool", _made(lambda b, h, dst, src: True)),
        of.type("the rule of", r"got \[5\]", _made(lambda b, h, dst, src: torch.ones(5).bool())),
        of.type(
            "the rule of",
            "be made of tensor operators .*: size",
            _made(lambda b, h, dst, src: dst @ src > 0),
        ),
        of.type("the rule of", "tensor operators", _made(lambda b, h, dst, src: dst if src <= dst else src)),
        of.value("^num_dst must", "got -1", _made(_causal, -1)),
        of.type("^num_src must", "got 2.5", _made(_causal, 2, 2.5)),
        of.value("^heads must", "got 0", _made(_causal, 2, heads=0)),
        of.type("^batch must", "'2'", _made(_causal, 2, batch="2")),
    ]


def _of_lists() -> list[Case]:
    of = Of(LIST)
    return [
        of.type("^edge_index must", "torch.float32", lambda e: TokenGraph.from_edges(e.float(), 2)),
        of.type("^edge_index must", "torch.bool", lambda e: TokenGraph.from_edges(e.bool(), 2)),
        of.type("^edge_index must", "torch.uint8", lambda e: TokenGraph.from_edges(e.to(torch.uint8), 2)),
        of.type("^edge_index must", "got ndarray", lambda e: TokenGraph.from_edges(e.numpy(), 2)),
        of.type("^edge_index must", "got list", lambda e: TokenGraph.from_edges(e.tolist(), 2)),
        of.value("^edge_index must", r"\[3\]", lambda e: TokenGraph.from_edges(e[0], 2)),
        of.value("^edge_index must", r"\[3, 2\].*pairs.t\(\)", lambda e: TokenGraph.from_edges(e.t(), 2)),
        of.value("^edge_index must", r"got \[\]", lambda e: TokenGraph.from_edges(e[0, 0], 2)),
        of.value("^edge_index must", "meta", lambda e: TokenGraph.from_edges(e.to("meta"), 2)),
        of.index(r"^edge_index\[0, 0\] = -1", "no sender", lambda e: TokenGraph.from_edges(e - 1, 2)),
        of.index(r"^edge_index\[1, 1\] = 1", "no receiver", lambda e: TokenGraph.from_edges(e, 1, 2)),
        of.value(
            "1 duplicate", "coalesce=True", lambda e: TokenGraph.from_edges(torch.cat([e, e[:, :1]], 1), 2)
        ),
        of.type("^num_dst must", "'2'", lambda e: TokenGraph.from_edges(e, "2")),
        of.type("^num_dst must", r"\.\.\.", lambda e: TokenGraph.from_edges(e, LARGE)),
        of.value("1 -> 0 is no edge", "edges", lambda e: TokenGraph.from_edges(e, 2).positions_of(e.flip(0))),
    ]


def _of_masks() -> list[Case]:
    of = Of(MASK)
    return [
        of.type("^mask must", r"got \[\[True", lambda m: convert.from_mask(m.tolist())),
        of.type("^mask must", "torch.int64", lambda m: convert.from_mask(m.long())),
        of.value("^mask must", r"got \[2\]", lambda m: convert.from_mask(m[0])),
        of.value("^mask must", r"\[1, 1, 1, 2, 2\]", lambda m: convert.from_mask(m[None, None, None])),
        of.value("^mask must be .*heads and batch", r"\[0, 2, 2\]", lambda m: convert.from_mask(m[None][:0])),
        of.value("mask != 0", "ambiguous", lambda m: convert.from_mask(m.float())),
        of.value(
            "^mask must", "to_padded_tensor", lambda m: convert.from_mask(torch.nested.as_nested_tensor(m))
        ),
        of.value("additive mask", "NaN", lambda m: convert.from_mask(m.float() * torch.nan)),
        of.value("^meaning must", "got 'yes'", lambda m: convert.from_mask(m, "yes")),
        of.type("meaning='additive'", "torch.bool", lambda m: convert.from_mask(m, "additive")),
        of.value("^mask must", "meta", lambda m: convert.from_mask(m.to("meta"))),
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


def _of_others() -> list[Case]:
    of, pyg, out = Of(NETWORKX), Of(PYG), Of(GRAPH)
    return [
        of.type(
            "^graph must be a networkx graph", r"got \[\(", lambda g: convert.from_networkx([("a", "b")])
        ),
        of.value("^order is needed", "'a', 'b'", lambda g: convert.from_networkx(g)),
        of.value("^order must hold every node", r"\['b'\]", lambda g: convert.from_networkx(g, ["a"])),
        of.value("^order must hold", "repeated", lambda g: convert.from_networkx(g, ["a", "b", "b"])),
        of.type("^order must", "got 2", lambda g: convert.from_networkx(g, 2)),
        pyg.type("expected a torch_geometric", "got 'edges'", lambda e: convert.from_pyg("edges", 2)),
        pyg.type(
            "expected a torch_geometric", "torch.bool", lambda e: convert.from_pyg(torch.ones(2, 2).bool())
        ),
        pyg.value("num_dst and num_src are needed", "does not know", lambda e: convert.from_pyg(e)),
        pyg.value("^adj_t must", r"\[1, 2, 2\]", lambda e: convert.from_pyg(torch.eye(2)[None].to_sparse())),
        pyg.value("^num_dst=3 contradicts", "has 2", lambda e: convert.from_pyg(torch.eye(2).to_sparse(), 3)),
        out.value("^labels must", "got 1", lambda g: convert.to_networkx(g, ["a"])),
        out.type("^graph must", "got 3", lambda g: convert.to_networkx(3)),
        out.value("^kind must", "'list'", lambda g: convert.to_pyg(g, "list")),
        out.value("a Data has one kind", r"cross\(2, 3\)", lambda g: convert.to_pyg(CROSS)),
        out.type("^graph must be", "got 3", lambda g: convert.to_sdpa_mask(3)),
        out.type("^dtype must", "torch.int64", lambda g: convert.to_sdpa_mask(g, torch.int64)),
        out.value("^block(_size)? must", "got 0", lambda g: convert.to_block_mask(g, 0)),
        out.value("varlen kernels", r"cross\(2, 3\)", lambda g: convert.to_varlen(CROSS)),
        out.value("is no window", "strides", lambda g: convert.to_window(patterns.strides(9, 3))),
        out.value("^block must", "got -1", lambda g: tiling.tiles(g, -1)),
    ]


BUILT = Subject("patterns", lambda: None, lambda _: patterns.window(4, 2).num_edges, lambda _: 7)


def _of_patterns() -> list[Case]:
    of, p = Of(BUILT), patterns
    return [
        of.value("^n must", "got -1", lambda _: p.causal(-1)),
        of.type("^n must", "got 2.5", lambda _: p.full(2.5)),
        of.type("^w must", "'2'", lambda _: p.window(4, "2")),
        of.value("^w must", "got -2", lambda _: p.window(4, -2)),
        of.value("^dilation must", "got 0", lambda _: p.dilated(4, 2, 0)),
        of.type("^lengths must", "got 4", lambda _: p.documents(4)),
        of.value("lengths", "-1", lambda _: p.documents([3, -1])),
        of.value("^chunk must", "got 0", lambda _: p.chunked(4, 0)),
        of.value("^p must", "got -1", lambda _: p.prefix(4, -1)),
        of.type("^parents must", "got 3", lambda _: p.tree(3)),
        of.index("^parents", "got 7", lambda _: p.tree([-1, 7])),
        of.type("^shape must", "got 4", lambda _: p.axial(4)),
        of.value("kernel", "got 0", lambda _: p.natten((4, 4), 0)),
        of.value("^p must", "got 2", lambda _: p.erdos_renyi(4, 2)),
        of.value("^method must", "'luck'", lambda _: p.expander(4, 2, method="luck")),
        of.type("^logits must", "got list", lambda _: p.top_k([[1.0]], 1)),
        of.value("^logits must", "NaN", lambda _: p.top_k(torch.full((2, 2), torch.nan), 1)),
        of.type("^buckets must", "torch.float32", lambda _: p.shared_bucket(torch.ones(1, 4))),
        of.type("^buckets must", r"\.\.\.", lambda _: p.shared_bucket([LARGE, LARGE[1:]])),
        of.value("order", "got|twice|every", lambda _: p.permutation([0, 0, 1])),
        of.type("^graph must", "got 4", lambda _: p.memory_tokens(4, 2)),
        of.value("^align must", "'middle'", lambda _: p.causal_aligned(2, 3, "middle")),
        of.index("media", "9", lambda _: p.media_cross(4, [9], 2)),
        of.value("no builder 'windw'", "window", lambda _: catalogue.entries(["windw"])),
    ]


def _by_head(heads: int) -> TokenGraph:
    return TokenGraph.from_rule(lambda b, h, dst, src: src + h <= dst, 2, heads=heads)


def _of_algebra() -> list[Case]:
    of, a, other = Of(GRAPH), algebra, patterns.causal(3)
    return [
        of.value(r"^graphs joined by \|", r"causal\(3\)", lambda g: g | other),
        of.value("^graphs joined by -", "heads 3", lambda g: _by_head(2) - _by_head(3)),
        of.value("^graphs joined by @ must meet", "3 receivers", lambda g: g @ other),
        of.value("the power of a graph must", "got -1", lambda g: g**-1),
        of.type("the power of a graph must", "got 0.5", lambda g: g**0.5),
        of.value("^only a square graph", r"cross\(2, 3\)", lambda g: CROSS**2),
        of.index(r"^rows\(1, 3\)", "num_dst = 2", lambda g: g.rows(1, 3)),
        of.index(r"^rows\(2, 1\)", "start <= stop", lambda g: g.rows(2, 1)),
        of.value("^start must", "got -1", lambda g: g.rows(-1, 1)),
        of.type("^stop must", "got 1.0", lambda g: g.rows(0, 1.0)),
        of.index(r"^head must be in 0 \.\. 1", "got 2", lambda g: _by_head(2).select(head=2)),
        of.type("^head must", "'0'", lambda g: g.select(head="0")),
        of.value("no single edge list", "head", lambda g: _by_head(2).edge_index),
        of.type("^device must", "got 3", lambda g: g.mask(3.5)),
        of.type("union takes graphs|must be a TokenGraph", "got", lambda g: a.union(g, 3)),
        of.value("union", "got none|at least one", lambda g: a.union()),
        of.value("per_head", r"causal\(3\)", lambda g: a.per_head(g, other)),
        of.index("tokens", "2", lambda g: a.restrict(g, [2])),
        of.value("tokens", "twice", lambda g: a.restrict(g, [0, 0])),
        of.type("order", "'a'", lambda g: a.relabel(g, ["a", 1])),
        of.value("^hops must", "got -1", lambda g: a.closure(g, -1)),
        of.value("^link must", "'loose'", lambda g: a.extend(g, 1, link="loose")),
        of.index("token", "5", lambda g: a.ancestry(g, 5)),
        of.index("src", "7", lambda g: analyse.layers_between(g, 7, 0)),
        of.type("^graphs must", "got 3", lambda g: analyse.layers_between(3, 0, 0)),
        of.type("^second must be a TokenGraph", "got int", lambda g: analyse.diff(g, 3)),
        of.type("must be a TokenGraph", "got 'g'", lambda g: analyse.summary("g")),
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
    (path / "bad.edges").write_text("0 1\nx\n", encoding="utf-8")
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
        of.type("an expression is a string", "got 3", lambda _: e(3)),
        of.value("^column 7", "not an expression", lambda _: e("window(4,")),
        of.value("^column 1, 'windw", "did you mean 'window'", lambda _: e("windw(4, 2)")),
        of.value("^column 1", "no builder '__import__'", lambda _: e("__import__('os')")),
        of.value("^column 1", "is not part|no method", lambda _: e("causal(3).__class__")),
        of.value("^column 1", "'w'.*window", lambda _: e("window(4)")),
        of.value("^column 8", "add up to at most", lambda _: e("causal(99999999999)")),
        of.value("is .*, an int|is 3", "expected a graph", lambda _: e("3")),
        of.value(r"^column \d+", "inside one another", lambda _: e("~" * 4000 + "causal(2)")),
        of.value("the expression has", "at most", lambda _: e("causal(2) | " * 20000 + "causal(2)")),
        files.value("graph.png", r"\.edges", lambda o: f.read(o.path / "graph.png")),
        files.value("bad.edges .*line 2", "'x'", lambda o: f.read(o.path / "bad.edges")),
        files.value("loose.edges", "num_tokens|tokens", lambda o: f.read(o.path / "loose.edges", 3)),
        files.type("^path must", "got 3", lambda o: f.read(3)),
        files.type("^graph must", "got 3", lambda o: f.write(3, o.path / "new.edges")),
        files.value("a file holds graphs", r"cross\(2, 3\)", lambda o: f.write(CROSS, o.path / "new.edges")),
    ]


def cases() -> list[Case]:
    found = [*_of_rules(), *_of_lists(), *_of_masks(), *_of_others(), *_of_patterns()]
    found += [*_of_algebra(), *_of_texts()]
    return found
