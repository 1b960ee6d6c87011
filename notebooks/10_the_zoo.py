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
# structure, usually does one thing: it says **who may hear whom**. That is a graph, and two graphs can be *compared*. So the question
# has an answer: put the masks of the papers side by side and ask which are equal. Some are, though their papers do not say so.
#
# To get there we need the graphs: tokens are nodes, and an edge `src -> dst` lets the receiver `dst` hear the sender `src`. On the way
# this notebook shows the families, counts what they cost, combines them, and takes them to other libraries.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb), or its one sentence: a mask is a graph, and `mask[dst, src]` is
# its table. (The builders live in `ga.patterns`, since the literature calls such graphs attention patterns. In this library's
# prose a *pattern* is something else: what a receiver looks for.)
#
# **Afterwards you can** build a mask from a paper's sentence, and test whether two papers draw one graph.
#
# before: [Why thin factors?](09_why_thin_factors.ipynb) | [the book](README.md) | next: [How many layers until the last token hears the first?](11_how_many_layers.ipynb)

# %%
import inspect
import textwrap
from itertools import combinations

import matplotlib.pyplot as plt
import networkx as nx
import torch

import gnn_attention as ga
from gnn_attention import algebra, analyse, draw, patterns
from gnn_attention.convert import catalogue
from gnn_attention.convert.expressions import parse

# %% [markdown]
# ## 1. Three ways to see a graph
#
# A small graph prints itself: the mask on the left, and in-edges on the right.

# %%
print(patterns.window(6, 3))

# %% [markdown]
# Drawn, there are the mask, the nodes with their links, and the arcs over a line of tokens. In the masks the receivers are
# the rows: read a row and you know whom that token hears. An arrow points from the sender to the receiver.

# %%
streaming = patterns.window(12, 3) | patterns.sinks(12, 1)
draw.side_by_side(streaming)

# %%
draw.arcs(streaming)

# %% [markdown]
# This one is a window (the last three tokens) joined with a *sink*: a first token that everyone hears, whatever the distance.
# It keeps a model running over endless text with a bounded memory: a token never hears more than four.

# %%
assert streaming.max_in_degree == 4
draw.degrees(patterns.window(64, 8) | patterns.sinks(64, 4))

# %% [markdown]
# ## 2. The families
#
# `gnn-attention graphs` lists all builders on the command line; here they are, by family. Every builder states its set of edges
# exactly, in its docstring, with the paper it comes from.

# %%
entries = catalogue.entries()
families = {}
for entry in entries:
    families.setdefault(entry.family, []).append(entry.name)
for family, names in families.items():
    print(f"{family:>11}: {', '.join(names)}")

assert set(patterns.__all__) == {entry.name for entry in entries}

# %%
print(inspect.getdoc(patterns.natten).partition("\n\n")[0])

# %% [markdown]
# Sixteen expressions at 64 tokens, as masks. Dark cells are edges. Are they sixteen graphs? Look closely before you go on.


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
# Fourteen. The LogSparse Transformer (2019, for time series) and Power Attention (2025, for language models) draw the same edges: the
# tokens 1, 2, 4, 8, ... before. And four memory tokens in front of a window are the four sinks of StreamingLLM. Papers differ in what
# they train, in kernels and in reasons; here two pairs agree in *who hears whom*. That is what one gains from writing masks as graphs:
# the question can be asked at all.
#
# From the top: graphs **on a line**; **strided** ones, which reach far with few edges; those with **hubs**, tokens that
# everyone hears; and those of **packed** rows, where one row of tokens holds several texts.
#
# Pictures are not lines. On a grid of 8 x 8 patches a window has two dimensions, and the mask of a line shows stripes:

# %%
gallery(["natten((8, 8), 3)", "swin((8, 8), 4, 2)", "axial((8, 8))", "sliding_tile((8, 8), 2, 3)"])

# %% [markdown]
# What one token hears is clearer on the grid itself. Below, the row of the mask of one patch (the dot) is folded back into
# the picture:

# %%
shape, patch = (8, 8), (2, 5)
receiver = patch[0] * shape[1] + patch[1]
figure, axes = plt.subplots(1, 4, figsize=(11, 3.1), layout="constrained")
for ax, text in zip(
    axes,
    ["natten((8, 8), 3)", "swin((8, 8), 4, 2)", "axial((8, 8))", "sliding_tile((8, 8), 2, 3)"],
    strict=True,
):
    heard = parse(text).mask()[receiver].view(shape)
    ax.imshow(heard.int(), cmap="Blues", vmin=0, vmax=1.3)
    ax.plot(patch[1], patch[0], "o", color="#D55E00", markersize=9)
    ax.set_title(f"{text}\nhears {int(heard.sum())} patches", fontsize=8.5, loc="left")
    ax.set(xticks=[], yticks=[])
plt.show()
assert parse("natten((8, 8), 3)").in_degree().unique().tolist() == [
    9
]  # also at the border: the window is pushed inwards

