"""Does information flow exactly along the graph? An audit of any module on sequences, from outside.

A mask is a promise about who can hear of whom. :func:`audit` tests the promise on the module itself, as a function: where the
Jacobian from inputs to outputs is not zero, information flows. Three witnesses are heard:

* **jacobian**: exact sparsity in float64. Random cotangents on groups of receivers, chosen so that every pair of tokens is
  looked at on its own by one of them; random directions make it improbable that two influences cancel, and a second random
  input that one is dead by chance. A gradient is exactly zero, or it is a flow.
* **perturbation**: the input of one sender is replaced, and all outputs compared. It also sees what has no gradient.
* **nan**: one sender is NaN. Alone it proves nothing (dense attention multiplies NaN by a weight of zero), so what only a NaN
  crosses is listed apart.

``assert audit(...).ok`` is a test of a model; ``pytest -p gnn_attention.interpret.audit.pytest_plugin`` has it as a fixture, and
``gnn-attention audit`` audits the file of a language model.

Of a Hugging Face model, with T tokens (``ids [1, T]`` are any):

==============================  ============================================================================================
all layers of a text model      ``audit(model, [graph of layer 1, ...], (T,))``
one layer                       ``audit(PartOf(model, "model.layers.0", input_ids=ids), graph, (T, width))``
padding                         ``call=lambda model, x: model(x, attention_mask=mask.expand(len(x), -1))``
decoding                        a ``call`` that hands on ``x`` in chunks, with the cache, and joins the logits
decoder of encoder-decoders     ``call=lambda model, x: model(ids.expand(len(x), -1), decoder_input_ids=x)`` and
                                ``embedding="decoder.embed_tokens"``; for the encoder alone ``audit(model.get_encoder(), ...)``
from encoder to decoder         the graph ``cross(answer, T)``, a ``call`` with fixed decoder ids, the encoder's embedding
pictures and sound              ``input_shape=(patches, channels)`` and a ``call`` that makes pixels of them
==============================  ============================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gnn_attention._support import checks
from gnn_attention._support.checks import quoted
from gnn_attention.graph import TokenGraph
from gnn_attention.huggingface._overrides import followed
from gnn_attention.interpret.audit.detectors import WITNESSES, Seen
from gnn_attention.interpret.audit.hooks import attention_calls
from gnn_attention.interpret.audit.leak_paths import Way, ways
from gnn_attention.interpret.audit.reachability import Bounds, as_graph, declared, edges, is_square
from gnn_attention.interpret.audit.report import Leak, Verdict, remarks_on
from gnn_attention.interpret.audit.runner import Runner, undisturbed
from gnn_attention.interpret.audit.submodule import PartOf

__all__ = ["WITNESSES", "Leak", "PartOf", "Verdict", "audit"]


def audit(
    module: nn.Module,
    graph: TokenGraph | Sequence[TokenGraph],
    input_shape: Sequence[int],
    layers: int | None = None,
    *,
    call: Callable[[nn.Module, torch.Tensor], Any] | None = None,
    embedding: nn.Module | str | None = None,
    witnesses: Sequence[str] = WITNESSES,
    samples: int = 32,
    tolerance: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    watch: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Along which pairs ``(src, dst)`` of tokens information really flows in ``module``, beside where ``graph`` lets it.

    After L layers dst may have heard of src if a path of at most L edges leads there: own states are carried along, so that
    the path src = dst is never a leak. The module is audited in the mode that it is in (the statistics of a BatchNorm flow in
    training alone), on a copy: it is left as it was, and so are torch's random numbers.

    Args:
        module: takes states ``[B, T, width]`` or token ids ``[B, T]``, and returns states ``[B, dst, ...]``, alone or as the
            first of several (``logits`` and ``last_hidden_state`` by name). If its ``forward`` has a parameter ``graph``, ``g``
            or ``edge_index``, it is given the graph. :class:`PartOf` makes such a module of a part of another.
        graph: the declared graph, or one for each layer, layer 1 first. Heads are joined: an edge of any is an edge.
        input_shape: of one sample: ``(T, width)`` for states; ``(T,)`` for token ids, audited from their embeddings.
        layers: how often the graph may be used; by default as often as a :class:`MessagePassingAttention` is called, else once
            (for a causal graph, where two hops lead no further than one, it does not matter).
        call: ``call(module, x)`` where the module must be called otherwise; it is handed the copy, and must use that.
        embedding: the submodule that turns ids into states, or its name, where it is not plain which.
        witnesses: those of "jacobian", "perturbation" and "nan" that are heard.
        samples: the most samples in one pass; 1 for a module that takes one at a time.
        tolerance: gradients up to this share of the largest count as zero; for what computes by FFT or running sums.
        dtype: of the copy; float32 where the module has no float64 (``grouped_mm`` in mixtures of experts; transformers'
            eager attention where padding leaves a receiver nobody), at the price that a flow too small for it counts as unused.
        seed: of inputs and cotangents.
        watch: called after each forward pass with how many there were, and about how many there will be.

    Raises:
        ValueError, TypeError: arguments that do not fit one another or the module; NotImplementedError: no copy can be made.

    >>> from gnn_attention import MessagePassingAttention, StandardHeads, patterns
    >>> layer = MessagePassingAttention(StandardHeads(width=4, num_heads=2))
    >>> audit(layer, patterns.window(24, 3), (24, 4)).exact
    True
    >>> verdict = audit(layer, patterns.window(24, 3), (24, 4), call=lambda module, x: module(x, patterns.window(24, 4)))
    >>> verdict.ok, len(verdict.leaks), str(verdict.leaks[0])
    (False, 21, '0 -> 3, comes in at MessagePassingAttention (seen by jacobian, perturbation, nan)')
    """
    graphs = declared(graph)
    shape, heard = _input_shape(input_shape, graphs[0]), _witnesses(witnesses)
    if call is not None and not callable(call):
        raise TypeError(f"call must be a function (module, x) -> states, got {quoted(call)} of type {type(call).__name__}")
    if call is not None:
        checks.takes("call", call, "module", "x")
    samples, call = checks.size("samples", samples, 1), _in_its_blocks(module, call or _usual_call(module, graph))
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a share of the largest gradient, in [0, 1), got {quoted(tolerance)}")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}: in less, small flows are lost")
    with undisturbed(module):
        runner = Runner(module, call, shape, graphs[0].num_dst, embedding, samples, seed, dtype, watch)
        layers = attention_calls(runner) or len(graphs) if layers is None else checks.size("layers", layers, 1)
        bounds = Bounds.of(graphs, layers)
        return _verdict(graphs, bounds, Seen.by(runner, bounds.after[-1], heard, float(tolerance)), runner)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _input_shape(given: Sequence[int], graph: TokenGraph) -> tuple[int, ...]:
    shape = tuple(checks.sizes("input_shape", given, 1))
    if not shape or shape[0] != graph.num_src:
        raise ValueError(
            f"input_shape must be (T, width) for states or (T,) for token ids, with T = {graph.num_src}, the senders of "
            f"{graph!r}; got {shape}"
        )
    return shape


