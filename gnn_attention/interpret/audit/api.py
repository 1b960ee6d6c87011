"""Whether information flows exactly along a graph: an audit of any module on sequences, from outside.

Where the Jacobian from inputs to outputs is not zero, information flows. Three detectors run:

* **jacobian**: the zeros of the derivative in float64, by a random cotangent on each receiver. Random
  directions and a second random input make it improbable that influences cancel or are 0 by chance. A
  gradient is exactly zero, or it is a flow.
* **perturbation**: the input of one sender is replaced, and all outputs compared: flows without gradient too.
* **nan**: one sender is NaN. Alone it shows nothing (dense attention multiplies NaN by a weight of zero), so
  pairs that only a NaN crosses are listed separately.

The audit can refute that a module keeps to its graph, and cannot prove it: the detectors see the module at
two random inputs and at those of ``inputs``, and a flow that is off there (behind a gate that none of them
opens) stays unseen.

``verdict = audit(...)`` and ``assert verdict.ok, verdict`` test a model; ``gnn-attention audit`` is a command
for the file of a language model.

``docs/guide/audit.md`` has the calls for parts, padding and decoding of Hugging Face models.
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
from gnn_attention.interpret.audit.leak_paths import Bounds, LeakPath, attention_calls, leak_paths
from gnn_attention.interpret.audit.report import Leak, Verdict
from gnn_attention.interpret.audit.runner import Call, Runner, detect

# Every pair of tokens is looked at.
MOST_TOKENS = 4096


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
    """The pairs of tokens along which information flows in ``module``, compared with ``graph``.

    The module is probed at two random inputs and at ``inputs``. Every leak in the verdict is real; a leak
    that shows at none of these inputs is missed.

    After L layers src may influence dst if a path of at most L edges leads there, or src = dst (states are
    carried along). The module is audited in its current mode, on a copy: the module and torch's random
    numbers are left as they were.

    Args:
        module: takes states ``[B, T, width]`` or token ids ``[B, T]``, and returns states ``[B, dst, ...]``,
            alone or as the first of several (``logits`` and ``last_hidden_state`` by name). A parameter
            ``graph``, ``g`` or ``edge_index`` of its ``forward`` receives the graph. A part of a model is a
            module too: give what else it takes in ``call``.
        graph: the declared graph, or one for each layer, layer 1 first. An edge of any head is an edge.
        input_shape: of one sample: ``(T, width)`` for states; ``(T,)`` for token ids, audited from their
            embeddings.
        layers: how often the graph may be used; by default the number of :class:`MessagePassingAttention`
            calls, else one (irrelevant for a causal graph, where two hops lead no further than one).
        call: ``call(module, x)`` for another calling convention; it receives the copy, and must use that.
        embedding: the submodule that turns ids into states, or its name, where there are several embeddings.
        samples: the most samples in one pass; 1 for a module that takes one at a time.
        tolerance: gradients up to this share of the largest count as zero; for modules with an FFT or running
            sums.
        dtype: of the copy; float32 where the module has no float64 (``grouped_mm`` in mixtures of experts):
            smaller flows then count as unused.
        seed: of the random inputs and cotangents.
        inputs: what to probe at beside the random inputs: states ``[B, T, width]``, or token ids ``[B, T]``
            for an ``input_shape`` of ``(T,)``, or a list of such tensors. Give real texts, and inputs that
            open the gates of the module.
        watch: called after each forward pass with the number so far, and about how many there will be.

    ValueError or TypeError for arguments that do not fit, NotImplementedError where no copy can be made.

    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> layer = MessagePassingAttention(StandardHeads(width=4, num_heads=2))
    >>> audit(layer, patterns.window(24, 3), (24, 4)).exact
    True
    >>> wider = lambda module, x: module(x, patterns.window(24, 4))
    >>> verdict = audit(layer, patterns.window(24, 3), (24, 4), call=wider)
    >>> verdict.ok, len(verdict.leaks), str(verdict.leaks[0])
    (False, 21, '0 -> 3, comes in at MessagePassingAttention (seen by jacobian, perturbation, nan)')

    A gate that random states do not open:

    >>> class Gate(nn.Module):
    ...     def forward(self, x):
    ...         following = x.roll(-1, 1)
    ...         return x + following.where(following > 5, 0.0)
    >>> wide_open = torch.full((1, 4, 2), 6.0)
    >>> [audit(Gate(), patterns.self_loops(4), (4, 2), inputs=x).ok for x in (None, wide_open)]
    [True, False]
    """
    graphs = _declared_graphs(graph)
    shape = tuple(checks.sizes("input_shape", input_shape, 1))
    if not shape or shape[0] != graphs[0].num_src:
        sizes = f"(T, width) for states or (T,) for token ids, with the T of {graphs[0]!r}"
        raise ValueError(f"input_shape must be {sizes}; got {shape}")
    samples = checks.size("samples", samples, 1)
    checks.instance("module", module, nn.Module)
    own = _own_inputs(inputs, shape)
    call = _default_call(module, graph) if call is None else call
    checks.check_signature("call", call, "module", "x")
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a share in [0, 1) of the largest, got {quote(tolerance)}")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}: less loses small flows")
    devices = sorted({t.get_device() for t in (*module.parameters(), *module.buffers()) if t.is_cuda})
    # gradients on, whatever the caller's mode
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        run = _with_overrides(module, call)
        runner = Runner(module, run, shape, graphs[0].num_dst, embedding, samples, seed, dtype, watch, own)
        if layers is None:
            layers = attention_calls(runner) or len(graphs)
        layers = checks.size("layers", layers, 1)
        bounds = Bounds.of(graphs, layers)
        return _verdict(graphs, bounds, *detect(runner, float(tolerance)), runner)


def _declared_graphs(value: TokenGraph | Sequence[TokenGraph]) -> tuple[TokenGraph, ...]:
    graphs = tuple(value) if isinstance(value, Sequence) else (value,)
    if not graphs or not all(isinstance(graph, TokenGraph) for graph in graphs):
        raise TypeError(f"graph must be a TokenGraph, or a list of one for each layer, got {quote(value)}")
    for graph in graphs:
        if graph.batch is not None:
            raise ValueError(f"graph {graph!r} differs by sample: audit one of them, graph.select(batch=...)")
        if not (graph.num_dst and graph.num_src) or max(graph.num_dst, graph.num_src) > MOST_TOKENS:
            raise ValueError(f"graph must have 1 to {MOST_TOKENS} tokens, got {graph!r}: cut it")
        if len(graphs) > 1 and not (is_square(graph) and graph.num_dst == graphs[0].num_dst):
            raise ValueError(f"graphs must be square, of the same tokens, got {graphs[0]!r} and {graph!r}")
    # An edge of any head is an edge.
    return tuple(g if g.heads is None else _as_graph(g.mask().any(0), g, g.name) for g in graphs)


def _as_graph(pairs: Bool[Tensor, "dst src"], like: TokenGraph, name: str) -> TokenGraph:
    graph = TokenGraph.from_edges(pairs.nonzero().T.flip(0), like.num_dst, like.num_src, name=name)
    return replace(graph, dst_offset=like.dst_offset, src_offset=like.src_offset)


def _edges(pairs: Bool[Tensor, "dst src"]) -> tuple[tuple[int, int], ...]:
    return tuple((src, dst) for dst, src in pairs.nonzero().tolist())


def _own_inputs(value: Any, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    # One [1, ...] each.
    parts = [] if value is None else [value] if isinstance(value, Tensor) else value
    kind = "integer token ids" if len(shape) == 1 else "floating states"
    for part in parts:
        fits = isinstance(part, Tensor) and tuple(part.shape[1:]) == shape
        if not fits or part.is_floating_point() == (len(shape) == 1):
            raise ValueError(f"inputs must be {kind}, tensors [B, *{shape}], got {quote(part)}")
    return tuple(sample[None].detach() for part in parts for sample in part)


def _with_overrides(module: nn.Module, call: Call) -> Call:
    # The graphs that use_graph gave the module hold for its copy too; where its package was never imported
    # (it needs transformers), no such block can be open.
    overrides = sys.modules.get("gnn_attention.huggingface._contexts")
    if overrides is None:
        return call

    def run(twin: nn.Module, x: Tensor) -> Any:
        with overrides.apply_to_copy(module, twin):
            return call(twin, x)

    return run


def _default_call(module: nn.Module, graph: TokenGraph | Sequence[TokenGraph]) -> Call:
    parameters = inspect.signature(module.forward).parameters
    name = next((name for name in ("graph", "g", "edge_index") if name in parameters), None)
    if name is None:
        return lambda module, x: module(x)
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"the module takes one {name}, got a list of graphs: give call=")
    if name == "edge_index":
        return lambda module, x: module(x, edge_index=graph.edges_on(x.device))
    return lambda module, x: module(x, **{name: graph})


def _verdict(
    graphs: Sequence[TokenGraph], bounds: Bounds, sizes: Tensor, found: dict[str, Tensor], runner: Runner
) -> Verdict:
    # NaN alone is no proof
    like, allowed, seen = graphs[0], bounds.after[-1], found["jacobian"] | found["perturbation"]
    square, leaking = is_square(like), _edges(seen & ~allowed)
    paths = leak_paths(runner, leaking, bounds) if leaking and square else {}
    leaks = []
    for src, dst in leaking:
        witnesses = tuple(name for name, pairs in found.items() if pairs[dst, src])
        path = paths.get((src, dst), LeakPath((src, dst)))
        leaks.append(Leak(src, dst, *path, witnesses, float(sizes[dst, src])))
    own = torch.eye(*allowed.shape, dtype=torch.bool, device="cpu") & square
    return Verdict(
        graphs=tuple(graphs),
        layers=len(bounds.hops),
        allowed=_as_graph(allowed, like, "allowed"),
        flow=_as_graph(seen, like, "flow"),
        leaks=tuple(leaks),
        unused=_edges(allowed & ~seen & ~own),
        poisoned=_edges(found["nan"] & ~allowed & ~seen),
        crosses_samples=runner.crosses_samples,
    )
