"""The three forms of heads equal each other, torch's attention and the formulas of the seeds (S0.1)."""

from __future__ import annotations

import io
import math
from functools import partial

import pytest
import torch
from support.bounds import assert_exact, error
from support.inputs import randn
from torch import Tensor, nn

import gnn_attention as ga
from gnn_attention import FactoredHeads, MergedHeads, StandardHeads, TokenGraph, convert, patterns
from gnn_attention.rotary import Rotary
from gnn_attention.verify import oracle

Heads = StandardHeads | FactoredHeads | MergedHeads

DST, SRC = 5, 6
# The graph is asymmetric and bipartite, and receiver 2 is isolated.
ROWS = [[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 1]]
GRAPH = convert.from_mask(torch.tensor(ROWS).bool())

SIZES = {
    "plain": {"width": 8, "num_heads": 2},
    "one head": {"width": 6, "num_heads": 1},
    "grouped": {"width": 8, "num_heads": 4, "num_kv_heads": 2},
    "multi-query": {"width": 6, "num_heads": 3, "head_dim": 4, "num_kv_heads": 1},
    "cross": {"width": 8, "num_heads": 2, "source_width": 5},
    "everything": {"width": 7, "num_heads": 6, "head_dim": 3, "value_dim": 4, "num_kv_heads": 2}
    | {"source_width": 5},
}
PLAIN = SIZES["plain"]
BIASES = {
    "no bias": (),
    "b_K": ("b_K",),
    "b_Q b_V": ("b_Q", "b_V"),
    "all": ("b_Q", "b_K", "b_V", "b_O"),
    "all, b_O by head": ("b_Q", "b_K", "b_V", "b_O by head"),
}
FORMS = {
    "standard": lambda heads: heads,
    "factored": FactoredHeads.of,
    "factored, sender": lambda heads: FactoredHeads.of(heads, side="sender"),
    "merged": MergedHeads.of,
    "merged, sender": lambda heads: MergedHeads.of(heads, side="sender"),
}
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
each_bias = pytest.mark.parametrize("biases", BIASES.values(), ids=BIASES)
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def make(sizes: dict[str, int], biases: tuple[str, ...] = ("b_Q", "b_K", "b_V", "b_O")) -> StandardHeads:
    """Make heads with random matrices and biases."""
    heads = StandardHeads(**sizes).double()
    for seed, (name, matrix) in enumerate([("b_Q", heads.W_Q), ("b_K", heads.W_K), ("b_V", heads.W_V)]):
        if name in biases:
            setattr(heads, name, nn.Parameter(randn(matrix.shape[0], matrix.shape[2], seed=seed)))
    if "b_O" in biases:
        heads.b_O = nn.Parameter(randn(heads.width, seed=7))
    if "b_O by head" in biases:
        heads.b_O = nn.Parameter(randn(heads.num_heads, heads.width, seed=7))
    for seed, name in enumerate(("W_Q", "W_K", "W_V", "W_O")):
        matrix = getattr(heads, name)
        matrix.data = randn(*matrix.shape, seed=10 + seed) * matrix.shape[1] ** -0.5
    return heads


