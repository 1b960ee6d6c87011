"""A task that a model can only solve along a graph with enough reach.

In the task NeighborsMatch the answer is ``depth`` hops away from the question in a binary tree. Along the
tree, a model with fewer layers never does better than chance. With ``depth`` layers, the information of all
leaves must pass through the states of two nodes; with a virtual node, question and answer must pass through
one state. Both take longer to learn than ``tree ** depth``, in which the root attends to every leaf.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean

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

_TEST_SAMPLES = 2048
_BATCH_SIZE = 64
_LEARNING_RATE = 3e-3
Log = Callable[[str], None]
Answers = Float[Tensor, "*batch nodes num_answers"]


@dataclass(frozen=True, eq=False)
class NeighboursMatch:
    """Samples on one tree: node 0 is the root, node i has the children ``2 i + 1`` and ``2 i + 2``.

    ``keys`` and ``labels`` count from 1; 0 marks a node without key or label. ``answers`` count from 0.
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
        """The one-hot keys and labels of each node, ``leaves + num_labels`` features; zeros for none."""
        keys = functional.one_hot(self.keys, int(self.leaves.sum()) + 1)
        labels = functional.one_hot(self.labels, self.num_labels + 1)
        return torch.cat([keys[..., 1:], labels[..., 1:]], -1).float()


def neighbours_match(depth: int, samples: int, num_labels: int = 4, seed: int = 0) -> NeighboursMatch:
    """Draw samples of NeighborsMatch: the answer is the label of the leaf with the same key as the root.

    The keys of the ``2 ** depth`` leaves are a random permutation, and the root has one of them. Labels are
    uniform and independent, so a guess is right with probability ``1 / num_labels``. The edges of the
    complete binary tree run in both directions, with self loops. ValueError for a depth below 1.

    Source: Alon and Yahav 2021 (arXiv 2006.05205), section 4.1, with the keys as features as in their code.

    >>> task = neighbours_match(depth=2, samples=3)
    >>> task.graph.num_dst, task.x.shape, task.leaves.int().tolist()
    (7, torch.Size([3, 7, 8]), [0, 0, 0, 1, 1, 1, 1])
    >>> is_match = task.keys[:, 1:] == task.keys[:, :1]
    >>> (task.labels[:, 1:][is_match] - 1).tolist() == task.answers.tolist()
    True
    """
    depth, samples = checks.size("depth", depth, 1), checks.size("samples", samples)
    generator = torch.Generator().manual_seed(checks.size("seed", seed))
    return _draw(_tree(depth), samples, checks.size("num_labels", num_labels, 1), generator)


