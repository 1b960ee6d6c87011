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
    """The part of that name, else ``get_input_embeddings()``, else the one ``nn.Embedding`` of the ids."""
    if name is not None:
        return module.get_submodule(name)
    if hasattr(module, "get_input_embeddings"):
        embedding: nn.Module = module.get_input_embeddings()  # type: ignore[operator]
        return embedding
    tables = {name: part for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    parts = list(tables.values())
    called = parts if len(parts) < 2 else _called_with_ids(module, parts, call, tokens)
    if len(called) != 1:
        found = f"{len(called)} of the module's embeddings {list(tables)} take them"
        advice = "choose with embedding='name', or give input_shape=(T, width) for a module that takes states"
        raise ValueError(f"input_shape ({tokens},) is for token ids, and {found}: {advice}")
    return called[0]


def random_ids(embedding: nn.Module, tokens: int, generator: torch.Generator) -> Int[Tensor, "batch tokens"]:
    """Ids of its vocabulary except the padding's, which models treat differently."""
    ids = torch.randint(_vocabulary_size(embedding), (1, tokens), generator=generator)
    padding = getattr(embedding, "padding_idx", None)
    return ids if padding is None else torch.where(ids == padding, other_ids(ids, embedding), ids)


def other_ids(ids: Int[Tensor, "batch tokens"], embedding: nn.Module) -> Int[Tensor, "batch tokens"]:
    """For each id a different one, and not the padding's."""
    size, padding = _vocabulary_size(embedding), getattr(embedding, "padding_idx", None)
    following = (ids + 1) % size
    return following if padding is None else torch.where(following == padding, (ids + 2) % size, following)


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
            hooks.enter_context(part.register_forward_pre_hook(note))
        call(module, ids)
    return called


def _vocabulary_size(embedding: nn.Module) -> int:
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"embedding must have a weight [vocabulary, width], got {type(embedding).__name__}")
    return len(weight)
