"""``attend`` and the layer compile with ``fullgraph=True`` on a CPU and give the results of eager calls.

The default run stops before C++: torch's compiler traces, decomposes and partitions a call as for Inductor,
and runs the result. The slow run compiles some rows of the table with Inductor.
"""

import shutil
from dataclasses import dataclass

import pytest
import torch
from support.bounds import assert_exact
from support.covering import thin
from torch.torch_version import TorchVersion

import gnn_attention as ga
from gnn_attention import patterns, score_mods

HEADS, KV_HEADS = 4, 2
# No length is a multiple of a tile.
LENGTHS = (37, 50, 41)

ignore_deprecation = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


def by_hand(score, b, h, dst, src):
    """Change a score by every index, as a score_mod of a user may do."""
    return score - 0.1 * (h + 1) * (dst - src).abs() + 0.01 * b


def random_mask(n):
    mask = torch.rand(n, n) < 0.15
    mask[3] = False
    return mask


GRAPHS = {
    "window": lambda n: patterns.window(n, 5),
    "causal": patterns.causal,
    "list": lambda n: ga.convert.from_mask(random_mask(n)),
    "both": lambda n: patterns.window(n, 5) | ga.convert.from_mask(random_mask(n)),
    "chosen": lambda n: ga.TokenGraph.from_indices(torch.rand(2, HEADS, n, n).topk(6).indices, n),
    "by head": lambda n: ga.TokenGraph.from_rule(
        lambda b, h, dst, src: (src <= dst) & (dst - src <= h), n, heads=HEADS
    ),
}
MODS = {
    "by hand": lambda n: by_hand,
    "softcap": lambda n: score_mods.softcap(3.0),
    "chain": lambda n: score_mods.chain(
        score_mods.alibi(score_mods.alibi_slopes(HEADS)), score_mods.softcap(2.0)
    ),
    "multiplicity": lambda n: score_mods.log_multiplicity(torch.rand(n).double() + 0.5),
    "table": lambda n: learned_table(),
    "single numbers": lambda n: by_single_numbers(torch.randn(2, n, 3).double()),
}


def by_single_numbers(factors):
    return lambda score, b, h, dst, src: score + torch.dot(factors[0, dst], factors[1, src]).tanh()


def learned_table():
    mod = score_mods.RelativeBias(HEADS, 4).double()
    torch.nn.init.normal_(mod.table)
    return mod


@dataclass(frozen=True)
class Row:
    """A call: the names of its backend, graph and score_mod, and its other options."""

    backend: str
    graph: str
    mod: str = ""
    extras: str = ""
    lengths: tuple[int, ...] = LENGTHS[:1]

    def __str__(self):
        return "-".join(filter(None, (self.backend, self.graph, self.mod, *self.extras.split())))

    def options(self, graph):
        """Return the options of ``attend``, with tensors that need gradients."""
        edges = graph.num_edges if "bias" in self.extras else 0
        options = {
            "bias": torch.randn(HEADS, edges, dtype=torch.float64, requires_grad=True),
            "sink_logits": torch.randn(HEADS, dtype=torch.float64, requires_grad=True),
            "scale": -0.3,
            "dropout": 0.3,
            "return_info": True,
        }
        mod = {"score_mod": MODS[self.mod](graph.num_src)} if self.mod else {}
        return mod | {name: value for name, value in options.items() if name in self.extras.split()}


# Earlier compilers cannot determine the indices that a score_mod needs.
BACKENDS = ("auto", "dense") if TorchVersion(torch.__version__) >= "2.13" else ()
SINGLE = [Row(name, "list", "single numbers", lengths=LENGTHS) for name in BACKENDS]
COMPILED = [
    *SINGLE,
    Row("tiles", "window", "chain", "bias sink_logits scale return_info"),
    Row("dense", "list", "table", "bias sink_logits return_info"),
    Row("auto", "chosen", "softcap"),
]
WRITTEN_OUT = {
    "auto": "by hand",
    "dense": "softcap",
    "tiles": "chain",
    "rows": "multiplicity",
    "reference": "table",
}
TRACED = [
    *SINGLE,
    *(Row(name, "list", mod) for name, mod in WRITTEN_OUT.items()),
    Row("mixed", "both", "", "sink_logits return_info", LENGTHS),
    Row("tiles", "list", "multiplicity", "bias sink_logits dropout", LENGTHS),
    Row("reference", "list", "chain", "bias sink_logits return_info"),
    *(Row(name, "chosen", "by hand", "dropout scale") for name in ("dense", "tiles")),
    *(Row(name, "by head", "by hand", "dropout scale") for name in ("rows", "reference")),
]


def compile_anew(function, compiler):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=compiler)


def run(q, k, v, graph, backend, options):
    output = ga.attend(q, k, v, graph, backend=backend, **options)
    if not isinstance(output, tuple):
        return [output]
    out, info = output
    return [out, info.lse, info.weights()]


def with_gradients(function, leaves, *arguments):
    """Return each output, and a tuple of all gradients; dropout has a fixed seed."""
    torch.manual_seed(1)
    output = function(*arguments)
    loss = sum(x.masked_fill(x == -torch.inf, 0.0).square().sum() for x in output)
    return *output, torch.autograd.grad(loss, leaves)


def assert_same(output, expected):
    for actual, eager in zip(output, expected, strict=True):
        assert_exact(actual, eager)


def check(row, compiler):
    program = compile_anew(run, compiler)
    for n in row.lengths:
        torch.manual_seed(n)
        graph = GRAPHS[row.graph](n)
        options = row.options(graph)
        widths = ((HEADS, 8), (KV_HEADS, 8), (KV_HEADS, 6))
        inputs = [torch.randn(2, h, n, d, dtype=torch.float64, requires_grad=True) for h, d in widths]
        leaves = inputs + [x for x in options.values() if isinstance(x, torch.Tensor)]
        leaves += [options["score_mod"].table] if row.mod == "table" else []
        arguments = leaves, *inputs, graph, row.backend, options
        assert_same(with_gradients(program, *arguments), with_gradients(run, *arguments))


@ignore_deprecation
@pytest.mark.parametrize("row", thin(TRACED), ids=str)
def test_attend_is_traced_and_decomposed(row):
    check(row, "aot_eager_decomp_partition")


@ignore_deprecation
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILED, ids=str)
def test_attend_is_compiled_by_inductor(row):
    """With ``fallback_random``, dropout draws the random numbers of eager calls."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        check(row, "inductor")


# The message-passing path refuses a graph that varies by head.
LAYERS = [("given", "auto"), ("window", "message_passing"), ("window", "auto"), ("by head", "auto")]


@ignore_deprecation
@pytest.mark.parametrize(("graph", "backend"), LAYERS)
def test_the_layer_is_compiled(graph, backend):
    """The learned table gets gradients; a compiled layer accepts other edges and another number of tokens."""
    torch.manual_seed(0)
    heads = ga.StandardHeads(8, HEADS, num_kv_heads=KV_HEADS).double()
    layer = ga.MessagePassingAttention(heads, score_mod=learned_table(), backend=backend)
    program = compile_anew(layer, "aot_eager_decomp_partition")
    for n in LENGTHS if graph == "given" else LENGTHS[:1]:
        torch.manual_seed(n)
        x = torch.randn(n, 8, dtype=torch.float64, requires_grad=True)
        edges = random_mask(n).nonzero().t().contiguous() if graph == "given" else GRAPHS[graph](n)
        results = [
            with_gradients(lambda *xs, call=call: [call(*xs)], [x, *layer.parameters()], x, edges)
            for call in (program, layer)
        ]
        assert_same(*results)
