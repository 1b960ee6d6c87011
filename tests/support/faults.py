"""Known faults: backends that compute something else, and changes of the source (file, old, new text)."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import gnn_attention
from gnn_attention import convert, patterns
from gnn_attention.backends import dense, reference

__all__ = ["PLANTED", "WRONG_BACKENDS", "changed_sources", "planted_here"]

PACKAGE = Path(gnn_attention.__file__).parent


def _tiled_groups(call):
    group = call.q.shape[1] // call.k.shape[1]
    return dense.run(replace(call, k=call.k.repeat(1, group, 1, 1), v=call.v.repeat(1, group, 1, 1)))


def _from_the_left(call):
    """Decoding as if the first of the rows were token 0."""
    graph = call.graph
    if graph.dst_offset and call.bias is None:
        graph = convert.from_mask(graph.mask().roll(-graph.dst_offset, -1))
    return dense.run(replace(call, graph=graph))


def _isolated_receive_one(call):
    out, lse = dense.run(call)
    return torch.where(call.has_in_edges.unsqueeze(-1), out, out + 1), lse


def _all_pairs(call):
    graph = call.graph
    whole = patterns.cross(graph.num_dst, graph.num_src)
    return dense.run(replace(call, graph=whole if call.bias is None else graph))


def _off_by(relative):
    """Every output off by this share, in these dtypes."""

    def run(call):
        out, lse = reference.run(call)
        return out * (1 + relative.get(out.dtype, 0)), lse

    return run


WRONG_BACKENDS = {
    "scale dropped": lambda call: dense.run(replace(call, scale=1.0)),
    "groups tiled": _tiled_groups,
    "graph ignored": _all_pairs,
    "rows from the left": _from_the_left,
    "isolated receive": _isolated_receive_one,
    "mod ignored": lambda call: dense.run(replace(call, score_mod=None)),
    "bias ignored": lambda call: dense.run(replace(call, bias=None)),
    "bias reversed": lambda call: dense.run(
        replace(call, bias=None if call.bias is None else call.bias.flip(-1))
    ),
    "sinks ignored": lambda call: dense.run(replace(call, sink_logits=None)),
    "half sums": lambda call: tuple(x.bfloat16().to(x.dtype) for x in reference.run(call)),
    "gradient of k lost": lambda call: dense.run(replace(call, k=call.k.detach())),
    "off by 1e-9 in float64": _off_by({torch.float64: 1e-9}),
    "off by 1e-4 in float32": _off_by({torch.float32: 1e-4}),
}


DENSE = "_squeeze(graph, enumerate_pairs.dense(graph.rule, repr(graph), graph.shape4, device))"
GROUPS = "x.repeat_interleave(num_heads // x.shape[1], dim=1)"
TILED = "x.repeat(1, num_heads // x.shape[1], *[1] * (x.dim() - 2))"
FACTORS = "near, far = (factor.double() for factor in _pattern_factors(standard))"
LOST = "\n            near = near.clone()\n            near[:, standard.width :] = 0"
MIXED = "z.to(self.W_O.dtype).transpose(-3, -2)"
BIASED = (
    "z + 0 if self.b_V is None else torch.where((z == 0).all(-1, keepdim=True), "
    "self.b_V.repeat_interleave(z.shape[-3] // len(self.b_V), 0).unsqueeze(1), z)"
)
ALL_PAIRS = "TokenGraph.from_rule(lambda b, h, i, j: (i >= 0) & (j >= 0), graph.num_dst, graph.num_src)"
GRAPH, SHIFTED = "graph/token_graph.py", "partial(rules.shifted, graph.rule, start)"
PLANTED = {
    "mask transposed": [("graph/derived.py", DENSE, f"{DENSE}.mT.contiguous()")],
    "scale dropped": [("backends/message_passing.py", ".sum(-1) * call.scale", ".sum(-1)")],
    "grouped heads tiled instead of repeated": [("edge_softmax.py", GROUPS, TILED)],
    "b_Q dropped in the merged form": [("heads/model_space.py", FACTORS, FACTORS + LOST)],
    "b_V added to receivers without in-edges": [
        ("heads/standard.py", MIXED, MIXED.replace("z.to(self.W_O.dtype)", f"({BIASED})"))
    ],
    # two mistakes, because the rule of a list is a set by itself: the list is left as it came
    "duplicate edges counted twice": [
        (GRAPH, "if not coalesce:", "if False:"),
        (GRAPH, "edges[:, edge_list.first_of_each(edge_list.keys_of(edges, num_src))]", "edges"),
    ],
    "decode rows aligned top-left": [
        ("graph/operators.py", SHIFTED, "partial(rules.shifted, graph.rule, 0)")
    ],
    "the graph ignored": [
        ("backends/call.py", "            graph=graph,\n", f"            graph={ALL_PAIRS},\n")
    ],
}


def changed_sources(fault: str) -> dict[str, str]:
    """The sources, by name of file, with the fault in them. AssertionError where its place has moved."""
    found: dict[str, str] = {}
    for name, old, new in PLANTED[fault]:
        source = found.get(name) or (PACKAGE / name).read_text(encoding="utf-8")
        assert old in source, f"the place for {fault!r} has moved"
        found[name] = source.replace(old, new, 1)
    return found


@contextlib.contextmanager
def planted_here(fault: str) -> Iterator[None]:
    """In the block every function of this process is that of the changed source."""
    changes = [change for name, source in changed_sources(fault).items() for change in _changes(name, source)]
    assert changes, fault
    before = [(function, function.__code__) for function, _ in changes]
    try:
        for function, code in changes:
            function.__code__ = code
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _changes(name: str, source: str) -> list[tuple[types.FunctionType, types.CodeType]]:
    """Functions of the module, each with its code in the changed source."""
    module = importlib.import_module(f"gnn_attention.{name.removesuffix('.py').replace('/', '.')}")
    codes = dict(_codes(compile(source, str(PACKAGE / name), "exec", dont_inherit=True)))
    return [
        (f, codes[f.__code__.co_qualname])
        for f in _functions(vars(module))
        if f.__code__.co_qualname in codes
        and f.__code__.co_freevars == codes[f.__code__.co_qualname].co_freevars
    ]


def _functions(names: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    """Those of a module and of its classes, without what is wrapped around them."""
    for x in [*names.values()]:
        x = getattr(x, "__func__", getattr(x, "fget", getattr(x, "func", x)))
        if isinstance(x, type) and x.__module__ == names.get("__name__"):
            yield from _functions(vars(x))
        elif callable(x) and isinstance(inspect.unwrap(x), types.FunctionType):
            yield inspect.unwrap(x)


def _codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)
