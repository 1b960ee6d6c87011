"""Train in one process, or on the ranks of torchrun, which share windows, tokens and heads.

The ranks form a mesh with three axes: ``data`` shards the windows of a batch, ``tokens`` the tokens of a
window (:func:`gnn_attention.distributed.local`), and ``heads`` the heads of a layer (``shard_heads``). Along
the first two, ranks are replicas, whose gradients DistributedDataParallel or FSDP2 averages. Each rank scales
its loss so that this average is the gradient of one process.
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

from examples.training.metrics import mean_loss, predict
from examples.training.recipe import Recipe
from gnn_attention import distributed
from gnn_attention._support import checks
from gnn_attention._support.shapes import Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.model import LanguageModel

Tokens = Int[Tensor, "batch tokens"]


@dataclass(frozen=True)
class Layout:
    """The numbers of ranks that share the tokens of a window and the heads; the other ranks share the batch.

    With ``data`` "ddp" each replica stores all parameters, with "fsdp" a shard of them (FSDP2); None means
    "ddp" for one rank of heads, otherwise "fsdp". ``partition`` is passed to
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
            checks.choice("data", self.data, ("ddp", "fsdp"))
        if self.data == "ddp" and self.heads > 1:
            raise ValueError("data must be 'fsdp' for heads > 1, which shards parameters, got 'ddp'")

    @property
    def wrapper(self) -> str:
        """``data``, or its default: "ddp" or "fsdp"."""
        return self.data or ("ddp" if self.heads == 1 else "fsdp")


class SingleProcess:
    """A training in one process, on one device."""

    rank = 0

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def place(self, model: LanguageModel) -> nn.Module:
        """Move the model to the device, and return the module that a training step calls."""
        return model.to(self.device)

    def loss(self, module: nn.Module, window: Tokens, graph: TokenGraph, precision: str) -> Tensor:
        """Return the loss of a batch of windows, for the backward pass."""
        return mean_loss(module, window.to(self.device), graph, precision)

    def mean(self, loss: Tensor) -> float:
        """Return the mean of :meth:`loss` over all replicas."""
        return loss.item()

    def broadcast(self, number: float) -> float:
        """Return the number of the first rank on every rank."""
        return number

    def gather(self, model: LanguageModel) -> LanguageModel:
        """Return a model with all parameters on every rank."""
        return model

    def description(self) -> dict[str, Any]:
        return {}


class Ranks(SingleProcess):
    """The ranks of the default process group, placed by a :class:`Layout`; all must call every method.

    Raises ValueError if the number of ranks does not fit the layout, or if more ranks share a batch than it
    has windows.
    """

    def __init__(self, layout: Layout, recipe: Recipe, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.layout = layout
        self.rank = torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()
        if self.count % (layout.tokens * layout.heads):
            factors = f"{layout.tokens} x {layout.heads}"
            raise ValueError(f"ranks must be a multiple of tokens x heads = {factors}, got {self.count}")
        self.replicas = self.count // layout.heads
        shards = self.replicas // layout.tokens
        if recipe.batch < shards:
            raise ValueError(f"batch must be at least {shards}, one for each data shard, got {recipe.batch}")
        kind, sizes = self.device.type, (shards, layout.tokens, layout.heads)
        self.mesh = init_device_mesh(kind, sizes, mesh_dim_names=("data", "tokens", "heads"))
        replicas = init_device_mesh(kind, (self.replicas, layout.heads), mesh_dim_names=("replicas", "heads"))
        self.replica_mesh = replicas["replicas"]

    def place(self, model: LanguageModel) -> nn.Module:
        """Shard the heads and MLPs, and wrap the model by DDP or FSDP2."""
        model.to(self.device)
        if self.layout.heads > 1:
            distributed.shard_heads(model, self.mesh["heads"])
            mlp_plan = {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}
            parallelize_module(model, self.mesh["heads"], mlp_plan)
        if self.replicas == 1:
            return model
        if self.layout.wrapper == "ddp":
            return DistributedDataParallel(model, process_group=self.replica_mesh.get_group())
        for block in model.blocks:
            fully_shard(block, mesh=self.replica_mesh)
        fully_shard(model, mesh=self.replica_mesh)
        return model

    def loss(self, module: nn.Module, window: Tokens, graph: TokenGraph, precision: str) -> Tensor:
        """Return the loss of this rank's tokens; its mean over replicas is the loss of the batch."""
        data = self.mesh["data"]
        shard = window.tensor_split(data.size())[data.get_local_rank()].to(self.device)
        inputs, targets = shard[:, :-1], shard[:, 1:]
        if self.layout.tokens > 1:
            group = self.mesh["tokens"]
            graph = distributed.local(graph, self.layout.partition, group)
            inputs = distributed.scatter(inputs, graph.partition, -1, group=group)
            targets = distributed.scatter(targets, graph.partition, -1, group=group)
        logits = predict(module, inputs, graph, precision)
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total * (self.replicas / window[:, 1:].numel())

    def mean(self, loss: Tensor) -> float:
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=self.replica_mesh.get_group())
        return total.item() / self.replicas

    def broadcast(self, number: float) -> float:
        tensor = torch.tensor(number, dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(tensor, src=0)
        return tensor.item()

    def gather(self, model: LanguageModel) -> LanguageModel:
        state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        with torch.device("meta"):
            copy = LanguageModel(model.config, model.backend)
        copy.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, assign=True)
        return copy

    def description(self) -> dict[str, Any]:
        return {"ranks": {"count": self.count, **asdict(self.layout), "data": self.layout.wrapper}}


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, also if some are DTensors of several meshes."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms: list[Tensor] = []
    for group in groups.values():
        gradients: list[Any] = [parameter.grad for parameter in group]
        norm = nn.utils.get_total_norm(gradients)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return float(total)


@contextmanager
def process_group(kind: str, timeout: float) -> Iterator[torch.device | None]:
    """Open torchrun's process group and yield the device of this rank; yield None without torchrun.

    A rank that waits for another for more than ``timeout`` seconds raises an error.
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
    # After an error this line is not reached, as other ranks may already have ended.
    torch.distributed.destroy_process_group()
