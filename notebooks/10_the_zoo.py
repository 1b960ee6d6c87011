# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The zoo: attention masks as graphs
#
# How many different ideas are there in hundreds of papers on "efficient attention"? A paper that makes attention cheaper, or gives it
# structure, usually does one thing: it says **which tokens attend to which**. That is a graph, and two graphs can be *compared*. So
# the question has an answer: write the masks of the papers as graphs and compute which are equal. Some are, though their papers
# do not say so.
#
# Tokens are nodes, and an edge `src -> dst` lets the receiver `dst` attend to the sender `src`. On the way to the answer, in section
# 6, this notebook shows the families, counts what they cost, combines them, and takes them to other libraries.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb), or its one sentence: a mask is a graph, and `mask[dst, src]` is
# its table. (The builders live in `ga.patterns`, since the literature calls such graphs attention patterns. In this library's
# prose a *pattern* is something else: what a receiver looks for.)
#
# **Afterwards you can** build a mask from a paper's sentence, and test whether two papers draw one graph.
#
# before: [09. Why thin factors?](09_why_thin_factors.ipynb) | [the book](README.md) | next: [11. How many layers until the last token reaches the first?](11_how_many_layers.ipynb)

# %%
import inspect
import math
import re
import textwrap
from collections import defaultdict
from itertools import combinations, product

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import torch
from pictures import BLUE, GREY, RED, draw_pairs, use_house_style

import gnn_attention as ga
from gnn_attention import algebra, analyse, draw, patterns
from gnn_attention.convert import catalogue
from gnn_attention.convert.expressions import parse

use_house_style()

# %% [markdown]
# ## 1. Three ways to see a graph
#
# A small graph prints itself: the mask on the left, and in-edges on the right.

# %%
print(patterns.window(6, 3))

# %% [markdown]
# A larger one can be drawn: as a mask, as nodes with their links, and as arcs over a line of tokens. In a mask the receivers are
# the rows: a row shows the tokens to which its token attends. An arrow points from the sender to the receiver.

# %%
streaming = patterns.window(12, 3) | patterns.sinks(12, 1)
draw.side_by_side(streaming)

# %%
draw.arcs(streaming)

# %% [markdown]
# This one is a window (the last three tokens) joined with a *[sink](../docs/glossary.md#sink)*: a first token to which all tokens attend, whatever the
# distance. With it a model runs over endless text in bounded memory: no token attends to more than four.

# %%
assert streaming.max_in_degree == 4
draw.degrees(patterns.window(64, 8) | patterns.sinks(64, 4))

# %% [markdown]
# The last picture counts the edges of such a graph, with a window of 8 and four sinks. Look at the blue bars first: from token 11 on,
# every token attends to exactly twelve. The orange bars show where the sinks are: most tokens send to eight receivers, and the four
# sinks to nearly all.
#
# ## 2. The families
#
# `gnn-attention graphs` lists all builders on the command line. Here they are, by family. The docstring of a builder states its set
# of edges exactly, and names the paper from which it comes.

# %%
entries = catalogue.entries()
families = {}
for entry in entries:
    families.setdefault(entry.family, []).append(entry.name)
for family, names in families.items():
    print(f"{family:>11}: {', '.join(names)}")

print(len(entries), "builders")
assert set(patterns.__all__) == {entry.name for entry in entries}
assert len(entries) == 90

# %%
print(inspect.getdoc(patterns.natten).partition("\n\n")[0])

# %% [markdown]
# Four of them at eight tokens, as masks above and as arcs below. Find the same edges in both. A window makes a band in the mask, and short
# arcs. A stride makes parallel diagonals, and long arcs. A hub makes a full column, and a fan of arcs that start at one token. Packed texts
# make triangles, and no arc leads from one text to the other.

# %%
small = [
    patterns.window(8, 3),
    patterns.dilated(8, 3, 3),
    patterns.sink_window(8, 2, 1),
    patterns.documents([5, 3]),
]
draw_pairs(small, draw.arcs, [graph.name for graph in small], links_height=0.55)
plt.show()
assert not any(src < 5 <= dst for src, dst in small[3].edge_index.T.tolist())

# %% [markdown]
# And sixteen at 64 tokens, as masks alone. Blue cells are edges. Are they sixteen graphs? Look closely before you go on.


