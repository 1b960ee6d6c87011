"""A question that only reach can answer, over several graphs.

In the task NeighborsMatch the answer is ``depth`` hops away in a binary tree. Over the tree with fewer layers
no training does better than chance. With ``depth`` layers all leaves must pass through the states of two
nodes; over a virtual node question and answer pass through one state: both take longer to learn than ``tree
** depth``, over which the root attends to every leaf at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from gnn_attention import algebra, analyse
from gnn_attention._support import atomic_files, checks
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention

__all__ = ["NeighboursMatch", "Outcome", "Reader", "compare", "neighbours_match", "table"]

_TESTED = 2048  # samples that a trained model is judged by
_BATCH = 64
_RATE = 3e-3
_Log = Callable[[str], None]
Answers = Float[Tensor, "*batch nodes num_answers"]


@dataclass(frozen=True, eq=False)
class NeighboursMatch:
    """Samples on one tree: node 0 is the root, ``2 i + 1`` and ``2 i + 2`` are the children of i.

    ``keys`` and ``labels`` are 0 where a node has none, else they count from 1. ``answers`` count from 0.
    """

    graph: TokenGraph
    keys: Int[Tensor, "samples nodes"]
    labels: Int[Tensor, "samples nodes"]
    answers: Int[Tensor, " samples"]
    num_labels: int

    @property
    def leaves(self) -> Bool[Tensor, " nodes"]:
        return torch.arange(self.graph.num_dst) >= self.graph.num_dst // 2

    @property
    def x(self) -> Float[Tensor, "samples nodes features"]:
        """Keys and labels, one-hot, concatenated, zeros for none: ``leaves + num_labels`` features."""
        sides = ((self.keys, int(self.leaves.sum())), (self.labels, self.num_labels))
        return torch.cat([functional.one_hot(side, count + 1)[..., 1:].float() for side, count in sides], -1)


def neighbours_match(depth: int, samples: int, num_labels: int = 4, seed: int = 0) -> NeighboursMatch:
    """NeighborsMatch on complete binary trees: the label of the leaf that has the root's key.

    Keys are a random permutation of the ``2 ** depth`` leaves, the root's is one of them, labels are drawn
    evenly and independently, so that a guess without the leaves answers ``1 / num_labels`` of the questions.
    The tree's edges run both ways, with self loops. ValueError for a depth or number below 1.

    Source: Alon and Yahav 2021 (arXiv 2006.05205), section 4.1, with the keys as features as in their code.

    >>> task = neighbours_match(depth=2, samples=3)
    >>> task.graph.num_dst, task.x.shape, task.leaves.int().tolist()
    (7, torch.Size([3, 7, 8]), [0, 0, 0, 1, 1, 1, 1])
    >>> found = task.keys[:, 1:] == task.keys[:, :1]
    >>> (task.labels[:, 1:][found] - 1).tolist() == task.answers.tolist()
    True
    """
    depth, samples = checks.size("depth", depth, 1), checks.size("samples", samples)
    generator = torch.Generator().manual_seed(checks.size("seed", seed))
    return _drawn(_tree(depth), samples, checks.size("num_labels", num_labels, 1), generator)


class Reader(nn.Module):
    """A small graph transformer with an answer at every node: ``layers`` blocks of attention and MLP.

    ``x`` is ``[N, features]`` or ``[B, N, features]``, the graph has ``N + virtual`` nodes: ``virtual`` more,
    with learned states, stand after those of the input. States have ``width`` channels. ValueError
    where sizes do not fit, are below 1, or width is no multiple of num_heads.

    >>> task = neighbours_match(depth=2, samples=3)
    >>> Reader(task.x.shape[-1], task.num_labels, layers=1)(task.x, task.graph**2).shape
    torch.Size([3, 7, 4])
    """

    def __init__(
        self,
        features: int,
        num_answers: int,
        layers: int = 1,
        width: int = 32,
        num_heads: int = 2,
        virtual: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(checks.size("features", features, 1), checks.size("width", width, 1))
        self.virtual = nn.Parameter(torch.randn(checks.size("virtual", virtual), width))
        numbers, hidden = range(checks.size("layers", layers, 1)), 2 * width
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in numbers)
        heads = (StandardHeads(width, num_heads, bias=True) for _ in numbers)
        self.attention = nn.ModuleList(MessagePassingAttention(each, backend="auto") for each in heads)
        mlp = ((nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in numbers)
        self.mlp = nn.ModuleList(nn.Sequential(nn.RMSNorm(width), *each) for each in mlp)
        self.answer = nn.Linear(width, checks.size("num_answers", num_answers, 1))

    def forward(self, x: Float[Tensor, "*batch nodes features"], graph: TokenGraph) -> Answers:
        """Logits of the answers at every node of the input."""
        state = torch.cat([self.embed(x), self.virtual.expand(*x.shape[:-2], -1, -1)], dim=-2)
        for norm, attention, mlp in zip(self.norms, self.attention, self.mlp, strict=True):
            state = state + attention(norm(state), graph)
            state = state + mlp(state)
        logits: Tensor = self.answer(state[..., : x.shape[-2], :])
        return logits


@dataclass(frozen=True)
class Outcome:
    """A graph with some layers: whether a leaf reaches the root, and one accuracy for each seed."""

    graph: str
    layers: int
    reaches: bool
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)


def compare(
    depth: int = 3, seeds: int = 3, steps: int = 300, num_labels: int = 4, log: _Log | None = None
) -> list[Outcome]:
    """Readers trained over the tree, over ``tree ** depth`` and with a virtual node.

    Each seed draws its own weights, its own fresh samples for every step and its own ``2048`` samples to be
    judged by. ``log`` is called with a line for every model that is done. ValueError for numbers below 1.
    """
    tree, steps = _tree(checks.size("depth", depth, 1)), checks.size("steps", steps, 1)
    outcomes, numbers, log = [], range(checks.size("seeds", seeds, 1)), log or (lambda line: None)
    for name, graph, layers in _plans(tree, depth):
        accuracies: list[float] = []
        for seed in numbers:
            accuracies.append(_trained(tree, graph, layers, num_labels, steps, seed))
            log(f"{name}, layers {layers}, seed {seed}: {accuracies[-1]:.3f}")
        outcomes.append(Outcome(name, layers, _reaches_leaf(tree, graph, layers), tuple(accuracies)))
    return outcomes


def _plans(tree: TokenGraph, depth: int) -> list[tuple[str, TokenGraph, int]]:
    star = algebra.tokens.extend(tree, 1, "both", "self")
    plans = [("the tree", tree, layers) for layers in sorted({1, depth})]
    plans.append((f"the tree ** {depth}", tree**depth, 1))
    return plans + [("with a virtual node", star, layers) for layers in (1, 2, 3)]


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as text, a line for each.

    >>> tree = Outcome("the tree", 1, False, (0.25, 0.27))
    >>> print(table([tree, Outcome("the tree ** 3", 1, True, (1.0, 1.0))]))
    graph          layers  reaches leaf  accuracy, mean (lowest to highest of 2 seeds)
    the tree            1            no   26.0 % ( 25.0 to  27.0)
    the tree ** 3       1           yes  100.0 % (100.0 to 100.0)
    """
    width = max(len(outcome.graph) for outcome in outcomes)
    count = len(outcomes[0].accuracies)
    lines = [f"{'graph':{width}}  layers  reaches leaf  accuracy, mean (lowest to highest of {count} seeds)"]
    for one in outcomes:
        mean, low, high = (100 * number for number in (one.mean, min(one.accuracies), max(one.accuracies)))
        reaches, shares = "yes" if one.reaches else "no", f"{mean:5.1f} % ({low:5.1f} to {high:5.1f})"
        lines.append(f"{one.graph:{width}}  {one.layers:6}  {reaches:>12}  {shares}")
    return "\n".join(lines)