class Reader(nn.Module):
    """A small graph transformer with ``layers`` layers of attention and MLP, and an answer at every node.

    ``x`` is ``[N, features]`` or ``[B, N, features]``. The graph has ``N + virtual`` nodes: ``virtual`` nodes
    with learned states follow those of the input. ValueError if ``width`` is not a multiple of ``num_heads``
    or a size is below 1.

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
        layer_heads = (StandardHeads(width, num_heads, bias=True) for _ in numbers)
        self.attention = nn.ModuleList(
            MessagePassingAttention(heads, backend="auto") for heads in layer_heads
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in numbers
        )
        self.answer = nn.Linear(width, checks.size("num_answers", num_answers, 1))

    def forward(self, x: Float[Tensor, "*batch nodes features"], graph: TokenGraph) -> Answers:
        """Return the logits of the answers at every node of the input."""
        state = torch.cat([self.embed(x), self.virtual.expand(*x.shape[:-2], -1, -1)], dim=-2)
        for norm, attention, mlp in zip(self.norms, self.attention, self.mlp, strict=True):
            state = state + attention(norm(state), graph)
            state = state + mlp(state)
        logits: Tensor = self.answer(state[..., : x.shape[-2], :])
        return logits


@dataclass(frozen=True)
class Outcome:
    """The accuracy for each seed of models with ``layers`` layers; ``reaches`` if a leaf reaches the root."""

    graph: str
    layers: int
    reaches: bool
    accuracies: tuple[float, ...]


def compare(
    depth: int = 3, seeds: int = 3, steps: int = 300, num_labels: int = 4, log: Log | None = None
) -> list[Outcome]:
    """Train readers along the tree, along ``tree ** depth``, and along the tree with a virtual node.

    Each seed draws its own parameters, new samples for every step and its own ``2048`` test samples. ``log``
    is called with a line for every trained model. ValueError for numbers below 1.
    """
    tree = _tree(checks.size("depth", depth, 1))
    steps = checks.size("steps", steps, 1)
    seeds = checks.size("seeds", seeds, 1)
    outcomes = []
    for name, graph, layers in _cases(tree, depth):
        accuracies: list[float] = []
        for seed in range(seeds):
            accuracies.append(_train(tree, graph, layers, num_labels, steps, seed))
            if log is not None:
                log(f"{name}, layers {layers}, seed {seed}: {accuracies[-1]:.3f}")
        outcomes.append(Outcome(name, layers, _reaches_leaf(tree, graph, layers), tuple(accuracies)))
    return outcomes


def _cases(tree: TokenGraph, depth: int) -> list[tuple[str, TokenGraph, int]]:
    star = algebra.tokens.extend(tree, 1, "both", "self")
    cases = [("the tree", tree, layers) for layers in sorted({1, depth})]
    cases.append((f"the tree ** {depth}", tree**depth, 1))
    return cases + [("with a virtual node", star, layers) for layers in (1, 2, 3)]


def table(outcomes: list[Outcome]) -> str:
    """Return a line of text for each outcome.

    >>> tree = Outcome("the tree", 1, False, (0.25, 0.27))
    >>> print(table([tree, Outcome("the tree ** 3", 1, True, (1.0, 1.0))]))
    graph          layers  reaches leaf  accuracy, mean (lowest to highest of 2 seeds)
    the tree            1            no   26.0 % ( 25.0 to  27.0)
    the tree ** 3       1           yes  100.0 % (100.0 to 100.0)
    """
    width = max(len(outcome.graph) for outcome in outcomes)
    count = len(outcomes[0].accuracies)
    lines = [f"{'graph':{width}}  layers  reaches leaf  accuracy, mean (lowest to highest of {count} seeds)"]
    for outcome in outcomes:
        low, high = 100 * min(outcome.accuracies), 100 * max(outcome.accuracies)
        shares = f"{100 * fmean(outcome.accuracies):5.1f} % ({low:5.1f} to {high:5.1f})"
        reaches = "yes" if outcome.reaches else "no"
        lines.append(f"{outcome.graph:{width}}  {outcome.layers:6}  {reaches:>12}  {shares}")
    return "\n".join(lines)


def _tree(depth: int) -> TokenGraph:
    count = 2 ** (depth + 1) - 1
    node = torch.arange(count, device="cpu")
    child, parent = node[1:], (node[1:] - 1) // 2
    edges = torch.stack([torch.cat([node, child, parent]), torch.cat([node, parent, child])])
    return TokenGraph.from_edges(edges, count, name=f"binary_tree({depth})")


def _draw(tree: TokenGraph, samples: int, num_labels: int, generator: torch.Generator) -> NeighboursMatch:
    count, leaves = tree.num_dst, (tree.num_dst + 1) // 2
    keys, labels = (torch.zeros(samples, count, dtype=torch.int64) for _ in range(2))
    keys[:, -leaves:] = torch.rand(samples, leaves, generator=generator).argsort(dim=1) + 1
    labels[:, -leaves:] = torch.randint(1, num_labels + 1, (samples, leaves), generator=generator)
    leaf = torch.randint(leaves, (samples, 1), generator=generator) + count - leaves
    keys[:, :1] = keys.gather(1, leaf)
    return NeighboursMatch(tree, keys, labels, labels.gather(1, leaf).squeeze(1) - 1, num_labels)


def _reaches_leaf(tree: TokenGraph, graph: TokenGraph, layers: int) -> bool:
    senders = analyse.receptive_field(graph, 0, layers)
    return bool(((senders >= tree.num_dst // 2) & (senders < tree.num_dst)).any())


def _train(tree: TokenGraph, graph: TokenGraph, layers: int, num_labels: int, steps: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    features = (tree.num_dst + 1) // 2 + num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Reader(features, num_labels, layers, virtual=graph.num_dst - tree.num_dst)
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        task = _draw(tree, _BATCH_SIZE, num_labels, generator)
        loss = functional.cross_entropy(model(task.x, graph)[:, 0], task.answers)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        task = _draw(tree, _TEST_SAMPLES, num_labels, generator)
        return float((model(task.x, graph)[:, 0].argmax(-1) == task.answers).float().mean())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command ``reach``."""
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--depth", type=int, default=3, help=f"hops from the root to the leaves {default}")
    add("--seeds", type=int, default=3, help=f"models to train for each graph {default}")
    add("--steps", type=int, default=300, help=f"batches to train each model on {default}")
    atomic_files.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Train the models and print the table."""
    with Progress("reach", unit="models") as bar:
        bar.expect(args.seeds * len(_cases(_tree(checks.size("depth", args.depth, 1)), args.depth)))
        outcomes = compare(args.depth, args.seeds, args.steps, log=lambda line: bar.advance(1, line))
    atomic_files.write_json(args.json, [*map(asdict, outcomes)], table(outcomes))
