"""A whole layer in every form of its weights against the formulas: drawn weights, and the trained model's.

Random weights make flat attention; a trained head is peaked, and its rounding errors are those of real use.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from gnn_attention import model, patterns
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import Backend
from gnn_attention.heads import StandardHeads
from gnn_attention.verify import oracle
from gnn_attention.verify.cases import BATCH, FEATURES, GRAPHS, HEADS, KV_HEADS, GraphCase
from gnn_attention.verify.check import BOTH, DIM, DTYPES, FORMS, VALUE_DIM, WIDTH, Check, Settings, worst
from gnn_attention.verify.measure import within
from gnn_attention.verify.selection import covering, grid
from gnn_attention.verify.truth import Problem, plain_names

KINDS = ("plain heads", "grouped heads with biases")
LAYER_GRAPHS = ("causal", "window", "strict_causal", "cross", "listed", "by head")
# a layer has no sinks
LAYER_OPTIONS = ("plain", "alibi", "relative bias", "softcap", "log multiplicity", "edge bias")
SENTENCE = "Llamas do not output words"  # seed S1.13
# of the sentence, by the vocabulary that ships: so verify needs no tokenizer
TOKENS = (76, 333, 109, 390, 568, 363, 868, 749, 308, 268, 636)
ONE_EDGE_LIST = "messages one by one need one edge list, and this graph differs by head or sample"


def layer_checks(settings: Settings) -> Iterator[Check]:
    """Forms x graphs x options x dtypes x paths: some graphs by triples of values, all by pairs."""
    for row in _rows(settings.dtypes, settings.graphs, settings.forms, settings.features, settings.sizes):
        name = f"{row['form']}, {row['kind']}, {row['graph']}, {row['option']}, inputs {row['size']}"
        factors = {key: value for key, value in row.items() if key != "dtype"} | {"direction": BOTH}
        given = row["dtype"], name, partial(layer_problem, settings, row), row["option"]
        both = row["size"] == "x1" and row["kind"] == KINDS[1]
        for check in settings.checks("layer", *given, factors):
            unlisted = check.backend == "walk" and GRAPHS[row["graph"]].varies
            check = replace(check, skipped=ONE_EDGE_LIST) if unlisted else check
            yield from (check, check.forward_alone()) if both else (check,)


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


def layer_problem(settings: Settings, row: Mapping[str, str]) -> Problem:
    case, feature, dtype = GRAPHS[row["graph"]], FEATURES[row["option"]], DTYPES[row["dtype"]]
    rng, size = torch.Generator().manual_seed(settings.seed + 1), float(row["size"][1:])
    shapes = {"x_src": case.graph.num_src, "x_dst": case.graph.num_dst, "direction": case.graph.num_dst}
    draw = partial(torch.randn, BATCH, generator=rng, dtype=torch.float64)
    inputs = {name: draw(n, WIDTH) * (1.0 if name == "direction" else size) for name, n in shapes.items()}
    inputs |= feature.learned(case, torch.Generator().manual_seed(settings.seed + 8))
    heads = FORMS[row["form"]](drawn_heads(row["kind"], settings.seed)).to(dtype)
    rounded = {name: x.to(dtype) for name, x in inputs.items()}
    return Problem.of(case, feature, rounded, settings.device, heads)


def drawn_heads(kind: str, seed: int) -> StandardHeads:
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
        make = functools.cache(partial(layer_problem, settings, {**row, "size": "x1"}))
        for form in settings.forms:
            name, factors = (
                f"{form} from standard, {kind}, {graph}",
                {"form": form, "kind": kind, "graph": graph},
            )
            yield from settings.checks("forms", "float64", name, make, "plain", factors, FORMS[form])


def trained_checks(settings: Settings) -> Iterator[Check]:
    """Every layer of the shipped model on its states for a sentence, in every form; then whole logits."""
    trained: Any = model.load_trained()[0]
    tokens, wide = torch.tensor([TOKENS]), copy.deepcopy(trained).double()
    with torch.no_grad():
        states = wide.states(tokens)[::2]
        inputs = [block.attention_norm(state) for block, state in zip(wide.blocks, states, strict=False)]
    for dtype, (number, state), form in product(settings.dtypes, enumerate(inputs), settings.forms):
        given = settings, trained.blocks[number].attention, form, DTYPES[dtype], state
        factors = {"layer": str(number), "form": form, "direction": BOTH}
        name, make = f"layer {number}, {form}, {SENTENCE!r}", partial(_trained_problem, *given)
        for check in settings.checks("trained", dtype, name, make, "relative bias", factors):
            yield from (check, check.forward_alone())
    for path in settings.paths:
        run, name = partial(_logits_agree, settings.device, wide, tokens, path), f"logits of {SENTENCE!r}"
        yield settings.check("trained", path, "float64", name, run, "relative bias", {"layer": "logits"})


def _sentence(heads: int) -> GraphCase:
    graph = patterns.causal(len(TOKENS))
    return GraphCase(SENTENCE, graph, lambda b, h, i, j: j <= i, sizes=(1, heads))


def _trained_problem(
    settings: Settings, attention: Any, form: str, dtype: torch.dtype, state: Tensor
) -> Problem:
    rng, table = torch.Generator().manual_seed(settings.seed), attention.score_mod.table.detach()
    direction = torch.randn(state.shape, generator=rng, dtype=torch.float64)
    inputs = {"x_src": state, "x_dst": state, "table": table, "direction": direction}
    heads = FORMS[form](copy.deepcopy(attention.heads)).to(dtype)
    rounded = {name: x.to(dtype) for name, x in inputs.items()}
    return Problem.of(_sentence(len(table)), FEATURES["relative bias"], rounded, settings.device, heads)


@torch.no_grad()
def _logits_agree(device: str, wide: Any, tokens: Tensor, path: Backend | None) -> Mapping[str, Any]:
    """Whole logits in float64, along this path and written out over T x T with masked softmax."""
    state, feature = wide.embedding(tokens), FEATURES["relative bias"]
    for block in wide.blocks:
        x, heads, table = block.attention_norm(state), block.attention.heads, block.attention.score_mod.table
        case = _sentence(len(table))
        dense = partial(feature.dense, case, {"table": table})
        state = state + oracle.layer(plain_names(heads), x, x, case.mask, heads.head_dim**-0.5, dense)
        state = state + block.mlp(block.mlp_norm(state))
    own = copy.deepcopy(wide).to(device)
    own.backend = path or "message_passing"
    wanted = wide.unembedding(wide.norm(state))
    return worst([("the whole model", within("logits", own(tokens.to(device)).cpu(), wanted))])