def _witnesses(given: Sequence[str]) -> tuple[str, ...]:
    heard = tuple(checks.choice("witnesses", word, WITNESSES) for word in ([given] if isinstance(given, str) else given))
    if not {"jacobian", "perturbation"} & set(heard):
        raise ValueError(f"witnesses must hold 'jacobian' or 'perturbation', since NaN alone proves nothing, got {quoted(given)}")
    return heard


def _in_its_blocks(module: nn.Module, call: Callable[[nn.Module, torch.Tensor], Any]) -> Callable[[nn.Module, torch.Tensor], Any]:
    """The call, where the graphs that ``use_graph`` gave the module hold for its copy."""

    def called(twin: nn.Module, x: torch.Tensor) -> Any:
        with followed(module, twin):
            return call(twin, x)

    return called


def _usual_call(module: nn.Module, graph: TokenGraph | Sequence[TokenGraph]) -> Callable[[nn.Module, torch.Tensor], Any]:
    """``module(x)``, with the graph where its forward has a place for it."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}; wrap a function in one")
    parameters = inspect.signature(module.forward).parameters
    name = next((name for name in ("graph", "g", "edge_index") if name in parameters), None)
    if name is None:
        return lambda module, x: module(x)
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"{type(module).__name__} takes one {name}, got a list of graphs: give call=lambda module, x: ...")
    if name == "edge_index":
        return lambda module, x: module(x, edge_index=graph.edges_on(x.device))
    return lambda module, x: module(x, **{name: graph})


def _verdict(graphs: tuple[TokenGraph, ...], bounds: Bounds, seen: Seen, runner: Runner) -> Verdict:
    """What was seen beside what is declared."""
    like, allowed = graphs[0], bounds.after[-1]
    leaking = edges(seen.flow & ~allowed)
    found = ways(runner, _by_sender(leaking), bounds) if leaking and is_square(like) else {}
    leaks = tuple(_leak(src, dst, found.get((src, dst), Way((src, dst))), seen) for src, dst in leaking)
    expected, flow = as_graph(allowed, like, "allowed"), as_graph(seen.flow, like, "flow")
    own = torch.eye(*allowed.shape, dtype=torch.bool, device="cpu") if is_square(like) else torch.zeros_like(allowed)
    depth = next((way.depth for way in found.values()), None)
    if depth is not None and bool((seen.flow & ~Bounds.of(graphs, depth).after[-1]).any()):
        depth = None  # so many layers would not explain it
    return Verdict(
        graphs=graphs,
        layers=bounds.layers,
        allowed=expected,
        flow=flow,
        leaks=leaks,
        unused=edges(allowed & ~seen.flow & ~own),
        poisoned=edges(seen.nan & ~allowed & ~seen.flow),
        crosses_samples=runner.crosses_samples,
        remarks=remarks_on(expected, flow, leaks, runner.crosses_samples, depth),
        probes=seen.probes,
        backward_passes=runner.backwards,
        forward_passes=runner.forwards,
    )


def _leak(src: int, dst: int, way: Way, seen: Seen) -> Leak:
    return Leak(src, dst, way.path, way.layer, seen.witnesses(src, dst), seen.size(src, dst))


def _by_sender(leaking: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    receivers: dict[int, list[int]] = {}
    for src, dst in leaking:
        receivers.setdefault(src, []).append(dst)
    return receivers
