"""Token ids of a module under audit: which of its parts turns them into states, and ids drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from gnn_attention._support.shapes import Int, Tensor

__all__ = ["another", "embedding_of", "random_ids"]


def embedding_of(module: nn.Module, given: str | None, call: Callable[[nn.Module, Tensor], Any], tokens: int) -> nn.Module:
    """The part of that name, else the module's own word for it (``get_input_embeddings``), else the one that gets the ids.

    Raises ValueError where none or several ``nn.Embedding`` get the ids.
    """
    if given is not None:
        return module.get_submodule(given)
    if hasattr(module, "get_input_embeddings"):
        own: Any = module.get_input_embeddings
        embedding: nn.Module = own()
        return embedding
    tables = {name: part for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    found = list(tables.values()) if len(tables) < 2 else _given_the_ids(module, list(tables.values()), call, tokens)
    if len(found) != 1:
        raise ValueError(
            f"input_shape ({tokens},) asks for token ids, and {len(found)} of the module's embeddings {list(tables)} take them: "
            "say which with embedding='name', or give input_shape=(T, width) for a module that takes states"
        )
    return found[0]


def random_ids(embedding: nn.Module, tokens: int, generator: torch.Generator) -> Int[Tensor, "batch tokens"]:
    """Ids of its vocabulary, never the padding's: models look for that."""
    ids, padding = torch.randint(_rows(embedding), (1, tokens), generator=generator), getattr(embedding, "padding_idx", None)
    return ids if padding is None else torch.where(ids == padding, (ids + 1) % _rows(embedding), ids)


def another(ids: Int[Tensor, "batch tokens"], embedding: nn.Module) -> Int[Tensor, "batch tokens"]:
    """For each id one that is another, and not the padding's."""
    following, padding = (ids + 1) % _rows(embedding), getattr(embedding, "padding_idx", None)
    return following if padding is None else torch.where(following == padding, (ids + 2) % _rows(embedding), following)


def _given_the_ids(
    module: nn.Module, tables: list[nn.Embedding], call: Callable[[nn.Module, Tensor], Any], tokens: int
) -> list[nn.Module]:
    """The embeddings that are called with the very ids that the module is called with."""
    smallest = min(tables, key=_rows)
    ids = random_ids(smallest, tokens, torch.Generator().manual_seed(0)).to(smallest.weight.device)
    met: list[nn.Module] = []

    def seen(part: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor) and torch.equal(arguments[0], ids) and part not in met:
            met.append(part)

    with ExitStack() as hooks, torch.no_grad():
        for part in tables:
            hooks.callback(part.register_forward_pre_hook(seen).remove)
        call(module, ids)
    return met


def _rows(embedding: nn.Module) -> int:
    """The size of the vocabulary."""
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"embedding must have a weight [vocabulary, width], got {type(embedding).__name__}")
    return len(weight)