# %%
def gallery(expressions, columns=4):
    """Small masks of many graphs, each written as an expression."""
    rows = -(-len(expressions) // columns)
    _, axes = plt.subplots(
        rows, columns, figsize=(2.9 * columns, 3.1 * rows), squeeze=False, layout="constrained"
    )
    for ax, expression in zip(axes.flat, expressions, strict=True):
        graph = parse(expression)
        draw.mask(graph, ax, title=expression)
        name = textwrap.fill(expression, 34)
        ax.set_title(f"{name}\n{graph.num_edges / graph.num_dst:.3g} senders each", fontsize=8.5, loc="left")
        ax.set(xlabel="", ylabel="", xticks=[], yticks=[])
    plt.show()


LINE = ["causal(64)", "window(64, 8)", "dilated(64, 8, 4)", "chunked(64, 16)"]
STRIDED = ["sparse_strided(64, 8)", "sparse_fixed(64, 8, 1)", "log_sparse(64)", "power_attention(64)"]
HUBS = [
    "sink_window(64, 8)",
    "longformer(64, 4, 2, causal=False)",
    "bigbird(64, 4)",
    "memory_tokens(window(60, 8), 4)",
]
PACKED = [
    "documents([24, 8, 32])",
    "prefix(64, 16)",
    "shared_prefix(16, [16, 16, 16])",
    "block_diffusion(32, 8)",
]
gallery(LINE + STRIDED + HUBS + PACKED)

# %% [markdown]
# Equality of graphs is equality of their sets of edges, whatever the rule that made them:

# %% tags=["B4"]
named = {expression: parse(expression) for expression in LINE + STRIDED + HUBS + PACKED}
same = [(one, other) for one, other in combinations(named, 2) if named[one] == named[other]]
for one, other in same:
    print(f"{one} == {other}")
different = len(named) - len(same)
print(f"{different} graphs in {len(named)} pictures")
assert same == [
    ("log_sparse(64)", "power_attention(64)"),
    ("sink_window(64, 8)", "memory_tokens(window(60, 8), 4)"),
]
assert different == 14

# %% [markdown]
# Fourteen. The LogSparse Transformer (2019, for time series) and Power Attention (2025, for language models) draw the same edges: to
# the tokens 1, 2, 4, 8, ... before. And four memory tokens in front of a window are the four sinks of StreamingLLM. The papers
# differ in what they train, in their kernels and in their reasons, and agree in *who attends to whom*. Once masks are written as
# graphs, this comparison is one line of code, and section 6 makes it for all builders.
#
# The rows of the picture, from the top: graphs **on a line**; **strided** graphs, which [reach](../docs/glossary.md#reach) far with few edges; graphs with
# **hubs**, to which all tokens attend; and graphs of **packed** rows, where one row of tokens holds several texts.
#
# An image is not a line. On a grid of 8 x 8 patches a window has two dimensions, and its mask has stripes:

# %%
gallery(["natten((8, 8), 3)", "swin((8, 8), 4, 2)", "axial((8, 8))", "sliding_tile((8, 8), 2, 3)"])

# %% [markdown]
# The grid itself shows more clearly to which patches one patch attends. Below, one row of the mask, that of the patch with the dot,
# is folded back into the grid:

# %%
shape, patch = (8, 8), (2, 5)
receiver = patch[0] * shape[1] + patch[1]
figure, axes = plt.subplots(1, 4, figsize=(11, 3.1), layout="constrained")
for ax, text in zip(
    axes,
    ["natten((8, 8), 3)", "swin((8, 8), 4, 2)", "axial((8, 8))", "sliding_tile((8, 8), 2, 3)"],
    strict=True,
):
    senders = parse(text).mask()[receiver].view(shape)
    ax.imshow(senders.int(), cmap="Blues", vmin=0, vmax=1.3)
    ax.plot(patch[1], patch[0], "o", color=RED, markersize=9)
    ax.set_title(f"{text}\nattends to {int(senders.sum())} patches", fontsize=8.5, loc="left")
    ax.set(xticks=[], yticks=[])
plt.show()
# also at the border, where the window is moved inwards
assert parse("natten((8, 8), 3)").in_degree().unique().tolist() == [9]

# %% [markdown]
# A graph need not follow the positions at all. An *expander* is random, with a constant number of edges per token, and still every
# token is a few steps from every other. The hypercube and the torus come from parallel computing. The diameter is the number of
# layers after which every token has received something from every other. Look at the lengths of the links: those of the expander follow
# no rule, and those of the other two repeat around the circle.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
for ax, text in zip(axes, ["expander(32, 2, causal=False)", "hypercube(5)", "torus(4, 8)"], strict=True):
    draw.graph(parse(text), ax)
    print(
        f"{text:>29}: at most {parse(text).max_in_degree} senders each, diameter {analyse.diameter(parse(text))}"
    )
plt.show()

# %% [markdown]
# In *tree decoding* a small model proposes several continuations at once, and the large model checks all of them in one pass: a
# token attends to the prompt, to itself, and to its ancestors. Below, tokens 0 to 2 are the prompt.

# %%
parents = [-1, -1, 0, 0, 1, 3]
draw.arcs(patterns.tree_decoding(3, parents), labels=["P0", "P1", "P2", "a", "b", "ac", "ad", "be", "adf"])

# %% [markdown]
# ## 3. What it costs
#
# Attention costs one product of two vectors for each edge. So its price is the number of edges. The plot shows how this number grows
# with the length of the text. (A graph is stored as a rule, not as a table, and most counts need no list of edges.)

# %%
GROWING = {
    "causal({n})": "-",
    "sparse_strided({n}, {root})": "--",
    "log_sparse({n})": "-.",
    "window({n}, 64) | sinks({n}, 4)": ":",
}
LENGTHS = [2**k for k in range(6, 13)]
figure, ax = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
counts = {}
for text, style in GROWING.items():
    counts[text] = [parse(text.format(n=n, root=round(n**0.5))).num_edges for n in LENGTHS]
    name, colour = text.format(n="n", root="√n"), RED if style == "-" else BLUE
    ax.loglog(LENGTHS, counts[text], style, marker="o", markersize=4, label=name, base=2, color=colour)
ax.set(xlabel="tokens n", ylabel="edges", title="edges, by the length of the text")
ax.legend(frameon=False)
plt.show()

n = LENGTHS[-1]
for text in GROWING:
    print(f"{text.format(n='n', root='√n'):>26}: {counts[text][-1] / n:8.1f} senders each at n = {n}")
assert counts["causal({n})"] == [n * (n + 1) // 2 for n in LENGTHS]

# %% [markdown]
# Twice the text costs four times as much with the causal graph, about $2\sqrt 2$ times with strides of $\sqrt n$, and twice,
# plus a little, with the other two. What is lost is reach: how many layers it takes until something of the first token can arrive
# at the last. That is the subject of [notebook 11](11_how_many_layers.ipynb).
#
# ## 4. How they combine
#
# Graphs are sets of edges, with an algebra: `|` joins, `&` intersects, `-` subtracts, `^` keeps the edges that are in exactly one,
# `~` complements, `.T` reverses every edge, `@` composes two hops and `** k` makes `k` hops. Many papers are one line:

# %%
n = 64
streaming_llm = patterns.window(n, 8) | patterns.sinks(n, 4)
longformer = patterns.window(n, 3, causal=False) | patterns.global_tokens(n, 2, causal=False)
packed_window = patterns.window(n, 8) & patterns.documents([24, 8, 32])
past = patterns.causal(n) - patterns.self_loops(n)

assert streaming_llm == patterns.sink_window(n, 8, 4)
assert past == patterns.strict_causal(n)
assert packed_window.num_edges < min(
    patterns.window(n, 8).num_edges, patterns.documents([24, 8, 32]).num_edges
)
assert (patterns.window(n, 3) | patterns.window(n, 3).T) == patterns.window(n, 3, causal=False)
assert patterns.window(n, 3) @ patterns.window(n, 3) == patterns.window(n, 5)  # two layers of a window of 3

gallery([graph.name for graph in (streaming_llm, longformer, packed_window, past)])

# %% [markdown]
# `gnn_attention.algebra` has what needs more than an operator: packing several graphs into one row (the disjoint sum),
# products (a grid is the Cartesian product of two lines), picking some of the tokens, giving every head a graph of its own.

# %%
line = patterns.window(8, 2, causal=False)
grid = algebra.cartesian_product(line, line)  # a token attends to its neighbours in its row and its column
packed = algebra.disjoint_sum(patterns.causal(24), patterns.prefix(8, 4), patterns.causal(32))
heads = algebra.per_head(
    patterns.causal(8), patterns.window(8, 3), patterns.dilated(8, 3, 3), patterns.sinks(8, 2)
)

assert algebra.disjoint_sum(*map(patterns.causal, [24, 8, 32])) == patterns.documents([24, 8, 32])
draw.mask(heads)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
draw.mask(grid, axes[0], title="cartesian_product of two lines")
draw.mask(packed, axes[1], title="disjoint_sum: causal, prefix, causal")
plt.show()

# %% [markdown]
# The name of a graph is the expression that builds it, and `parse` reads such expressions from text: from a configuration, a
# command line or a web page. It calls nothing but builders, so the text may come from anyone.

# %%
graph = patterns.window(64, 8) & patterns.documents([24, 40])
print(graph.name)
assert parse(graph.name) == graph

try:
    parse("windw(64, 8) | sinks(64, 2)")
except ValueError as error:
    print(error)

# %% [markdown]
# ## 5. In and out
#
# A graph converts to and from the other forms of masks and graphs. The mask `mask[dst, src]` is the *transpose* of the adjacency
# matrix of networkx.

# %%
graph = patterns.window(6, 2) | patterns.sinks(6, 1)

mask = graph.mask()  # bool [dst, src], what scaled_dot_product_attention takes
digraph = ga.convert.to_networkx(graph)
edge_index = graph.edge_index  # what torch_geometric takes: row 0 senders, row 1 receivers

assert ga.convert.from_mask(mask) == graph
assert ga.convert.from_networkx(digraph) == graph
assert ga.convert.from_edge_index(edge_index, 6) == graph
assert torch.equal(mask, torch.tensor(nx.to_numpy_array(digraph, nodelist=range(6))).bool().T)

print(
    "edges of the longest path from token to token:",
    nx.dag_longest_path_length(nx.DiGraph(e for e in digraph.edges if e[0] != e[1])),
)
print(
    "nodes on which all others depend:",
    [v for v in digraph if nx.descendants(digraph, v) | {v} == set(digraph)],
)

# %% [markdown]
# Attention runs on the graph as well as on the mask. Along the edges of the graph alone, the result is that of dense attention with
# the mask:

# %%
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
out = ga.attend(q, k, v, graph)
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
assert torch.allclose(out, dense, atol=1e-6)
print("equal:", torch.allclose(out, dense, atol=1e-6))

# %% [markdown]
# ## 6. Which are one graph?
#
# Now the question of the beginning. The sixteen masks were chosen by hand; let us take **all 90 builders**. A builder has parameters,
# so we compare *calls*. The table in the next cell has more than a hundred: `n` is the number of tokens, `a` and `b` are small numbers,
# `r` is $\sqrt n$ and `d` is $\log_2 n$. `nearest` and `top_k` choose senders by content; here the content of a token is its position.
#
# Three rules keep accidents out:
#
# * **No degenerate sizes.** In a text of 64 tokens `window(64, 99)` is the causal graph, and so is every mask that has been widened until
#   it forbids nothing. Therefore `a` and `b` are 2, 3 or 4, and calls that draw all pairs of tokens, the whole past, or self loops
#   alone are left out.
# * **No part is switched off.** A small world in which no link is moved is a ring. A LongNet with one length of segments is a chunked
#   text. With such a setting a builder is equal to a simpler one, so the table has none of them. The cell below the table shows six.
# * **One size may be an accident.** Two calls are equal if they draw the same edges for $n = 16$ *and* for $n = 64$. (All pairs that
#   pass this test are equal for $n = 256$, too.)

# %% tags=["hide-input"] jupyter={"source_hidden": true}
CALLS = """
strict_causal(n); temporal(full(n), range(n), strict=True); anti_causal(n); permutation(range(n)[::-1]); no_self(n);
permutation([5 * i % n for i in range(n)]); temporal(full(n), [pow(5, -1, n) * i % n for i in range(n)]);
permutation([*range(a), *range(n - b, n), *range(a, n - b)]); fill_in_the_middle(n, a, n - b);
prefix(n, a); encoder_decoder(a, n - a); bidirectional_groups([0] * a + [-1] * (n - a));
block_causal(n, a); bidirectional_groups([i // a for i in range(n)]); temporal(full(n), [i // a for i in range(n)]);
window(n, a); band(n, a, 0); natten((n,), a, causal=True); k_hop(window(n, 2), a); nearest(positions, a);
top_k(-(positions - positions.T).abs(), a); causal_aligned(a, n, "lower_right"); sparse_strided(n, a);
window(n, a, causal=False); band(n, a, a); k_hop(window(n, 2, causal=False), a); svg_spatial(r, r, a);
dilated(n, a, b); band(n, a, 0, b); natten((n,), a, b, causal=True); natten((r, r), a); sliding_tile((n,), 2, a);
dilated(n, a, b, causal=False); band(n, a, a, b); sparse_fixed(n, a, b); summary_tokens(n, a, b);
chunked(n, a); documents([a] * (n // a)); clusters([i // a for i in range(n)]); longnet(n, [a, 4 * a], [1, 4]);
chunked(n, a, causal=False); documents([a] * (n // a), causal=False); clusters([i // a for i in range(n)], causal=False);
swin((n,), a); media_cross(n, range(0, n, a), a); butterfly_factor(n, 0, a); side_nodes(n, a);
chunked(n, r, causal=False); axial((r, r), axis=1); axial((r, r)); image_local_2d((r, r), 2, a); swin((r, r), a, 1);
chunked(n, a, before=1); segment_recurrence(n, a, b); h_matrix_level(n, a, 0); h_matrix_level(n, a, 1);
chunked(n, a, before=1, after=1, causal=False); haloed_blocks((n,), a, a); h_matrix_level(n, a, 0, causal=False);
chunked(n, r, before=a); image_local_2d((r, r), (1, r), (a, 0)); compressed_blocks(n, a);
strides(n, a); clusters([i % a for i in range(n)]); strides(n, a, causal=False); clusters([i % a for i in range(n)], causal=False);
strides(n, r, causal=False); axial((r, r), axis=0); svg_temporal(r, r, 1); svg_temporal(r, r, a);
sinks(n, a); global_tokens(n, a); sink_window(n, a, b); memory_tokens(window(n - b, a), b); longformer(n, a, b);
vertical_slash(n, range(b), range(a)); duo_attention(n, 2, [1], a, b).select(head=0); bigbird(n, a); bigbird_etc(n - b, a, b);
longformer(n, a, b, causal=False); memory_tokens(window(n - b, a, causal=False), b, causal=False); etc(n - b, a, b);
global_tokens(n, a, causal=False); tglobal(n, a, b); star(n); virtual_nodes(window(n, a, causal=False), b);
cross(a, n); isab(n, a)[0]; perceiver(n, a)[0]; log_sparse(n); power_attention(n); power_attention(n, a);
hypercube(d); torus(*[2] * d); torus(r, r); butterfly(n); with_self_loops(hypercube(d)); de_bruijn(2, d); binary_partition(n, a);
tree(binary(n)); family(binary(n)); hierarchical_document([[a, a]] * (n // (2 * a)));
tree_decoding(a, binary(n - a)); prefix_tree([a] + [1] * (n - a), [-1] + [parent + 1 for parent in binary(n - a)]);
tree([*range(-1, a - 1)] + [parent + a for parent in binary(n - a)]);
shared_prefix(a, [b, n - a - b]); prefix_tree([a, b, n - a - b], [-1, 0, 0]); block_diffusion(n, a); draft_training(n, a, b);
random_senders(n, a); expander(n, a); watts_strogatz(n, 4, 0.1); erdos_renyi(n, 0.1); fibottention(n, 2).select(head=1);
shared_bucket([[i // a for i in range(n)]]); sorted_blocks(n, range(n // a)[::-1], a); permuted_blocks(n, range(n // a)[::-1], a)
"""


def binary(size):
    """The parents in a binary tree of nodes 0, 1, 2, ..."""
    return [(node + 1) // 2 - 1 for node in range(size)]


def builder(call):
    return call.partition("(")[0]


# %%
def draw_call(call, n):
    """The graph of a call for a text of n tokens."""
    numbers = {"n": n, "r": math.isqrt(n), "d": n.bit_length() - 1, "positions": torch.arange(n)[:, None]}
    return eval(call, {**vars(patterns), **numbers, "binary": binary})


def is_degenerate(graph):
    n = graph.num_dst
    return graph.num_src == n and graph in (patterns.full(n), patterns.causal(n), patterns.self_loops(n))


SWITCHED_OFF = {
    "watts_strogatz(n, 2, 0.0)": "torus(n)",  # no link is moved
    "longnet(n, [4], [1])": "chunked(n, 4)",  # one length of segments
    "sliding_tile((r, r), 1, 3)": "natten((r, r), 3)",  # a tile is one patch
    "vertical_slash(n, [], range(4))": "window(n, 4)",  # no verticals
    "permuted_blocks(n, range(n // 4), 4)": "chunked(n, 4, causal=False)",  # no block is moved
    "family(range(-1, n - 1))": "window(n, 2, causal=False)",  # the tree is a line
}
for call, simpler in SWITCHED_OFF.items():
    print(f"{call:>37} == {simpler}")
    assert all(draw_call(call, n) == draw_call(simpler, n) for n in (16, 64))

drawn = {}  # for each call its graphs for 16 and 64 tokens
for row in CALLS.split(";"):
    for a, b in product(*[(2, 3, 4) if re.search(rf"\b{name}\b", row) else (2,) for name in "ab"]):
        call = re.sub(r"\bb\b", str(b), re.sub(r"\ba\b", str(a), " ".join(row.split())))
        try:
            graphs = [draw_call(call, n) for n in (16, 64)]
        except ValueError:  # these numbers do not divide n, or are out of range
            continue
        if not any(map(is_degenerate, graphs)):
            drawn[call] = graphs

by_size = defaultdict(list)  # graphs with different numbers of edges cannot be equal
for call, graphs in drawn.items():
    by_size[tuple((graph.num_dst, graph.num_src, graph.num_edges) for graph in graphs)].append(call)

equal_calls = nx.Graph()
for same_size in by_size.values():
    for call, other in combinations(same_size, 2):
        if builder(call) != builder(other) and drawn[call] == drawn[other]:  # TokenGraph.__eq__, twice
            equal_calls.add_edge(call, other)
assert all(draw_call(one, 256) == draw_call(other, 256) for one, other in equal_calls.edges)
print(f"{len(drawn)} calls are compared; {len(equal_calls)} of them draw a graph that another builder draws")

# %% [markdown]
# Each line below is one graph, under all the names that the table has for it. (Of each set of builders only one example is shown.)

# %%
shown = []
for names in sorted(nx.connected_components(equal_calls), key=len, reverse=True):
    if not any({*map(builder, names)} <= builders for builders in shown):
        shown.append({*map(builder, names)})
        first = {builder(call): call for call in sorted(names, reverse=True)}.values()
        line = " == ".join(call.replace(" ", "~") for call in sorted(first, key=len))  # break no call
        print(textwrap.fill(line, 118, subsequent_indent="    ").replace("~", " "))

# %% [markdown]
# And now a picture, with a node for each builder and a link where two builders draw one graph.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
IDEAS = {
    "chunked": "blocks, and their rows and columns",
    "prefix": "an order in time",
    "window": "the nearest tokens",
    "longformer": "a window and hubs",
    "tree": "the ancestors in a tree",
    "perceiver": "latents that read all tokens",
    "sinks": "the first tokens",
    "log_sparse": "1, 2, 4, 8, ... tokens before",
    "hypercube": "one bit of the position differs",
    "butterfly": "at most one bit differs",
}


def draw_circle(ax, group, links, centre, radius):
    """A group of builders on a circle, with their links."""
    order = list(nx.dfs_preorder_nodes(links, min(group, key=lambda name: (links.degree(name), name))))
    angles = np.pi / 2 - 2 * np.pi * (np.arange(len(order)) + 0.5) / len(order)
    place = {
        name: centre + radius * np.array([np.cos(x), np.sin(x)])
        for name, x in zip(order, angles, strict=True)
    }
    draw_links(ax, links, place)
    for name, angle in zip(order, angles, strict=True):
        x, y = place[name] + 0.13 * np.array([np.cos(angle), np.sin(angle)])
        side = "center" if abs(np.cos(angle)) < 0.2 else "left" if np.cos(angle) > 0 else "right"
        level = "center" if side != "center" else "bottom" if np.sin(angle) > 0 else "top"
        ax.text(x, y, name, ha=side, va=level, fontsize=9.5)
    write_idea(ax, group, centre[0], centre[1] + radius + 0.42)


def draw_links(ax, links, place, colour=BLUE):
    for one, other in links.edges:
        ax.plot(*np.array([place[one], place[other]]).T, color=colour, linewidth=1.6, alpha=0.55, zorder=1)
    ax.plot(*np.array(list(place.values())).T, "o", color=colour, markersize=7, zorder=2)


def write_idea(ax, group, x, y, side="center"):
    idea = next(text for name, text in IDEAS.items() if name in group)
    ax.text(x, y, idea, ha=side, va="bottom", fontsize=11, fontweight="bold")


def draw_builders(equal, groups, not_compared):
    """All builders: groups with links above, the others below."""
    _, ax = plt.subplots(figsize=(13.2, 10.4))
    circles, pairs = [[g for g in groups if is_large(len(g))] for is_large in ((2).__lt__, (2).__eq__)]
    centres = [(2.6, 8.1), (7.4, 8.3), (11.2, 8.3), (2.3, 4.6), (6.3, 4.75), (6.3, 3.2)]
    radii = [1.55, 1.1, 1.05, 0.95, 0.45, 0.3]
    for group, centre, radius in zip(circles, centres, radii, strict=True):
        draw_circle(ax, group, equal.subgraph(group), np.array(centre), radius)
    for number, group in enumerate(sorted(pairs, key=min)):
        left, right = sorted(group)
        y = 5.6 - 0.78 * number
        colour = RED if "log_sparse" in group else BLUE
        draw_links(ax, equal.subgraph(group), {left: (10.5, y), right: (11.5, y)}, colour)
        ax.text(10.37, y, left, ha="right", va="center", fontsize=9.5)
        ax.text(11.63, y, right, va="center", fontsize=9.5)
        write_idea(ax, group, 11.0, y + 0.13)
    alone = sorted(name for group in groups if len(group) == 1 for name in group)
    ax.text(
        0, 2.35, "no link: drawn by no other builder (hollow: not compared)", fontsize=11, fontweight="bold"
    )
    for number, name in enumerate(alone):
        x, y = 0.1 + 2.2 * (number // 7), 2.05 - 0.32 * (number % 7)
        fill = "white" if name in not_compared else GREY
        ax.plot(x, y, "o", color=GREY, markerfacecolor=fill, markersize=6)
        ax.text(x + 0.12, y, name, va="center", fontsize=9.5)
    ax.set(xlim=(-0.2, 13.4), ylim=(-0.1, 10.5))
    ax.set_axis_off()
    plt.show()


# %%
equal = nx.Graph()  # a node for each builder
equal.add_nodes_from(patterns.__all__)
equal.add_edges_from((builder(call), builder(other)) for call, other in equal_calls.edges)
groups = sorted(nx.connected_components(equal), key=len, reverse=True)
linked = [group for group in groups if len(group) > 1]
not_compared = set(equal) - set(map(builder, drawn))
draw_builders(equal, groups, not_compared)

papers = {
    paper for name in equal for paper in re.findall(r"\d{4}\.\d{5}", inspect.getdoc(getattr(patterns, name)))
}
print(f"{len(equal)} builders, which cite {len(papers)} papers of arXiv")
print(
    f"{sum(map(len, linked))} builders draw a graph that another one draws: {equal.number_of_edges()} links, {len(linked)} groups"
)
print(
    f"{len(equal) - sum(map(len, linked))} builders have no link; {len(not_compared)} of these are not compared"
)
print(f"groups and builders without a link: {len(groups)}")
assert (sum(map(len, linked)), equal.number_of_edges(), len(linked), len(groups)) == (51, 79, 10, 49)

# %% [markdown]
# Read a link as: *these two papers could share one kernel, one proof and one picture*. The orange link is the one of section 2. A few
# others: a prefix language model attends as an encoder and a decoder do (`prefix`, `encoder_decoder`). The segments with a memory of
# Transformer-XL are the lowest level of an H-matrix (`segment_recurrence`, `h_matrix_level`). Filling in the middle is a permuted
# text (`fill_in_the_middle`, `permutation`). And the streaming heads of DuoAttention, memory tokens and Longformer's global tokens
# are sinks in front of a window.
#
# What the picture does not say:
#
# * A **group** is not one graph. `clusters` draws blocks *and* strides, depending on the labels, and so it joins two ideas.
# * A **missing link** is not a proof, since the table does not hold all calls. More calls can only join groups, so 49 is an upper
#   bound. The six calls in which a part is switched off would join some, too: with them, the next cell counts 43.
# * Of the **11 builders without a comparison**, three draw the graphs that we left out, two give a number for each edge instead of
#   a graph, and six choose blocks, buckets or clusters by content, so that the text decides what they draw.
# * Equal means **the same tokens**. If tokens may be renamed, more graphs are equal: a torus of 4 x 4 is a hypercube under other names, and a
#   virtual node behind a text is, with a self loop, a memory token in front of it. For a language model these are different masks.

# %%
joined = equal.copy()
joined.add_edges_from((builder(call), builder(simpler)) for call, simpler in SWITCHED_OFF.items())
print("with the six calls in which a part is switched off:", nx.number_connected_components(joined))
assert nx.number_connected_components(joined) == 43

line = patterns.window(14, 3, causal=False)
renamed = {
    "torus and hypercube": (patterns.torus(4, 4), patterns.hypercube(4)),
    "hub behind and in front": (
        patterns.with_self_loops(patterns.virtual_nodes(line, 1)),
        patterns.memory_tokens(line, 1, causal=False),
    ),
}
for name, (one, other) in renamed.items():
    isomorphic = nx.is_isomorphic(ga.convert.to_networkx(one), ga.convert.to_networkx(other))
    print(f"{name}: equal {one == other}, isomorphic {isomorphic}")
    assert isomorphic
    assert one != other

# %% [markdown]
# **How many different ideas are there?** If two builders that draw one graph share an idea, there are at most 49 ideas in these 90
# builders: 51 of them draw a graph that another one draws as well, and fall into 10 groups, and 39 have no link.
#
# ## 7. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/10_the_zoo.py).
#
# **1. A triangle with a gap** (easy, 3 minutes). Build the graph of 12 tokens in which a token attends to its past, itself
# included, *except* its direct predecessor.
#
# <details><summary>Hint</summary>
#
# Subtract from `causal(12)`. A window of 2 without its self loops holds exactly the edges from the predecessors.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_edges == 12 * 13 // 2 - 11, "not the right number of edges"
assert not any(dst - src == 1 for src, dst in answer.edge_index.T.tolist()), (
    "some token attends to its direct predecessor"
)
assert all(src <= dst for src, dst in answer.edge_index.T.tolist()), "some token attends to a later one"
print("right:\n", answer, sep="")

# %% [markdown]
# **2. A chat** (medium, 10 minutes, code). Three turns have 4, 3 and 5 tokens. The first turn holds the instructions, and
# its tokens attend to their past, themselves included. A token of turn 2 or 3 attends to the instructions and to its own turn up to
# itself, but not to the other turn. Which builder is it?
#
# <details><summary>Hint</summary>
#
# Several answers share one prompt. Look at the family *sequences* in section 2.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 12 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

turn = [1] * 4 + [2] * 3 + [3] * 5
for dst in range(12):
    expected = [src for src in range(dst + 1) if turn[src] in (1, turn[dst])]
    assert answer.mask()[dst].nonzero().flatten().tolist() == expected, (
        f"token {dst} should attend to {expected}"
    )
draw.mask(answer)

# %% [markdown]
# **3. A tenth of the price** (easy, 3 minutes). What is the widest `window(4096, w)` that has at most a tenth of the edges of `causal(4096)`?
#
# <details><summary>Hint</summary>
#
# `patterns.window(4096, w).num_edges` counts without a list of edges, so a loop over `w` takes less than a second.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: w

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
budget = patterns.causal(4096).num_edges / 10

assert patterns.window(4096, answer).num_edges <= budget, "that costs more"
assert patterns.window(4096, answer + 1).num_edges > budget, "it can be wider"
print(
    f"right: w = {answer}, {answer / 4096:.1%} of the text; in the causal graph a token attends to half of it on average"
)

# %% [markdown]
# **4. From a paper's sentence to a mask** (medium, 10 minutes, code). "Within its document, each token attends to itself, to the three tokens before it, and to
# the document's first token." Write a function of the documents' lengths that returns this graph, from three builders and two
# operators.
#
# <details><summary>Hint</summary>
#
# `documents(lengths)` cuts whatever crosses from one document to another. So the rest may ignore the borders: a window of 4, joined
# with `global_tokens` at the first tokens, whose positions are sums of lengths.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of a list of lengths

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

for lengths in ([12], [5, 7], [1, 6, 2, 3]):
    starts = [sum(lengths[:number]) for number, length in enumerate(lengths) for _ in range(length)]
    for dst, start in enumerate(starts):
        expected = sorted({start, *range(max(start, dst - 3), dst + 1)})
        senders = answer(lengths).mask()[dst].nonzero().flatten().tolist()
        assert senders == expected, (
            f"documents of {lengths}: token {dst} should attend to {expected}, not to {senders}"
        )
print("right:\n", answer([5, 7]), sep="")

# %% [markdown]
# ## Sources
#
# Every builder names its paper in its docstring. Some of those in the pictures above: Child et al. 2019
# ([1904.10509](https://arxiv.org/abs/1904.10509)), Beltagy et al. 2020 ([2004.05150](https://arxiv.org/abs/2004.05150)), Zaheer
# et al. 2020 ([2007.14062](https://arxiv.org/abs/2007.14062)), Li et al. 2019
# ([1907.00235](https://arxiv.org/abs/1907.00235)), Xiao et al. 2024 ([2309.17453](https://arxiv.org/abs/2309.17453)), Hassani et
# al. 2022 ([2204.07143](https://arxiv.org/abs/2204.07143)), Liu et al. 2021 ([2103.14030](https://arxiv.org/abs/2103.14030)),
# Shirzad et al. 2023 ([2303.06147](https://arxiv.org/abs/2303.06147)).

# %% [markdown]
# ---
# before: [09. Why thin factors?](09_why_thin_factors.ipynb) | [the book](README.md) | next: [11. How many layers until the last token reaches the first?](11_how_many_layers.ipynb)
