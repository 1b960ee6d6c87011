"""Steps that a subclass overrides, or that are replaced on a layer, run with every backend."""

import importlib
import linecache
import sys
from functools import partial

import pytest
import torch
from support import inputs
from support.bounds import assert_exact
from support.inputs import randn
from torch_geometric.explain.algorithm.utils import set_masks
from torch_geometric.nn.aggr import MaxAggregation

import gnn_attention as ga
from gnn_attention import MessagePassingAttention, algebra, patterns
from gnn_attention.cache import KeyValueCache

BACKENDS = ["message_passing", "auto", "rows", "tiles", "dense"]
GRAPH = patterns.window(9, 3)

# Without biases, the update is linear in the messages and in the weights.
heads = partial(inputs.heads, bias=False)


class TwiceTheWeights(MessagePassingAttention):
    """A layer whose step takes the inputs of torch_geometric in another order."""

    def edge_update(self, index, size_i, k_j, q_i, edge_index_j, call):
        return 2 * super().edge_update(q_i, k_j, index, edge_index_j, size_i, call)


class TwiceTheMessage(MessagePassingAttention):
    def message(self, alpha, v_j):
        return 2 * super().message(v_j, alpha)


class TwiceTheSum(MessagePassingAttention):
    def aggregate(self, inputs, index, dim_size):
        return 2 * super().aggregate(inputs, index, dim_size)


class TwiceTheUpdate(MessagePassingAttention):
    def update(self, inputs):
        return 2 * super().update(inputs)


class TwiceThePropagation(MessagePassingAttention):
    def propagate(self, edge_index, **options):
        return 2 * super().propagate(edge_index, **options)


class TwiceTheEdges(MessagePassingAttention):
    def edge_updater(self, edge_index, **options):
        return 2 * super().edge_updater(edge_index, **options)


class TwiceTheCall(MessagePassingAttention):
    def forward(self, *inputs, **options):
        return 2 * super().forward(*inputs, **options)


class TwiceOfAMixin:
    def message(self, alpha, v_j):
        return 2 * super().message(v_j, alpha)


class TwiceByAMixin(TwiceOfAMixin, MessagePassingAttention):
    """A layer whose step comes from a mixin, not from a subclass of ours."""


def replace_step(step):
    """Return a constructor of layers with another function in place of the step."""

    def layer(*arguments, **options):
        result = MessagePassingAttention(*arguments, **options)
        original = getattr(result, step)
        setattr(result, step, lambda *inputs, **options: 2 * original(*inputs, **options))
        return result

    return layer


CLASSES = [TwiceTheWeights, TwiceTheMessage, TwiceTheSum, TwiceTheUpdate, TwiceByAMixin]
CLASSES += [TwiceThePropagation, TwiceTheEdges, TwiceTheCall]
FUNCTIONS = ["edge_update", "message", "aggregate", "update", "propagate", "edge_updater"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [*CLASSES, *map(replace_step, FUNCTIONS)], ids=lambda make: make.__name__)
def test_a_step_of_ones_own_runs_whatever_the_backend(backend, make):
    """Each step doubles its output, so the update is twice the dense formula for any kind of graph."""
    standard, x = heads(), randn(2, 9, 12) if backend == "auto" else randn(9, 12)
    layer = make(standard, backend=backend)
    expected = 2 * MessagePassingAttention(standard, backend="reference")(x, GRAPH)
    for g in (GRAPH, GRAPH.edge_index, ga.convert.to_pyg(GRAPH, "adj_t")):
        assert_exact(layer(x, g), expected)


def test_a_step_replaced_on_the_class(monkeypatch):
    """A step that a user's test replaces on the class runs; afterwards the layer uses its backend again."""
    layer, x = MessagePassingAttention(heads(), backend="auto"), randn(9, 12)
    expected = layer(x, GRAPH)
    with monkeypatch.context() as patch:
        patch.setattr(
            MessagePassingAttention, "message", lambda self, v_j, alpha: 0 * alpha.unsqueeze(-1) * v_j
        )
        assert (layer(x, GRAPH) == 0).all()
    assert torch.equal(layer(x, GRAPH), expected)


@pytest.mark.slow
@pytest.mark.parametrize("g", [GRAPH, GRAPH.edge_index], ids=["graph", "edge_index"])
@pytest.mark.parametrize("make", [TwiceTheMessage, replace_step("update")], ids=lambda make: make.__name__)
def test_a_step_of_ones_own_compiles(g, make):
    """The layer compiles without a graph break, also if the edge_index is an input."""
    torch.compiler.reset()
    layer, x = make(heads(), backend="auto"), randn(9, 12)
    output = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, g)
    assert_exact(output, 2 * MessagePassingAttention(layer.heads, backend="reference")(x, GRAPH))


def test_an_explainer_masks_a_subclass_too():
    """A mask applies to a subclass, although torch_geometric has generated code of its parent without one."""
    MessagePassingAttention(heads())
    for make in (MessagePassingAttention, TwiceTheUpdate):
        layer = make(heads(), backend="auto")
        set_masks(layer, torch.zeros(GRAPH.num_edges).double(), GRAPH.edge_index, apply_sigmoid=False)
        assert (layer(randn(9, 12), GRAPH) == 0).all()


