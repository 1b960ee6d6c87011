"""The core is the list of checks, fixed by name, that a backend must pass on a GPU to be verified in a dtype.

It covers the backends rows, dense, varlen, flex and reference, and the message-passing path of a layer, each
with its output and gradients against the float64 formula. For each backend every pair among dtype, graph and
option occurs, and every pair among dtype, shape, graph and option. Checks that a backend would refuse are left
out; the list is the same on a machine without a GPU.

FlexAttention compiles a kernel for each kind of call, so it has few kinds: three dtypes and heads of 64 and 128
channels. For each there is a forward pass of a plain call, and with gradients a plain call, a call with sinks
(which needs lse) and a call with a relative bias (a score_mod).
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
from gnn_attention.verify.cases import DROPOUT, DTYPES, EDGE_OPTIONS, FEATURES, GRAPHS, KINDS
from gnn_attention.verify.groups import (
    DROPOUT_GRAPHS,
    EDGE_GRAPHS,
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
# Backends that take the fewest calls come first, so that the others can share their problems.
CORE_BACKENDS = ("flex", "varlen", "rows", "dense", "reference")
EVERYWHERE = ("rows", "dense", "reference")  # the backends that take every dtype, graph and option
CORE_GRAPHS = (
    *("full", "causal", "strict_causal", "window", "documents", "window | sinks", "global_tokens", "cross"),
    *("decode rows", "one token", "no edges", "listed", "by head", "by sample"),
    *("causal, 97 tokens", "window, 97 tokens"),
)
WIDTHS = ("64 channels", "128 channels")  # the channels of heads for FlexAttention
FLEX_OPTIONS = ("plain", "sinks", "relative bias")
KERNEL_OF_ROWS = "triton_attention"  # the operator that launches the kernel of rows
COMPILED = "compiled as one graph"
PROCESSES = 16

Row = Mapping[str, str]


@dataclass(frozen=True)
class Sizes:
    """Tokens of larger graphs (for FlexAttention and layers too), of shapes and of far offsets."""

    large: int = 2131
    flex: int = 1200
    layer: int = 500
    shapes: int = 150
    far: int = 2**22 + 77


TRIAL = Sizes(large=16, flex=16, layer=16, shapes=12, far=20)  # for a rehearsal on a CPU


def core_checks(device: str = "cuda", sizes: Sizes = Sizes()) -> list[Check]:
    """Return all checks of the core. Checks of one problem are neighbours, and far offsets come last."""
    graphs = shape_graphs(sizes.shapes)
    calls = grid(graph=CORE_GRAPHS, option=FEATURES)
    calls = [row for row in calls if FEATURES[row["option"]].fits(GRAPHS[row["graph"]])]
    wide = [{**row, "channels": width} for width in WIDTHS for row in calls if row["option"] in FLEX_OPTIONS]
    calls = [*wide, *(row for row in calls if row["option"] not in FLEX_OPTIONS)]
    lists = [name for name in CORE_GRAPHS if not GRAPHS[name].graph.varying_axes]
    layers = grid(graph=lists, option=LAYER_OPTIONS, kind=KINDS)
    shapes = grid(shape=SHAPES, graph=graphs, option=OPTIONS_OF_SHAPES)

    def make_layer(row: Row) -> Problem:
        return draw_problem(device, form="standard", **row)

    groups = (
        _covering_checks("attend", calls, _takes_call, partial(_attend_problem, device)),
        _covering_checks("layer", layers, lambda backend, row: backend == MESSAGE_PASSING, make_layer),
        _covering_checks("shapes", shapes, _takes_shape, partial(shape_problem, device, sizes.shapes)),
        _edge_checks(device),
        _dropout_checks(device),
        _rule_checks(device),
        _large_checks(device, sizes),
        _repeat_checks(device, sizes.large),
        _operator_checks(device),
        _far_checks(device, sizes.far),
    )
    return [check for group in groups for check in group]


def takes(backend: str, dtype: str, graph: TokenGraph, *options: str) -> bool:
    """Return True if a backend declares that it takes a call on CUDA; no GPU is needed.

    >>> takes("flex", "float64", GRAPHS["causal"].graph), takes("varlen", "float16", GRAPHS["listed"].graph)
    (False, False)
    """
    capabilities = BACKENDS[backend].capabilities
    if capabilities.devices and "cuda" not in capabilities.devices:
        return False
    if capabilities.dtypes and DTYPES[dtype] not in capabilities.dtypes:
        return False
    if any(getattr(capabilities, option) not in (True, "cuda") for option in options):
        return False
    return backend != "varlen" or packing(graph) is not None


# ---- groups in which every pair of values occurs for each backend


def _covering_checks(
    group: str, rows: Sequence[Row], takes_row: Callable[[str, Row], bool], make: Callable[[Row], Problem]
) -> Iterator[Check]:
    """Yield checks of a few rows; plain calls of ``attend`` have a check of the forward pass alone, too.

    For every backend the checks contain each pair of values of the rows that it takes. Dtypes change from one row
    to the next, so that the choice is balanced. Rows that an earlier backend uses are preferred.
    """
    typed_rows = [
        {"dtype": CORE_DTYPES[(number + shift) % 4], **row}
        for shift, (number, row) in product(range(4), enumerate(rows))
    ]
    users = defaultdict[int, list[str]](list)
    for backend in (*CORE_BACKENDS, MESSAGE_PASSING):
        numbers = [number for number, row in enumerate(typed_rows) if takes_row(backend, row)]
        numbers.sort(key=lambda number: number not in users)
        for index in cover_values([typed_rows[number] for number in numbers], 2):
            users[numbers[index]].append(backend)
    for number, backends in users.items():
        row = typed_rows[number]
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
        # One token with a score_mod needs another kernel, as does a graph that varies by head or sample.
        shares_kernel = "channels" in row and not case.graph.varying_axes
        if not shares_kernel or (row["graph"] == "one token" and "score_mod" in options):
            return False
    return takes(backend, row["dtype"], case.graph, *options)


def _attend_problem(device: str, row: Row) -> Problem:
    case = GRAPHS[row["graph"]]
    if "channels" in row:
        width = int(row["channels"].split()[0])
        case = replace(case, dims=(width, width))
    return draw_problem(device, row["dtype"], case, row["option"])


def _takes_shape(backend: str, row: Row) -> bool:
    if backend == MESSAGE_PASSING or (backend == "flex" and row["shape"] not in WIDTHS):
        return False
    options = () if row["option"] == "plain" else ("bias", "sink_logits")
    return takes(backend, row["dtype"], shape_graphs(Sizes().shapes)[row["graph"]][0], *options)


# ---- the other groups


def _edge_checks(device: str) -> Iterator[Check]:
    """Yield features and types of edges and normalisers for rows: every pair of dtype, graph and option."""
    rows = grid(dtype=CORE_DTYPES, graph=EDGE_GRAPHS, option=EDGE_OPTIONS)
    for row in (rows[index] for index in cover_values(rows, 2)):
        problem = functools.cache(partial(draw_problem, device, **row))
        factors = {key: value for key, value in row.items() if key != "dtype"}
        run = partial(_solve, problem, "rows")
        yield Check("edges", "rows", row["dtype"], ", ".join(factors.values()), run, factors=factors)


def _dropout_checks(device: str) -> Iterator[Check]:
    for row in grid(dtype=CORE_DTYPES, graph=DROPOUT_GRAPHS):
        problem = partial(draw_problem, device, **row, option=DROPOUT)
        for backend in EVERYWHERE:
            run = partial(_solve, problem, backend)
            yield Check("dropout", backend, row["dtype"], row["graph"], run, factors={"graph": row["graph"]})


def _rule_checks(device: str) -> Iterator[Check]:
    """Yield every rule in every dtype; backends that assume finite tokens skip the rule of NaN."""
    for row, backend in product(grid(dtype=CORE_DTYPES, rule=RULES), EVERYWHERE):
        if row["rule"] != NAN_RULE or not BACKENDS[backend].capabilities.visits_non_edges:
            run = partial(run_row, device, backend, row)
            yield Check("rules", backend, row["dtype"], row["rule"], run, factors={"rule": row["rule"]})


def _large_checks(device: str, sizes: Sizes) -> Iterator[Check]:
    """Yield larger graphs: all for rows and dense, plain calls for reference, and what varlen and flex take."""
    packings = {name: large.graph(sizes.large) for name, large in LARGE.items() if not large.listed}
    for dtype, (graph, large) in product(CORE_DTYPES, LARGE.items()):
        for full in (False, True) if large.listed else (False,):
            case = functools.cache(partial(large_problem, device, large, DTYPES[dtype], sizes.large, full))
            backends = ["rows", "dense", *([] if full else ["reference"])]
            if graph in packings and takes("varlen", dtype, packings[graph]):
                backends.append("varlen")
            name = f"{graph}, {sizes.large} tokens{', bias and sinks' if full else ''}"
            for backend in backends:
                yield Check("large", backend, dtype, name, partial(_solve, case, backend))
    for (number, large), (shift, dtype) in product(enumerate(LARGE.values()), enumerate(CORE_DTYPES)):
        if takes("flex", dtype, GRAPHS["causal"].graph):
            # The tables of bits are as large as those of small graphs, because each size has its own kernel.
            width = WIDTHS[(number + shift) % 2]
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
    """Yield checks that rows gives the same bits three times on the larger graphs."""
    kernel = KERNEL_OF_ROWS if device.startswith("cuda") else ""
    for dtype, large in product(CORE_DTYPES, LARGE.values()):
        make = partial(large_problem, device, large, DTYPES[dtype], tokens, full=large.listed)
        name = f"{large.name}, {tokens} tokens: three runs give the same bits"
        yield Check("repeat", "rows", dtype, name, partial(_run_again, make, kernel))


def _operator_checks(device: str) -> Iterator[Check]:
    """Yield ``opcheck`` and compilation of rows on two graphs, and of each other backend on one."""
    operators = [
        ("rows", "float32", "window"),
        ("rows", "bfloat16", "listed"),
        ("varlen", "bfloat16", "window"),
    ]
    for backend, dtype, graph in operators:
        run = partial(run_opcheck, device, dtype, graph, BACKENDS[backend])
        yield Check("operators", backend, dtype, f"opcheck on {graph}", run)
    further_calls = [("dense", "float32", "causal"), ("reference", "float32", "listed")]
    for backend, dtype, graph in [*operators, *further_calls]:
        run = partial(run_compiled, device, dtype, graph, BACKENDS[backend])
        yield Check("operators", backend, dtype, f"{COMPILED} on {graph}", run)
    run = partial(run_compiled_layer, device, "float32", "window")
    yield Check("operators", MESSAGE_PASSING, "float32", f"{COMPILED} on window", run)


def _far_checks(device: str, tokens: int) -> Iterator[Check]:
    run = partial(run_far, device, DTYPES["bfloat16"], tokens, BACKENDS["rows"])
    yield Check("far", "rows", "bfloat16", f"a window over {tokens} tokens", run)


# ---- processes


def parts(checks: Sequence[Check], processes: int = PROCESSES) -> dict[str, list[Check]]:
    """Return the checks of each process by name; far offsets, which need 40 GB, have the process "far".

    Checks of one problem stay together, and all rules of a dtype are one problem. FlexAttention's checks of one
    dtype and width share a process, so that no two processes compile the same kernels. The others are distributed
    one by one, so that each process gets checks of every group.
    """
    far_checks = [check for check in checks if check.group == "far"]
    flex, units = defaultdict[str, list[Check]](list), defaultdict[tuple[str, ...], list[Check]](list)
    for check in checks:
        if check.backend == "flex":
            flex[f"flex {check.dtype} {kernel_of_flex(check)[1]}"].append(check)
        elif check.group != "far":
            problem = "" if check.group == "rules" else check.name.removesuffix(f", {FORWARD}")
            units[check.group, check.dtype, problem].append(check)
    other_checks = defaultdict[str, list[Check]](list)
    count = max(1, processes - len(flex))
    for number, unit in enumerate(units.values()):
        other_checks[f"others {number % count + 1}"] += unit
    return {**flex, **other_checks, **({"far": far_checks} if far_checks else {})}


def kernel_of_flex(check: Check) -> tuple[str, str, str]:
    """Return the key of FlexAttention's kernel: the dtype, the channels, and the option or the direction."""
    channels = check.factors.get("channels") or check.factors["shape"]
    return check.dtype, channels, check.factors.get("direction") or check.factors.get("option", "plain")


def digest(labels: Iterable[str]) -> str:
    """Return the sha256 of the labels of checks, whatever their order.

    >>> digest(["b", "a"]) == digest(["a", "b"]) != digest(["a"])
    True
    """
    return hashlib.sha256("\n".join(sorted(labels)).encode()).hexdigest()
