"""Shard heads: each rank sums the messages of some heads, and an all-reduce adds up the sums.

The parameters become DTensors under their old names, so that checkpoints, optimizers and FSDP2 see
whole tensors. Each call runs the usual code on a copy of the heads with the shard of this rank.
Heads share the states, norms and a learned score_mod, whose gradients are summed over ranks.
The layer, its heads and its score_mod become instances of the mixins below.
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

# The first axis of these parameters is the axis of heads; the last four belong to latent heads.
HEAD_PARAMETERS = {"W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "pattern", "message"}
HEAD_PARAMETERS |= {"W_UQ", "W_QR", "W_UK", "W_UV"}
# The output bias is added once, after the all-reduce.
OUTPUT_BIAS = "b_O"


class HeadwiseParallel(ParallelStyle):
    """A style of ``parallelize_module`` for :class:`MessagePassingAttention`: ``H / n`` heads on each rank.

    ``update = all_reduce(sum over local heads of weighted messages) + b_O``; every rank has the
    whole states before and after. All forms of heads, score_mods, a bias for each edge (per head or
    not), graphs that vary by head, and dropout give the same results as in one process. Attention
    weights are gathered. Key/value heads are on the ranks of the query heads that they serve.

    Raises ValueError if the number of heads, or of key/value heads, is not a multiple of the number
    of ranks, and TypeError for a module that is not an attention layer.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, the two conjugate operators around
    the heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MessagePassingAttention):
            raise TypeError(f"HeadwiseParallel is for MessagePassingAttention, got {type(module).__name__}")
        shard = HeadShard.of(module.heads, device_mesh)
        _shard_parameters(module.heads, shard, self.src_data_rank)
        for submodule in module.score_mod.modules() if isinstance(module.score_mod, nn.Module) else ():
            if any(True for _ in submodule.parameters()):
                _distribute(submodule, device_mesh, self.src_data_rank)
                _change_class(submodule, _ShardedScoreMod, shard)
        _change_class(module, _ShardedLayer, shard)
        return module


def shard_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the attention of ``model`` by heads over the ranks of a mesh in place; return ``model``.

    The parameters of the first rank are used. ``state_dict`` then has DTensors under the same
    names, which ``torch.distributed.checkpoint`` saves and loads with any number of ranks. Dropout
    is as in one process if all ranks use the same seed. Example: ``shard_heads(model,
    init_device_mesh("cpu", (2,)))``. All other modules stay whole on every rank; to shard the MLPs
    of a ``LanguageModel`` call ``parallelize_module( model, mesh, {"blocks.*.mlp.0":
    ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()})``.

    Raises ValueError, before any change, for a number of heads that is not a multiple of the number
    of ranks, for a mesh of several axes, and for a model without attention.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one axis, got {mesh.ndim}: use, for example, mesh['heads']")
    layers = [module for module in model.modules() if isinstance(module, MessagePassingAttention)]
    if not layers:
        raise ValueError(f"model must have a MessagePassingAttention, got {type(model).__name__}")
    for layer in layers:
        _check_heads(layer.heads, mesh.size())
    for layer in layers:
        parallelize_module(layer, mesh, HeadwiseParallel())
    return model


@dataclass(frozen=True)
class HeadShard:
    """The heads of one rank: ``num_heads`` of ``total_heads``, from ``first_head`` on."""

    mesh: DeviceMesh
    first_head: int
    num_heads: int
    total_heads: int

    @classmethod
    def of(cls, heads: nn.Module, mesh: DeviceMesh) -> HeadShard:
        total_heads = _check_heads(heads, mesh.size())
        num_heads = total_heads // mesh.size()
        return cls(mesh, mesh.get_local_rank() * num_heads, num_heads, total_heads)

    def replicate(self, x: Tensor) -> Tensor:
        """Return ``x``, which all ranks have; its gradient is summed over the ranks."""
        replica = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return replica.to_local(grad_placements=[Partial()])

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks; every ``x`` gets the gradient of the sum."""
        summand = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return summand.redistribute(placements=[Replicate()]).to_local()

    def copy(self, module: Any) -> Any:
        """Copy a module for one call, with this rank's parameters; threads then share no state."""
        copy = object.__new__(type(module))
        copy.__dict__.update(module.__dict__)
        parameters, modules = module._parameters, module._modules
        copy.__dict__["_parameters"] = {n: self._local_parameter(n, x) for n, x in parameters.items()}
        copy.__dict__["_modules"] = {name: x if x is None else self.copy(x) for name, x in modules.items()}
        # A chain consists of modules, which have been copied by now, and of functions.
        if isinstance(module, chain):
            copies = dict(zip(map(id, module.learned), copy.learned, strict=True))
            copy.__dict__["mods"] = tuple(copies.get(id(mod), mod) for mod in module.mods)
        # Merged heads store `num_heads`; other forms compute it from their parameters.
        if "num_heads" in copy.__dict__:
            copy.__dict__["num_heads"] = self.num_heads
        return copy

    def _local_parameter(self, name: str, parameter: Tensor | None) -> Tensor | None:
        if not isinstance(parameter, DTensor):
            return parameter
        local = parameter.to_local()
        return local if name == OUTPUT_BIAS or parameter.placements[0].is_shard() else self.replicate(local)


def _select_heads(graph: TokenGraph, first_head: int, num_heads: int) -> TokenGraph:
    name = f"{graph.name}, heads {first_head} to {first_head + num_heads - 1}"
    rule = partial(_shift_heads, graph.edges.contains, first_head)
    fields: dict[str, Any] = {"edges": RuleEdges(rule), "heads": num_heads, "name": name}
    if isinstance(graph, RankGraph):
        fields["whole"] = memoized(_select_heads, graph.whole, first_head, num_heads)
    return replace(graph, **fields)