def test_overridden_steps_are_refused_without_messages():
    """Steps need a single list of edges and all tokens at once, so other calls are refused."""
    layer, x = TwiceTheSum(heads(), backend="auto"), randn(2, 9, 12)
    by_head = algebra.stacks.per_head(*(patterns.window(9, w) for w in (1, 2, 3, 4)))
    with pytest.raises(NotImplementedError, match="without hooks, explainers and overridden steps"):
        layer(x, by_head)
    with pytest.raises(NotImplementedError, match="decode supports no hook, explainer, overridden step,"):
        layer.decode(x, KeyValueCache(patterns.causal(9)))
    layer = MessagePassingAttention(heads(), backend="auto")
    assert layer(x, by_head).shape == layer.decode(x, KeyValueCache(patterns.causal(9))).shape == (2, 9, 12)


class Fused(TwiceTheMessage):
    """A layer with the step that torch_geometric prefers for a sparse adjacency."""

    def message_and_aggregate(self, edge_index, v):
        raise AssertionError("never called")


def test_a_fused_step_is_refused_where_it_would_run():
    """torch_geometric would call it for sparse adjacencies only; other graphs are passed to ``message``."""
    layer, x = Fused(heads(), backend="auto"), randn(9, 12)
    expected = 2 * MessagePassingAttention(layer.heads)(x, GRAPH)
    assert_exact(layer(x, GRAPH.edge_index), expected)
    assert_exact(layer(x, ga.convert.to_pyg(GRAPH, "edge_index")), expected)
    with pytest.raises(NotImplementedError, match="message_and_aggregate is not a step of this layer"):
        layer(x, ga.convert.to_pyg(GRAPH, "adj_t"))


SETTINGS = [
    ("flow", "target_to_source", r"flow must stay 'source_to_target', got 'target_to_source': reverse the"),
    ("decomposed_layers", 2, r"decomposed_layers must stay 1, got 2"),
    ("aggr", "mean", r"aggr must stay 'add', got 'mean': override aggregate instead"),
]


@pytest.mark.parametrize(("setting", "value", "message"), SETTINGS)
def test_settings_of_torch_geometric_are_not_ignored(setting, value, message):
    """A setting that the layer does not support raises an error, and the layer works as before."""
    layer, x = MessagePassingAttention(heads()), randn(9, 12)
    expected = layer(x, GRAPH)
    with pytest.raises(NotImplementedError, match=message):
        setattr(layer, setting, value)
    assert torch.equal(layer(x, GRAPH), expected)


def test_an_aggregation_that_would_not_run_is_refused():
    """The layer's own ``aggregate`` would ignore ``aggr_module``; that of a subclass may use it."""
    with pytest.raises(NotImplementedError, match=r"aggr must stay 'add', got .*MaxAggregation"):
        MessagePassingAttention(heads()).aggr_module = MaxAggregation()
    layer = TwiceTheSum(heads())
    layer.aggr_module = MaxAggregation()
    assert layer(randn(9, 12), GRAPH).shape == (9, 12)


@pytest.mark.parametrize("step", FUNCTIONS)
def test_a_module_in_place_of_a_step_is_refused(step):
    """torch would register a module as a submodule; its ``forward`` is a function, and is accepted."""
    layer, x = MessagePassingAttention(heads(), backend="auto"), randn(9, 12)
    with pytest.raises(TypeError, match=rf"{step} must be .* Linear: write layer.{step} = module.forward"):
        setattr(layer, step, torch.nn.Linear(2, 2))
    expected = layer(x, GRAPH)
    layer.update = torch.nn.Flatten(-2).forward
    assert layer(x, GRAPH).shape == (9, 20) != expected.shape


def test_torchscript_is_refused_by_name():
    """The error names TorchScript even if the layer is inside another module."""
    layer = MessagePassingAttention(heads())
    for module in (layer, torch.nn.Sequential(layer)):
        with pytest.raises(
            NotImplementedError, match=r"torch.jit.script cannot compile a .*use torch.compile"
        ):
            torch.jit.script(module)


UNKNOWN_INPUTS = [
    ("message", "v_j, alpha, edge_attr", r"message of Own asks for edge_attr, but may take v_j, alpha"),
    ("edge_update", "q_i, v_j", r"edge_update of Own asks for v_j, but may take q_i, k_j, call"),
    ("update", "inputs, x", r"update of Own asks for x, but may take v_j"),
]


@pytest.mark.parametrize(("step", "parameters", "message"), UNKNOWN_INPUTS)
def test_a_step_asks_for_what_the_layer_gives(step, parameters, message):
    """A step with an unknown input is refused, except in a subclass whose ``forward`` may pass it."""
    space = {}
    exec(f"def {step}(self, {parameters}): ...", space)
    with pytest.raises(TypeError, match=message):
        type("Own", (MessagePassingAttention,), {step: space[step]})(heads())
    type("Own", (TwiceTheCall,), {step: space[step]})(heads())


