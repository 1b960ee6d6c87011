"""The core: the checks that a GPU must pass before a backend counts as verified in a dtype, a list fixed by name.

It holds what a user runs on a GPU: the backends rows, dense, varlen, flex and reference, and the
message-passing path of a layer, forward and gradients, against the float64 formula. For each backend every
pair of dtype, graph and option occurs, and every pair of dtype, shape, graph and option. Checks of one problem
stand next to each other and share one float64 truth. A check that its backend refuses is not in the list, which
needs no GPU: ``python -m tests.guarantees.gpu_core`` prints how many checks there are and the digest of their
labels.

FlexAttention compiles a kernel for each kind of call, so that it takes few kinds: three dtypes, heads of 64 and
128 channels, and of each a plain call forward alone, and with gradients a plain call, one with sinks (which
needs lse) and one with a relative bias (a score_mod).
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from gnn_attention.backends import BACKENDS
from gnn_attention.backends.plan.packing import packing
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.attend_checks import DROPOUT_GRAPHS, drawn, dropout_problem
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.check import BOTH, DTYPES, FORWARD, Check, Settings, judged
from gnn_attention.verify.layer_checks import KINDS, LAYER_OPTIONS, layer_problem
from gnn_attention.verify.rule_checks import RULES, Trial, run_rule
from gnn_attention.verify.selection import covering
from gnn_attention.verify.truth import Problem
from tests.guarantees.gpu_checks import (
    run_again,
    run_compiled,
    run_compiled_layer,
    run_fresh,
    run_memory,
    run_opcheck,
)
from tests.guarantees.gpu_large import LARGE, LargeCase, large_layer
from tests.guarantees.gpu_shapes import OPTIONS, SHAPES, run_far, shape_graphs, shape_problem

CORE_DTYPES = ("bfloat16", "float16", "float32", "float64")
MESSAGE_PASSING = "message_passing"
# the narrowest first, so that the others take the problems that those can
CORE_BACKENDS = ("flex", "varlen", "rows", "dense", "reference")
EVERYWHERE = ("rows", "dense", "reference")  # the backends that take every dtype, graph and option
CORE_GRAPHS = (
    *("full", "causal", "strict_causal", "window", "documents", "window | sinks", "global_tokens", "cross"),
    *("decode rows", "one token", "no edges", "listed", "by head", "by sample"),
    *("causal, 97 tokens", "window, 97 tokens"),
)
NARROW, WIDTHS = (16, 12), (64, 128)  # channels of keys and values where FlexAttention has no part, and where
FLEX_OPTIONS = ("plain", "sinks", "relative bias")
FLEX_SHAPES = ("64 channels", "128 channels")
VARLEN_RULE = "a NaN that is attended to is not cleaned"
KERNEL_OF_ROWS = "triton_attention"  # the operator that launches it
COMPILED, NEW_PROCESS = "compiled as one graph", "the same bits in a new process"
PROCESSES = 16
# seconds on a GPU, by which the parts are balanced: of the float64 truth and SDPA, measured on a CPU core
SECONDS_OF_TRUTH = {"attend": 0.4, "layer": 0.5, "shapes": 1.0, "dropout": 0.4, "rules": 1.0, "large": 2.5}
SECONDS_OF_TRUTH |= {"repeat": 0.3, "memory": 2.0, "operators": 0.5, "far": 20.0}
SECONDS_OF_CALL = {"rows": 0.4}  # of which most is the compilation of a kernel
SECONDS_OF_COMPILATION = 10.0  # by Inductor, forward and backward
SECONDS_OF_PROCESS = 25.0

Run = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """Tokens of the larger graphs, also of FlexAttention and of layers, of shapes, memory and far offsets."""

    large: int = 4131
    flex: int = 1200
    layer: int = 500
    shapes: int = 150
    memory: int = 65_536
    far: int = 2**22 + 77


TRIAL = Sizes(large=16, flex=16, layer=16, shapes=12, memory=64, far=20)  # for a rehearsal on a CPU


def core_checks(device: str = "cuda", sizes: Sizes = Sizes()) -> list[Check]:
    """All checks of the core, those of one problem next to each other, far offsets last."""
    groups = (
        _attend_checks(device),
        _layer_checks(device),
        _shape_checks(device, sizes.shapes),
        _dropout_checks(device),
        _rule_checks(device),
        _large_checks(device, sizes),
        _repeat_checks(device, sizes.large),
        _memory_checks(device, sizes.memory),
        _operator_checks(device),
        _far_checks(device, sizes.far),
    )
    return [check for group in groups for check in group]


def takes(backend: str, dtype: str, graph: TokenGraph, *options: str) -> bool:
    """Whether a backend takes a call on CUDA: decided by its capabilities, so that no GPU is needed.

    >>> takes("flex", "float64", GRAPHS["causal"].graph), takes("varlen", "float16", GRAPHS["listed"].graph)
    (False, False)
    """
    supported = BACKENDS[backend].capabilities
    if supported.devices and "cuda" not in supported.devices:
        return False
    if supported.dtypes and DTYPES[dtype] not in supported.dtypes:
        return False
    if any(getattr(supported, option) not in (True, "cuda") for option in options):
        return False
    return backend != "varlen" or packing(graph) is not None


class Call(NamedTuple):
    """What a check of ``attend`` asks: the values of which every pair occurs for each backend."""

    dtype: str
    graph: str
    option: str
    channels: int

    @property
    def name(self) -> str:
        return f"{self.graph}, {self.option}, {self.channels} channels"


def _calls() -> list[Call]:
    """All calls; dtypes and channels change from one to the next, so that a choice of few is balanced."""
    rows = list(product(CORE_GRAPHS, FEATURES))
    rows = [(g, option) for g, option in rows if FEATURES[option].unsupported(GRAPHS[g]) is None]
    calls = []
    for turn, (number, (graph, option)) in product(range(2 * len(CORE_DTYPES)), enumerate(rows)):
        dtype = CORE_DTYPES[(number + turn) % len(CORE_DTYPES)]
        channels = WIDTHS[(number // len(CORE_DTYPES) + turn // len(CORE_DTYPES)) % len(WIDTHS)]
        calls.append(Call(dtype, graph, option, channels if option in FLEX_OPTIONS else NARROW[0]))
    return list(dict.fromkeys(calls))


def _takes_call(backend: str, call: Call) -> bool:
    feature, case = FEATURES[call.option], GRAPHS[call.graph]
    options = [name for name in feature.learns if name != "table"]
    options += ["score_mod"] if feature.score_mod is not None else []
    if backend == "flex":
        # one token with a score_mod is a kernel of its own, as is a graph that differs by head or sample
        kernels = call.option in FLEX_OPTIONS and not case.varies
        if not kernels or (call.graph == "one token" and "score_mod" in options):
            return False
    return takes(backend, call.dtype, case.graph, *options)


def _users(rows: Sequence[Any], takes_row: Callable[[str, Any], bool]) -> dict[Any, list[str]]:
    """Few of the rows (named tuples), and the backends that take each.

    For every backend they hold each pair of values that any row which it takes holds. Rows that an earlier
    backend has are preferred, so that the backends share problems.
    """
    users: dict[Any, list[str]] = {}
    for backend in CORE_BACKENDS:
        mine = sorted((row for row in rows if takes_row(backend, row)), key=lambda row: row not in users)
        for number in covering([row._asdict() for row in mine], 2):
            users.setdefault(mine[number], []).append(backend)
    return users


def _attend_checks(device: str) -> Iterator[Check]:
    """Pairs of dtype, graph, option and channels; the plain calls forward alone, too."""
    for call, backends in _users(_calls(), _takes_call).items():
        problem = functools.cache(partial(_attend_problem, device, call))
        factors = {"graph": call.graph, "option": call.option, "channels": str(call.channels)}
        for backend in backends:
            run = partial(judged, problem, BACKENDS[backend])
            factors = {**factors, "direction": BOTH}
            check = Check("attend", backend, call.dtype, call.name, run, factors=factors)
            yield check
            if call.option == "plain":
                yield check.forward_alone()


def _attend_problem(device: str, call: Call) -> Problem:
    case, feature = GRAPHS[call.graph], FEATURES[call.option]
    channels = (call.channels, call.channels) if call.option in FLEX_OPTIONS else NARROW
    inputs = drawn(0, DTYPES[call.dtype], case, feature, dims=channels)
    return Problem.of(case, feature, inputs, device)


class Layer(NamedTuple):
    """What a check of a layer asks."""

    dtype: str
    graph: str
    option: str
    kind: str


def _layer_checks(device: str) -> Iterator[Check]:
    """Pairs of dtype, graph, option and kind of heads on the message-passing path."""
    graphs = [name for name in CORE_GRAPHS if not GRAPHS[name].varies]
    pairs = list(product(graphs, LAYER_OPTIONS))
    rows = [
        Layer(CORE_DTYPES[(number + turn) % 4], graph, option, KINDS[(number // 4 + turn // 4) % 2])
        for turn, (number, (graph, option)) in product(range(8), enumerate(pairs))
    ]
    settings = Settings(device)
    for number in covering([row._asdict() for row in rows], 2):
        row = rows[number]
        problem = partial(layer_problem, settings, {**row._asdict(), "form": "standard", "size": "x1"})
        run = partial(judged, functools.cache(problem), None)
        name = f"{row.kind}, {row.graph}, {row.option}"
        factors = {"graph": row.graph, "option": row.option, "kind": row.kind, "direction": BOTH}
        yield Check("layer", MESSAGE_PASSING, row.dtype, name, run, factors=factors)


class ShapedCall(NamedTuple):
    """What a check of shapes asks."""

    dtype: str
    shape: str
    graph: str
    option: str


def _shape_checks(device: str, tokens: int) -> Iterator[Check]:
    """Pairs of dtype, shape, graph and option."""
    graphs = shape_graphs(tokens)
    others = list(product(SHAPES, graphs, OPTIONS))
    rows = [
        ShapedCall(CORE_DTYPES[(number + turn) % 4], *other)
        for turn, (number, other) in product(range(4), enumerate(others))
    ]

    def takes_row(backend: str, row: ShapedCall) -> bool:
        if backend == "flex" and row.shape not in FLEX_SHAPES:
            return False
        options = () if row.option == "plain" else ("bias", "sink_logits")
        return takes(backend, row.dtype, graphs[row.graph].graph, *options)

    for row, backends in _users(rows, takes_row).items():
        edges, shape = graphs[row.graph], SHAPES[row.shape]
        problem = functools.cache(partial(shape_problem, device, DTYPES[row.dtype], shape, edges, row.option))
        name = f"{row.graph} of {tokens} tokens, {row.shape}, {row.option}"
        factors = {"shape": row.shape, "graph": row.graph, "option": row.option, "direction": BOTH}
        for backend in backends:
            run = partial(_run_problem, problem, backend)
            yield Check("shapes", backend, row.dtype, name, run, factors=factors)


def _run_problem(problem: Callable[[], Any], backend: str) -> Mapping[str, Any]:
    return dict(problem().run(BACKENDS[backend]))


def _dropout_checks(device: str) -> Iterator[Check]:
    for dtype, graph in product(CORE_DTYPES, DROPOUT_GRAPHS):
        make = partial(dropout_problem, Settings(device), GRAPHS[graph], DTYPES[dtype])
        problem = functools.cache(make)
        for backend in EVERYWHERE:
            run = partial(judged, problem, BACKENDS[backend])
            name = f"the weights dropped on {graph} are those of the key"
            yield Check("dropout", backend, dtype, name, run, factors={"graph": graph})


def _rule_checks(device: str) -> Iterator[Check]:
    """Every rule in every dtype, and of varlen the one whose graph it takes."""
    settings = Settings(device)  # one for all, by which rules find the problems that they share
    for dtype, (name, (rule, _)) in product(CORE_DTYPES, RULES.items()):
        varlen = name == VARLEN_RULE and takes("varlen", dtype, GRAPHS["window"].graph)
        for backend in (*EVERYWHERE, "varlen") if varlen else EVERYWHERE:
            run = partial(run_rule, rule, Trial(settings, DTYPES[dtype], BACKENDS[backend]))
            yield Check("rules", backend, dtype, name, run, factors={"rule": name})


def _large_checks(device: str, sizes: Sizes) -> Iterator[Check]:
    """Larger graphs: all of rows and of dense, the plain ones of reference, what varlen and flex take."""
    packed = {name: large.graph(sizes.large) for name, large in LARGE.items() if not large.listed}
    for dtype, (graph, large) in product(CORE_DTYPES, LARGE.items()):
        for full in (False, True) if large.listed else (False,):
            case = functools.cache(partial(LargeCase, device, large, DTYPES[dtype], sizes.large, full))
            backends = ["rows", "dense", *([] if full else ["reference"])]
            if graph in packed and takes("varlen", dtype, packed[graph]):
                backends.append("varlen")
            name = f"{large.name}, {sizes.large} tokens{', bias and sinks' if full else ''}"
            for backend in backends:
                run = partial(_run_problem, case, backend)
                yield Check("large", backend, dtype, name, run, factors={"graph": large.name})
    yield from _large_checks_of_flex(device, sizes.flex)
    for dtype, graph in product(CORE_DTYPES, ("documents", "random, in-degree 32", "hubs")):
        make = partial(large_layer, device, LARGE[graph], DTYPES[dtype], sizes.layer)
        run = partial(judged, functools.cache(make), None)
        name, factors = f"{graph}, {sizes.layer} tokens, a layer", {"graph": graph}
        yield Check("large", MESSAGE_PASSING, dtype, name, run, factors=factors)


def _large_checks_of_flex(device: str, tokens: int) -> Iterator[Check]:
    """Tables of bits as large as those of small graphs, since another size would be another kernel."""
    for (number, large), (turn, dtype) in product(enumerate(LARGE.values()), enumerate(CORE_DTYPES)):
        channels = WIDTHS[(number + turn) % 2]
        if takes("flex", dtype, GRAPHS["causal"].graph):
            make = partial(LargeCase, device, large, DTYPES[dtype], tokens, samples=2, dim=channels)
            run = partial(_run_problem, functools.cache(make), "flex")
            name = f"{large.name}, {tokens} tokens, {channels} channels"
            factors = {"graph": large.name, "channels": str(channels), "direction": BOTH}
            yield Check("large", "flex", dtype, name, run, factors=factors)


def _repeat_checks(device: str, tokens: int) -> Iterator[Check]:
    """rows on the larger graphs: the same bits three times, and in two dtypes in a new process."""
    kernel = KERNEL_OF_ROWS if device.startswith("cuda") else ""
    for dtype, large in product(CORE_DTYPES, LARGE.values()):
        make = partial(LargeCase, device, large, DTYPES[dtype], tokens, full=large.listed)
        name = f"{large.name}, {tokens} tokens: three runs give the same bits"
        yield Check("repeat", "rows", dtype, name, partial(_run_again, make, kernel))
    for dtype in ("bfloat16", "float32"):
        name = f"{tokens} tokens: {NEW_PROCESS}"
        yield Check("repeat", "rows", dtype, name, partial(run_fresh, device, "rows", dtype, tokens))


def _run_again(make: Callable[[], LargeCase], kernel: str) -> Mapping[str, Any]:
    return run_again(make(), BACKENDS["rows"], kernel)


def _memory_checks(device: str, tokens: int) -> Iterator[Check]:
    skipped = None if device.startswith("cuda") else "memory is measured on CUDA alone"
    for dtype, hubs in product(("bfloat16", "float32"), (False, True)):
        name = f"{'hubs' if hubs else 'random'}, {tokens} tokens: its graph, results and 64 MiB"
        run = partial(run_memory, device, DTYPES[dtype], tokens, hubs, BACKENDS["rows"])
        yield Check("memory", "rows", dtype, name, run, skipped=skipped)


def _operator_checks(device: str) -> Iterator[Check]:
    """``opcheck`` and compilation: of rows on two graphs, of each other backend on one."""
    operators = [
        ("rows", "float32", "window"),
        ("rows", "bfloat16", "listed"),
        ("varlen", "bfloat16", "window"),
    ]
    for backend, dtype, graph in operators:
        run = partial(run_opcheck, device, DTYPES[dtype], GRAPHS[graph], BACKENDS[backend])
        yield Check("operators", backend, dtype, f"opcheck on {graph}", run)
    others = [("dense", "float32", "causal"), ("reference", "float32", "listed")]
    for backend, dtype, graph in [*operators, *others]:
        run = partial(run_compiled, device, DTYPES[dtype], GRAPHS[graph], BACKENDS[backend])
        yield Check("operators", backend, dtype, f"{COMPILED} on {graph}", run)
    run = partial(run_compiled_layer, device, DTYPES["float32"], GRAPHS["window"])
    yield Check("operators", MESSAGE_PASSING, "float32", f"{COMPILED} on window", run)


def _far_checks(device: str, tokens: int) -> Iterator[Check]:
    run = partial(run_far, device, DTYPES["bfloat16"], tokens, BACKENDS["rows"])
    yield Check("far", "rows", "bfloat16", f"a window over {tokens} tokens", run)


# ---- processes


def parts(checks: Sequence[Check], processes: int = PROCESSES) -> dict[str, list[Check]]:
    """The checks of each process, by dtype and part; far offsets, which need 40 GB, are the part "far".

    Checks of one problem stay together, and so do those for which FlexAttention compiles the same kernels.
    The parts of a dtype take about equally long.
    """
    far = [check for check in checks if check.group == "far"]
    units = defaultdict[tuple[str, str], list[Check]](list)
    for unit in _units([check for check in checks if check.group != "far"]):
        units[unit[0].dtype, _kernels(unit) or unit[0].label] += unit
    by_dtype = defaultdict[str, list[list[Check]]](list)
    for (dtype, _), unit in units.items():
        by_dtype[dtype].append(unit)
    total = sum(seconds_of(unit) for unit in units.values())
    found: dict[str, list[Check]] = {}
    for dtype, members in by_dtype.items():
        share = sum(map(seconds_of, members)) / total
        for number, part in enumerate(_balanced(members, max(1, round(processes * share)))):
            found[f"{dtype} {number + 1}"] = part
    return found | ({"far": far} if far else {})


def _units(checks: Sequence[Check]) -> list[list[Check]]:
    """Checks of one problem together, and all rules of a dtype, which have problems in common."""
    units = defaultdict[tuple[str, ...], list[Check]](list)
    for check in checks:
        problem = "" if check.group == "rules" else check.name.removesuffix(f", {FORWARD}")
        units[check.group, check.dtype, problem].append(check)
    return list(units.values())


def _kernels(unit: Iterable[Check]) -> str:
    """The channels for which FlexAttention compiles kernels for these checks, or nothing."""
    return next((kernel_of_flex(check)[1] for check in unit if check.backend == "flex"), "")


def _balanced(units: Sequence[list[Check]], count: int) -> list[list[Check]]:
    """The units in so many parts, the longest first, each to the part with least to do."""
    bins: list[list[list[Check]]] = [[] for _ in range(count)]
    for unit in sorted(units, key=seconds_of, reverse=True):
        min(bins, key=lambda units: sum(map(seconds_of, units))).append(unit)
    return [[check for unit in units for check in unit] for units in bins if units]


def seconds_of(unit: Sequence[Check]) -> float:
    """The seconds that checks of one problem, or of some, take a process on a GPU, compilation included."""
    exact = unit[0].dtype == "float64"
    problems = {(check.group, check.name.removesuffix(f", {FORWARD}")) for check in unit}
    groups = [group for group, name in problems]
    truths = sum(SECONDS_OF_TRUTH[group] * (0.1 if exact else 1.0) for group in groups)
    calls = sum(SECONDS_OF_CALL.get(check.backend, 0.05) for check in unit)
    kinds = {kernel_of_flex(check) for check in unit if check.backend == "flex"}
    compiled = sum(COMPILED in check.name for check in unit)
    fresh = sum(NEW_PROCESS in check.name for check in unit)
    return truths + calls + SECONDS_OF_COMPILATION * (len(kinds) + 2 * compiled) + SECONDS_OF_PROCESS * fresh


def kernel_of_flex(check: Check) -> tuple[str, str, str]:
    """What FlexAttention compiles anew for: the dtype, the channels, and the option or the direction."""
    channels = check.factors.get("channels") or check.factors["shape"].partition(" ")[0]
    kind = FORWARD if check.factors["direction"] == FORWARD else check.factors.get("option", "plain")
    return check.dtype, channels, kind


def digest(labels: Iterable[str]) -> str:
    """The sha256 of the labels of checks, in whatever order.

    >>> digest(["b", "a"]) == digest(["a", "b"]) != digest(["a"])
    True
    """
    return hashlib.sha256("\n".join(sorted(labels)).encode()).hexdigest()


def main() -> int:
    """Print how many checks there are by group and by cell, and the digest of their labels."""
    checks = core_checks()
    for count in (Counter(c.group for c in checks), Counter(f"{c.backend} {c.dtype}" for c in checks)):
        print(*(f"{name:<26}{number:>6}" for name, number in count.items()), "", sep="\n")
    print(f"{len(checks)} checks, {digest(check.label for check in checks)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