def _tree(depth: int) -> TokenGraph:
    count = 2 ** (depth + 1) - 1
    node = torch.arange(count, device="cpu")
    child, parent = node[1:], (node[1:] - 1) // 2
    edges = torch.stack([torch.cat([node, child, parent]), torch.cat([node, parent, child])])
    return TokenGraph.from_edges(edges, count, name=f"binary_tree({depth})")


def _drawn(tree: TokenGraph, samples: int, num_labels: int, generator: torch.Generator) -> NeighboursMatch:
    count, leaves = tree.num_dst, (tree.num_dst + 1) // 2
    keys, labels = (torch.zeros(samples, count, dtype=torch.int64) for _ in range(2))
    keys[:, -leaves:] = torch.rand(samples, leaves, generator=generator).argsort(dim=1) + 1
    labels[:, -leaves:] = torch.randint(1, num_labels + 1, (samples, leaves), generator=generator)
    chosen = torch.randint(leaves, (samples, 1), generator=generator) + count - leaves
    keys[:, :1] = keys.gather(1, chosen)
    return NeighboursMatch(tree, keys, labels, labels.gather(1, chosen).squeeze(1) - 1, num_labels)


def _reaches_leaf(tree: TokenGraph, graph: TokenGraph, layers: int) -> bool:
    senders = analyse.receptive_field(graph, 0, layers)
    return bool(((senders >= tree.num_dst // 2) & (senders < tree.num_dst)).any())


def _trained(
    tree: TokenGraph, graph: TokenGraph, layers: int, num_labels: int, steps: int, seed: int
) -> float:
    generator, features = torch.Generator().manual_seed(seed), (tree.num_dst + 1) // 2 + num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Reader(features, num_labels, layers, virtual=graph.num_dst - tree.num_dst)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    for _ in range(steps):
        task = _drawn(tree, _BATCH, num_labels, generator)
        loss = functional.cross_entropy(model(task.x, graph)[:, 0], task.answers)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        task = _drawn(tree, _TESTED, num_labels, generator)
        return float((model(task.x, graph)[:, 0].argmax(-1) == task.answers).float().mean())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--depth", type=int, default=3, help=f"hops from the root to the leaves {shown}")
    add("--seeds", type=int, default=3, help=f"models to train for each graph {shown}")
    add("--steps", type=int, default=300, help=f"batches each learns from {shown}")
    atomic_files.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Train, and print the table."""
    with Progress("reach", unit="models") as shown:
        shown.expect(args.seeds * len(_plans(_tree(checks.size("depth", args.depth, 1)), args.depth)))
        outcomes = compare(args.depth, args.seeds, args.steps, log=lambda line: shown.advance(1, line))
    atomic_files.write_json(args.json, [*map(asdict, outcomes)], table(outcomes))
