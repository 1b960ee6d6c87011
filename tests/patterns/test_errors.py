"""Builders reject wrong arguments with messages that name the argument, its value and what is expected."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.refusals import assert_errors

from gnn_attention import patterns
from gnn_attention.convert import expressions
from gnn_attention.convert.catalogue import EXAMPLES

ERRORS = r"""
causal_aligned(2, 4, "left") -> ValueError: align must be one of 'upper_left', 'lower_right', got 'left'
block_top_k(numbers(4, 3), 2, 1) -> ValueError: a column for each of the 2 blocks of 2, .*\[4, 3\]
moba(numbers(4, 4, 2), numbers(2, 4, 2), 2, 1) -> ValueError: with repeat_interleave
sorted_blocks(4, [0], 2) -> ValueError: order must name a block for each of the 2 blocks of 2, got 1
sorted_blocks(4, [0, 2], 2) -> IndexError: order must name blocks in 0 \.\. 1, got 2
permuted_blocks(4, [1, 1], 2) -> ValueError: must hold each of the 2 blocks once, got \[1, 1\]
top_k([[True]], 1) -> TypeError: logits must be a tensor of numbers, got torch.bool
top_k(torch.ones(2), 1) -> ValueError: logits must be \[dst, src\], \[heads, dst, src\] or .*\[2\]
top_k(torch.tensor([[torch.nan]]), 1) -> ValueError: logits must hold no NaN
lsh(torch.ones(2, 2), 3) -> ValueError: num_buckets must be even, .*got 3
clusters([0.5, 1.0]) -> TypeError: dst_labels must be integers, got torch.float64
clusters(labels(2, 3), labels(3)) -> ValueError: must agree in batch and heads, got \[1, 2, 3\] and .*3\]
routing(numbers(3, 2), numbers(3, 2), torch.eye(3), 1) -> ValueError: centroids must be \[clusters, 2\]
vertical_slash(4, [4], []) -> IndexError: columns must be positions in 0 \.\. 3, got 4
vertical_slash(4, 2, []) -> TypeError: columns must be a list of positions, .*got 2
vertical_slash(4, [[0], [1]], [[0]]) -> ValueError: equally many heads, at least 1, got \[1, 2\]
media_cross(4, [4], 2) -> IndexError: media must be text positions in 0 \.\. 3, got 4
media_cross(4, [2, 1], 2) -> ValueError: strictly increasing positions, got \[2, 1\]
torus(3, 0) -> ValueError: each entry of sizes must be at least 1, got 0
watts_strogatz(4, 5, 0.1) -> ValueError: k must be at most n = 4, the number of tokens, got 5
erdos_renyi(4, -0.1) -> ValueError: p must be a probability in \[0, 1\], got -0.1
natten(16, 3) -> TypeError: shape must be a list of sizes, got 16; for a single value pass \[16\]
natten((), 3) -> ValueError: shape must have at least one axis
natten((4, 4), (3, 3, 3)) -> ValueError: kernel must be one value or 2, .*\(4, 4\), got \(3, 3, 3\)
natten((5, 4), 5) -> ValueError: kernel \* dilation must fit .* got 5 along axis 1 of 4
natten((7,), 4, dilation=2) -> ValueError: kernel \* dilation must fit .* got 8 along axis 0 of 7
natten((7,), 3, causal=1) -> TypeError: causal must be a bool, got 1 of type int
swin((8, 8), 4, 4) -> ValueError: shift must be less than window, got 4 for a window of 4 along axis 0
axial((2, 3), 2) -> IndexError: axis must be in 0 \.\. 1, got 2
image_local_2d((8,), 4, 1) -> ValueError: shape must be \(height, width\), got \(8,\)
sliding_tile((8, 6), 4, 1) -> ValueError: tile must divide the grid, got 4 along axis 1, which has 6
sliding_tile((8,), 4, 3) -> ValueError: window must fit into the grid, got 3 along axis 0 of 2
longnet(8, [4, 8], [1]) -> ValueError: got 1 dilations for 2 segments
memory_tokens(cross(2, 3), 1) -> ValueError: needs the same tokens on both sides, got TokenGraph\(cross
documents([2, -1]) -> ValueError: each entry of lengths must be at least 0, got -1
global_tokens(4, [4]) -> IndexError: tokens must be positions in 0 \.\. 3, got 4
global_tokens(4, True) -> TypeError: tokens must be an integer, got the bool True
tree([-1, 2]) -> IndexError: parents\[1\] must be -1 \(a root\) or in 0 \.\. 1, got 2
tree([-1, 2, 1, 1]) -> ValueError: must form a forest, but token 1 is on or below a cycle
documents(3) -> TypeError: lengths must be a list of sizes, got 3; for a single value pass \[3\]
permutation(3) -> TypeError: order must be a list of positions, got 3
permutation([0, 2]) -> ValueError: order must hold each of 0 \.\. 1 once, in any order, got \[0, 2\]
fill_in_the_middle(4, 1, 5) -> IndexError: n = 4, got start 1 and stop 5
duo_attention(4, 2, [2], 2) -> IndexError: retrieval must be head indices in 0 \.\. 1, got 2
summary_tokens(4, 2, 3) -> ValueError: c must be at most stride = 2, the length of a chunk, got 3
with_self_loops(cross(2, 3)) -> ValueError: needs the same tokens on both sides
edge_types(causal(3), 1) -> TypeError: parts must be a list of graphs.*got 1
shortest_paths(causal(3), 2) -> TypeError: shortest_paths takes graphs \(TokenGraph\), got int
k_hop(causal(4).rows(1, 3), 2) -> ValueError: needs the same tokens on both sides
temporal(full(2), [0.0]) -> ValueError: times must be 2 numbers.* got \[0.0\]
temporal(full(2), [True, False]) -> TypeError: times must be a tensor of numbers, got torch.bool
sparse_strided(8, 4, 2) -> TypeError: causal must be a bool, got 2 of type int
window(4) -> TypeError: window\(\) missing 1 required positional argument: 'w'
edge_types(full(2), [full(3)]) -> ValueError: each entry of parts must be a graph over
shortest_paths(full(2), full(3)) -> ValueError: structure must be a graph over
prefix_tree([2, 1], [-1]) -> ValueError: for each of the 2 lengths, got 1
hierarchical_document(3) -> TypeError: sections must be a list of lists .*got 3
"""

# Integers that divide, or that count rounds, heads or letters, must be at least 1.
AT_LEAST_1 = """
block chunk d dilation frame_size heads length page rounds segment stride tile
de_bruijn.k k_hop.k binary_partition.k power_attention.window moba.top media_cross.tokens summary_tokens.c
sparse_fixed.c lsh.num_buckets
"""


def numbers(*shape):
    return torch.randn(shape)


def labels(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def test_wrong_arguments():
    assert_errors(ERRORS, {**vars(patterns), "numbers": numbers, "labels": labels, "torch": torch})


def example_arguments(name):
    """Return the arguments, by name, of the builder's call in the catalogue."""
    call, names = EXAMPLES[name].removesuffix("[0]"), {**vars(patterns), **vars(expressions)}
    signature = inspect.signature(getattr(patterns, name))
    return eval(call, names | {name: lambda *args, **kwargs: signature.bind(*args, **kwargs).arguments})


@pytest.mark.parametrize("name", patterns.__all__)
def test_whole_numbers(name):
    """A value that is not an integer, or is too small, is refused by the name of its parameter."""
    builder, arguments = getattr(patterns, name), example_arguments(name)
    for word, parameter in inspect.signature(builder, eval_str=True).parameters.items():
        if parameter.annotation not in (int, int | None) or word == "sizes":
            continue
        cases = [(True, TypeError), (2.5, TypeError), ("4", TypeError), (-1, ValueError)]
        cases += [(0, ValueError)] if {word, f"{name}.{word}"} & set(AT_LEAST_1.split()) else []
        for value, error in cases:
            with pytest.raises(error, match=f"^{word} must be (an integer|at least)"):
                builder(**{**arguments, word: value})


@pytest.mark.parametrize("wrong", [None, "x", {}, [None], [[0, 1], [0]]])
def test_labels_must_be_numbers(wrong):
    """The message is the same for all data that torch cannot read."""
    for build, argument in (
        (patterns.clusters, "dst_labels"),
        (patterns.shared_bucket, "buckets"),
        (lambda order: patterns.sorted_blocks(4, order, 2), "order"),
        (lambda order: patterns.permuted_blocks(4, order, 2), "permutation"),
    ):
        with pytest.raises(TypeError, match=f"{argument} must be"):
            build(wrong)
