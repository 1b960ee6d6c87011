"""Audit a module: find where information flows, and compare the flows with a graph.

Information flows from an input to an output if a change of the input can change the output. Three
detectors look for such flows:

* **jacobian** differentiates in float64, with a random cotangent at each receiver. A gradient that is
  not exactly zero is a flow. At two random inputs, gradients are unlikely to cancel by chance.
* **perturbation** changes one sender's input and compares all outputs, so flows need no gradient.
* **nan** sets one sender to NaN. Dense attention passes NaN even where the weight is zero, so pairs
  that only a NaN crosses are listed separately.

An audit can prove that information leaves the graph, but not that it never does: if none of the inputs
opens a gate, the flow behind it is missed. In a test of a model, write ``assert verdict.ok, verdict``.
``docs/guide/audit.md`` shows the calls for submodules, padding and decoding of Hugging Face models.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Bool, Tensor
from gnn_attention.analyse._walks import is_square
from gnn_attention.graph import TokenGraph
from gnn_attention.interpret.audit.leak_paths import Bounds, count_attention_calls, find_leak_paths
from gnn_attention.interpret.audit.report import Leak, Verdict
from gnn_attention.interpret.audit.runner import Call, Runner, detect_flows

# An audit checks every pair of tokens, so it limits their number.
MAX_TOKENS = 4096


def audit(
    module: nn.Module,
    graph: TokenGraph | Sequence[TokenGraph],
    input_shape: Sequence[int],
    layers: int | None = None,
    *,
    call: Call | None = None,
    embedding: nn.Module | str | None = None,
    samples: int = 32,
    tolerance: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    inputs: Tensor | Sequence[Tensor] | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Find where information flows in ``module``, and compare that with ``graph``.

    The module is probed at two random inputs and at ``inputs``. Every leak in the verdict is real,
    but a leak that shows at none of these inputs is missed. After L layers, src may influence dst
    if a path of at most L edges leads from src to dst. Each token may influence itself, as with
    residual connections. The audit runs a copy of the module, in its training or eval mode, and
    restores torch's random number generators.

    Args:
        module: takes states ``[B, T, width]`` or token ids ``[B, T]``, and returns states ``[B, dst, ...]``,
            alone or first among several outputs (``logits`` and ``last_hidden_state`` are found by name). A
            parameter ``graph``, ``g`` or ``edge_index`` of its ``forward`` receives the graph.
        graph: the declared graph, or one graph for each layer, layer 1 first. An edge of any head counts.
        input_shape: shape of one sample: ``(T, width)`` for states, or ``(T,)`` for token ids,
            whose embeddings the audit then changes.
        layers: how many times information may move along the graph. Default: the number of calls of
            :class:`MessagePassingAttention`, or of graphs if there are no such calls.
        call: ``call(module, x)`` runs a module with other arguments. It must run the copy that it gets.
        embedding: the submodule that embeds token ids, or its name, if the module has several embeddings.
        samples: the largest batch size. Set 1 for a module that takes one sample at a time.
        tolerance: gradients up to this fraction of the largest one count as zero. Set it for FFTs.
        dtype: dtype of the copy. Use float32 if the module cannot run in float64 (``grouped_mm`` in
            mixtures of experts). The audit then misses flows that are smaller than rounding errors.
        seed: seed of the random inputs and cotangents.
        inputs: further inputs to probe, such as real text, or states that open a gate: a tensor
            ``[B, T, width]`` of states or ``[B, T]`` of token ids, or a list of such tensors.
        watch: called after each forward pass with the number of passes so far and the expected total.

    Raises ValueError or TypeError for invalid arguments, NotImplementedError if the module cannot
    be copied.

    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> layer = MessagePassingAttention(StandardHeads(width=4, num_heads=2))
    >>> audit(layer, patterns.window(24, 3), (24, 4)).exact
    True
    >>> wider = lambda module, x: module(x, patterns.window(24, 4))
    >>> verdict = audit(layer, patterns.window(24, 3), (24, 4), call=wider)
    >>> verdict.ok, len(verdict.leaks), str(verdict.leaks[0])
    (False, 21, '0 -> 3, comes in at MessagePassingAttention (seen by jacobian, perturbation, nan)')
    """
    graphs = _read_graphs(graph)
    shape = tuple(checks.sizes("input_shape", input_shape, 1))
    if not shape or shape[0] != graphs[0].num_src:
        raise ValueError(f"input_shape must be (T, width) or (T,) with T = {graphs[0].num_src}, got {shape}")
    samples = checks.size("samples", samples, 1)
    checks.instance("module", module, nn.Module)
    probes = _read_inputs(inputs, shape)
    call = _default_call(module, graph) if call is None else call
    checks.check_signature("call", call, "module", "x")
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a fraction in [0, 1), got {quote(tolerance)}")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    devices = sorted({t.get_device() for t in (*module.parameters(), *module.buffers()) if t.is_cuda})
    # The detectors need gradients even if the caller has disabled them.
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        call = _keep_overrides(module, call)
        num_dst = graphs[0].num_dst
        runner = Runner(
            module, call, shape, num_dst, embedding, samples, seed, dtype=dtype, watch=watch, inputs=probes
        )
        if layers is None:
            layers = count_attention_calls(runner) or len(graphs)
        layers = checks.size("layers", layers, 1)
        bounds = Bounds.of(graphs, layers)
        gradients, flows = detect_flows(runner, float(tolerance))
        return _make_verdict(graphs, bounds, gradients, flows, runner)