def states(heads: StandardHeads, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Return the states of receivers and senders."""
    return randn(batch, DST, heads.width, seed=20), randn(batch, SRC, heads.source_width, seed=21)


def run(
    heads: Heads, x_dst: Tensor, x_src: Tensor, graph: TokenGraph = GRAPH, backend: str = "reference"
) -> Tensor:
    """Compute a layer: ``collect(attend(receive(x), *send(x), graph, scale=heads.scale))``."""
    z = ga.attend(heads.receive(x_dst), *heads.send(x_src), graph, scale=heads.scale, backend=backend)
    return heads.collect(z)


def seed_formula(heads: StandardHeads, x_dst: Tensor, x_src: Tensor, mask: Tensor) -> Tensor:
    """Compute ``sum_h softmax(q_h k_h^T / sqrt(head_dim)) v_h W_O_h + b_O`` (S0.1, S0.2, S2.7)."""
    weights = {name: x.detach() for name, x in heads.named_parameters()}
    return oracle.layer(weights, x_src, x_dst, mask, heads.head_dim**-0.5)


class TestForms:
    @each_size
    @each_bias
    def test_every_form_is_the_formula(self, sizes, biases):
        heads = make(sizes, biases)
        x_dst, x_src = states(heads)
        with torch.no_grad():
            expected = seed_formula(heads, x_dst, x_src, GRAPH.mask())
            for name, form in FORMS.items():
                assert_exact(run(form(heads), x_dst, x_src), expected), name

    @pytest.mark.parametrize("side", ["receiver", "sender"])
    @pytest.mark.parametrize("biases", [BIASES["no bias"], BIASES["all"]], ids=["no bias", "all"])
    def test_factored_heads_are_the_same_parameters(self, side, biases):
        """The parameters are the same objects and get the same gradients as in the standard form."""
        heads = make(SIZES["everything"], biases)
        factored = FactoredHeads.of(heads, side)
        assert {id(p) for p in factored.parameters()} == {id(p) for p in heads.parameters()}
        x, weight, gradients = states(heads), randn(2, DST, 7, seed=30), []
        for form in (heads, factored):
            heads.zero_grad()
            (run(form, *x) * weight).sum().backward()
            gradients.append([p.grad.clone() for p in heads.parameters()])
        assert_exact(gradients[1], gradients[0])
        with torch.no_grad():
            heads.W_Q.add_(1.0)
        assert_exact(run(factored, *x), run(heads, *x))

    @pytest.mark.parametrize("side", ["receiver", "sender"])
    def test_built_directly(self, side):
        """Merged heads have the logits x W_P x^T / sqrt(head_dim) and the update sum_h A_h x W_M_h."""
        merged = MergedHeads(8, 2, head_dim=3, source_width=5, side=side).double()
        assert merged.pattern.shape == merged.W_P.shape == (2, 8, 5)
        assert merged.message.shape == merged.W_M.shape == (2, 5, 8)
        assert merged.b_O is None
        assert merged.scale == 3**-0.5
        x_dst, x_src = randn(2, DST, 8), randn(2, SRC, 5, seed=1)
        logits = torch.einsum("bid,hde,bje->bhij", x_dst, merged.W_P, x_src) / math.sqrt(3)
        weights = torch.nan_to_num(torch.softmax(logits.masked_fill(~GRAPH.mask(), -torch.inf), -1))
        assert_exact(run(merged, x_dst, x_src), torch.einsum("bhij,bje,hed->bid", weights, x_src, merged.W_M))


class TestPatternsAndMessages:
    @each_size
    def test_matrices(self, sizes):
        """Each query head has W_P = W_Q W_K^T and W_M = W_V W_O, factored and merged."""
        heads = make(sizes)
        merged, group = MergedHeads.of(heads), heads.num_heads // heads.num_kv_heads
        pattern, message = heads.pattern_matrix(), heads.message_matrix()
        assert pattern.shape == (heads.num_heads, heads.width, heads.source_width)
        assert message.shape == (heads.num_heads, heads.source_width, heads.width)
        for h in range(heads.num_heads):
            W_P, W_M = heads.W_Q[h] @ heads.W_K[h // group].T, heads.W_V[h // group] @ heads.W_O[h]
            assert_exact(pattern.full()[h], W_P)
            assert_exact(merged.W_P[h], W_P)
            assert_exact(message.full()[h], W_M)
            assert_exact(merged.W_M[h], W_M)
        assert int(pattern.rank().max()) <= min(heads.head_dim, heads.width, heads.source_width)


def random_mha(embed_dim: int = 8, num_heads: int = 2, **options) -> nn.MultiheadAttention:
    """Make a module with random biases instead of zeros."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True, dtype=torch.float64, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


class TestFromMHA:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("kdim", [None, 5], ids=["packed", "kdim = vdim"])
    def test_equal_to_the_module(self, bias, kdim):
        """Self- and cross-attention are equal, with and without a mask (S0.1, S0.3)."""
        module = random_mha(8, 2, bias=bias, kdim=kdim, vdim=kdim)
        heads = StandardHeads.from_mha(module)
        x_dst, x_src = randn(2, DST, 8), randn(2, SRC, kdim or 8, seed=1)
        with torch.no_grad():
            expected, _ = module(x_dst, x_src, x_src, need_weights=False)
            assert_exact(run(heads, x_dst, x_src, patterns.cross(DST, SRC)), expected)
            # Receiver 2 is not isolated here, because the module gives NaN to an isolated receiver.
            mask = GRAPH.mask() | (torch.arange(DST) == 2).unsqueeze(1)
            expected, _ = module(x_dst, x_src, x_src, attn_mask=~mask, need_weights=False)
            assert_exact(run(heads, x_dst, x_src, convert.from_mask(mask)), expected)


class TestFromArrays:
    """Arrays in every accepted layout and type make the same heads."""

    sizes = SIZES["everything"]

    def arrays(self, layout: str, flat: bool) -> dict[str, Tensor]:
        heads = make(self.sizes)
        result = {name: getattr(heads, name).detach() for name in ("W_Q", "W_K", "W_V", "W_O")}
        if flat:
            W_O = result.pop("W_O").flatten(0, 1)
            result = {name: x.transpose(0, 1).flatten(1) for name, x in result.items()} | {"W_O": W_O}
        if layout == "column":
            result = {name: matrix.mT.contiguous() for name, matrix in result.items()}
        biases = {name: getattr(heads, name).detach() for name in ("b_Q", "b_K", "b_V", "b_O")}
        return result | {name: bias.flatten() if flat else bias for name, bias in biases.items()}

    @pytest.mark.parametrize(
        ("layout", "flat", "kind"),
        [("row", False, Tensor.tolist), ("row", True, Tensor.numpy), ("column", True, Tensor.clone)],
    )
    def test_every_way_gives_the_same_heads(self, layout, flat, kind):
        """The arrays are lists, numpy arrays or tensors, by head or side by side."""
        expected = make(self.sizes)
        counts = {"num_heads": 6, "num_kv_heads": 2} if flat else {}
        arrays = {name: kind(x) for name, x in self.arrays(layout, flat).items()}
        heads = StandardHeads.from_arrays(**arrays, layout=layout, **counts)
        for name, parameter in expected.named_parameters():
            actual = dict(heads.named_parameters())[name]
            assert actual.shape == parameter.shape
            assert actual.is_contiguous()
            assert torch.equal(actual, parameter.to(actual.dtype))
        assert str(heads) == str(expected)


ARRAYS = {name: getattr(make(SIZES["everything"]), name).detach() for name in ("W_Q", "W_K", "W_V", "W_O")}
ARRAYS |= {name: getattr(make(SIZES["everything"]), name).detach() for name in ("b_Q", "b_K", "b_V", "b_O")}
WRONG_ARRAYS = [
    ({"layout": "rows"}, "layout must be one of 'row', 'column', got 'rows'"),
    ({"W_Q": randn(7, 18)}, r"W_Q has its heads side by side, shape \[7, 18\]: pass num_heads"),
    ({"W_Q": randn(7, 18), "num_heads": 4, "num_kv_heads": 2}, r"\[7, 18\] .* does not split into 4 heads"),
    ({"W_Q": randn(5, 7, 3)}, "W_Q has 5 heads, not a multiple of the 2 of W_K"),
    ({"W_V": randn(3, 5, 4)}, r"W_K \[2, 5, 3\] and W_V \[3, 5, 4\] must agree in heads"),
    ({"W_O": randn(4, 6, 7)}, r"W_O must be \[6, 4, 7\] or \[24, 7\] .*got \[4, 6, 7\]"),
    ({"b_O": randn(8)}, r"b_O must be \[7\] or \[6, 7\] in row layout, got \[8\]"),
    ({"W_O": None}, "b_O needs W_O: pass both or neither"),
    ({"W_K": randn(2, 5, 3).float()}, "W_K must have the dtype of W_Q, torch.float64, got torch.float32"),
]
WRONG_SIZES = [
    ({"width": 7}, "width 7 is not a multiple of num_heads 2: pass head_dim"),
    ({"num_heads": 4, "num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    ({"width": 6, "rotary": Rotary()}, "head_dim must be even, got 3"),
]
NO_OUTPUT = StandardHeads.from_arrays(*(randn(2, 8, 4),) * 3)
REFUSED = [
    *((partial(StandardHeads.from_arrays, **ARRAYS | changes), ValueError, m) for changes, m in WRONG_ARRAYS),
    *((partial(StandardHeads, **PLAIN | changes), ValueError, match) for changes, match in WRONG_SIZES),
    (lambda: StandardHeads.from_arrays(**ARRAYS | {"b_Q": [[1, 2, 3]] * 6}), TypeError, "floating point"),
    (lambda: StandardHeads(8, 2, rotary=1e4), TypeError, "rotary must be a .*Rotary or None, got float"),
    (lambda: MergedHeads(8, 2, 4, None, "left"), ValueError, "side must be one of 'receiver', 'sender'"),
    (lambda: FactoredHeads.of(StandardHeads(8, 2, rotary=Rotary())), ValueError, "cannot hold rotary,"),
    (lambda: MergedHeads.of(NO_OUTPUT), ValueError, "needs W_O: heads without it have values but no"),
    (lambda: MergedHeads.of(MergedHeads(8, 2, 4)), TypeError, "StandardHeads, got MergedHeads"),
    (lambda: StandardHeads(8, 2, rotary=Rotary()).pattern_matrix(), ValueError, "a pattern matrix for each"),
    (lambda: StandardHeads(8, 2, qk_norm=True).pattern_matrix(1), ValueError, "qk_norm have no pattern"),
    (lambda: from_mha(add_bias_kv=True), ValueError, "add_bias_kv and add_zero_attn add a sender: make"),
    (lambda: from_mha(kdim=5), ValueError, "kdim and vdim must be equal, got 5 and 8"),
    (lambda: make(SIZES["cross"]).receive(randn(2, 3, 5)), ValueError, r"x must be \[B, T, 8\] .*got \[2,"),
    (lambda: make(SIZES["cross"]).send(randn(5, 5)), ValueError, r"x must be \[B, T, 5\] .*x.unsqueeze"),
]


def from_mha(**options):
    return StandardHeads.from_mha(nn.MultiheadAttention(8, 2, **options))


@pytest.mark.parametrize(("call", "error", "match"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


class TestModules:
    def test_biases_start_at_zero_and_matrices_at_unit_variance(self):
        """States of unit variance give queries, keys, values and updates of about unit variance."""
        torch.manual_seed(0)
        heads = StandardHeads(256, 4, bias=True)
        assert not any(getattr(heads, name).any() for name in ("b_Q", "b_K", "b_V", "b_O"))
        x = randn(1, 200, 256, dtype=torch.float32)
        update = heads.collect(randn(1, 4, 200, 64, dtype=torch.float32))
        merged = MergedHeads(256, 4, 64)
        merged_projections = merged.patterns(x), merged.sum_of_heads(merged.messages(x))
        for projection in (heads.receive(x), *heads.send(x), update, *merged_projections):
            assert 0.9 < projection.std() < 1.1

    @each_form
    @pytest.mark.parametrize("biases", [BIASES["no bias"], BIASES["all"]], ids=["no bias", "all"])
    def test_state_dict_round_trip(self, form, biases):
        """A state goes through a file into heads of the same form, and replaces their parameters."""
        heads = form(make(SIZES["everything"], biases))
        numbers = make(SIZES["everything"], biases).state_dict()
        new_heads = form(StandardHeads.from_arrays(**{name: x + 1 for name, x in numbers.items()}))
        x = states(make(SIZES["everything"]))
        assert error(run(new_heads, *x), run(heads, *x)) > 1e-3
        file = io.BytesIO()
        torch.save(heads.state_dict(), file)
        file.seek(0)
        new_heads.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(run(new_heads, *x), run(heads, *x))

    @each_form
    @pytest.mark.parametrize("biases", [BIASES["no bias"], BIASES["all"]], ids=["no bias", "all"])
    def test_reset_parameters(self, form, biases):
        """Every form draws new parameters and sets biases to 0; the same seed draws the same parameters."""
        heads = form(make(SIZES["everything"], biases))
        initial = {name: parameter.clone() for name, parameter in heads.named_parameters()}
        draws = []
        for _ in range(2):
            torch.manual_seed(3)
            heads.reset_parameters()
            draws.append({name: parameter.clone() for name, parameter in heads.named_parameters()})
        for name in initial:
            assert not torch.equal(draws[0][name], initial[name])
            assert torch.equal(draws[0][name], draws[1][name])
            assert torch.isfinite(draws[0][name]).all()
            if name.split(".")[-1].startswith("b_"):
                assert not draws[0][name].any()

    def test_merging_half_precision_multiplies_in_float64(self):
        """A merged matrix is the exact product, rounded once to the dtype of its factors."""
        heads = make(SIZES["plain"], BIASES["no bias"]).to(torch.bfloat16)
        merged = MergedHeads.of(heads)
        assert merged.pattern.dtype == merged.message.dtype == torch.bfloat16
        exact = heads.W_Q.detach().double() @ heads.W_K.detach().double().mT
        assert torch.equal(merged.W_P, exact.to(torch.bfloat16))
