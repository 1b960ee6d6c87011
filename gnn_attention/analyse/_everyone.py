"""Which tokens every token has received from, all at once: a row of bits for each receiver."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch

from gnn_attention._support.shapes import Bool, Int, Tensor
from gnn_attention.graph import TokenGraph

ALL_PAIRS = 8192  # tokens up to which every pair is looked at
BITS = 8  # of a word: the senders that are looked up at once


def check_all_pairs(what: str, graph: TokenGraph, instead: str) -> None:
    if graph.num_dst > ALL_PAIRS:
        most = f"looks at every pair of tokens, at most {ALL_PAIRS} tokens"
        raise ValueError(f"{what} {most}; got {graph!r}: {instead}")


def layers_until(graphs: Sequence[TokenGraph], wanted: Int[Tensor, "dst words"]) -> int | None:
    """The fewest layers after which every token has received from all that is wanted, None for never.

    Twice as many cycles until they suffice, then the most that do not, then layer by layer: about
    2 log2(cycles) products, however deep it is.
    """
    layers = [_layer(graph) for graph in graphs]
    stretches = [_cycle(layers)]
    while _misses(stretches[-1], wanted):
        twice = compose(stretches[-1], stretches[-1])
        if torch.equal(twice, stretches[-1]):
            return None
        stretches.append(twice)
    reached, count = _identity(len(wanted)), 0
    for power in reversed(range(len(stretches) - 1)):
        longer = compose(stretches[power], reached)
        if _misses(longer, wanted):
            reached, count = longer, count + 2**power * len(layers)
    while _misses(reached, wanted):
        reached, count = compose(layers[count % len(layers)], reached), count + 1
    return count


def reached_in_the_end(graphs: Sequence[TokenGraph]) -> Int[Tensor, "dst words"]:
    reached = _cycle([_layer(graph) for graph in graphs])
    while not torch.equal(reached, twice := compose(reached, reached)):
        reached = twice
    return reached


def compose(later: Int[Tensor, "dst words"], earlier: Int[Tensor, "mid words"]) -> Int[Tensor, "dst words"]:
    """What every token receives by way of those that it attends to: the boolean product of packed matrices.

    All unions of eight rows are looked up in a table (the method of four Russians), at 4096 tokens some ten
    times as fast as a product of float32 matrices.
    """
    result = torch.zeros_like(earlier[:1]).repeat(len(later), 1)
    for number, chosen in enumerate(later.T.int()):
        if bool(chosen.any()):
            # row k of the table is the union of the rows whose bits are set in k
            unions = earlier.new_zeros(1, earlier.shape[1])
            for row in earlier[BITS * number : BITS * (number + 1)]:
                unions = torch.cat([unions, unions | row])
            result |= unions.index_select(0, chosen)
    return result


def packed(mask: Bool[Tensor, "dst src"]) -> Int[Tensor, "dst words"]:
    return torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))


def unpacked(words: Int[Tensor, "dst words"], num_src: int) -> Bool[Tensor, "dst src"]:
    bits = np.unpackbits(words.numpy(), axis=1, count=num_src, bitorder="little")
    return torch.from_numpy(bits).bool()


def _layer(graph: TokenGraph) -> Tensor:
    return packed(graph.mask()) | _identity(graph.num_dst)


def _cycle(layers: Sequence[Tensor]) -> Tensor:
    return reduce(lambda reached, layer: compose(layer, reached), layers)


def _identity(tokens: int) -> Tensor:
    return packed(torch.eye(tokens, dtype=torch.bool, device="cpu"))


def _misses(reached: Tensor, wanted: Tensor) -> bool:
    return bool((wanted & ~reached).any())
