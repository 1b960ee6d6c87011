"""A whole layer in every form of its weights against the formulas: drawn weights, and those of the trained
model.

Random weights make flat attention; a trained head is peaked, and its rounding errors are those of real use.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from gnn_attention import model, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.heads import StandardHeads
from gnn_attention.score_mods import relative_bias
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, unordered
from gnn_attention.verify.check import (
    BOTH,
    DIM,
    DTYPES,
    FORMS,
    VALUE_DIM,
    WIDTH,
    Check,
    Settings,
    path_name,
    worst,
)
from gnn_attention.verify.measure import exactly
from gnn_attention.verify.problems import LayerProblem, layer_truth, plain_names
from gnn_attention.verify.selection import covering

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
            skipped = settings.unsupported(path, row["dtype"], row["option"])
            if path is None and GRAPHS[row["graph"]].varies:
                skipped = ONE_EDGE_LIST
            run = partial(_run, problem, path)
            check = Check("layer", path_name(path), row["dtype"], name, run, True, factors, skipped)
            yield check
            if row["size"] == "x1" and row["kind"] == KINDS[1]:
                yield check.forward_alone()


@functools.lru_cache(maxsize=16)
def _rows(*values: tuple[Any, ...]) -> list[dict[str, str]]:
    """The values of each problem: of some graphs all triples, of all graphs all pairs."""
    dtypes, graphs, forms, features, sizes = values
    rows = [
        {"dtype": dtype, "graph": graph, "form": form, "option": option, "kind": kind, "size": f"x{size:g}"}
        for dtype in dtypes
        for graph in graphs
        for form in forms
        for option in LAYER_OPTIONS
        if option in features and unordered(FEATURES[option], GRAPHS[graph]) is None
        for kind in KINDS
        for size in sizes
    ]
    few = [number for number, row in enumerate(rows) if row["graph"] in LAYER_GRAPHS]
    triples = {few[number] for number in covering([rows[number] for number in few], 3)}
    return [rows[number] for number in sorted(triples | set(covering(rows, 2)))]


def _run(problem: Lazy, path: Backend | None, form: str | None = None) -> Mapping[str, Any]:
    """The layer of a problem; with ``form``, that form of its heads, judged by the formula on its own."""
    layer = problem()
    return layer.run(path, None if form is None else FORMS[form](layer.heads))


def _problem(settings: Settings, row: Row) -> LayerProblem:
    case, feature, dtype = GRAPHS[row["graph"]], FEATURES[row["option"]], DTYPES[row["dtype"]]
    rng = torch.Generator().manual_seed(settings.seed + 1)
    tokens = (case.graph.num_src, case.graph.num_dst, case.graph.num_dst)
    x_src, x_dst, direction = (
        torch.randn(BATCH, t, WIDTH, generator=rng, dtype=torch.float64) for t in tokens
    )
    size = float(row["size"][1:])
    learned = feature.learned(case, torch.Generator().manual_seed(settings.seed + 8))
    return LayerProblem(
        heads=FORMS[row["form"]](_heads(row["kind"], settings.seed)).to(dtype),
        graph=case.graph,
        mask=case.mask,
        x_src=(x_src * size).to(dtype),
        x_dst=(x_dst * size).to(dtype),
        direction=direction.to(dtype),
        device=settings.device,
        learned={name: x.to(dtype) for name, x in learned.items()},
        options=feature.options,
        dense=partial(feature.dense, case),
        additive=feature.additive,
    )


def _heads(kind: str, seed: int) -> StandardHeads:
    """Float64 heads: plain, or grouped with odd sizes and biases, which are drawn."""
    rng = torch.Generator().manual_seed(seed)
    grouped: dict[str, Any] = {
        "head_dim": DIM,
        "value_dim": VALUE_DIM,
        "num_kv_heads": KV_HEADS,
        "bias": True,
    }
    heads = StandardHeads(WIDTH, HEADS, **({} if kind == "plain heads" else grouped)).double()
    for name, parameter in heads.named_parameters():
        spread = parameter.shape[-2] ** -0.5 if name.startswith("W_") else 0.5
        parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * spread
    return heads


def form_checks(settings: Settings) -> Iterator[Check]:
    """Conversions are exact: every form of the same heads gives what the standard formula gives (float64)."""
    if "float64" not in settings.dtypes:
        return
    for kind in KINDS:
        for graph in [name for name in LAYER_GRAPHS if name in settings.graphs]:
            row = {"form": "standard", "kind": kind, "graph": graph, "option": "plain", "dtype": "float64"}
            problem = functools.cache(partial(_problem, settings, {**row, "size": "x1"}))
            for form in settings.forms:
                for backend in settings.backends:
                    name, factors = (
                        f"{form} from standard, {kind}, {graph}",
                        {"form": form, "kind": kind, "graph": graph},
                    )
                    run = partial(_run, problem, backend, form)
                    yield Check("forms", backend.name, "float64", name, run, True, factors)


def trained_checks(settings: Settings) -> Iterator[Check]:
    """Every layer of the shipped model on its states for a sentence, in every form; then whole logits."""
    trained: Any = model.load_trained()[0]
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        wide = copy.deepcopy(trained).double()
        states = wide.states(tokens)[::2]
        inputs = [block.attention_norm(state) for block, state in zip(wide.blocks, states, strict=False)]
    for dtype in settings.dtypes:
        for number, state in enumerate(inputs):
            for form in settings.forms:
                problem = functools.cache(
                    partial(
                        _trained_problem,
                        settings,
                        trained.blocks[number].attention,
                        form,
                        DTYPES[dtype],
                        state,
                    )
                )
                for path in settings.paths:
                    name, run = f"layer {number}, {form}, {SENTENCE!r}", partial(_run, problem, path)
                    factors = {"layer": str(number), "form": form, "direction": BOTH}
                    skipped = settings.unsupported(path, dtype, "relative bias")
                    check = Check("trained", path_name(path), dtype, name, run, True, factors, skipped)
                    yield from (check, check.forward_alone())
    for path in settings.paths:
        run = partial(_logits_agree, settings, trained, tokens, path)
        skipped = settings.unsupported(path, "float64", "relative bias")
        name = f"logits of {SENTENCE!r}"
        yield Check("trained", path_name(path), "float64", name, run, False, {"layer": "logits"}, skipped)


def _trained_problem(
    settings: Settings, attention: Any, form: str, dtype: torch.dtype, state: Tensor
) -> LayerProblem:
    """One layer of the trained model, with its learned relative bias."""
    rng, n = torch.Generator().manual_seed(settings.seed), state.shape[1]
    direction = torch.randn(state.shape, generator=rng, dtype=torch.float64)
    table, x = attention.score_mod.table.detach().to(dtype), state.to(dtype)
    return LayerProblem(
        heads=FORMS[form](copy.deepcopy(attention.heads)).to(dtype),
        graph=patterns.causal(n),
        mask=_lower(n).expand(1, len(table), n, n),
        x_src=x,
        x_dst=x,
        direction=direction.to(dtype),
        device=settings.device,
        options=lambda learned: {"score_mod": relative_bias(table.to(settings.device))},
        dense=lambda inputs, logits: logits + _biases(table, n).to(logits),
    )


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
