"""One process, or the ranks of torchrun, which share windows, tokens and heads.

The ranks form a mesh of three axes: ``data`` (some windows of the batch), ``tokens`` (some of its windows,
:func:`gnn_attention.distributed.local`), ``heads`` (some of them, ``shard_heads``). Over the first two, the
replicas, gradients are averaged by DistributedDataParallel or FSDP2. The loss of a rank is weighted so that
this average is the gradient of one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.training.metrics import nats, predicted
from examples.training.recipe import Recipe
from gnn_attention import distributed
from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.model import LanguageModel

COPIES = ("ddp", "fsdp")
Tokens = Int[Tensor, "batch tokens"]


@dataclass(frozen=True)
class Layout:
    """How many ranks share the tokens of a window and the heads; others share the batch.

    ``data`` is what replicas store: "ddp" whole weights, "fsdp" a part of them (FSDP2); None takes "ddp"
    where heads stay together, "fsdp" where they do not. ``partition`` is that of
    :func:`gnn_attention.distributed.local`.
    """

    data: str | None = None
    tokens: int = 1
    heads: int = 1
    partition: str = "contiguous"

    def __post_init__(self) -> None:
        for name in ("tokens", "heads"):
            checks.size(name, getattr(self, name), 1)
        if self.data is not None:
            checks.choice("data", self.data, COPIES)
        if self.data == "ddp" and self.heads > 1:
            raise ValueError("data 'ddp' is whole weights on every rank, heads > 1 shards them: take 'fsdp'")

    @property
    def copies(self) -> str:
        """What replicas store: "ddp" or "fsdp"."""
        return self.data or ("ddp" if self.heads == 1 else "fsdp")


class Alone:
    """All of a training in one process, on one device: the model and the windows."""

    rank = 0

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def place(self, model: LanguageModel) -> nn.Module:
        """The module that a step calls: the model on the device."""
        return model.to(self.device)

    def loss(self, called: nn.Module, window: Tokens, graph: TokenGraph, precision: str) -> Tensor:
        """The loss of a batch of windows, whose gradient a step takes."""
        return nats(called, window.to(self.device), graph, precision)

    def mean(self, loss: Tensor) -> float:
        """The loss of the batch, from what :meth:`loss` gave."""
        return loss.item()

    def of_first(self, share: float) -> float:
        """The number of the first rank, whose clock counts for all."""
        return share

    def whole(self, model: LanguageModel) -> LanguageModel:
        """The model with all weights, as one process has it."""
        return model

    def description(self) -> dict[str, Any]:
        """The ranks, for the report."""
        return {}


class Ranks(Alone):
    """The ranks of a process group, in the order of a :class:`Layout`; all call every method.

    Raises ValueError for ranks that do not go into the layout, or a batch with fewer windows than ranks that
    share it.
    """

    def __init__(self, layout: Layout, recipe: Recipe, device: torch.device | str = "cpu") -> None:
        # all ranks of the default process group
        super().__init__(device)
        self.layout, self.rank = layout, torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()
        if self.count % (layout.tokens * layout.heads):
            factors = f"tokens {layout.tokens} x heads {layout.heads}"
            raise ValueError(f"ranks must be a multiple of {factors}, got {self.count}")
        self.replicas = self.count // layout.heads
        sharing = self.replicas // layout.tokens
        if recipe.batch < sharing:
            ranks = f"{sharing} ranks that share it"
            raise ValueError(f"batch must have a window for each of the {ranks}, got {recipe.batch}")
        kind, sizes = self.device.type, (sharing, layout.tokens, layout.heads)
        self.mesh = init_device_mesh(kind, sizes, mesh_dim_names=("data", "tokens", "heads"))
        replicas = init_device_mesh(kind, (self.replicas, layout.heads), mesh_dim_names=("replicas", "heads"))
        self.copies = replicas["replicas"]

    def place(self, model: LanguageModel) -> nn.Module:
        """The model with its heads sharded, under DDP or FSDP2."""
        model.to(self.device)
        if self.layout.heads > 1:
            distributed.shard_heads(model, self.mesh["heads"])
            of_mlp = {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}
            parallelize_module(model, self.mesh["heads"], of_mlp)
        if self.replicas == 1:
            return model
        if self.layout.copies == "ddp":
            return DistributedDataParallel(model, process_group=self.copies.get_group())
        for block in model.blocks:
            fully_shard(block, mesh=self.copies)
        fully_shard(model, mesh=self.copies)
        return model

    def loss(self, called: nn.Module, window: Tokens, graph: TokenGraph, precision: str) -> Tensor:
        """Of this rank's windows and tokens; the mean over replicas is the loss of the whole batch."""
        data = self.mesh["data"]
        own = window.tensor_split(data.size())[data.get_local_rank()].to(self.device)
        inputs, targets = own[:, :-1], own[:, 1:]
        if self.layout.tokens > 1:
            group = self.mesh["tokens"]
            graph = distributed.local(graph, self.layout.partition, group)
            inputs = distributed.scatter(inputs, graph.partition, -1, group=group)
            targets = distributed.scatter(targets, graph.partition, -1, group=group)
        logits = predicted(called, inputs, graph, precision)
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total * (self.replicas / window[:, 1:].numel())

    def mean(self, loss: Tensor) -> float:
        """The mean over replicas, on every rank."""
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=self.copies.get_group())
        return total.item() / self.replicas

    def of_first(self, share: float) -> float:
        """The number of the first rank."""
        first = torch.tensor(share, dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(first, src=0)
        return first.item()

    def whole(self, model: LanguageModel) -> LanguageModel:
        """A model of its own with all weights, on every rank."""
        state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        with torch.device("meta"):
            plain = LanguageModel(model.config, model.backend)
        plain.load_state_dict({name: part.detach().clone() for name, part in state.items()}, assign=True)
        return plain

    def description(self) -> dict[str, Any]:
        """The layout, and how many ranks there were."""
        return {"ranks": {"count": self.count, **asdict(self.layout), "data": self.layout.copies}}


def clip(parameters: Iterable[nn.Parameter], most: float) -> float:
    """``torch.nn.utils.clip_grad_norm_`` for gradients of which some are DTensors, of several meshes."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    gradients: list[Any] = [[parameter.grad for parameter in some] for some in kinds.values()]
    found = map(nn.utils.get_total_norm, gradients)
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in found]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for some in kinds.values():
        nn.utils.clip_grads_with_norm_(some, most, total)
    return float(total)


@contextmanager
def started(kind: str, timeout: float) -> Iterator[torch.device | None]:
    """The process group of torchrun and this rank's device; None in a program on its own.

    ``timeout`` in seconds is how long a rank waits for another before it gives up with an error.
    """
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        yield None
        return
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
    yield device
    # not after an error: others may be gone
    torch.distributed.destroy_process_group()
