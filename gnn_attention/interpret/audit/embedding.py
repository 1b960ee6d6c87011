"""Token ids of a module under audit: its embedding, and random ids."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from gnn_attention._support.shapes import Int, Tensor


def embedding_of(
    module: nn.Module, name: str | None, call: Callable[[nn.Module, Tensor], Any], tokens: int
) -> nn.Module:
    """The part of that name, else ``get_input_embeddings()``, else the ``nn.Embedding`` of the ids.

    Raises ValueError where none or several are called with the ids.
    """
    if name is not None:
        return module.get_submodule(name)
    if hasattr(module, "get_input_embeddings"):
        method: Any = module.get_input_embeddings
        embedding: nn.Module = method()
        return embedding
    tables = {name: part for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    parts = list(tables.values())
    called = parts if len(parts) < 2 else _called_with_ids(module, parts, call, tokens)
    if len(called) != 1:
        raise ValueError(
            f"input_shape ({tokens},) is for token ids, and {len(called)} of the module's embeddings "
            f"{list(tables)} "
            "take them: choose with embedding='name', or give input_shape=(T, width) for a module that "
            "takes states"
        )
    return called[0]


def random_ids(embedding: nn.Module, tokens: int, generator: torch.Generator) -> Int[Tensor, "batch tokens"]:
    """Ids of its vocabulary except the padding's, which models treat differently."""
    ids = torch.randint(_vocabulary_size(embedding), (1, tokens), generator=generator)
    return _without_padding(ids, embedding)


def other_ids(ids: Int[Tensor, "batch tokens"], embedding: nn.Module) -> Int[Tensor, "batch tokens"]:
    """For each id a different one, and not the padding's."""
    return _without_padding((ids + 1) % _vocabulary_size(embedding), embedding)


def _without_padding(ids: Tensor, embedding: nn.Module) -> Tensor:
    padding = getattr(embedding, "padding_idx", None)
    return (
        ids if padding is None else torch.where(ids == padding, (ids + 1) % _vocabulary_size(embedding), ids)
    )


def _called_with_ids(
    module: nn.Module, tables: list[nn.Embedding], call: Callable[[nn.Module, Tensor], Any], tokens: int
) -> list[nn.Module]:
    smallest = min(tables, key=_vocabulary_size)
    ids = random_ids(smallest, tokens, torch.Generator().manual_seed(0)).to(smallest.weight.device)
    called: list[nn.Module] = []

    def note(part: nn.Module, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        if isinstance(first, Tensor) and torch.equal(first, ids) and part not in called:
            called.append(part)

    with ExitStack() as hooks, torch.no_grad():
        for part in tables:
            hooks.callback(part.register_forward_pre_hook(note).remove)
        call(module, ids)
    return called


def _vocabulary_size(embedding: nn.Module) -> int:
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"embedding must have a weight [vocabulary, width], got {type(embedding).__name__}")
    return len(weight)
