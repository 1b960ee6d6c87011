"""The settings of a training, its windows of text and its learning rate; ``trainer.py`` trains by them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from gnn_attention import patterns
from gnn_attention._support import checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.convert import expressions
from gnn_attention.graph import TokenGraph


def _option(default: Any, described: str) -> Any:
    return field(default=default, metadata={"help": f"{described} (default: %(default)s)"})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights, except the corpus and the machine.

    ``repeats`` is the share of training windows, at the beginning, that repeat one stretch of text (an eighth
    to a half of the window); it falls evenly to a fifth of that, and all other windows are text as it stands.
    Text alone gave this model no induction head within four million tokens (score 0.01); with these windows
    the score reached 0.64, and was 0.56 in the end. ``rate`` is reached after ``warmup`` steps; it falls to a
    tenth along a cosine. ``graph`` is an expression, "" causal. TypeError or ValueError for a wrong value.
    """

    steps: int = _option(20000, "batches to learn from")
    seed: int = _option(0, "of the first weights and of the windows")
    batch: int = _option(8, "windows in a batch")
    length: int = _option(128, "tokens in a window")
    pieces: int = _option(1024, "size of the vocabulary")
    rate: float = _option(3e-3, "highest learning rate")
    warmup: int = _option(200, "steps until it is reached")
    decay: float = _option(0.1, "weight decay")
    clip: float = _option(1.0, "largest norm of the gradient")
    repeats: float = _option(0.5, "share of windows, at first, that say one stretch of text again and again")
    precision: str = _option("bfloat16", "of the products: float32 or bfloat16")
    graph: str = _option("", "graph of a window, such as 'window(8192, 256)'; causal unless given")

    def __post_init__(self) -> None:
        least = {"steps": 1, "seed": 0, "batch": 1, "length": 8, "pieces": 256, "warmup": 0}
        for name, minimum in least.items():
            checks.size(name, getattr(self, name), minimum)
        checks.choice("precision", self.precision, ("float32", "bfloat16"))
        for name in ("rate", "clip", "repeats", "decay"):
            checks.number(name, getattr(self, name), positive=name in ("rate", "clip"))
        if not isinstance(self.graph, str):
            raise TypeError(f"graph must be an expression such as 'causal(128)', got {quote(self.graph)}")
        if not 0 <= self.repeats <= 1 or self.decay < 0:
            got = f"{self.repeats}, {self.decay}"
            raise ValueError(f"repeats must be a share from 0 to 1 and decay at least 0, got {got}")
        self.edges()

    def edges(self) -> TokenGraph:
        """The graph of a window; ValueError if it has another number of tokens."""
        return fitting(expressions.parse(self.graph), self) if self.graph else patterns.causal(self.length)


def fitting(graph: TokenGraph, recipe: Recipe) -> TokenGraph:
    """``graph``; ValueError if it has another number of tokens than a window."""
    if (graph.num_dst, graph.num_src) != (recipe.length, recipe.length):
        raise ValueError(f"graph must be one of length = {recipe.length} tokens, got {graph!r}")
    return graph


def check_long_enough(recipe: Recipe, *parts: Tensor) -> None:
    """ValueError for a part of the corpus that is no longer than a window."""
    for tokens in parts:
        if len(tokens) <= recipe.length:
            part = f"a part of {len(tokens)} tokens"
            raise ValueError(f"the corpus has {part}: expected more than length = {recipe.length}")


def windows(
    tokens: Int[Tensor, " tokens"], recipe: Recipe, share: float, generator: torch.Generator
) -> Int[Tensor, "batch length_and_one"]:
    """A batch ``[batch, length + 1]`` of text, a share of which repeats one stretch."""
    place, shape = torch.arange(recipe.length + 1), (recipe.batch, 1)
    start = torch.randint(len(tokens) - recipe.length, shape, generator=generator)
    period = torch.randint(recipe.length // 8, recipe.length // 2 + 1, shape, generator=generator)
    again = torch.rand(shape, generator=generator) < share
    return tokens[start + torch.where(again, place % period, place)]


def rate(recipe: Recipe, step: int, done: float) -> float:
    """The learning rate of a step, when a share ``done`` of the training is over."""
    return recipe.rate * min(1.0, (step + 1) / (recipe.warmup + 1)) * (0.55 + 0.45 * math.cos(math.pi * done))


def add_recipe(
    parser: argparse.ArgumentParser, defaults: Recipe | None = None, without: Collection[str] = ()
) -> None:
    """An option for each field of :class:`Recipe`, those ``without`` left out."""
    recipe = defaults or Recipe()
    for one in fields(recipe):
        if one.name not in without:
            default, described = getattr(recipe, one.name), one.metadata["help"]
            parser.add_argument(f"--{one.name}", type=type(default), default=default, help=described)
