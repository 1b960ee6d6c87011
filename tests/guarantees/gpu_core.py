"""The core: the checks that a GPU must pass before a backend counts as verified in a dtype, a list fixed by name.

It holds what a user runs on a GPU: the backends rows, dense, varlen, flex and reference, and the
message-passing path of a layer, forward and gradients, against the float64 formula. For each backend every
pair of dtype, graph and option occurs, and every pair of dtype, shape, graph and option. A check that its
backend refuses is not in the list, which needs no GPU.

FlexAttention compiles a kernel for each kind of call, so that it takes few kinds: three dtypes, heads of 64 and
128 channels, and of each a plain call forward alone, and with gradients a plain call, one with sinks (which
needs lse) and one with a relative bias (a score_mod).
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from gnn_attention.backends import BACKENDS
from gnn_attention.backends.plan.planner import packing
from gnn_attention.graph import TokenGraph
from gnn_attention.verify.cases import DROPOUT, DTYPES, FEATURES, GRAPHS, KINDS
from gnn_attention.verify.groups import (
    DROPOUT_GRAPHS,
    LAYER_OPTIONS,
    NAN_RULE,
    RULES,
    cover_values,
    draw_problem,
    grid,
    run_row,
)
from gnn_attention.verify.measure import Outcome, judge
from gnn_attention.verify.report import FORWARD, Check
from gnn_attention.verify.truth import Problem
from tests.guarantees.gpu_checks import run_again, run_compiled, run_compiled_layer, run_opcheck
from tests.guarantees.gpu_large import LARGE, large_layer, large_problem
from tests.guarantees.gpu_shapes import OPTIONS_OF_SHAPES, SHAPES, run_far, shape_graphs, shape_problem

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
WIDTHS = ("64 channels", "128 channels")  # of FlexAttention
FLEX_OPTIONS = ("plain", "sinks", "relative bias")
KERNEL_OF_ROWS = "triton_attention"  # the operator that launches it
COMPILED = "compiled as one graph"
PROCESSES = 16

Row = Mapping[str, str]


@dataclass(frozen=True)
class Sizes:
    """Tokens of the larger graphs, also of FlexAttention and of layers, of shapes and far offsets."""

    large: int = 2131
    flex: int = 1200
    layer: int = 500
    shapes: int = 150
    far: int = 2**22 + 77


TRIAL = Sizes(large=16, flex=16, layer=16, shapes=12, far=20)  # for a rehearsal on a CPU


def core_checks(device: str = "cuda", sizes: Sizes = Sizes()) -> list[Check]:
    """All checks of the core, those of one problem next to each other, far offsets last."""
    graphs = shape_graphs(sizes.shapes)
    calls = grid(graph=CORE_GRAPHS, option=FEATURES)
    calls = [row for row in calls if FEATURES[row["option"]].fits(GRAPHS[row["graph"]])]
    wide = [{**row, "channels": width} for width in WIDTHS for row in calls if row["option"] in FLEX_OPTIONS]
    calls = [*wide, *(row for row in calls if row["option"] not in FLEX_OPTIONS)]
    lists = [name for name in CORE_GRAPHS if not GRAPHS[name].graph.varying_axes]
    layers = grid(graph=lists, option=LAYER_OPTIONS, kind=KINDS)
    shapes = grid(shape=SHAPES, graph=graphs, option=OPTIONS_OF_SHAPES)
    groups = (
        _covering_checks("attend", calls, _takes_call, partial(_attend_problem, device)),
        _covering_checks("layer", layers, _is_message_passing, partial(_layer_problem, device)),
        _covering_checks("shapes", shapes, _takes_shape, partial(shape_problem, device, sizes.shapes)),
        _dropout_checks(device),
        _rule_checks(device),
        _large_checks(device, sizes),
        _repeat_checks(device, sizes.large),
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


# ---- groups of which every pair of values occurs for each backend


def _covering_checks(
    group: str, rows: Sequence[Row], takes_row: Callable[[str, Row], bool], make: Callable[[Row], Problem]
) -> Iterator[Check]:
    """The checks of few rows; plain calls of ``attend`` are checked forward alone, too.

    For every backend they hold each pair of values that any row which it takes holds. Dtypes change from one
    row to the next, so that the choice is balanced; rows that an earlier backend has are preferred.
    """
    every = [
        {"dtype": CORE_DTYPES[(number + turn) % 4], **row}
        for turn, (number, row) in product(range(4), enumerate(rows))
    ]
    users = defaultdict[int, list[str]](list)
    for backend in (*CORE_BACKENDS, MESSAGE_PASSING):
        mine = [number for number, row in enumerate(every) if takes_row(backend, row)]
        mine.sort(key=lambda number: number not in users)
        for place in cover_values([every[number] for number in mine], 2):
            users[mine[place]].append(backend)
    for number, backends in users.items():
        row = every[number]
        problem = functools.cache(partial(make, row))
        for backend in backends:
            factors = {key: value for key, value in row.items() if key != "dtype"}
            run, name = partial(_solve, problem, backend), ", ".join(factors.values())
            check = Check(group, backend, row["dtype"], name, run, factors=factors)
            yield check
            if group == "attend" and row["option"] == "plain":
                yield check.forward_alone()


def _solve(make: Callable[[], Problem], backend: str) -> Outcome:
    problem = make()
    return judge(*problem.solve(BACKENDS[backend]), problem.truth.for_backend(BACKENDS[backend]))


def _takes_call(backend: str, row: Row) -> bool:
    feature, case = FEATURES[row["option"]], GRAPHS[row["graph"]]
    options = [name for name in feature.extras if name != "table"]
    options += ["score_mod"] if feature.score_mod is not None else []
    if backend == MESSAGE_PASSING:
        return False
    if backend == "flex":
        # one token with a score_mod is a kernel of its own, as is a graph that differs by head or sample
        kernels = "channels" in row and not case.graph.varying_axes
        if not kernels or (row["graph"] == "one token" and "score_mod" in options):
            return False
    return takes(backend, row["dtype"], case.graph, *options)


def _attend_problem(device: str, row: Row) -> Problem:
    case = GRAPHS[row["graph"]]
    if "channels" in row:
        width = int(row["channels"].split()[0])
        case = replace(case, dims=(width, width))
    return draw_problem(device, row["dtype"], case, row["option"])


def _is_message_passing(backend: str, row: Row) -> bool:
    return backend == MESSAGE_PASSING


def _layer_problem(device: str, row: Row) -> Problem:
    return draw_problem(device, form="standard", **row)


def _takes_shape(backend: str, row: Row) -> bool:
    if backend == MESSAGE_PASSING or (backend == "flex" and row["shape"] not in WIDTHS):
        return False
    options = () if row["option"] == "plain" else ("bias", "sink_logits")
    return takes(backend, row["dtype"], shape_graphs(Sizes().shapes)[row["graph"]][0], *options)


# ---- the other groups


def _dropout_checks(device: str) -> Iterator[Check]:
    for row in grid(dtype=CORE_DTYPES, graph=DROPOUT_GRAPHS):
        problem = partial(draw_problem, device, **row, option=DROPOUT)
        for backend in EVERYWHERE:
            run = partial(_solve, problem, backend)
            yield Check("dropout", backend, row["dtype"], row["graph"], run, factors={"graph": row["graph"]})


def _rule_checks(device: str) -> Iterator[Check]:
    """Every rule in every dtype, but that of a NaN for backends that assume finite tokens."""
    for row, backend in product(grid(dtype=CORE_DTYPES, rule=RULES), EVERYWHERE):
        if row["rule"] != NAN_RULE or not BACKENDS[backend].capabilities.visits_non_edges:
            run = partial(run_row, device, backend, row)
            yield Check("rules", backend, row["dtype"], row["rule"], run, factors={"rule": row["rule"]})


def _large_checks(device: str, sizes: Sizes) -> Iterator[Check]:
    """Larger graphs: all of rows and of dense, the plain ones of reference, what varlen and flex take."""
    packed = {name: large.graph(sizes.large) for name, large in LARGE.items() if not large.listed}
    for dtype, (graph, large) in product(CORE_DTYPES, LARGE.items()):
        for full in (False, True) if large.listed else (False,):
            case = functools.cache(partial(large_problem, device, large, DTYPES[dtype], sizes.large, full))
            backends = ["rows", "dense", *([] if full else ["reference"])]
            if graph in packed and takes("varlen", dtype, packed[graph]):
                backends.append("varlen")
            name = f"{graph}, {sizes.large} tokens{', bias and sinks' if full else ''}"
            for backend in backends:
                yield Check("large", backend, dtype, name, partial(_solve, case, backend))
    for (number, large), (turn, dtype) in product(enumerate(LARGE.values()), enumerate(CORE_DTYPES)):
        if takes("flex", dtype, GRAPHS["causal"].graph):
            # tables of bits as large as those of small graphs, since another size would be another kernel
            width = WIDTHS[(number + turn) % 2]
            dim = int(width.split()[0])
            make = partial(large_problem, device, large, DTYPES[dtype], sizes.flex, samples=2, dim=dim)
            name = f"{large.name}, {sizes.flex} tokens, {width}"
            run = partial(_solve, functools.cache(make), "flex")
            yield Check("large", "flex", dtype, name, run, factors={"channels": width})
    for dtype, graph in product(CORE_DTYPES, ("documents", "random, in-degree 32", "hubs")):
        layer = partial(large_layer, device, LARGE[graph], DTYPES[dtype], sizes.layer)
        run = partial(_solve, functools.cache(layer), MESSAGE_PASSING)
        yield Check("large", MESSAGE_PASSING, dtype, f"{graph}, {sizes.layer} tokens, a layer", run)


def _run_again(make: Callable[[], Problem], kernel: str) -> Outcome:
    return run_again(make(), BACKENDS["rows"], kernel)


def _repeat_checks(device: str, tokens: int) -> Iterator[Check]:
    """rows on the larger graphs: the same bits three times."""
    kernel = KERNEL_OF_ROWS if device.startswith("cuda") else ""
    for dtype, large in product(CORE_DTYPES, LARGE.values()):
        make = partial(large_problem, device, large, DTYPES[dtype], tokens, full=large.listed)
        name = f"{large.name}, {tokens} tokens: three runs give the same bits"
        yield Check("repeat", "rows", dtype, name, partial(_run_again, make, kernel))


def _operator_checks(device: str) -> Iterator[Check]:
    """``opcheck`` and compilation: of rows on two graphs, of each other backend on one."""
    operators = [
        ("rows", "float32", "window"),
        ("rows", "bfloat16", "listed"),
        ("varlen", "bfloat16", "window"),
    ]
    for backend, dtype, graph in operators:
        run = partial(run_opcheck, device, dtype, graph, BACKENDS[backend])
        yield Check("operators", backend, dtype, f"opcheck on {graph}", run)
    others = [("dense", "float32", "causal"), ("reference", "float32", "listed")]
    for backend, dtype, graph in [*operators, *others]:
        run = partial(run_compiled, device, dtype, graph, BACKENDS[backend])
        yield Check("operators", backend, dtype, f"{COMPILED} on {graph}", run)
    run = partial(run_compiled_layer, device, "float32", "window")
    yield Check("operators", MESSAGE_PASSING, "float32", f"{COMPILED} on window", run)


def _far_checks(device: str, tokens: int) -> Iterator[Check]:
    run = partial(run_far, device, DTYPES["bfloat16"], tokens, BACKENDS["rows"])
    yield Check("far", "rows", "bfloat16", f"a window over {tokens} tokens", run)


# ---- processes


def parts(checks: Sequence[Check], processes: int = PROCESSES) -> dict[str, list[Check]]:
    """The checks of each process by name; far offsets, which need 40 GB, are the part "far".

    Checks of one problem stay together, and all rules of a dtype are one problem. FlexAttention's checks of
    one dtype and width are a part, so that no two processes compile the same kernels. The others are dealt
    out in turn, so that each process gets checks of every group.
    """
    far = [check for check in checks if check.group == "far"]
    flex, units = defaultdict[str, list[Check]](list), defaultdict[tuple[str, ...], list[Check]](list)
    for check in checks:
        if check.backend == "flex":
            flex[f"flex {check.dtype} {kernel_of_flex(check)[1]}"].append(check)
        elif check.group != "far":
            problem = "" if check.group == "rules" else check.name.removesuffix(f", {FORWARD}")
            units[check.group, check.dtype, problem].append(check)
    others, count = defaultdict[str, list[Check]](list), max(1, processes - len(flex))
    for number, unit in enumerate(units.values()):
        others[f"others {number % count + 1}"] += unit
    return {**flex, **others, **({"far": far} if far else {})}


def kernel_of_flex(check: Check) -> tuple[str, str, str]:
    """What FlexAttention compiles anew for: the dtype, the channels, and the option or the direction."""
    channels = check.factors.get("channels") or check.factors["shape"]
    return check.dtype, channels, check.factors.get("direction") or check.factors.get("option", "plain")


def digest(labels: Iterable[str]) -> str:
    """The sha256 of the labels of checks, in whatever order.

    >>> digest(["b", "a"]) == digest(["a", "b"]) != digest(["a"])
    True
    """
    return hashlib.sha256("\n".join(sorted(labels)).encode()).hexdigest()
