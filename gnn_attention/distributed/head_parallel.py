"""Heads as shards: the update is a sum over heads, so each rank sums its own and one all-reduce adds them up.

The weights become DTensors under their old names: checkpoints, optimizers and FSDP2 see whole tensors. In a
call the heads are a copy with the part of this rank, so the same code computes some heads or all. What all
heads share (states, norms, a learned score_mod) enters as a copy whose gradients are summed. The layer, its
heads and its score_mod become subclasses made here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.distributed.collectives import keep_in_graph
from gnn_attention.distributed.rank_graph import RankGraph
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.edges import RuleEdges
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads, arrays
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.score_mods import chain

Heads = StandardHeads | FactoredHeads | MergedHeads | LatentHeads

# parameters whose first axis is that of heads
OF_HEADS: tuple[str, ...] = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "pattern", "message")
OF_HEADS += ("W_UQ", "W_QR", "W_UK", "W_UV")  # latent heads
AFTER_THE_SUM = "b_O"  # added once, to what the all-reduce gives


class HeadwiseParallel(ParallelStyle):
    """A style of ``parallelize_module`` for :class:`MessagePassingAttention`: ``H / n`` heads on each rank.

    ``update = all_reduce(sum over own heads of weighted messages) + b_O``; states go in and come out whole on
    every rank. All forms of heads, score_mods, per-edge bias (for each head, or for all), graphs that differ
    by head and dropout give what they give in one process; attention weights are gathered. Key/value heads go
    with the query heads they serve.

    Raises ValueError for heads or key/value heads that do not go into as many parts as there are ranks, and
    TypeError for a module that is no attention layer.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, the two conjugate operators around the heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MessagePassingAttention):
            raise TypeError(f"HeadwiseParallel is for MessagePassingAttention, got {type(module).__name__}")
        shard = HeadShard.of(module.heads, device_mesh)
        _shard_parameters(module.heads, shard, self.src_data_rank)
        for inner in module.score_mod.modules() if isinstance(module.score_mod, nn.Module) else ():
            if any(True for _ in inner.parameters()):
                _distribute(inner, device_mesh, self.src_data_rank)
                _derive(inner, _ShardedScoreMod, shard)
        _derive(module, _ShardedLayer, shard)
        return module


def shard_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """``model`` itself, its attention sharded by heads over a mesh's ranks.

    The first rank's weights are taken. ``state_dict`` then has DTensors under the same names, which
    ``torch.distributed.checkpoint`` saves and loads at any number of ranks. Dropout is that of one process
    where all ranks seed torch's generator alike. In use: ``shard_heads(model, init_device_mesh("cpu",
    (2,)))``. The rest stays whole on every rank; torch shards the MLPs of a ``LanguageModel`` by
    ``parallelize_module(model, mesh, {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2":
    RowwiseParallel()})``.

    Raises ValueError, before anything is changed, where heads do not divide, for a mesh of several
    axes, and for a model without attention.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one axis, got {mesh.ndim}: take for example mesh['heads']")
    layers = [module for module in model.modules() if isinstance(module, MessagePassingAttention)]
    if not layers:
        raise ValueError(f"model has no MessagePassingAttention: expected one in {type(model).__name__}")
    for layer in layers:
        _checked_size(layer.heads, mesh.size())
    for layer in layers:
        parallelize_module(layer, mesh, HeadwiseParallel())
    return model


@dataclass(frozen=True)
class HeadShard:
    """``count`` of ``total`` query heads from ``first`` on, with their key/value heads."""

    mesh: DeviceMesh
    first: int
    count: int
    total: int

    @classmethod
    def of(cls, heads: nn.Module, mesh: DeviceMesh) -> HeadShard:
        total = _checked_size(heads, mesh.size())
        count = total // mesh.size()
        return cls(mesh, mesh.get_local_rank() * count, count, total)

    def enter(self, x: Tensor) -> Tensor:
        """``x``, which is the same on all ranks; backward, the sum of all ranks' gradients."""
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; backward, the gradient as it is."""
        whole = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local()

    def copy(self, module: Any) -> Any:
        """A copy of the module for one call (threads do not interfere) with this rank's parameters."""
        twin = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        parameters, modules = module._parameters, module._modules
        twin.__dict__["_parameters"] = {name: self._part(name, x) for name, x in parameters.items()}
        twin.__dict__["_modules"] = {name: x if x is None else self.copy(x) for name, x in modules.items()}
        if isinstance(module, chain):  # whose links are modules, or functions
            learned = dict(zip(map(id, module.learned), twin.learned, strict=True))
            twin.__dict__["mods"] = tuple(learned.get(id(mod), mod) for mod in module.mods)
        if "num_heads" in twin.__dict__:  # the merged form; others read it off their parameters
            twin.__dict__["num_heads"] = self.count
        return twin

    def _part(self, name: str, parameter: Tensor | None) -> Tensor | None:
        if not isinstance(parameter, DTensor):
            return parameter
        local = parameter.to_local()
        own = name == AFTER_THE_SUM or parameter.placements[0].is_shard()
        return local if own else self.enter(local)