class Doubled(MessagePassingAttention):
    def message(self, v_j, alpha):
        return 2 * super().message(v_j, alpha)


class Double(Doubled):
    """A class whose name is the beginning of its parent's name."""

    def message(self, v_j, alpha, index, scale=2.0):
        return scale * super().message(v_j, alpha)


REDEFINED = """
from gnn_attention import MessagePassingAttention
class Own(MessagePassingAttention):
    def message(self, v_j, alpha{more}):
        return {factor} * super().message(v_j, alpha)
"""


def test_a_class_that_is_defined_again_runs_its_own_steps(tmp_path, monkeypatch):
    """A class runs its own steps if its module runs again, or if its name begins that of its parent."""
    x, file = randn(9, 12), tmp_path / "defined_again.py"
    expected = MessagePassingAttention(heads())(x, GRAPH)
    assert_exact(Doubled(heads())(x, GRAPH), 2 * expected)
    assert_exact(Double(heads())(x, GRAPH), 4 * expected)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    layers = []
    for factor, more in ((2, ""), (3, ", index")):
        file.write_text(REDEFINED.format(factor=factor, more=more))
        linecache.checkcache()
        importlib.invalidate_caches()
        sys.modules.pop("defined_again", None)
        layers.append(importlib.import_module("defined_again").Own(heads()))
    for factor, layer in zip((2, 3), layers, strict=True):
        assert layer.propagate.__module__ == "defined_again_Own_propagate"
        assert_exact(layer(x, GRAPH), factor * expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_traced_layer_takes_other_edges(backend):
    """The edges are an input of the traced program, which needs none of our operators."""
    layer = MessagePassingAttention(heads(), backend=backend)
    program = torch.jit.trace(layer, (randn(9, 12), GRAPH.edge_index))
    assert "gnn_attention::" not in str(program.inlined_graph)
    for size, graph in ((9, GRAPH), (9, patterns.causal(9)), (7, patterns.window(7, 4))):
        x = randn(size, 12)
        assert_exact(
            program(x, graph.edge_index), MessagePassingAttention(layer.heads, backend="reference")(x, graph)
        )


STEPS_WITH_HOOKS = ("edge_update", "message", "aggregate", "propagate")
HOOKS = [f"register_{step}_forward_{kind}hook" for step in STEPS_WITH_HOOKS for kind in ("", "pre_")]


@pytest.mark.parametrize("g", [GRAPH, GRAPH.edge_index], ids=["graph", "edge_index"])
@pytest.mark.parametrize("register", HOOKS)
def test_every_kind_of_hook_is_called_by_default(register, g):
    """A hook is called once in each call of the layer; after it is removed, it is not called."""
    layer, x, calls = MessagePassingAttention(heads()), randn(9, 12), []
    expected = layer(x, g)
    hook = getattr(layer, register)(lambda *arguments: calls.append(arguments[0]))
    assert_exact(layer(x, g), expected)
    assert calls == [layer]
    hook.remove()
    layer(x, g)
    assert calls == [layer]


def test_explain_path_names_the_reason_for_messages():
    layer = MessagePassingAttention(heads())
    assert layer.explain_path(GRAPH).choice == "dense"
    assert layer.explain_path(GRAPH.edge_index, 9).choice == "dense"
    assert layer.explain_path(GRAPH.edge_index, 100).choice == "message_passing"
    layer.register_aggregate_forward_hook(lambda *arguments: None)
    path_layer = MessagePassingAttention(heads(), backend="message_passing")
    layer_with_step = MessagePassingAttention(heads(), backend="rows")
    layer_with_step.message = layer_with_step.message
    expected = {
        layer: ("message_passing", "there is a hook on aggregate"),
        layer_with_step: ("message_passing", "a step is replaced on the layer"),
        path_layer: ("message_passing", "it is the backend of the layer"),
    }
    for layer, path in expected.items():
        explanation = layer.explain_path(GRAPH)
        assert (explanation.choice, explanation.reason) == path
        assert str(explanation).splitlines() == [repr(GRAPH), ": ".join(path)]


def test_none_is_the_message_passing_path_and_deprecated():
    """``backend=None`` chooses the message-passing path; the warning names the file of the caller."""
    with pytest.warns(DeprecationWarning, match="write backend='message_passing'") as warnings:
        layer = MessagePassingAttention(heads(), backend=None)
    assert (layer.backend, warnings[0].filename) == ("message_passing", __file__)


@pytest.mark.parametrize("backend", ["message_passing", "rows", "tiles", "mixed", "dense"])
def test_the_layer_has_every_derivative(backend):
    x, graph = randn(4, 12).requires_grad_(), patterns.window(4, 2)
    layer = MessagePassingAttention(heads(), backend=backend)
    assert torch.autograd.gradcheck(lambda x: layer(x, graph), x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, graph), x, check_fwd_over_rev=True)
