"""The command ``gnn-attention cost``: what the forms of attention and a graph cost, as tables or as JSON."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from gnn_attention import cost
from gnn_attention._support import json_option
from gnn_attention._support.checks import quoted
from gnn_attention._support.progress import Progress
from gnn_attention.convert import expressions
from gnn_attention.cost import FormCost, tables
from gnn_attention.cost.configs import CONFIGS, ModelSizes, config, custom
from gnn_attention.cost.rate_table import Sizes
from gnn_attention.distributed import PARTITIONS
from gnn_attention.graph import TokenGraph

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
MODEL, TOKENS = "llama-3-8b", 8192
OF_WIDTH = {"heads": "num_heads", "head_dim": "head_dim", "kv_heads": "num_kv_heads", "layers": "layers"}
OPTIONS: list[tuple[str, Callable[[str], Any], str]] = [
    ("--config NAME", str, f"one of {', '.join(CONFIGS)} (default {MODEL})"),
    ("--width D", int, "of a state, in place of --config"),
    ("--heads H", int, "query heads, with --width"),
    ("--head-dim D", int, "of a query and a key, with --width (default: width / heads)"),
    ("--kv-heads H", int, "key/value heads, with --width (default: as many as heads)"),
    ("--layers L", int, "with --width (default 1)"),
    ("--tokens N", int, f"that came so far (default {TOKENS}, or those of --graph)"),
    ("--graph EXPR", str, "of all layers, e.g. 'window(4096) | sinks(4)' (default: the model's)"),
    ("--ranks N", int, "what each of N ranks computes and exchanges, in place of the forms"),
]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention cost``."""
    for names, kind, text in OPTIONS:
        flag, metavar = names.split()
        command.add_argument(flag, type=kind, metavar=metavar, help=text)
    dtype, partition = "of all numbers (default %(default)s)", "of the tokens, with --ranks"
    command.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help=dtype)
    command.add_argument("--partition", choices=list(PARTITIONS), help=f"{partition} (default: contiguous)")
    json_option.add_json(command)
    command.set_defaults(run=_cost)


def _cost(args: argparse.Namespace) -> int:
    if args.partition is not None and args.ranks is None:
        raise ValueError(f"--partition {args.partition} needs --ranks, the number of ranks")
    with Progress("cost"):
        model, graph = _model(args), _graph(args.graph, args.tokens)
        tokens = (TOKENS if args.tokens is None else args.tokens) if graph is None else graph.num_dst
        of = _of_forms if args.ranks is None else _of_ranks
        values, report = of(args, model, graph, tokens)
    json_option.write_json(args.json, values | {"tokens": tokens, "dtype": args.dtype}, report)
    return 0


def _of_forms(
    args: argparse.Namespace, model: ModelSizes, graph: TokenGraph | None, tokens: int
) -> tuple[dict[str, Any], str]:
    layers = cost.graphs_of(model, tokens) if graph is None else [(graph, model.layers)]
    costs = cost.of_config(model, tokens, graph, DTYPES[args.dtype])
    compared = tables.compared(model, layers)
    shares = ("of_causal", "of_full", "fill")
    graphs = [asdict(each) | {name: getattr(each, name) for name in shares} for each, _ in compared]
    values = {
        "model": asdict(model),
        "layers": [{"graph": graph.name, "layers": count} for graph, count in layers],
        "forms": {form: _form_as_json(each) for form, each in costs.items()},
        "graphs": graphs,
    }
    return values, tables.report(model, layers, costs, compared, args.dtype)


def _of_ranks(
    args: argparse.Namespace, model: ModelSizes, graph: TokenGraph | None, tokens: int
) -> tuple[dict[str, Any], str]:
    partition = args.partition or "contiguous"
    plans = cost.of_ranks(model, args.ranks, tokens, graph, DTYPES[args.dtype], partition)
    values = {"model": asdict(model), "plans": [{"layers": count} | plan.to_dict() for plan, count in plans]}
    heads = [f"{model.name}: {count} {'layer' if count == 1 else 'layers'}, each" for _, count in plans]
    return values, "\n\n".join(f"{head}\n{plan}" for head, (plan, _) in zip(heads, plans, strict=True))


def _model(args: argparse.Namespace) -> ModelSizes:
    sizes = {name: value for option, name in OF_WIDTH.items() if (value := getattr(args, option)) is not None}
    if args.width is None:
        for option in (option for option, name in OF_WIDTH.items() if name in sizes):
            given = f"--{option.replace('_', '-')} {sizes[OF_WIDTH[option]]}"
            raise ValueError(f"{given} needs --width: the sizes of --config are fixed")
        return config(args.config or MODEL)
    if args.config is not None:
        raise ValueError(f"give --config or --width, not both: got {quoted(args.config)} and {args.width}")
    if "num_heads" not in sizes:
        raise ValueError(f"--width {args.width} needs --heads, the number of query heads")
    return custom(sizes.pop("layers", 1), Sizes.of(args.width, **sizes))


def _graph(expression: str | None, tokens: int | None) -> TokenGraph | None:
    """The graph of an expression, in which the number of tokens may be left out."""
    if expression is None:
        return None
    if tokens is None:
        with suppress(ValueError):
            return expressions.parse(expression)  # it says everything
    graph = expressions.parse(expression, n=TOKENS if tokens is None else tokens)
    if tokens not in (None, graph.num_dst):
        advice = "leave --tokens out, or change the graph"
        raise ValueError(f"--tokens {tokens}: {graph!r} has {graph.num_dst} receivers; {advice}")
    return graph


def _form_as_json(each: FormCost) -> dict[str, Any]:
    values = asdict(each) | {"parameter_bytes": each.parameter_bytes}
    for name, macs in (("macs", each.macs), ("step", each.step)):
        values[name] |= {"total": macs.total}
    return values
