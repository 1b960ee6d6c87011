"""Heads as shards: the update is a sum over heads, so each rank sums the messages of its own and one all-reduce finishes.

The weights become DTensors under their old names: checkpoints, optimizers and FSDP2 see whole tensors. For the length of a call
the heads are a copy of themselves that holds the part of its rank, so the code that computes all heads computes these. What the
heads of all ranks share (states, norms, a learned score_mod, keys and values where one of them serves several ranks) goes in as a
copy whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gnn_attention._support.shapes import Tensor
from gnn_attention.distributed.collectives import tied
from gnn_attention.distributed.rank_graph import RankGraph
from gnn_attention.graph import TokenGraph, kept
from gnn_attention.graph.intervals.arithmetic import ask
from gnn_attention.heads import FactoredHeads, MergedHeads, StandardHeads, arrays
from gnn_attention.heads.latent import LatentHeads
from gnn_attention.heads.lazy import LazyHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.score_mods import ScoreMod, chain

__all__ = ["HeadwiseParallel", "heads_plan", "shard_heads"]

Heads = StandardHeads | FactoredHeads | MergedHeads | LatentHeads

OF_QUERIES = ("W_Q", "b_Q", "W_O", "pattern", "message", "W_UQ", "W_QR", "W_UK", "W_UV")  # led by the axis of query heads
OF_KEYS = ("W_K", "W_V", "b_K", "b_V")  # led by the axis of key/value heads
AFTER_THE_SUM = "b_O"  # added once, to what the all-reduce gives


class HeadwiseParallel(ParallelStyle):
    """The style of ``parallelize_module`` for :class:`MessagePassingAttention`: each of n ranks has ``H / n`` neighbouring heads.

    ``update = all_reduce(sum over own heads of weighted messages) + b_O``; states go in and come out whole on every rank. All
    forms of heads, score_mods (which are told the numbers the heads have in the whole), per-edge bias (given for all heads, or
    for one), graphs that differ by head and dropout are those of one process; weights asked for are gathered. Key/value heads
    are dealt out with the query heads they serve; where one serves several ranks, each of these computes it.

    Raises ValueError for heads that do not go into as many parts, or groups (GQA) that would be cut; TypeError for a module that
    is no attention layer, or heads without parameters yet.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, the two conjugate operators before and after the heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MessagePassingAttention):
            raise TypeError(f"HeadwiseParallel is for MessagePassingAttention, got {type(module).__name__}")
        shard = HeadShard.of(module.heads, device_mesh)
        _share_out(module.heads, shard, self.src_data_rank)
        for inner in module.score_mod.modules() if isinstance(module.score_mod, nn.Module) else ():
            if any(True for _ in inner.parameters()):
                _spread(inner, dict.fromkeys(_names(inner), Replicate()), device_mesh, self.src_data_rank)
                _become(inner, _ScoreModOnOneRank, shard)
        return module


