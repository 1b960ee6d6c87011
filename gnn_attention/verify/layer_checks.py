"""A whole layer in every form of its weights against the formulas: drawn weights, and the trained model's.

Random weights make flat attention; a trained head is peaked, and its rounding errors are those of real use.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention import model, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.heads import StandardHeads
from gnn_attention.score_mods import relative_bias
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS
from gnn_attention.verify.check import BOTH, DIM, DTYPES, FORMS, VALUE_DIM, WIDTH, Check, Settings, worst
from gnn_attention.verify.measure import exactly
from gnn_attention.verify.selection import covering, grid
from gnn_attention.verify.truth import Formula, LayerProblem, layer_truth, plain_names

__all__ = ["form_checks", "layer_checks", "layer_truth", "plain_names", "trained_checks"]

KINDS = ("plain heads", "grouped heads with biases")
LAYER_GRAPHS = ("causal", "window", "strict_causal", "cross", "listed", "by head")
# a layer has no sinks
LAYER_OPTIONS = ("plain", "alibi", "relative bias", "softcap", "log multiplicity", "edge bias")
SENTENCE = "Llamas do not output words"  # seed S1.13
# of the sentence, by the vocabulary that ships: so verify needs no tokenizer
TOKENS = (76, 333, 109, 390, 568, 363, 868, 749, 308, 268, 636)
ONE_EDGE_LIST = "messages one by one need one edge list, and this graph differs by head or sample"

Row = Mapping[str, str]
Lazy = Callable[[], LayerProblem]


def layer_checks(settings: Settings) -> Iterator[Check]:
    """Forms x graphs x options x dtypes x paths: some graphs by triples of values, all by pairs."""
    for row in _rows(settings.dtypes, settings.graphs, settings.forms, settings.features, settings.sizes):
        problem = functools.cache(partial(_problem, settings, row))
        name = f"{row['form']}, {row['kind']}, {row['graph']}, {row['option']}, inputs {row['size']}"
        factors = {key: value for key, value in row.items() if key != "dtype"} | {"direction": BOTH}
        for path in settings.paths:
            run = partial(_run, problem, path)
            check = settings.check("layer", path, row["dtype"], name, run, row["option"], **factors)
            if path is None and GRAPHS[row["graph"]].varies:
                check = replace(check, skipped=ONE_EDGE_LIST)
            yield check
            if row["size"] == "x1" and row["kind"] == KINDS[1]:
                yield check.forward_alone()


@functools.lru_cache(maxsize=16)
def _rows(*values: tuple[Any, ...]) -> list[dict[str, str]]:
    """The values of each problem: of some graphs all triples, of all graphs all pairs."""
    dtypes, graphs, forms, features, sizes = values
    options = [option for option in LAYER_OPTIONS if option in features]
    named = {"form": forms, "option": options, "kind": KINDS, "size": [f"x{size:g}" for size in sizes]}
    every = grid(dtype=dtypes, graph=graphs, **named)
    rows = [row for row in every if FEATURES[row["option"]].unsupported(GRAPHS[row["graph"]]) is None]
    few = [number for number, row in enumerate(rows) if row["graph"] in LAYER_GRAPHS]
    triples = {few[number] for number in covering([rows[number] for number in few], 3)}
    return [rows[number] for number in sorted(triples | set(covering(rows, 2)))]


def _run(problem: Lazy, path: Backend | None, form: str | None = None) -> Mapping[str, Any]:
    """The layer of a problem; with ``form``, that form of its heads, judged by the formula on its own."""
    layer = problem()
    return layer.run(path, None if form is None else FORMS[form](layer.heads))


def _problem(settings: Settings, row: Row) -> LayerProblem:
    case, feature, dtype = GRAPHS[row["graph"]], FEATURES[row["option"]], DTYPES[row["dtype"]]
    rng, size = torch.Generator().manual_seed(settings.seed + 1), float(row["size"][1:])
    draw = partial(torch.randn, BATCH, generator=rng, dtype=torch.float64)
    inputs = {
        "x_src": draw(case.graph.num_src, WIDTH) * size,
        "x_dst": draw(case.graph.num_dst, WIDTH) * size,
    }
    direction = draw(case.graph.num_dst, WIDTH).to(dtype)
    inputs |= feature.learned(case, torch.Generator().manual_seed(settings.seed + 8))
    heads = FORMS[row["form"]](_heads(row["kind"], settings.seed)).to(dtype)
    dense = partial(feature.dense, case)
    formula = Formula(case.mask, direction, heads.scale, dense, feature.additive, device=settings.device)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    return LayerProblem(heads, case.graph, formula, inputs, feature.options)


def _heads(kind: str, seed: int) -> StandardHeads:
    """Float64 heads: plain, or grouped with odd sizes and biases, which are drawn."""
    rng = torch.Generator().manual_seed(seed)
    heads = StandardHeads(WIDTH, HEADS)
    if kind != "plain heads":
        heads = StandardHeads(WIDTH, HEADS, DIM, VALUE_DIM, num_kv_heads=KV_HEADS, bias=True)
    for name, parameter in heads.double().named_parameters():
        spread = parameter.shape[-2] ** -0.5 if name.startswith("W_") else 0.5
        parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * spread
    return heads


def form_checks(settings: Settings) -> Iterator[Check]:
    """Conversions are exact: every form of the same heads gives what the standard formula gives (float64)."""
    graphs = [name for name in LAYER_GRAPHS if name in settings.graphs and "float64" in settings.dtypes]
    for kind, graph in product(KINDS, graphs):
        row = {"form": "standard", "kind": kind, "graph": graph, "option": "plain", "dtype": "float64"}
        problem = functools.cache(partial(_problem, settings, {**row, "size": "x1"}))
        for form, path in product(settings.forms, settings.backends):
            name, run = f"{form} from standard, {kind}, {graph}", partial(_run, problem, path, form)
            factors = {"form": form, "kind": kind, "graph": graph}
            yield settings.check("forms", path, "float64", name, run, "plain", **factors)


def trained_checks(settings: Settings) -> Iterator[Check]:
    """Every layer of the shipped model on its states for a sentence, in every form; then whole logits."""
    trained: Any = model.load_trained()[0]
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        wide = copy.deepcopy(trained).double()
        states = wide.states(tokens)[::2]
        inputs = [block.attention_norm(state) for block, state in zip(wide.blocks, states, strict=False)]
    for dtype, (number, state), form in product(settings.dtypes, enumerate(inputs), settings.forms):
        given = settings, trained.blocks[number].attention, form, DTYPES[dtype], state
        problem = functools.cache(partial(_trained_problem, *given))
        factors = {"layer": str(number), "form": form, "direction": BOTH}
        for path in settings.paths:
            name, run = f"layer {number}, {form}, {SENTENCE!r}", partial(_run, problem, path)
            check = settings.check("trained", path, dtype, name, run, "relative bias", **factors)
            yield from (check, check.forward_alone())
    for path in settings.paths:
        run = partial(_logits_agree, settings, trained, tokens, path)
        name = f"logits of {SENTENCE!r}"
        yield settings.check("trained", path, "float64", name, run, "relative bias", layer="logits")


def _trained_problem(
    settings: Settings, attention: Any, form: str, dtype: torch.dtype, state: Tensor
) -> LayerProblem:
    """One layer of the trained model, with its learned relative bias."""
    rng, n = torch.Generator().manual_seed(settings.seed), state.shape[1]
    direction = torch.randn(state.shape, generator=rng, dtype=torch.float64).to(dtype)
    table, x = attention.score_mod.table.detach().to(dtype), state.to(dtype)
    heads = FORMS[form](copy.deepcopy(attention.heads)).to(dtype)
    formula = Formula(
        mask=_lower(n).expand(1, len(table), n, n),
        direction=direction,
        scale=heads.scale,
        dense=lambda inputs, logits: logits + _biases(table, n).to(logits),
        device=settings.device,
    )
    score_mod = relative_bias(table.to(settings.device))
    inputs = {"x_src": x, "x_dst": x}
    return LayerProblem(heads, patterns.causal(n), formula, inputs, lambda _: {"score_mod": score_mod})


def _lower(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def _biases(table: Tensor, n: int) -> Tensor:
    """The relative bias ``[heads, n, n]``: that of the distance, at most the table's."""
    reach = table.shape[1] // 2
    distance = torch.arange(n).view(-1, 1) - torch.arange(n)
    return table[:, distance.clamp(-reach, reach) + reach]


