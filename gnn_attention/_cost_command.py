"""The command ``gnn-attention cost``: what the forms of attention and a graph cost, as tables or as JSON."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gnn_attention import _cost_table, cost, expressions
from gnn_attention._cost_configs import CONFIGS, ModelSizes, config, given
from gnn_attention._cost_rates import Sizes
from gnn_attention._cost_table import Compared
from gnn_attention.cost import FormCost
from gnn_attention.graph import TokenGraph

__all__ = ["add_cost"]

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
MODEL, TOKENS = "llama-3-8b", 8192
OF_WIDTH = {"heads": "num_heads", "head_dim": "head_dim", "kv_heads": "num_kv_heads", "layers": "layers"}  # what options set


def add_cost(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``gnn-attention cost``."""
    command = commands.add_parser("cost", help="multiply-accumulates, bytes and cache of the forms of attention and of a graph")
    command.add_argument("--config", metavar="NAME", help=f"one of {', '.join(CONFIGS)} (default {MODEL})")
    command.add_argument("--width", type=int, metavar="D", help="of a state, in place of --config")
    command.add_argument("--heads", type=int, metavar="H", help="query heads, with --width")
    command.add_argument("--head-dim", type=int, metavar="D", help="of a query and a key, with --width (default: width / heads)")
    command.add_argument("--kv-heads", type=int, metavar="H", help="key/value heads, with --width (default: as many as heads)")
    command.add_argument("--layers", type=int, metavar="L", help="with --width (default 1)")
    command.add_argument("--tokens", type=int, metavar="N", help=f"that came so far (default {TOKENS}, or those of --graph)")
    command.add_argument("--graph", metavar="EXPR", help="of all layers, e.g. 'window(4096) | sinks(4)' (default: the model's)")
    command.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of all numbers (default %(default)s)")
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write it as JSON (without FILE: to stdout)")
    command.set_defaults(run=_cost)


def _cost(args: argparse.Namespace) -> int:
    if args.json not in (None, "-") and not Path(args.json).parent.is_dir():
        raise ValueError(f"--json {args.json}: expected a folder that exists, make {Path(args.json).parent} first")
    model, graph = _model(args), _graph(args.graph, args.tokens)
    tokens = (TOKENS if args.tokens is None else args.tokens) if graph is None else graph.num_dst
    layers = cost.graphs_of(model, tokens) if graph is None else [(graph, model.layers)]
    costs = cost.of_config(model, tokens, graph, DTYPES[args.dtype])
    compared = _cost_table.compared(model, layers)
    text = json.dumps(_as_json(model, layers, costs, compared) | {"tokens": tokens, "dtype": args.dtype}, indent=2)
    if args.json == "-":
        print(text)
        return 0
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    print(_cost_table.report(model, layers, costs, compared, args.dtype))
    return 0


def _model(args: argparse.Namespace) -> ModelSizes:
    """The named model, or one of the given sizes."""
    sizes = {name: value for option, name in OF_WIDTH.items() if (value := getattr(args, option)) is not None}
    if args.width is None:
        option = next((option for option, name in OF_WIDTH.items() if name in sizes), None)
        if option is not None:
            word = option.replace("_", "-")
            raise ValueError(f"--{word} {sizes[OF_WIDTH[option]]} needs --width: the sizes of --config are fixed")
        return config(args.config or MODEL)
    if args.config is not None:
        raise ValueError(f"give --config or --width, not both: got {args.config!r} and {args.width}")
    if "num_heads" not in sizes:
        raise ValueError(f"--width {args.width} needs --heads, the number of query heads")
    return given(sizes.pop("layers", 1), Sizes.of(args.width, **sizes))


def _graph(expression: str | None, tokens: int | None) -> TokenGraph | None:
    """The graph of an expression, in which the number of tokens may be left out; ValueError if it has another one."""
    if expression is None:
        return None
    if tokens is None:
        with suppress(ValueError):
            return expressions.parse(expression)  # it says everything
    graph = expressions.parse(expressions.sized(expression, TOKENS if tokens is None else tokens))
    if tokens not in (None, graph.num_dst):
        raise ValueError(f"--tokens {tokens}: {graph!r} has {graph.num_dst} receivers; leave --tokens out, or change the graph")
    return graph


def _as_json(
    model: ModelSizes, layers: list[tuple[TokenGraph, int]], costs: dict[str, FormCost], compared: list[Compared]
) -> dict[str, Any]:
    """Every number, exactly."""
    graphs = [asdict(each) | {"of_causal": each.of_causal, "of_full": each.of_full, "fill": each.fill} for each, _ in compared]
    return {
        "model": asdict(model),
        "layers": [{"graph": graph.name, "layers": count} for graph, count in layers],
        "forms": {form: _form_as_json(each) for form, each in costs.items()},
        "graphs": graphs,
    }


def _form_as_json(each: FormCost) -> dict[str, Any]:
    said = asdict(each) | {"parameter_bytes": each.parameter_bytes}
    for name, macs in (("macs", each.macs), ("step", each.step)):
        said[name] |= {"total": macs.total}
    return said
