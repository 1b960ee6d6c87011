"""What builders reject: every message names the argument, what came and what is expected."""

from __future__ import annotations

import pytest
import torch
from support.error_tables import assert_errors

from gnn_attention import patterns

ERRORS = r"""
anti_causal(2.5) -> TypeError: must be an integer, got 2.5
causal_aligned(2, 4, "left") -> ValueError: align must be one of 'upper_left', 'lower_right', got 'left'
causal_aligned(-2, 4, "upper_left") -> ValueError: num_dst must be at least 0, got -2
causal_aligned(2, "4", "upper_left") -> TypeError: num_src must be an integer, got '4'
encoder_decoder(-1, 4) -> ValueError: source must be at least 0, got -1
encoder_decoder(4, True) -> TypeError: target must be an integer, got the bool True
block_top_k(numbers(4, 3), 2, 1) -> ValueError: a column for each of the 2 blocks of 2, .*\[4, 3\]
block_top_k(numbers(4, 2), 2, 1, 1) -> ValueError: k must hold the 1 initial and 1 local blocks.*k = 1
block_top_k(numbers(4, 2), 0, 1) -> ValueError: block must be at least 1, got 0
block_top_k(numbers(4, 2), 2, 1, local=-1) -> ValueError: local must be at least 0, got -1
block_top_k(numbers(4), 2, 1) -> ValueError: logits must be \[n, blocks\]
moba(numbers(4, 2), numbers(5, 2), 2, 1) -> ValueError: q and k must agree
moba(numbers(4, 4, 2), numbers(2, 4, 2), 2, 1) -> ValueError: repeat_interleave keys
moba(numbers(4, 2), numbers(4, 2), 2, 0) -> ValueError: top must be at least 1, got 0
moba(numbers(4, 2), numbers(4, 2), 1.5, 1) -> TypeError: block must be an integer, got 1.5
quest(numbers(4, 2), numbers(4, 3), 2, 1) -> ValueError: q and k must agree
quest(numbers(4, 2), numbers(4, 2), 0, 1) -> ValueError: page must be at least 1, got 0
compressed_blocks(4, 0) -> ValueError: block must be at least 1, got 0
compressed_blocks(4, 2, 0) -> ValueError: stride must be at least 1, got 0
tile_top_k(numbers(4, 2), numbers(4, 3), 2, 1) -> ValueError: q and k must agree
tile_top_k(numbers(4, 2), numbers(4, 2), 2, -1) -> ValueError: top must be at least 0, got -1
sorted_blocks(4, [0], 2) -> ValueError: order must name a block for each of the 2 blocks of 2 tokens
sorted_blocks(4, [0, 2], 2) -> IndexError: order must name blocks in 0 \.\. 1, got 2
sorted_blocks(4, [0.0, 1.0], 2) -> TypeError: order must be integers, got torch.float32
permuted_blocks(4, [-1, 0], 2) -> IndexError: permutation must name blocks in 0 \.\. 1, got -1
permuted_blocks(4, [1, 1], 2) -> ValueError: must hold each of the 2 blocks once, got \[1, 1\]
top_k([[1.0]], 1) -> TypeError: logits must be a tensor of numbers, got list
top_k(torch.ones(2, 2, dtype=torch.bool), 1) -> TypeError: tensor of numbers, got torch.bool
top_k(torch.ones(2), 1) -> ValueError: logits must be \[dst, src\], \[heads, dst, src\] or .*\[2\]
top_k(torch.ones(1, 1, 1, 2, 2), 1) -> ValueError: logits must be .*got
top_k(torch.ones(0, 2, 2), 1) -> ValueError: logits must be .*got \[0, 2, 2\]
top_k(torch.tensor([[torch.nan]]), 1) -> ValueError: logits must hold no NaN
top_k(torch.ones(2, 2), -1) -> ValueError: k must be at least 0, got -1
nearest(torch.ones(2, 2), True) -> TypeError: k must be an integer, got the bool True
nearest(torch.ones(2), 1) -> ValueError: points must be \[n, dim\]
shared_bucket([[0.5]]) -> TypeError: buckets must be integers, got torch.float32
shared_bucket(torch.tensor([1, 2])) -> ValueError: buckets must be \[rounds, n\]
lsh(torch.ones(2, 2), 3) -> ValueError: num_buckets must be even, .*got 3
lsh(torch.ones(2, 2), 0) -> ValueError: num_buckets must be at least 2, got 0
lsh(torch.ones(2, 2), 2, 0) -> ValueError: rounds must be at least 1, got 0
lsh(torch.ones(2, 2), 2, seed=None) -> TypeError: seed must be an integer, got None
clusters([True, False]) -> TypeError: dst_labels must be integers, got torch.bool
clusters(labels(2, 3), labels(3)) -> ValueError: both labels must have the same heads and batch
routing(numbers(3, 2), numbers(2, 3, 2), torch.eye(2), 1) -> ValueError: q and k must agree .*repeat
routing(numbers(3, 2), numbers(3, 4), torch.eye(2), 1) -> ValueError: q and k must agree
routing(numbers(3, 2), numbers(3, 2), torch.eye(3), 1) -> ValueError: centroids must be \[clusters, 2\]
vertical_slash(4, [4], []) -> IndexError: columns must be positions in 0 \.\. 3, got 4
vertical_slash(4, [], [-1]) -> IndexError: slashes must be positions in 0 \.\. 3, got -1
vertical_slash(4, [0.5], []) -> TypeError: each of columns must be an integer, got 0.5
vertical_slash(4, 2, []) -> TypeError: columns must be a list of positions, .*got 2
vertical_slash(4, [[0], [1]], [[0]]) -> ValueError: same number of heads, at least 1, got \[1, 2\]
block_diffusion(4, 0) -> ValueError: block must be at least 1, got 0
block_diffusion(4, 2.0) -> TypeError: block must be an integer, got 2.0
draft_training(-1, 2, 2) -> ValueError: prefix must be at least 0, got -1
draft_training(1, -2, 2) -> ValueError: blocks must be at least 0, got -2
draft_training(1, 2, 0) -> ValueError: block must be at least 1, got 0
media_cross(4, [1], 0) -> ValueError: tokens must be at least 1, got 0
media_cross(4, 1, 2) -> TypeError: media must be a list of text positions, got 1; one image is \[1\]
media_cross(4, [0.5], 2) -> TypeError: each of media must be an integer, got 0.5
media_cross(4, [4], 2) -> IndexError: media must be text positions in 0 \.\. 3, got 4
media_cross(4, [-1], 2) -> IndexError: in 0 \.\. 3, got -1
media_cross(4, [2, 1], 2) -> ValueError: strictly increasing positions, got \[2, 1\]
media_cross(4, [1, 1], 2) -> ValueError: strictly increasing positions, got \[1, 1\]
random_senders(4, -2) -> ValueError: r must be at least 0, got -2
random_senders(4, 2, seed=0.5) -> TypeError: seed must be an integer, got 0.5
expander(8, 0) -> ValueError: d must be at least 1, got 0
expander(8, 2, method="trees") -> ValueError: method must be one of 'cycles', 'permutations'
expander(8, 2, seed=None) -> TypeError: seed must be an integer, got None
expander(8, 2, draws=0) -> ValueError: draws must be at least 1, got 0
hypercube(-1) -> ValueError: dimension must be at least 0, got -1
de_bruijn(0, 2) -> ValueError: k must be at least 1, got 0
de_bruijn(2, 0) -> ValueError: length must be at least 1, got 0
torus(3, 0) -> ValueError: each of sizes must be at least 1, got 0
torus([3, 4]) -> TypeError: each of sizes must be an integer, got \[3, 4\]
watts_strogatz(4, 5, 0.1) -> ValueError: k must be at most n = 4, the number of tokens, got 5
watts_strogatz(4, -1, 0.1) -> ValueError: k must be at least 0, got -1
watts_strogatz(4, 2, 1.5) -> ValueError: p must be a probability in \[0, 1\], got 1.5
erdos_renyi(4, -0.1) -> ValueError: p must be a probability in \[0, 1\], got -0.1
erdos_renyi(4, "0.1") -> ValueError: p must be a probability in \[0, 1\], got '0.1'
erdos_renyi(4, True) -> ValueError: p must be a probability in \[0, 1\], got True
erdos_renyi(4, float("nan")) -> ValueError: p must be a probability in \[0, 1\], got nan
natten(16, 3) -> TypeError: shape must be a sequence of sizes, got 16; a line of tokens is \(16,\)
natten((), 3) -> ValueError: shape must have at least one axis
natten((4, 0), 3) -> ValueError: each of shape must be at least 1, got 0
natten((4, 4.0), 3) -> TypeError: each of shape must be an integer, got 4.0
natten((4, 4), 0) -> ValueError: kernel must be at least 1, got 0
natten((4, 4), (3, 3, 3)) -> ValueError: kernel must be one value or 2, .*\(4, 4\), got \(3, 3, 3\)
natten((4, 4), (3, "3")) -> TypeError: each of kernel must be an integer, got '3'
natten((5, 4), 5) -> ValueError: kernel must fit into the grid, got kernel = 5 along axis 1, which has 4
natten((7,), 4, dilation=2) -> ValueError: got kernel \* dilation = 4 \* 2 along axis 0, which has 7
natten((7,), 3, stride=4) -> ValueError: stride must be at most kernel, got 4 for a kernel of 3
natten((7,), 3, stride=0) -> ValueError: stride must be at least 1, got 0
natten((7,), 3, causal=1) -> TypeError: causal must be True or False, .* got 1 of type int
natten((7, 7), 3, causal=(True,)) -> ValueError: causal must be one value or 2, .* got \(True,\)
swin((8, 8), 4, 4) -> ValueError: shift must be less than window, got 4 for a window of 4 along axis 0
swin((8, 8), 4, -1) -> ValueError: shift must be at least 0, got -1
swin((8, 8), 0) -> ValueError: window must be at least 1, got 0
haloed_blocks((8, 8), 4, -1) -> ValueError: halo must be at least 0, got -1
haloed_blocks((8, 8), (4, 0), 1) -> ValueError: each of block must be at least 1, got 0
axial((2, 3), 2) -> IndexError: axis must be in 0 \.\. 1 for a grid of shape \(2, 3\), got 2
axial((2, 3), -1) -> IndexError: axis must be in 0 \.\. 1 .* got -1
axial((2, 3), 0.0) -> TypeError: axis must be an integer, got 0.0
image_local_2d((8,), 4, 1) -> ValueError: shape must be \(height, width\), got \(8,\)
image_local_2d((8, 8), 0, 1) -> ValueError: block must be at least 1, got 0
image_local_2d((8, 8), 2, -1) -> ValueError: memory must be at least 0, got -1
sliding_tile((8, 6), 4, 1) -> ValueError: tile must divide the grid, got 4 along axis 1, which has 6
sliding_tile((8,), 4, 3) -> ValueError: window must fit into the grid, got window = 3 along axis 0
sliding_tile((8,), 4, 1, text=-1) -> ValueError: text must be at least 0, got -1
svg_spatial(-1, 4, 2) -> ValueError: frames must be at least 0, got -1
svg_spatial(2, 0, 2) -> ValueError: frame_size must be at least 1, got 0
svg_temporal(2, 4, -2) -> ValueError: w must be at least 0, got -2
svg_temporal(2, 4, 2, prompt=-1) -> ValueError: prompt must be at least 0, got -1
power_attention(8, 0) -> ValueError: block must be at least 1, got 0
power_attention(8, 2, 0) -> ValueError: window must be at least 1, got 0
power_attention(8, 2, 1, -1) -> ValueError: sinks must be at least 0, got -1
butterfly(8, 0) -> ValueError: block must be at least 1, got 0
butterfly(8, levels=-1) -> ValueError: levels must be at least 0, got -1
butterfly_factor(8, -1) -> ValueError: level must be at least 0, got -1
butterfly_factor(8, 0, 0) -> ValueError: block must be at least 1, got 0
binary_partition(8, 0) -> ValueError: k must be at least 1, got 0
longnet(8, [4], [0]) -> ValueError: each of dilations must be at least 1, got 0
longnet(8, [0], [1]) -> ValueError: each of segments must be at least 1, got 0
longnet(8, [4, 8], [1]) -> ValueError: got 1 dilations for 2 segments
longnet(8, [], []) -> ValueError: a dilation for each segment length, got 0 dilations for 0
longnet(8, 4, [1]) -> TypeError: segments must be a sequence of sizes, got 4; .* \[4\]
longnet(8, [4], 1) -> TypeError: dilations must be a sequence of sizes, got 1; .* \[1\]
longnet(8, [4], [1], heads=0) -> ValueError: heads must be at least 1, got 0
fibottention(8, 0) -> ValueError: heads must be at least 1, got 0
fibottention(8, 2, -1) -> ValueError: w_min must be at least 0, got -1
fibottention(8, 2, 5, 4) -> ValueError: w_max must be at least 5, got 4
h_matrix_level(8, 0, 1) -> ValueError: block must be at least 1, got 0
h_matrix_level(8, 2, -1) -> ValueError: level must be at least 0, got -1
longformer(4, -1, 1) -> ValueError: w must be at least 0, got -1
longformer(4, 1.0, 1) -> TypeError: w must be an integer, got 1.0
longformer(4, 2, [4]) -> IndexError: tokens must be positions in 0 \.\. 3, got 4
longformer(4, 2, 5) -> IndexError: tokens must be positions in 0 \.\. 3, got 4
etc(4, -2, 1) -> ValueError: w must be at least 0, got -2
etc(4, 2, -1) -> ValueError: num_global must be at least 0, got -1
etc(4, 2, 1, owner=0) -> TypeError: owner must be a sequence .* each of the 4 long ones, got 0
etc(4, 2, 1, owner=[0]) -> ValueError: for each of the 4 long ones, got 1 of them
etc(2, 2, 1, owner=[0, 1]) -> IndexError: owner must hold global tokens in 0 \.\. 0, got 1
etc(2, 2, 1, owner=[0, -1]) -> IndexError: owner must hold global tokens in 0 \.\. 0, got -1
etc(2, 2, 1, owner=[0, 0.0]) -> TypeError: each of owner must be an integer, got 0.0
bigbird(8, 0) -> ValueError: block must be at least 1, got 0
bigbird(8, 2, -1) -> ValueError: num_random must be at least 0, got -1
bigbird(8, 2, heads=0) -> ValueError: heads must be at least 1, got 0
bigbird(8, 2, heads=2.0) -> TypeError: heads must be an integer, got 2.0
bigbird(8, 2, seed=0.5) -> TypeError: seed must be an integer, got 0.5
bigbird_etc(8, 2, -1) -> ValueError: num_global must be at least 0, got -1
bigbird_etc(8, 0, 1) -> ValueError: block must be at least 1, got 0
bigbird_etc(8, 2, 1, num_random=True) -> TypeError: num_random must be an integer, got the bool
memory_tokens(5, 1) -> TypeError: graph must be a TokenGraph .* got 5 of type int
memory_tokens(cross(2, 3), 1) -> ValueError: must be square, .* got TokenGraph\(cross\(2, 3\)
memory_tokens(causal(3).rows(1, 3), 1) -> ValueError: must be square
memory_tokens(causal(6).rows(2, 6).T.rows(0, 4).T, 1) -> ValueError: square, the same tokens .* dst from 2
memory_tokens(causal(3), -1) -> ValueError: m must be at least 0, got -1
tglobal(5, -2, 2) -> ValueError: w must be at least 0, got -2
tglobal(5, 2, 0) -> ValueError: block must be at least 1, got 0
side_nodes(5, 0) -> ValueError: block must be at least 1, got 0
isab(3, -1) -> ValueError: m must be at least 0, got -1
perceiver(3, 1.5) -> TypeError: m must be an integer, got 1.5
band(4, -1, 0) -> ValueError: left must be at least 0, got -1
band(4, 0, -1) -> ValueError: right must be at least 0, got -1
band(4, None, 0) -> TypeError: left must be an integer, got None
band(4, 1, 1, 0) -> ValueError: dilation must be at least 1, got 0
chunked(4, 0) -> ValueError: chunk must be at least 1, got 0
chunked(4, 2, before=-1) -> ValueError: before must be at least 0, got -1
chunked(4, 2, after=1.0) -> TypeError: after must be an integer, got 1.0
chunked(4, 2, before=True) -> TypeError: before must be an integer, got the bool True
segment_recurrence(4, 0, 2) -> ValueError: segment must be at least 1, got 0
segment_recurrence(4, 2, -2) -> ValueError: memory must be at least 0, got -2
causal(2.0) -> TypeError: must be an integer, got 2.0 of type float
cross(2, "3") -> TypeError: num_src must be an integer, got '3'
cross(2, -3) -> ValueError: num_src must be at least 0, got -3
window(4, -1) -> ValueError: w must be at least 0, got -1
window(4, 1.5) -> TypeError: w must be an integer, got 1.5
window(4, True) -> TypeError: w must be an integer, got the bool True
dilated(4, -1, 2) -> ValueError: w must be at least 0, got -1
dilated(4, 2, 0) -> ValueError: dilation must be at least 1, got 0
prefix(4, -2) -> ValueError: p must be at least 0, got -2
prefix(4, None) -> TypeError: p must be an integer, got None
documents([2, -1]) -> ValueError: each of lengths must be at least 0, got -1
documents([2, 1.0]) -> TypeError: each of lengths must be an integer, got 1.0
sinks(4, -1) -> ValueError: s must be at least 0, got -1
sinks(4, False) -> TypeError: s must be an integer, got the bool False
global_tokens(4, [4]) -> IndexError: tokens must be positions in 0 \.\. 3, got 4
global_tokens(4, [-1]) -> IndexError: tokens must be positions in 0 \.\. 3, got -1
global_tokens(4, 5) -> IndexError: tokens must be positions in 0 \.\. 3, got 4
global_tokens(4, -1) -> ValueError: tokens must be at least 0, got -1
global_tokens(4, True) -> TypeError: tokens must be an integer, got the bool True
global_tokens(4, [True]) -> TypeError: tokens must be an integer, got the bool True
global_tokens(4, [1.7]) -> TypeError: tokens must be an integer, got 1.7
global_tokens(4, "12") -> TypeError: tokens must be an integer, got '1'
global_tokens(-1, []) -> ValueError: must be at least 0, got -1
tree([-1, 2]) -> IndexError: parents\[1\] must be -1 \(a root\) or in 0 \.\. 1, got 2
tree([-2]) -> IndexError: parents\[0\] must be -1 .*got -2
tree([0]) -> ValueError: must form a forest, but token 0 is on or below a cycle
tree([-1, 2, 1, 1]) -> ValueError: must form a forest, but token 1 is on or below a cycle
tree([-1, 0.5]) -> TypeError: parents.* must be an integer, got 0.5
tree([-1, False]) -> TypeError: parents.* must be an integer, got the bool False
documents(3) -> TypeError: lengths must be a sequence of sizes, got 3; for a single one give \[3\]
shared_prefix(-1, []) -> ValueError: prompt must be at least 0, got -1
shared_prefix(2, 3) -> TypeError: answers must be .*got 3; for a single one give \[3\]
shared_prefix(2, [1, -3]) -> ValueError: each of answers must be at least 0, got -3
block_causal(4, 0) -> ValueError: block must be at least 1, got 0
bidirectional_groups(4) -> TypeError: groups must be a sequence .*got 4
bidirectional_groups([0, 1.5]) -> TypeError: each of groups must be an integer, got 1.5
permutation(3) -> TypeError: order must be a sequence of positions, got 3
permutation([0, 2]) -> ValueError: order must hold each of 0 \.\. 1 once, in any order, got \[0, 2\]
permutation([0, 0]) -> ValueError: each of 0 \.\. 1 once
permutation([-1, 0]) -> ValueError: each of 0 \.\. 1 once
permutation([0, True]) -> TypeError: each of order must be an integer, got the bool True
permutation([0], -1) -> ValueError: context must be at least 0, got -1
permutation([0], 0, "both") -> ValueError: stream must be one of 'content', 'query', got 'both'
fill_in_the_middle(4, 3, 2) -> IndexError: 0 <= start <= stop <= n = 4, got start 3 and stop 2
fill_in_the_middle(4, 1, 5) -> IndexError: n = 4, got start 1 and stop 5
fill_in_the_middle(4, -1, 2) -> ValueError: start must be at least 0, got -1
fill_in_the_middle(4, 1, 2, "mps") -> ValueError: order must be one of 'psm', 'spm', got 'mps'
sink_window(4, -2) -> ValueError: w must be at least 0, got -2
sink_window(4, 2, -1) -> ValueError: s must be at least 0, got -1
sink_window(4, 2, 1.0) -> TypeError: s must be an integer, got 1.0
duo_attention(4, 0, [], 2) -> ValueError: heads must be at least 1, got 0
duo_attention(4, 2, [2], 2) -> IndexError: retrieval must hold head numbers in 0 \.\. 1, got 2
duo_attention(4, 2, [-1], 2) -> IndexError: in 0 \.\. 1, got -1
duo_attention(4, 2, 1, 2) -> TypeError: list of head numbers, got 1; one head is \[1\]
duo_attention(4, 2, [True], 2) -> TypeError: each of retrieval must be an integer, got the bool
duo_attention(4, 2, [0], -1) -> ValueError: w must be at least 0, got -1
duo_attention(4, 2, [0], 1, None) -> TypeError: s must be an integer, got None
strides(4, 0) -> ValueError: stride must be at least 1, got 0
summary_tokens(4, 2, 0) -> ValueError: c must be at least 1, got 0
summary_tokens(4, 2, 3) -> ValueError: c must be at most stride = 2, the length of a chunk, got 3
sparse_strided(4, 2.0) -> TypeError: stride must be an integer, got 2.0
sparse_strided(4, 2, heads=0) -> ValueError: heads must be at least 1, got 0
sparse_fixed(4, 2, 3) -> ValueError: c must be at most stride = 2
sparse_fixed(4, 2, 1, heads=True) -> TypeError: heads must be an integer, got the bool True
with_self_loops(cross(2, 3)) -> ValueError: graph must be square
with_self_loops(torch.eye(3)) -> TypeError: graph must be a TokenGraph, got Tensor; see
edge_types(torch.eye(3), []) -> TypeError: graph must be a TokenGraph, got Tensor
edge_types(causal(3), 1) -> TypeError: parts must be a list of graphs.*got 1
shortest_paths(None, causal(3)) -> TypeError: graph must be a TokenGraph, got NoneType
shortest_paths(causal(3), 2) -> TypeError: structure must be a TokenGraph, got int
k_hop(causal(3), 0) -> ValueError: k must be at least 1, got 0
k_hop(causal(3), 1.5) -> TypeError: k must be an integer, got 1.5
k_hop(causal(4).rows(1, 3), 2) -> ValueError: graph must be square
virtual_nodes(causal(3), -1) -> ValueError: m must be at least 0, got -1
virtual_nodes(cross(3, 2)) -> ValueError: graph must be square
virtual_nodes(sparse_strided(4, 2, heads=2)) -> ValueError: differs by head has no single edge list
temporal(full(2), [0.0]) -> ValueError: times must be 2 numbers.* got \[0.0\]
temporal(full(2), [0.0, float("nan")]) -> ValueError: and no NaN, got
temporal(full(2), ["a", "b"]) -> TypeError: times must be a sequence .* of numbers, got
temporal(full(2), [True, 0]) -> TypeError: times must be a sequence
temporal(full(2), 3) -> TypeError: times must be a sequence .*got 3
temporal(full(1), torch.tensor(3)) -> TypeError: times must be a sequence
edge_types(full(2), [full(3)]) -> ValueError: each of parts must be a graph over
edge_types(full(2), [torch.eye(2)]) -> ValueError: each of parts must be a graph over
shortest_paths(full(2), full(3)) -> ValueError: structure must be a graph over
shortest_paths(cross(2, 3), cross(2, 3)) -> ValueError: structure must be square
tree(3) -> TypeError: parents must be a sequence of positions .*got 3
tree_decoding(-1, [-1]) -> ValueError: prompt must be at least 0, got -1
tree_decoding(2, 0) -> TypeError: parents must be a sequence of positions .*got 0
tree_decoding(2, [-1, 2]) -> IndexError: parents\[1\] must be -1 \(a root\) or in 0 \.\. 1, got 2
tree_decoding(2, [-2]) -> IndexError: parents\[0\] must be -1 .*got -2
tree_decoding(2, [-1, 1]) -> ValueError: must form a forest, but token 1 is on or below a cycle
tree_decoding(2, [0.5]) -> TypeError: parents\[0\] must be an integer, got 0.5
prefix_tree(2, [-1]) -> TypeError: lengths must be a sequence of sizes, got 2
prefix_tree([2], -1) -> TypeError: parents must be a sequence of positions .*got -1
prefix_tree([2, -1], [-1, 0]) -> ValueError: each of lengths must be at least 0, got -1
prefix_tree([2, 1], [-1]) -> ValueError: for each of the 2 lengths, got 1
prefix_tree([2, 1], [-1, 5]) -> IndexError: parents\[1\] must be -1 .*got 5
prefix_tree([2, 1], [1, 0]) -> ValueError: must form a forest
family([1, 0]) -> ValueError: must form a forest, but token 0 is on or below a cycle
family([3]) -> IndexError: parents\[0\] must be -1 .*got 3
family(None) -> TypeError: parents must be a sequence of positions .*got None
hierarchical_document(3) -> TypeError: sections must be a list of lists .*got 3
hierarchical_document([3]) -> TypeError: sections\[0\] must be a list of sentence lengths, got 3
hierarchical_document([[1], [-2]]) -> ValueError: each of sections\[1\] must be at least 0, got -2
hierarchical_document([[True]]) -> TypeError: each of sections\[0\] must be an integer, got the bool
"""