def _read_graphs(value: TokenGraph | Sequence[TokenGraph]) -> tuple[TokenGraph, ...]:
    graphs = tuple(value) if isinstance(value, Sequence) else (value,)
    if not graphs or not all(isinstance(graph, TokenGraph) for graph in graphs):
        raise TypeError(f"graph must be a TokenGraph, or a list of one for each layer, got {quote(value)}")
    for graph in graphs:
        if graph.batch is not None:
            raise ValueError(f"graph {graph!r} varies by sample: audit graph.select(batch=...)")
        if not (graph.num_dst and graph.num_src) or max(graph.num_dst, graph.num_src) > MAX_TOKENS:
            raise ValueError(f"graph must have 1 to {MAX_TOKENS} tokens, got {graph!r}: audit a shorter one")
        if len(graphs) > 1 and not (is_square(graph) and graph.num_dst == graphs[0].num_dst):
            raise ValueError(f"graphs must be square, over the same tokens, got {graphs[0]!r} and {graph!r}")
    # An edge of any head counts as an edge.
    return tuple(g if g.heads is None else _to_graph(g.mask().any(0), g, g.name) for g in graphs)


def _to_graph(mask: Bool[Tensor, "dst src"], like: TokenGraph, name: str) -> TokenGraph:
    graph = TokenGraph.from_edges(mask.nonzero().T.flip(0), like.num_dst, like.num_src, name=name)
    return replace(graph, dst_offset=like.dst_offset, src_offset=like.src_offset)


def _list_pairs(mask: Bool[Tensor, "dst src"]) -> tuple[tuple[int, int], ...]:
    return tuple((src, dst) for dst, src in mask.nonzero().tolist())


def _read_inputs(value: Any, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    tensors = [] if value is None else [value] if isinstance(value, Tensor) else value
    kind = "integer token ids" if len(shape) == 1 else "floating states"
    for tensor in tensors:
        has_shape = isinstance(tensor, Tensor) and tuple(tensor.shape[1:]) == shape
        if not has_shape or tensor.is_floating_point() == (len(shape) == 1):
            raise ValueError(f"inputs must be {kind} in tensors [B, *{shape}], got {quote(tensor)}")
    return tuple(sample[None].detach() for tensor in tensors for sample in tensor)


def _keep_overrides(module: nn.Module, call: Call) -> Call:
    """Run the copy of the module with the graphs that ``use_graph`` set for the module."""
    # ``use_graph`` is part of this optional package. Unless it was imported, no graph is set.
    overrides = sys.modules.get("gnn_attention.huggingface._contexts")
    if overrides is None:
        return call

    def run(module_copy: nn.Module, x: Tensor) -> Any:
        with overrides.apply_to_copy(module, module_copy):
            return call(module_copy, x)

    return run


def _default_call(module: nn.Module, graph: TokenGraph | Sequence[TokenGraph]) -> Call:
    parameters = inspect.signature(module.forward).parameters
    name = next((name for name in ("graph", "g", "edge_index") if name in parameters), None)
    if name is None:
        return lambda module, x: module(x)
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"the module's forward takes one {name}, got a list of graphs: pass call=")
    if name == "edge_index":
        return lambda module, x: module(x, edge_index=graph.edges_on(x.device))
    return lambda module, x: module(x, **{name: graph})


def _make_verdict(
    graphs: Sequence[TokenGraph], bounds: Bounds, gradients: Tensor, flows: dict[str, Tensor], runner: Runner
) -> Verdict:
    first_graph, allowed = graphs[0], bounds.after[-1]
    # A NaN alone does not prove a flow.
    flow = flows["jacobian"] | flows["perturbation"]
    square = is_square(first_graph)
    leak_pairs = _list_pairs(flow & ~allowed)
    paths = find_leak_paths(runner, leak_pairs, bounds) if leak_pairs and square else {}
    leaks = []
    for src, dst in leak_pairs:
        tokens, layer = paths.get((src, dst), ((src, dst), None))
        witnesses = tuple(name for name, pairs in flows.items() if pairs[dst, src])
        leaks.append(Leak(src, dst, tokens, layer, witnesses, size=float(gradients[dst, src])))
    self_loops = torch.eye(*allowed.shape, dtype=torch.bool, device="cpu") & square
    return Verdict(
        graphs=tuple(graphs),
        layers=len(bounds.hops),
        allowed=_to_graph(allowed, first_graph, "allowed"),
        flow=_to_graph(flow, first_graph, "flow"),
        leaks=tuple(leaks),
        unused=_list_pairs(allowed & ~flow & ~self_loops),
        poisoned=_list_pairs(flows["nan"] & ~allowed & ~flow),
        crosses_samples=runner.crosses_samples,
    )