# %% [markdown]
# Graphs need not come from a picture of positions at all. An *expander* is random, with a constant number of edges per token,
# and still everyone is a few steps from everyone. A hypercube and a torus are classics of parallel computing. The diameter is
# the number of layers after which everyone has heard of everyone.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
for ax, text in zip(axes, ["expander(32, 2, causal=False)", "hypercube(5)", "torus(4, 8)"], strict=True):
    draw.graph(parse(text), ax)
    print(
        f"{text:>29}: at most {parse(text).max_in_degree} senders each, diameter {analyse.diameter(parse(text))}"
    )
plt.show()

# %% [markdown]
# Trees are graphs of their own. In *tree decoding* a small model proposes several continuations at once, and the large model
# checks all of them in one pass: a token hears the prompt, itself, and its ancestors. Below, tokens 0 to 2 are the prompt.

# %%
parents = [-1, -1, 0, 0, 1, 3]
draw.arcs(patterns.tree_decoding(3, parents), labels=["P0", "P1", "P2", "a", "b", "ac", "ad", "be", "adf"])

# %% [markdown]
# ## 3. What it costs
#
# Attention costs one product of two vectors for each edge. So the number of edges, as the text gets longer, is the price.
# A graph is a rule, not a table, and most counts need no list of edges.

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
    ax.loglog(LENGTHS, counts[text], style, marker="o", markersize=4, label=text, base=2)
ax.set(xlabel="tokens n", ylabel="edges", title="the number of edges is the price of attention")
ax.legend(frameon=False)
plt.show()

n = LENGTHS[-1]
for text in GROWING:
    print(f"{text:>32}: {counts[text][-1] / n:8.1f} senders each at n = {n}")
assert counts["causal({n})"] == [n * (n + 1) // 2 for n in LENGTHS]

# %% [markdown]
# Twice the text costs four times as much with the causal graph, about $2\sqrt 2$ times with strides of $\sqrt n$, and twice,
# plus a little, with the other two. What is lost is reach: how many layers it takes until the last token can have heard of
# the first. That is the subject of [notebook 11](11_how_many_layers.ipynb).
#
# ## 4. How they combine
#
# Graphs are sets of edges, with an algebra: `|` joins, `&` intersects, `-` subtracts, `^` takes what is in exactly one, `~`
# complements, `.T` turns every edge round, `@` composes two hops and `** k` goes `k`. Many a paper is one line:

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
grid = algebra.cartesian_product(line, line)  # a token hears its neighbours in its row and in its column
packed = algebra.disjoint_sum(patterns.causal(24), patterns.prefix(8, 4), patterns.causal(32))
heads = algebra.per_head(
    patterns.causal(32), patterns.window(32, 4), patterns.dilated(32, 4, 4), patterns.sinks(32, 2)
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
# A graph comes from, and goes to, the other forms that masks and graphs have. The mask `mask[dst, src]` is the *transpose* of
# the adjacency matrix of networkx.

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
    "longest way from token to token:",
    nx.dag_longest_path_length(nx.DiGraph(e for e in digraph.edges if e[0] != e[1])),
)
print(
    "nodes that everyone depends on:",
    [v for v in digraph if nx.descendants(digraph, v) | {v} == set(digraph)],
)

# %% [markdown]
# And any of them runs attention. Over the graph's edges alone, the result is that of dense attention under the mask:

# %%
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
out = ga.attend(q, k, v, graph)
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
assert torch.allclose(out, dense, atol=1e-6)
print("equal:", torch.allclose(out, dense, atol=1e-6))

# %% [markdown]
# ## 6. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/10_the_zoo.py).
#
# **1. A triangle with a gap.** Build the graph over 12 tokens in which a token hears its past, itself included, *except* its
# direct predecessor.

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_edges == 12 * 13 // 2 - 11, "not the right number of edges"
assert not any(dst - src == 1 for src, dst in answer.edge_index.T.tolist()), (
    "somebody hears its direct predecessor"
)
assert all(src <= dst for src, dst in answer.edge_index.T.tolist()), "somebody hears what is still to come"
print("right:\n", answer, sep="")

# %% [markdown]
# **2. A chat.** Three turns of 4, 3 and 5 tokens. The first is the instructions, which everyone hears. A token of turn 2 or 3
# hears its own turn up to itself, and the instructions, but not the other turn. Which builder is it?

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 12 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

turn = [1] * 4 + [2] * 3 + [3] * 5
for dst in range(12):
    expected = [src for src in range(dst + 1) if turn[src] in (1, turn[dst])]
    assert answer.mask()[dst].nonzero().flatten().tolist() == expected, f"token {dst} should hear {expected}"
draw.mask(answer)

# %% [markdown]
# **3. A tenth of the price.** What is the widest `window(4096, w)` that has at most a tenth of the edges of `causal(4096)`?

# %% tags=["exercise"]
answer = None  # your turn: w

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
budget = patterns.causal(4096).num_edges / 10

assert patterns.window(4096, answer).num_edges <= budget, "that costs more"
assert patterns.window(4096, answer + 1).num_edges > budget, "it can be wider"
print(
    f"right: w = {answer}, {answer / 4096:.1%} of the text; in the causal graph a token hears half of it on average"
)

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
# before: [Why thin factors?](09_why_thin_factors.ipynb) | [the book](README.md) | next: [How many layers until the last token hears the first?](11_how_many_layers.ipynb)
