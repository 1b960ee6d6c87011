"""Heads as shards: the update is a sum over heads, so each rank sums its own and one all-reduce adds them up.

The weights become DTensors under their old names: checkpoints, optimizers and FSDP2 see whole tensors. For
the length of a call the heads are a copy of themselves with the part of its rank, so the same code computes
some heads or all. What the heads of all ranks share (states, norms, a learned score_mod, keys and values
where one of them serves several ranks) enters as a copy whose gradients are summed. The sharded layer, heads
and score_mod are subclasses made here; the modules they derive from know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from gnn_attention._support.shapes import Tensor
from gnn_attention.backends.call import AttentionCall
from gnn_attention.distributed.collectives import keep_in_graph
from gnn_attention.distributed.rank_graph import RankGraph
from gnn_attention.graph import TokenGraph, memoized
from gnn_attention.graph.intervals.arithmetic import evaluate
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads, arrays
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.lazy import LazyHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.score_mods import ScoreMod, chain

Heads = StandardHeads | FactoredHeads | MergedHeads | LatentHeads

# parameters whose first axis is that of query heads, or of key/value heads
OF_QUERIES = ("W_Q", "b_Q", "W_O", "pattern", "message", "W_UQ", "W_QR", "W_UK", "W_UV")
OF_KEYS = ("W_K", "W_V", "b_K", "b_V")
AFTER_THE_SUM = "b_O"  # added once, to what the all-reduce gives


class HeadwiseParallel(ParallelStyle):
    """The style of ``parallelize_module`` for :class:`MessagePassingAttention`: ``H / n`` neighbouring heads
    a rank.

    ``update = all_reduce(sum over own heads of weighted messages) + b_O``; states go in and come out whole on
    every rank. All forms of heads, score_mods (at the numbers the heads have in the whole), per-edge bias
    (for all heads, or for one), graphs that differ by head and dropout are those of one process; weights are
    gathered. Key/value heads go with the query heads they serve; where one serves several ranks, each of
    these computes it. Decode with ``layer.decode`` or ``model.proceed``: ``cache.update`` of the heads alone
    numbers those of a rank from 0.

    Raises ValueError for heads that do not go into as many parts, or groups (GQA) that would be cut;
    TypeError for a module that is no attention layer, or heads without parameters yet.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, the two conjugate operators around the heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MessagePassingAttention):
            raise TypeError(f"HeadwiseParallel is for MessagePassingAttention, got {type(module).__name__}")
        shard = HeadShard.of(module.heads, device_mesh)
        _shard_parameters(module.heads, shard, self.src_data_rank)
        for inner in module.score_mod.modules() if isinstance(module.score_mod, nn.Module) else ():
            if any(True for _ in inner.parameters()):
                replicated = dict.fromkeys(_own_parameters(inner), Replicate())
                _distribute(inner, replicated, device_mesh, self.src_data_rank)
                _derive(inner, _ShardedScoreMod, shard)
        _derive(module, _ShardedLayer, shard)
        return module


def heads_plan(model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """The plan for ``parallelize_module``: every attention layer by heads, every MLP by hidden channels.

    An MLP is a ``Sequential`` called ``mlp`` of a linear layer, an activation and a linear layer, as in
    ``model.Block``; other MLPs stay whole on every rank. Raises ValueError where heads or groups do not go
    into ``ranks`` parts.

    >>> from gnn_attention.model import Config, LanguageModel
    >>> for name, style in heads_plan(LanguageModel(Config(300, num_layers=1)), ranks=2).items():
    ...     print(name, type(style).__name__)
    blocks.0.attention HeadwiseParallel
    blocks.0.mlp.0 ColwiseParallel
    blocks.0.mlp.2 RowwiseParallel
    """
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, MessagePassingAttention):
            _checked_sizes(module.heads, ranks)
            plan[name] = HeadwiseParallel()
        elif name.rpartition(".")[2] == "mlp" and (width := _hidden_width(module)) and width % ranks == 0:
            plan |= {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel()}
    return dict(sorted(plan.items()))


def shard_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """``model`` itself, its attention and MLPs sharded over the ranks of a mesh of one axis by
    :func:`heads_plan`.

    The first rank's weights are taken. ``state_dict`` then holds DTensors under the same names, which
    ``torch.distributed.checkpoint`` saves and loads at any number of ranks. Dropout is that of one process
    where all ranks seed torch's generator alike. Two lines: ``mesh = init_device_mesh("cpu", (2,))`` and
    ``shard_heads(model, mesh)``.

    Raises as :func:`heads_plan` does, before anything is changed, and ValueError for a mesh of several axes
    or a model without attention.
    """
    if mesh.ndim != 1:
        advice = "take the one of the heads, for example mesh['heads']"
        raise ValueError(f"mesh must have one axis, got {mesh.ndim}; {advice}")
    plan = heads_plan(model, mesh.size())
    if not plan:
        kind = type(model).__name__
        raise ValueError(f"model has no MessagePassingAttention: expected one at least in {kind}")
    return parallelize_module(model, mesh, plan[""] if list(plan) == [""] else plan)