def _logits_agree(
    settings: Settings, trained: Any, tokens: Tensor, path: Backend | None
) -> Mapping[str, Any]:
    """Whole logits in float64, along this path and written out with masked softmax."""
    own = copy.deepcopy(trained).double().to(settings.device)
    own.backend = path
    with torch.no_grad():
        found = own(tokens.to(settings.device)).cpu()
        wanted = _plain_logits(copy.deepcopy(trained).double(), tokens)
    return worst([("the whole model", exactly("logits", found, wanted))])


def _plain_logits(trained: Any, tokens: Tensor) -> Tensor:
    """The model written out over T x T, for the whole stack."""
    hidden, state = ~_lower(tokens.shape[1]), trained.embedding(tokens)
    for block in trained.blocks:
        x, heads = block.attention_norm(state), block.attention.heads
        added = _biases(block.attention.score_mod.table, tokens.shape[1])
        for h in range(heads.num_heads):
            logits = (x @ heads.W_Q[h]) @ (x @ heads.W_K[h]).mT * heads.head_dim**-0.5 + added[h]
            weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)
            state = state + weights @ (x @ heads.W_V[h]) @ heads.W_O[h]
        state = state + block.mlp(block.mlp_norm(state))
    logits_out: Tensor = trained.unembedding(trained.norm(state))
    return logits_out