# the other arguments of builders whose first is the number of tokens
OTHERS = [
    ("full self_loops causal anti_causal strict_causal no_self log_sparse power_attention star", ()),
    ("window prefix block_causal sinks strides sparse_strided chunked butterfly", (1,)),
    ("butterfly_factor bigbird", (1,)),
    ("random_senders side_nodes isab perceiver binary_partition block_diffusion sink_window expander", (2,)),
    ("dilated band segment_recurrence summary_tokens sparse_fixed h_matrix_level tglobal", (2, 1)),
    ("etc longformer", (2, 1)),
    ("global_tokens", ([1],)),
    ("media_cross", ([1], 1)),
    ("longnet", ([2], [1])),
    ("duo_attention", (1, [0], 2)),
    ("erdos_renyi", (0.1,)),
]
BUILDERS = [(name, others) for names, others in OTHERS for name in names.split()]


def numbers(*shape):
    return torch.randn(shape)


def labels(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def test_wrong_arguments():
    assert_errors(ERRORS, {**vars(patterns), "numbers": numbers, "labels": labels, "torch": torch})


@pytest.mark.parametrize(("name", "others"), BUILDERS, ids=[name for name, _ in BUILDERS])
def test_the_number_of_tokens_is_named_n(name, others):
    for wrong, error in ((-1, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"^n must be"):
            getattr(patterns, name)(wrong, *others)


@pytest.mark.parametrize("wrong", [None, "x", {}, [None], [[0, 1], [0]]])
def test_labels_that_are_no_numbers(wrong):
    """Whatever torch cannot read gets the same message."""
    for build, argument in (
        (patterns.clusters, "dst_labels"),
        (patterns.shared_bucket, "buckets"),
        (lambda order: patterns.sorted_blocks(4, order, 2), "order"),
        (lambda order: patterns.permuted_blocks(4, order, 2), "permutation"),
    ):
        with pytest.raises(TypeError, match=f"{argument} must be"):
            build(wrong)