def heads_plan(model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """The plan for ``parallelize_module``: every attention layer by heads, every MLP by hidden channels.

    An MLP is a ``Sequential`` called ``mlp`` of a linear layer, an activation and a linear layer, as in ``model.Block``.

    Raises ValueError where heads or groups do not go into ``ranks`` parts; MLPs that do not stay whole on every rank.

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
        elif name.rpartition(".")[2] == "mlp" and _hidden(module) and _hidden(module) % ranks == 0:
            plan |= {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel()}
    return dict(sorted(plan.items()))


def shard_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """``model`` itself, its attention and MLPs shared out over the ranks of a mesh of one axis by :func:`heads_plan`.

    The first rank's weights are taken. ``state_dict`` then holds DTensors under the same names, which
    ``torch.distributed.checkpoint`` saves and loads at any number of ranks. Dropout is that of one process where all ranks seed
    torch's generator alike. Two lines start it: ``mesh = init_device_mesh("cpu", (2,))`` and ``shard_heads(model, mesh)``.

    Raises as :func:`heads_plan` does, before anything is changed, and ValueError for a mesh of several axes or a model without
    attention.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one axis, got {mesh.ndim}; take the one of the heads, for example mesh['heads']")
    plan = heads_plan(model, mesh.size())
    if not plan:
        raise ValueError(f"model has no MessagePassingAttention: expected one at least in {type(model).__name__}")
    whole = plan[""] if list(plan) == [""] else plan
    return parallelize_module(model, mesh, whole)


def _hidden(mlp: nn.Module) -> int:
    """The hidden width of ``Sequential(Linear, activation, Linear)``; 0 for another module."""
    first, last = (mlp[0], mlp[-1]) if isinstance(mlp, nn.Sequential) and len(mlp) == 3 else (None, None)
    return first.out_features if isinstance(first, nn.Linear) and isinstance(last, nn.Linear) else 0


# -- the heads of one rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadShard:
    """``count`` of ``total`` heads from ``first`` on, which hear ``kv_count`` key/value heads from ``kv_first`` on."""

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

    # -- values that pass between the ranks

    def entering(self, x: Tensor) -> Tensor:
        """``x``, which is the same on all ranks; backward, the sum of all ranks' gradients."""
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def summed(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; backward, the gradient as it is."""
        whole = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local()

    def gathered(self, x: Tensor) -> Tensor:
        """All ranks' ``x`` side by side along the last axis, that of the heads."""
        return DTensor.from_local(x, self.mesh, [Shard(x.dim() - 1)], run_check=False).full_tensor()

    # -- a rank's part of what is given for all heads

    def graph(self, graph: TokenGraph) -> TokenGraph:
        """The graph of these heads: ``graph`` itself where it is the same for all."""
        if graph.heads is None:
            return graph
        if graph.heads != self.total:
            raise ValueError(f"{graph!r} differs by heads ({graph.heads}), but the layer has {self.total} over all ranks")
        part: TokenGraph = kept(_graph_of_heads, graph, self.first, self.count)
        return part

    def score_mod(self, mod: ScoreMod | None) -> ScoreMod | None:
        """A score_mod that is told the numbers of these heads in the whole."""
        return None if mod is None else partial(_of_later_heads, mod, self.first)

    def entered(self, mod: ScoreMod | None, q: Tensor) -> tuple[ScoreMod | None, Tensor]:
        """A learned score_mod whose parameters came in once, for all of a call, and ``q``, which ties the call to them.

        How often a backend asks a score_mod depends on the graph of a rank's heads; how often gradients are summed must not.
        """
        if not isinstance(mod, nn.Module):
            return mod, q
        here = self.here(mod)
        return here, tied(q, *here.parameters())

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """A per-edge bias of these heads, from one that is the same on all ranks, for each head or for all."""
        if bias is None:
            return None
        bias = self.entering(bias)
        by_head = bias.dim() >= 2 and bias.shape[-2] == self.total
        return bias.narrow(-2, self.first, self.count) if by_head else bias

    # -- a rank's part of the parameters

    def here(self, module: Any) -> Any:
        """The module with this rank's part of its parameters: a copy for one call, so that threads do not meet."""
        twin = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        twin.__dict__["_parameters"] = {name: self._view(name, part) for name, part in module._parameters.items()}
        twin.__dict__["_modules"] = {name: None if inner is None else self.here(inner) for name, inner in module._modules.items()}
        if isinstance(module, chain):  # whose links are modules, or functions
            learned = dict(zip(map(id, module.learned), twin.learned, strict=True))
            twin.__dict__["mods"] = tuple(learned.get(id(mod), mod) for mod in module.mods)
        if "num_heads" in twin.__dict__:  # the merged form says it, the others read it off their parameters
            twin.__dict__["num_heads"] = self.count
        return twin

    def _view(self, name: str, parameter: Tensor | None) -> Tensor | None:
        """What a call sees of a parameter."""
        if not isinstance(parameter, DTensor):
            return parameter
        local = parameter.to_local()
        if name == AFTER_THE_SUM or parameter.placements[0].is_shard():
            return local
        shared = self.entering(local)
        return shared[self.kv_first : self.kv_first + self.kv_count] if name in OF_KEYS else shared


class _OnOneRank:
    """What changes in heads of which a rank has a part: what comes in and what goes out."""

    shard: HeadShard

    def reset_parameters(self) -> None:
        """NotImplementedError: what is drawn would depend on the number of ranks."""
        raise NotImplementedError("heads that are shared out cannot draw their weights anew: draw them before, or load them")

    def receive(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """As in the whole, for this rank's heads."""
        here, x = self.shard.here(self), self.shard.entering(x)
        q: Tensor = super(_OnOneRank, here).receive(x, positions)  # type: ignore[misc]
        return q

    def send(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As in the whole, for this rank's heads."""
        here, x = self.shard.here(self), self.shard.entering(x)
        sent: tuple[Tensor, Tensor] = super(_OnOneRank, here).send(x, positions)  # type: ignore[misc]
        return sent

    def collect(self, z: Tensor) -> Tensor:
        """The update, of the heads of all ranks."""
        here = self.shard.here(self)
        update: Tensor = super(_OnOneRank, here).sum_of_heads(z)  # type: ignore[misc]
        return arrays.plus_bias(self.shard.summed(update), here.b_O)


class _ScoreModOnOneRank:
    """A learned score_mod, whole on every rank, whose gradients are summed."""

    shard: HeadShard

    def forward(self, *arguments: Any) -> Tensor:
        """As in the whole."""
        score: Tensor = super(_ScoreModOnOneRank, self.shard.here(self)).forward(*arguments)  # type: ignore[misc]
        return score


def _later_heads(graph_rule: Any, first: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return ask(graph_rule, b, h + first, dst, src)


def _of_later_heads(mod: ScoreMod, first: int, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return mod(score, b, h + first, dst, src)


def _graph_of_heads(graph: TokenGraph, first: int, count: int) -> TokenGraph:
    name = f"{graph.name}, heads {first} to {first + count - 1}"
    more = {"whole": kept(_graph_of_heads, graph.whole, first, count)} if isinstance(graph, RankGraph) else {}
    return replace(graph, rule=partial(_later_heads, graph.rule, first), heads=count, name=name, **more)


# -- checks -----------------------------------------------------------------------------------------------------------


def _checked_sizes(heads: nn.Module, ranks: int) -> tuple[int, int]:
    """All query heads, and how many of them share a key/value head."""
    if not isinstance(heads, Heads) or isinstance(heads, LazyHeads):
        raise TypeError(f"heads that are shared out must have their parameters, got {type(heads).__name__}; call the layer once")
    if hasattr(heads, "shard"):
        raise ValueError(f"these {type(heads).__name__} are shared out already: once is enough, for a layer and for a model")
    standard = heads.standard if isinstance(heads, FactoredHeads) else heads
    if isinstance(standard, StandardHeads) and standard.W_O is None:
        raise ValueError("heads without W_O are laid side by side, not summed: only a sum can be shared out over ranks")
    total = standard.num_heads
    group = total // standard.num_kv_heads if isinstance(standard, StandardHeads) else 1
    if total % ranks:
        raise ValueError(f"num_heads must be a multiple of the {ranks} ranks that share them, got {total}")
    if (total // ranks) % group and group % (total // ranks):
        raise ValueError(
            f"groups of {group} query heads, one for each of {total // group} key/value heads, would be cut by {ranks} ranks of "
            f"{total // ranks} heads; take a number of ranks that divides num_kv_heads, or is a multiple of it"
        )
    return total, group


# -- parameters as DTensors -------------------------------------------------------------------------------------------


def _share_out(heads: Any, shard: HeadShard, source: int | None) -> None:
    """Make the parameters DTensors, and ``heads`` those of one rank; a factored form shares its standard one's parameters."""
    if isinstance(heads, FactoredHeads):
        _share_out(heads.standard, shard, source)
    else:
        placements = {name: _placement(name, part.shape[0], shard.mesh.size()) for name, part in _names(heads).items()}
        _spread(heads, placements, shard.mesh, source)
        for norm in heads.children():
            _spread(norm, dict.fromkeys(_names(norm), Replicate()), shard.mesh, source)
    _become(heads, _OnOneRank, shard)


def _placement(name: str, size: int, ranks: int) -> Placement:
    return Shard(0) if name in OF_QUERIES or (name in OF_KEYS and size % ranks == 0) else Replicate()


def _names(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are the module's own."""
    return dict(module.named_parameters(recurse=False))


def _spread(module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh, source: int | None) -> None:
    """Make DTensors of these parameters, where modules, optimizers and checkpoints look for them."""
    for name, placement in placements.items():
        parameter = _names(module)[name]
        whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        module._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _become(module: Any, mixed_in: type, shard: HeadShard) -> None:
    """Let the module do as ``mixed_in`` says, under its own name."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (mixed_in, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    module.shard = shard