def _shift_heads(rule: Any, first_head: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return rule(b, h + first_head, dst, src)  # type: ignore[no-any-return]


class _ShardedLayer:
    # A mixin for layers, which computes the heads of this rank from the graph and bias of all heads.
    shard: HeadShard

    def make_call(
        self, x_src: Tensor, x_dst: Tensor, graph: TokenGraph, bias: Any, wants_weights: bool, **edges: Any
    ) -> AttentionCall:
        shard, total_heads = self.shard, self.shard.total_heads
        if edges:
            raise NotImplementedError("a shard of heads has no maps of edges: use the layer on one rank")
        if graph.heads is not None:
            if graph.heads != total_heads:
                raise ValueError(f"graph must have the layer's {total_heads} heads or none, got {graph!r}")
            graph = memoized(_select_heads, graph, shard.first_head, shard.num_heads)
        if bias is not None:
            bias = shard.replicate(bias)
            has_heads = bias.dim() >= 2 and bias.shape[-2] == total_heads
            bias = bias.narrow(-2, shard.first_head, shard.num_heads) if has_heads else bias
        call: AttentionCall = super().make_call(x_src, x_dst, graph, bias, wants_weights)  # type: ignore[misc]
        call = replace(call, first_head=shard.first_head)
        if not isinstance(call.score_mod, nn.Module):
            return call
        # This replicates the parameters of the score_mod once, however often a backend calls it.
        mod = shard.copy(call.score_mod)
        return replace(call, score_mod=mod, q=keep_in_graph(call.q, *mod.parameters()))

    def run_call(self, call: AttentionCall, batched: bool, graph_is_temporary: bool) -> tuple[Tensor, Any]:
        update, weights = super().run_call(call, batched, graph_is_temporary)  # type: ignore[misc]
        if call.with_lse:
            placements = [Shard(weights.dim() - 1)]
            weights = DTensor.from_local(weights, self.shard.mesh, placements, run_check=False).full_tensor()
        return update, weights


class _ShardedHeads:
    # A mixin for heads, which computes only the heads of this rank and returns the update of all heads.
    shard: HeadShard

    @property
    def first_head(self) -> int:
        # A cache adds this to the index of a local head before it calls the score_mod.
        return self.shard.first_head

    def reset_parameters(self) -> None:
        # The random parameters would depend on the number of ranks.
        raise NotImplementedError("sharded heads cannot draw parameters: draw them before, or load them")

    def receive(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        local_heads = self.shard.copy(self)
        return super(_ShardedHeads, local_heads).receive(self.shard.replicate(x), positions)  # type: ignore[misc,no-any-return]

    def send(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        local_heads = self.shard.copy(self)
        return super(_ShardedHeads, local_heads).send(self.shard.replicate(x), positions)  # type: ignore[misc,no-any-return]

    def collect(self, z: Tensor) -> Tensor:
        local_heads = self.shard.copy(self)
        update: Tensor = super(_ShardedHeads, local_heads).sum_of_heads(z)  # type: ignore[misc]
        return arrays.add_bias(self.shard.all_reduce(update), local_heads.b_O)


class _ShardedScoreMod:
    # A mixin for learned score_mods, which every rank has whole and whose gradients are summed.
    shard: HeadShard

    def forward(self, *arguments: Any) -> Tensor:
        local_mod = self.shard.copy(self)
        return super(_ShardedScoreMod, local_mod).forward(*arguments)  # type: ignore[misc,no-any-return]


def _change_class(module: Any, mixin: type, shard: HeadShard) -> None:
    """Change the class of a module to a subclass that has the mixin, under the same name."""
    cls = type(module)
    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    module.__class__ = type(cls.__name__, (mixin, cls), attributes)
    module.shard = shard


def _check_heads(heads: nn.Module, num_ranks: int) -> int:
    """Return the number of query heads, after checking that the ranks can share them."""
    kind = type(heads).__name__
    if not isinstance(heads, Heads):
        raise TypeError(f"sharded heads must be standard, factored, merged or latent, got {kind}")
    if isinstance(heads, _ShardedHeads):
        raise ValueError(f"these {kind} are sharded already: shard a layer or a model once")
    heads = heads.standard if isinstance(heads, FactoredHeads) else heads
    if isinstance(heads, StandardHeads) and heads.W_O is None:
        raise ValueError("heads without W_O are concatenated, but only a sum can be sharded over ranks")
    num_kv_heads = heads.num_kv_heads if isinstance(heads, StandardHeads) else heads.num_heads
    for name, count in (("num_heads", heads.num_heads), ("num_kv_heads", num_kv_heads)):
        if count % num_ranks:
            raise ValueError(f"{name} must be a multiple of the {num_ranks} ranks, got {count}")
    return int(heads.num_heads)


def _shard_parameters(heads: Any, shard: HeadShard, src_rank: int | None) -> None:
    # Factored heads share the parameters of their standard form.
    if isinstance(heads, FactoredHeads):
        _shard_parameters(heads.standard, shard, src_rank)
    else:
        for module in (heads, *heads.children()):
            _distribute(module, shard.mesh, src_rank)
    _change_class(heads, _ShardedHeads, shard)


def _distribute(module: nn.Module, mesh: DeviceMesh, src_rank: int | None) -> None:
    # Parameters with other names, of norms and score_mods, are shared by all heads.
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement: Placement = Shard(0) if name in HEAD_PARAMETERS else Replicate()
        tensor = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=src_rank)
        module._parameters[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