def _graph_of_heads(graph: TokenGraph, first: int, count: int) -> TokenGraph:
    name = f"{graph.name}, heads {first} to {first + count - 1}"
    rule = partial(_rule_from_head, graph.edges.contains, first)
    more: dict[str, Any] = {"edges": RuleEdges(rule), "heads": count, "name": name}
    if isinstance(graph, RankGraph):
        more["whole"] = memoized(_graph_of_heads, graph.whole, first, count)
    return replace(graph, **more)


def _rule_from_head(rule: Any, first: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return rule(b, h + first, dst, src)  # type: ignore[no-any-return]


class _ShardedLayer:
    # a MessagePassingAttention of some heads, called with graph, bias and options of the whole
    shard: HeadShard

    def make_call(
        self, x_src: Tensor, x_dst: Tensor, graph: TokenGraph, bias: Any, wants_weights: bool
    ) -> AttentionCall:
        shard, parent = self.shard, super()
        if graph.heads is not None:
            if graph.heads != shard.total:
                raise ValueError(f"{graph!r} differs by {graph.heads} heads, but the layer has {shard.total}")
            graph = memoized(_graph_of_heads, graph, shard.first, shard.count)
        if bias is not None:
            bias = shard.enter(bias)
            by_head = bias.dim() >= 2 and bias.shape[-2] == shard.total
            bias = bias.narrow(-2, shard.first, shard.count) if by_head else bias
        call: AttentionCall = parent.make_call(x_src, x_dst, graph, bias, wants_weights)  # type: ignore[attr-defined]
        call = replace(call, first_head=shard.first)
        if not isinstance(call.score_mod, nn.Module):
            return call
        # its parameters enter once a call, however often a backend calls it
        mod = shard.copy(call.score_mod)
        return replace(call, score_mod=mod, q=keep_in_graph(call.q, *mod.parameters()))

    def run_call(self, call: AttentionCall, batched: bool, graph_is_temporary: bool) -> tuple[Tensor, Any]:
        update, weights = super().run_call(call, batched, graph_is_temporary)  # type: ignore[misc]
        if call.with_lse:
            by_head = [Shard(weights.dim() - 1)]
            weights = DTensor.from_local(weights, self.shard.mesh, by_head, run_check=False).full_tensor()
        return update, weights


class _ShardedHeads:
    # some of the heads: states enter whole, the update leaves whole
    shard: HeadShard

    @property
    def first_head(self) -> int:
        # that of a cache's score_mod
        return self.shard.first

    def reset_parameters(self) -> None:
        # the numbers would depend on the number of ranks
        raise NotImplementedError("sharded heads cannot draw their weights anew: draw before, or load them")

    def receive(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        own, x = self.shard.copy(self), self.shard.enter(x)
        return super(_ShardedHeads, own).receive(x, positions)  # type: ignore[misc,no-any-return]

    def send(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        own, x = self.shard.copy(self), self.shard.enter(x)
        return super(_ShardedHeads, own).send(x, positions)  # type: ignore[misc,no-any-return]

    def collect(self, z: Tensor) -> Tensor:
        own = self.shard.copy(self)
        update: Tensor = super(_ShardedHeads, own).sum_of_heads(z)  # type: ignore[misc]
        return arrays.add_bias(self.shard.all_reduce(update), own.b_O)


class _ShardedScoreMod:
    # a learned score_mod, whole on every rank, whose gradients are summed
    shard: HeadShard

    def forward(self, *arguments: Any) -> Tensor:
        own = self.shard.copy(self)
        return super(_ShardedScoreMod, own).forward(*arguments)  # type: ignore[misc,no-any-return]


def _derive(module: Any, mixed_in: type, shard: HeadShard) -> None:
    # the class becomes a subclass of the same name
    cls = type(module)
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    module.__class__ = type(cls.__name__, (mixed_in, cls), body)
    module.shard = shard


def _checked_size(heads: nn.Module, ranks: int) -> int:
    """The number of query heads, which can be shared by the ranks."""
    kind = type(heads).__name__
    if not isinstance(heads, Heads):
        raise TypeError(f"sharded heads must be standard, factored, merged or latent, got {kind}")
    if isinstance(heads, _ShardedHeads):
        raise ValueError(f"these {kind} are sharded already: shard a layer or a model once")
    standard = heads.standard if isinstance(heads, FactoredHeads) else heads
    if isinstance(standard, StandardHeads) and standard.W_O is None:
        raise ValueError("heads without W_O are concatenated, but only a sum can be sharded over ranks")
    kv_heads = standard.num_kv_heads if isinstance(standard, StandardHeads) else standard.num_heads
    for name, number in (("num_heads", standard.num_heads), ("num_kv_heads", kv_heads)):
        if number % ranks:
            raise ValueError(f"{name} must be a multiple of the {ranks} ranks that share them, got {number}")
    return int(standard.num_heads)


def _shard_parameters(heads: Any, shard: HeadShard, source: int | None) -> None:
    # a factored form shares the parameters of its standard form
    if isinstance(heads, FactoredHeads):
        _shard_parameters(heads.standard, shard, source)
    else:
        for part in (heads, *heads.children()):
            _distribute(part, shard.mesh, source)
    _derive(heads, _ShardedHeads, shard)


def _distribute(module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
    # norms and score_mods, which all heads share, have parameters of other names
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement: Placement = Shard(0) if name in OF_HEADS else Replicate()
        whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        module._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
