"""The operators that this package registers, each with the arguments that real calls give it, under
``torch.library.opcheck``.

torch lists them, so that a new one that no call here reaches is a failure, not a gap; the
arguments are recorded while public functions run, so that they cannot be out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gnn_attention import patterns, score_mods
from gnn_attention._support.shapes import Tensor
from gnn_attention.attend import attend
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from tests.guarantees.gpu_checks import Recorder, leaf_like

NAMESPACE = "gnn_attention::"
OF_CUDA = (
    "flash_",
    "triton_",
)  # operators that launch kernels for CUDA: `gnn-attention verify --device cuda` checks them there
Checked = dict[str, str]


def names() -> list[str]:
    """Every operator of the package, as torch knows them.

    >>> "attention_pieces" in names()
    True
    """
    known = torch._C._dispatch_get_all_op_names()
    return sorted(
        {name.removeprefix(NAMESPACE).split(".")[0] for name in known if name.startswith(NAMESPACE)}
    )


def on_this_machine() -> list[str]:
    """Those that run here: all of them but kernels for CUDA."""
    return [name for name in names() if not name.startswith(OF_CUDA)]


def recorded() -> dict[str, list[tuple[Any, ...]]]:
    """For each operator the arguments of some calls, forward and backward, with and without options."""
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in names()}
    for call in _calls():
        with Recorder() as recorder:
            call()
        for operator, arguments, _ in recorder.calls:
            found[str(operator).split(".")[1]].append(arguments)
    return found


def checks(name: str, calls: list[tuple[Any, ...]]) -> Checked:
    """The outcome of each of the four tests of ``opcheck`` on each call; the first that fails counts."""
    operator = getattr(torch.ops.gnn_attention, name).default
    outcomes: Checked = {}
    for arguments in calls:
        given = tuple(leaf_like(x, "backward" not in name) for x in arguments)
        found = torch.library.opcheck(operator, given, raise_exception=False)
        for test, outcome in found.items():
            if outcomes.get(test, "SUCCESS") == "SUCCESS":
                outcomes[test] = outcome if outcome == "SUCCESS" else " ".join(str(outcome).split())[:200]
    return outcomes


def _calls() -> Iterator[Callable[[], Any]]:
    graph = patterns.window(6, 3) | patterns.sinks(6, 1)
    for backend in ("tiles", "rows", "mixed"):
        yield partial(_with_gradients, graph, {"backend": backend})
        yield partial(_with_gradients, graph, {"backend": backend, "sink_logits": _numbers(2)})
    for options in (
        {"bias": _numbers(graph.num_edges)},
        {"score_mod": score_mods.softcap(2.0), "sink_logits": _numbers(2)},
    ):
        yield partial(_with_gradients, graph, {"backend": "rows", **options}, twice=True)
    yield partial(
        _with_gradients,
        graph,
        {"backend": "reference", "score_mod": score_mods.relative_bias(_numbers(2, 5))},
    )
    yield _walk_over_listed_edges
    yield partial(torch.ops.gnn_attention.apart, _numbers(3, 4).mT)
    for index in (torch.tensor([[0, -1], [1, 0]]), torch.tensor([[[[1, 1, 0]], [[-1, 0, 0]]]])):
        for count in (None, torch.ones(index.shape[:-1], dtype=torch.int64)):
            yield partial(torch.ops.gnn_attention.chosen_edges, index, count, 2, True, False)
    blocks = torch.tensor([[0, -1], [1, 0]])
    yield partial(torch.ops.gnn_attention.chosen_blocks, blocks, 2, 4, 4)


def _numbers(*shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()


def _with_gradients(graph: TokenGraph, options: dict[str, Any], twice: bool = False) -> None:
    q, k, v = (_numbers(2, heads, graph.num_dst, 4) for heads in (2, 1, 1))
    inputs = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    found = torch.autograd.grad(attend(q, k, v, graph, **options).square().sum(), inputs, create_graph=twice)
    if twice:
        torch.autograd.grad(torch.stack([x.square().sum() for x in found]).sum(), inputs)


def _walk_over_listed_edges() -> None:
    """Inside a program, where the numbers of a list are checked by an operator."""
    layer = MessagePassingAttention(StandardHeads(4, 2)).double()
    edges = torch.tensor([[0, 2, 1], [1, 1, 2]])
    torch.ops.gnn_attention.edge_list(edges, 3, 3)
    layer(_numbers(3, 4), edges)