def _hidden_width(mlp: nn.Module) -> int:
    """The hidden width of ``Sequential(Linear, activation, Linear)``; 0 for another module."""
    first, last = (mlp[0], mlp[-1]) if isinstance(mlp, nn.Sequential) and len(mlp) == 3 else (None, None)
    return first.out_features if isinstance(first, nn.Linear) and isinstance(last, nn.Linear) else 0


@dataclass(frozen=True)
class HeadShard:
    """``count`` of ``total`` query heads from ``first`` on, with their key/value heads."""

    mesh: DeviceMesh
    first: int
    count: int
    total: int
    kv_first: int
    kv_count: int

    @classmethod
    def of(cls, heads: nn.Module, mesh: DeviceMesh) -> HeadShard:
        """The part of this rank; raises as :class:`HeadwiseParallel` does."""
        ranks, rank = mesh.size(), mesh.get_local_rank()
        total, group = _checked_sizes(heads, ranks)
        count = total // ranks
        return cls(mesh, rank * count, count, total, rank * count // group, max(1, count // group))

    def enter(self, x: Tensor) -> Tensor:
        """``x``, which is the same on all ranks; backward, the sum of all ranks' gradients."""
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; backward, the gradient as it is."""
        whole = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local()

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x`` concatenated along the last axis, that of the heads."""
        return DTensor.from_local(x, self.mesh, [Shard(x.dim() - 1)], run_check=False).full_tensor()

    def graph(self, graph: TokenGraph) -> TokenGraph:
        """The graph of these heads: ``graph`` itself where it is the same for all."""
        if graph.heads is None:
            return graph
        if graph.heads != self.total:
            expected = f"the layer has {self.total} over all ranks"
            raise ValueError(f"{graph!r} differs by heads ({graph.heads}), but {expected}")
        part: TokenGraph = memoized(_graph_of_heads, graph, self.first, self.count)
        return part

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """The bias of these heads, from one that is the same on all ranks, for each head or for all."""
        if bias is None:
            return None
        bias = self.enter(bias)
        by_head = bias.dim() >= 2 and bias.shape[-2] == self.total
        return bias.narrow(-2, self.first, self.count) if by_head else bias

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
        if name == AFTER_THE_SUM or parameter.placements[0].is_shard():
            return local
        shared = self.enter(local)
        return shared[self.kv_first : self.kv_first + self.kv_count] if name in OF_KEYS else shared


def _graph_of_heads(graph: TokenGraph, first: int, count: int) -> TokenGraph:
    name = f"{graph.name}, heads {first} to {first + count - 1}"
    more = (
        {"whole": memoized(_graph_of_heads, graph.whole, first, count)}
        if isinstance(graph, RankGraph)
        else {}
    )
    return replace(graph, rule=partial(_rule_from_head, graph.rule, first), heads=count, name=name, **more)


def _rule_from_head(rule: Any, first: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return evaluate(rule, b, h + first, dst, src)


def _score_from_head(mod: ScoreMod, first: int, score: Tensor, b: Tensor, h: Tensor, *ends: Tensor) -> Tensor:
    return mod(score, b, h + first, *ends)


class _ShardedLayer:
    """A :class:`MessagePassingAttention` of some heads, with graph, bias and options of the whole."""

    shard: HeadShard

    def decode(self, x: Tensor, cache: Any, layer: int = 0) -> Tensor:
        """As in the whole, with a score_mod at the numbers of these heads."""
        own: Any = self
        mod = None if own.score_mod is None else partial(_score_from_head, own.score_mod, self.shard.first)
        update: Tensor = cache.update(own.heads, x, layer, mod, backend=own.backend or "auto")
        return update

    def _call(
        self, x_src: Tensor, x_dst: Tensor, graph: TokenGraph, bias: Any, wants_weights: bool
    ) -> AttentionCall:
        shard, parent = self.shard, super()
        graph, bias = shard.graph(graph), shard.bias(bias)
        call: AttentionCall = parent._call(x_src, x_dst, graph, bias, wants_weights)  # type: ignore[attr-defined]
        call = replace(call, first_head=shard.first)
        if not isinstance(call.score_mod, nn.Module):
            return call
        # its parameters enter once a call: how often a backend calls a score_mod depends on the rank's graph
        mod = shard.copy(call.score_mod)
        return replace(call, score_mod=mod, q=keep_in_graph(call.q, *mod.parameters()))

    def _run(self, call: AttentionCall, batched: bool) -> tuple[Tensor, Any]:
        update, weights = super()._run(call, batched)  # type: ignore[misc]
        return update, self.shard.all_gather(weights) if call.with_lse else weights


class _ShardedHeads:
    """Some of the heads: states enter whole, the update leaves whole."""

    shard: HeadShard

    def reset_parameters(self) -> None:
        """NotImplementedError: the drawn numbers would depend on the number of ranks."""
        message = "heads that are shared out cannot draw their weights anew: draw them before, or load them"
        raise NotImplementedError(message)

    def receive(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """As in the whole, for this rank's heads."""
        own, x = self.shard.copy(self), self.shard.enter(x)
        q: Tensor = super(_ShardedHeads, own).receive(x, positions)  # type: ignore[misc]
        return q

    def send(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As in the whole, for this rank's heads."""
        own, x = self.shard.copy(self), self.shard.enter(x)
        k_v: tuple[Tensor, Tensor] = super(_ShardedHeads, own).send(x, positions)  # type: ignore[misc]
        return k_v

    def collect(self, z: Tensor) -> Tensor:
        """The update, of the heads of all ranks."""
        own = self.shard.copy(self)
        update: Tensor = super(_ShardedHeads, own).sum_of_heads(z)  # type: ignore[misc]
        return arrays.plus_bias(self.shard.all_reduce(update), own.b_O)


class _ShardedScoreMod:
    """A learned score_mod, whole on every rank, whose gradients are summed."""

    shard: HeadShard

    def forward(self, *arguments: Any) -> Tensor:
        """As in the whole."""
        own = self.shard.copy(self)
        score: Tensor = super(_ShardedScoreMod, own).forward(*arguments)  # type: ignore[misc]
        return score


def _derive(module: Any, mixed_in: type, shard: HeadShard) -> None:
    """Change the module's class to a subclass of the same name with the methods of ``mixed_in``."""
    cls = type(module)
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    module.__class__ = type(cls.__name__, (mixed_in, cls), body)
    module.shard = shard


def _checked_sizes(heads: nn.Module, ranks: int) -> tuple[int, int]:
    """The number of query heads, and how many of them share a key/value head."""
    if not isinstance(heads, Heads) or isinstance(heads, LazyHeads):
        kind = type(heads).__name__
        advice = "call the layer once"
        raise TypeError(f"heads that are shared out must have their parameters, got {kind}; {advice}")
    if isinstance(heads, _ShardedHeads):
        kind = type(heads).__name__
        raise ValueError(f"these {kind} are shared out already: once is enough, for a layer and for a model")
    standard = heads.standard if isinstance(heads, FactoredHeads) else heads
    if isinstance(standard, StandardHeads) and standard.W_O is None:
        reason = "are laid side by side, not summed: only a sum can be shared out over ranks"
        raise ValueError(f"heads without W_O {reason}")
    total = standard.num_heads
    group = total // standard.num_kv_heads if isinstance(standard, StandardHeads) else 1
    if total % ranks:
        raise ValueError(f"num_heads must be a multiple of the {ranks} ranks that share them, got {total}")
    if (total // ranks) % group and group % (total // ranks):
        raise ValueError(
            f"groups of {group} query heads, one for each of {total // group} key/value heads, would be cut "
            f"by {ranks} ranks of {total // ranks} heads; take a number of ranks that divides num_kv_heads, "
            "or is a multiple of it"
        )
    return total, group


def _shard_parameters(heads: Any, shard: HeadShard, source: int | None) -> None:
    """Make DTensors of the parameters; a factored form shares those of its standard form."""
    if isinstance(heads, FactoredHeads):
        _shard_parameters(heads.standard, shard, source)
    else:
        sizes = {name: part.shape[0] for name, part in _own_parameters(heads).items()}
        placements = {name: _placement(name, size, shard.mesh.size()) for name, size in sizes.items()}
        _distribute(heads, placements, shard.mesh, source)
        for norm in heads.children():
            _distribute(norm, dict.fromkeys(_own_parameters(norm), Replicate()), shard.mesh, source)
    _derive(heads, _ShardedHeads, shard)


def _placement(name: str, size: int, ranks: int) -> Placement:
    return Shard(0) if name in OF_QUERIES or (name in OF_KEYS and size % ranks == 0) else Replicate()


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _distribute(module: nn.Module, placements: Mapping[str, Placement], mesh: Any, source: Any) -> None:
    """Replace these parameters by DTensors, where modules, optimizers and checkpoints look for them."""
    for name, placement in placements.items():
        parameter = _own_parameters(module)[name]
        whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        module._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
