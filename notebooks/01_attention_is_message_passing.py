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
# # Attention is message passing
#
# A language model reads a row of tokens. At some points each token looks at other tokens and takes something over from
# them. That step is called **attention**, and it is usually written with large matrices.
#
# A graph neural network has nodes, and edges between them. At some points each node receives messages along its edges and
# changes its state. That step is called **message passing**.
#
# They are the same step. This notebook goes from a graph of five words to a trained model, and checks every claim on the
# way by running it: if a cell with an `assert` runs through, its claim holds.
#
# You need some Python and a rough idea of what a matrix product is. You need to know neither graphs nor transformers.
#
# **Afterwards you can** compute attention for one receiver by hand, and say why it is message passing.
#
# [the book](README.md) | next: [Four perspectives on one run](03_four_perspectives.ipynb)

# %%
import inspect
import math
import textwrap
import warnings

import matplotlib.pyplot as plt
import networkx as nx
import torch
from matplotlib.colors import LinearSegmentedColormap

import gnn_attention as ga
from gnn_attention import draw

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that "equal" can mean equal to twelve digits
torch.set_grad_enabled(False)  # nothing is trained here
torch.set_printoptions(precision=2, sci_mode=False)
warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
warnings.filterwarnings(
    "ignore", message="Sparse CSR tensor support is in beta"
)  # torch, on the first product of two graphs

# %% [markdown]
# The library draws graphs (`draw.arcs`: tokens on a line with arrows). The next cell holds the drawing function that is
# missing: a table of numbers as colours. You can skip it.

# %% tags=["hide-input"] jupyter={"source_hidden": true}
BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"  # told apart by colour-blind eyes too
COLOURS = LinearSegmentedColormap.from_list("orange-white-blue", [ORANGE, "white", BLUE])
COLOURS.set_bad("#E4E4E4")  # where there is no edge
plt.rcParams.update({"figure.dpi": 100, "font.size": 11, "axes.titlesize": 12, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.constrained_layout.use": True})


def draw_table(ax, table, rows, columns, title="", limit=1.0, digits=2, mask=None, aspect="equal"):
    """A table of numbers: blue above zero, orange below, grey where ``mask`` has no edge. ``digits=None`` writes no numbers."""
    table = torch.as_tensor(table).double()
    ax.imshow(
        table if mask is None else table.masked_fill(~mask, math.nan),
        cmap=COLOURS,
        vmin=-limit,
        vmax=limit,
        aspect=aspect,
    )
    ax.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks([c + 0.5 for c in range(len(columns) - 1)], minor=True)
    ax.set_yticks([r + 0.5 for r in range(len(rows) - 1)], minor=True)
    ax.grid(which="minor", color="white" if mask is not None else "#DDDDDD")
    ax.tick_params(which="both", length=0)
    ax.set_title(title)
    for r, row in enumerate(table.tolist() if digits is not None else []):
        for c, value in enumerate(row):
            if mask is None or mask[r, c]:
                colour = "white" if value > 0.6 * limit else "black"
                ax.text(
                    c, r, f"{value + 0.0:.{digits}f}", ha="center", va="center", color=colour, fontsize=10
                )


# %% [markdown]
# ## 1. Who may hear whom
#
# $$\text{edge } \mathit{src} \to \mathit{dst}: \quad \mathit{dst} \text{ listens to } \mathit{src}$$
#
# Five words on a line are five **nodes**. (In a language model a node is a *token*: a word or a piece of one.) An **edge**
# `src -> dst` says that the receiver `dst` may hear the sender `src`. A model that writes from left to right lets every
# token hear itself and all tokens before it, because those after it do not exist yet. This graph is called *causal*.

# %%
WORDS = ["Llamas", "do", "not", "output", "words"]
LLAMAS, DO, NOT, OUTPUT, LAST = range(5)

edges = [(src, dst) for dst in range(5) for src in range(5) if src <= dst]

for word in range(5):
    print(f"{WORDS[word]:>6} hears", ", ".join(WORDS[src] for src, dst in edges if dst == word))
print(len(edges), "edges")

# %% [markdown]
# ## 2. The same thing as a mask
#
# $$\text{mask}[\mathit{dst}, \mathit{src}] = \text{True} \iff \text{there is an edge } \mathit{src} \to \mathit{dst}$$
#
# Put the receivers in rows and the senders in columns, and fill a cell for each edge. That table is what the transformer
# literature calls an **attention mask**. The picture shows one edge twice, in orange: *Llamas* is heard by *output*.

# %%
mask = torch.zeros(5, 5, dtype=torch.bool)
for src, dst in edges:
    mask[dst, src] = True

chosen = (LLAMAS, OUTPUT)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), width_ratios=[2, 1])
draw.arcs(
    ga.convert.from_edge_index(torch.tensor(edges).T, 5),
    left,
    WORDS,
    lit=[chosen],
    title="a graph: who hears whom",
)
draw_table(right, mask, WORDS, WORDS, title="the same graph as a mask", mask=mask, digits=None)
right.add_patch(plt.Rectangle((LLAMAS - 0.5, OUTPUT - 0.5), 1, 1, color=RED))
right.set(xlabel="src (sender)", ylabel="dst (receiver)")
plt.show()

# %% [markdown]
# The table is not symmetric: *output* hears *Llamas*, but *Llamas* does not hear *output*. So it matters which index comes
# first, and two conventions exist. Attention masks and this library say `mask[dst, src]`. The adjacency matrix of graph theory,
# which networkx computes, says `A[src, dst]`: it is the **transpose**. Many a wrong mask is this mistake, and it shows only on
# a graph that is not symmetric.

# %%
graph = nx.DiGraph(edges)
adjacency = torch.tensor(nx.to_numpy_array(graph, nodelist=range(5))).bool()

assert torch.equal(mask, adjacency.T)
assert not torch.equal(mask, adjacency)
print(
    "mask[output, Llamas] =",
    mask[OUTPUT, LLAMAS].item(),
    "   adjacency[Llamas, output] =",
    adjacency[LLAMAS, OUTPUT].item(),
)
print(
    "mask[Llamas, output] =",
    mask[LLAMAS, OUTPUT].item(),
    "  adjacency[output, Llamas] =",
    adjacency[OUTPUT, LLAMAS].item(),
)

# %% [markdown]
# In this library a graph is one object. Build it from a list of edges, from a mask, from networkx, or by name; printed, it
# shows both readings. Two graphs are equal if they have the same edges.

# %%
g = ga.patterns.causal(5)
edge_index = torch.tensor(edges).T  # row 0 holds the senders, row 1 the receivers

assert g == ga.convert.from_edge_index(edge_index, 5)
assert g == ga.convert.from_mask(mask)
assert g == ga.convert.from_networkx(graph)
print(g)

# %% [markdown]
# ## 3. One receiver, by hand
#
# Every node has a **state**: a row of numbers. In a model the numbers are learned and hard to read, so here we write them
# by hand, with four columns that mean something.

# %%
FEATURES = ["thing", "doing", "denial", "many"]
x = torch.tensor(
    [  # thing doing denial many
        [1.0, 0.0, 0.0, 1.0],  # Llamas: a thing, and more than one
        [0.0, 0.5, 0.0, 0.0],  # do: half a doing
        [0.0, 0.0, 1.0, 0.0],  # not: a denial
        [0.0, 1.0, 0.0, 0.0],  # output: a doing
        [0.8, 0.0, 0.0, 1.0],  # words: a thing, and more than one
    ]
)
# one row for each feature, one column for each of two channels (W_O: the other way round)
W_Q = torch.tensor(
    [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
)  # a doing looks for: a thing (2), a denial (3)
W_K = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # findable are: a thing, a denial
W_V = torch.tensor(
    [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
)  # what is sent: am I many? am I a denial?
W_O = torch.tensor(
    [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
)  # where it is written: into the columns many, denial

# %% [markdown]
# The four small matrices are one attention **head**. They make it a piece of grammar: a verb looks for its subject and for
# a denial. If it finds a plural subject it becomes plural, and if it finds a denial it becomes denied.
#
# Attention is then a protocol of seven steps. Read it as an exchange of messages, for the receiver *output*:
#
# | | step | formula | usual name |
# |---|---|---|---|
# | 1 | **receiving channel** of the receiver $i$ | $q_i = x_i W_Q$ | query |
# | 2 | **sending channel** of every sender $j$ | $k_j = x_j W_K$ | key |
# | 3 | **channel overlap** of the two | $a_{ij} = q_i \cdot k_j$ | logit (elsewhere also: score) |
# | 4 | **listening distribution** over the in-edges of $i$ | $w_{ij} = \text{softmax}_j (a_{ij} / \sqrt d)$ | weights |
# | 5 | **outgoing message** of every sender | $v_j = x_j W_V$ | value |
# | 6 | **mixed incoming message** | $z_i = \sum_{j \to i} w_{ij} v_j$ | head output |
# | 7 | **state update** | $y_i = z_i W_O$ | output projection |
#
# Here $d = 2$ is the width of a channel. The *logit* of an edge is what goes into the softmax: wherever we say it below, the
# $1 / \sqrt d$ is in it. The *softmax* turns numbers into shares: exponentials, divided by their sum. Steps 1 to 4 decide
# **who is listened to**, steps 5 to 7 decide **what is said**.

# %%
heard = [src for src, dst in edges if dst == OUTPUT]  # the in-edges of "output": a list, not a matrix

receiving_channel = x[OUTPUT] @ W_Q  # 1
print("output listens on the channel", receiving_channel.tolist())

mass = {}
for j in heard:
    sending_channel = x[j] @ W_K  # 2
    overlap = receiving_channel @ sending_channel  # 3
    mass[j] = math.exp(overlap / math.sqrt(2))
    print(f"{WORDS[j]:>8} sends on the channel {sending_channel.tolist()}: overlap {overlap:.1f}")

# %% [markdown]
# *not* fits best (3), *Llamas* fits well (2), *do* and *output* itself do not fit at all (0). The softmax turns this into
# shares that add up to 1, and the shares mix the messages.

# %%
listening = {j: mass[j] / sum(mass.values()) for j in heard}  # 4
mixed = torch.zeros(2)
for j in heard:
    outgoing_message = x[j] @ W_V  # 5
    mixed += listening[j] * outgoing_message  # 6
    print(f"{listening[j]:6.1%} of {WORDS[j]:>6}, whose message is {outgoing_message.tolist()}")

update = mixed @ W_O  # 7
assert math.isclose(sum(listening.values()), 1.0)
print("\nmixed incoming message", mixed)
print("state before", x[OUTPUT], "\nstate after ", x[OUTPUT] + update)

# %% [markdown]
# After one round *output* is still a doing, and now it is also mostly denied and a little plural. It knows these two things
# only because they were sent to it. Nothing in this computation was a large matrix: there were four edges.
#
# The overlap of step 3 exists for any two tokens, also where there is no edge. *words* would fit quite well, but the sum of
# step 4 runs over the in-edges alone, so *output* does not hear it.

# %%
overlap = (x[OUTPUT] @ W_Q) @ (x[LAST] @ W_K)
assert overlap > 0
assert (LAST, OUTPUT) not in edges
print(
    f"overlap of output with words: {overlap:.1f}; is there an edge words -> output? {(LAST, OUTPUT) in edges}"
)

# %% [markdown]
# ## 4. All receivers at once
#
# $$y_i = \Big( \sum_{j \to i} w_{ij} v_j \Big) W_O, \qquad
# w_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt d)}{\sum_{j' \to i} \exp(q_i \cdot k_{j'} / \sqrt d)}$$
#
# The loops go away with two operations on the list of edges. **Gather**: `q[dst]` copies to each edge the channel of its
# receiver. **Scatter**: `index_add` adds the number of each edge to its receiver. This is how graph libraries compute.


# %%
def edge_by_edge(x, W_Q, W_K, W_V, W_O, edge_index):
    (src, dst), n = edge_index, len(x)
    q, k, v = x @ W_Q, x @ W_K, x @ W_V
    logits = (q[dst] * k[src]).sum(-1) / math.sqrt(q.shape[1])  # gather: one number for each edge
    mass = logits.exp()
    total = torch.zeros(n).index_add(0, dst, mass)  # scatter: one number for each receiver
    weights = mass / total[dst]  # the softmax over the in-edges
    mixed = torch.zeros(n, v.shape[1]).index_add(0, dst, weights[:, None] * v[src])
    return mixed @ W_O, weights


updates, weights = edge_by_edge(x, W_Q, W_K, W_V, W_O, edge_index)
assert torch.allclose(updates[OUTPUT], update, rtol=0, atol=1e-12)  # the one we did by hand

# %% [markdown]
# Now the form that is printed in every paper:
#
# $$Y = \text{softmax} \left(\frac{Q K^\top}{\sqrt d} + \text{mask}\right) V W_O$$
#
# $Q K^\top$ is the table of **all** overlaps, edge or no edge. Adding $-\infty$ where there is no edge makes its share
# exactly 0, since $e^{-\infty} = 0$. What is left are the sums over in-edges. The two functions below compute the same.


# %%
def by_matrices(x, W_Q, W_K, W_V, W_O, mask):
    logits = (x @ W_Q) @ (x @ W_K).T / math.sqrt(W_Q.shape[1])
    table = logits.masked_fill(~mask, -math.inf).softmax(-1)
    return table @ (x @ W_V) @ W_O, table


updates_too, table = by_matrices(x, W_Q, W_K, W_V, W_O, mask)
assert torch.allclose(updates, updates_too, rtol=0, atol=1e-12)
assert torch.allclose(weights, table[edge_index[1], edge_index[0]], rtol=0, atol=1e-12)

# %% [markdown]
# Left: what is listened to, one row for each receiver; the shares of a row add up to 1. Right: what each token's state
# gains.
#
# *Llamas*, *not* and *words* look for nothing: their receiving channel is 0, all overlaps are 0, and so they listen to everyone
# they may hear equally. The softmax has no way to say "nobody".

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4))
draw_table(left, table, WORDS, WORDS, title="listening distributions (weights)", mask=mask)
left.set(xlabel="src (sender)", ylabel="dst (receiver)")
draw_table(right, updates, WORDS, FEATURES, title="state updates")
plt.show()

# %% [markdown]
# Five words could agree by accident. Forty random tokens, on a random graph of no particular shape, do not:

# %%
n, width, d = 40, 16, 8
states = torch.randn(n, width)
matrices = [torch.randn(width, d), torch.randn(width, d), torch.randn(width, d), torch.randn(d, width)]
random_mask = (torch.rand(n, n) < 0.2) | torch.eye(n, dtype=torch.bool)
random_graph = ga.convert.from_mask(random_mask)

one, _ = edge_by_edge(states, *matrices, random_graph.edge_index)
other, _ = by_matrices(states, *matrices, random_mask)
assert torch.allclose(one, other, rtol=1e-12, atol=1e-11)
print(f"{n} tokens, {random_graph.num_edges} edges of {n * n} pairs: equal")

# %% [markdown]
# The matrix form computes all $n^2$ pairs and throws away those without an edge; the edge form computes the edges alone. On
# a full graph the matrix form is faster, because computers are good at matrix products. On a sparse graph it does work
# that nobody needs. The mathematics is the same.
#
# ## 5. Message, aggregate, update
#
# $$y_i = \text{update}\Big( \underset{j \to i}{\text{aggregate}} \ \text{message}(x_i, x_j) \Big)$$
#
# Graph neural networks are written with these three functions, and the library **torch_geometric** (PyG) asks for them by
# name. PyG does the gathering and scattering: an argument that ends in `_j` arrives gathered from the sender of each edge,
# one that ends in `_i` from its receiver. These are the methods of our attention layer, as they stand in the library:

# %%
for method in ("edge_update", "message", "update"):
    print(textwrap.dedent(inspect.getsource(getattr(ga.MessagePassingAttention, method))))

# %% [markdown]
# `edge_update` is steps 3 and 4: overlap and listening distribution. (`_modified` is where a change of the logits by edge would
# come in; we use none here.) `message` is what travels along an edge: the sender's message, times its weight. Then comes
# `aggregate`, step 6. It is not printed because PyG's own sum is used as it is. `update` is step 7. Steps 1, 2 and 5 happen
# at the nodes, before anything travels.
#
# The same numbers come out. The layer takes our graph object, or the plain `edge_index` that PyG users have.

# %%
heads = ga.StandardHeads.from_arrays(W_Q[None], W_K[None], W_V[None], W_O[None])  # [None]: a list of one head
layer = ga.MessagePassingAttention(heads)

y, (_, layer_weights) = layer(x, g, return_attention_weights=True)
assert torch.allclose(y, updates, rtol=0, atol=1e-12)
assert torch.allclose(layer_weights[:, 0], weights, rtol=0, atol=1e-12)
assert torch.equal(layer(x, edge_index), y)
print(layer)

# %% [markdown]
# ## 6. Many heads
#
# $$\text{Concat}(z^0, z^1, \dots) W_O = \sum_h z^h W_O^h$$
#
# One head has one question. A sender has one message in it for everybody, however different its listeners are. So models
# run several heads side by side over the same graph, counted from 0. Ours was head 0. Here is head 1: a thing, and a
# denial, look for a doing.

# %%
W_Q2 = torch.tensor([[3.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]])  # a thing, and a denial, look for
W_K2 = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])  # a doing,
W_V2 = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])  # which says how much of a doing it is,
W_O2 = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])  # and it is written into the column doing

pairs = [(W_Q, W_Q2), (W_K, W_K2), (W_V, W_V2), (W_O, W_O2)]
heads = ga.StandardHeads.from_arrays(*(torch.stack(pair) for pair in pairs))
layer = ga.MessagePassingAttention(heads)
_, (_, weights) = layer(x, g, return_attention_weights=True)

figure, axes = plt.subplots(1, 2, figsize=(12, 2.6), sharey=True)
for h, ax in enumerate(axes):
    draw.arcs(g, ax, WORDS, weights[:, h], title=f"head {h}: line width = weight")
plt.show()

# %% [markdown]
# The usual formula puts the outputs of all heads side by side and multiplies by one large $W_O$. Cut that $W_O$ into one
# block of rows for each head, and the product falls apart into a **sum**. Heads do not mix: each adds its own messages to
# the state, and a head that you leave out takes away exactly its own part.

# %%
z = ga.attend(heads.receive(x[None]), *heads.send(x[None]), g)[0]  # mixed messages: [head, token, channel]

side_by_side = torch.cat([z[0], z[1]], dim=1)  # 5 tokens x (2 + 2)
W_O_all = torch.cat([W_O, W_O2], dim=0)  # (2 + 2) x 4 features
parts = torch.stack([z[0] @ W_O, z[1] @ W_O2])  # what each head adds

assert torch.allclose(side_by_side @ W_O_all, parts.sum(0), rtol=0, atol=1e-12)
assert torch.allclose(layer(x, g), parts.sum(0), rtol=0, atol=1e-12)

figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
draw_table(axes[0], parts[0], WORDS, FEATURES, title="head 0 adds")
draw_table(axes[1], parts[1], WORDS, FEATURES, title="head 1 adds")
draw_table(axes[2], x + parts.sum(0), WORDS, FEATURES, title="state + both = new state", limit=1.5)
plt.show()

# %% [markdown]
# ## 7. Patterns and messages
#
# $$W_P = W_Q W_K^\top, \quad P = X W_P \qquad\qquad W_M = W_V W_O, \quad M = X W_M$$
#
# $$\text{logits} = \frac{P X^\top}{\sqrt d}, \qquad Y = \sum_h \text{softmax}(\text{logits}_h) M_h$$
#
# $W_Q$ and $W_K$ are only ever used as a product, and so are $W_V$ and $W_O$. Multiply them out, and queries, keys and
# values disappear. (Models that rotate queries and keys by position put something between the two; that is another story.)
# What is left has names of its own:
#
# * the **pattern** of a receiver is a description of the state it looks for. It is as wide as a state, so the two can be
#   compared by a dot product;
# * the **message** of a sender is what it would add to the state of a listener that heard nobody else.
#
# Both live in the space of the states, where our columns have names. So the two matrices of a head can be read like a
# text.

# %%
W_P, W_M = W_Q @ W_K.T, W_V @ W_O

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
draw_table(left, W_P, FEATURES, FEATURES, title="$W_P$ of head 0: what looks for what", limit=3, digits=0)
left.set(xlabel="looks for this in a sender", ylabel="a receiver that is this")
draw_table(right, W_M, FEATURES, FEATURES, title="$W_M$ of head 0: what becomes what", digits=0)
right.set(xlabel="adds this to a receiver", ylabel="a sender that is this")
plt.show()

# %% [markdown]
# "A *doing* looks for a *thing* (2) and for a *denial* (3). *Denial* adds *denial*, *many* adds *many*." That is the whole
# head. The pattern of *output*, dotted with the states, gives the overlaps that we found by hand:

# %%
P, M = x @ W_P, x @ W_M
print("pattern of output", dict(zip(FEATURES, P[OUTPUT].tolist(), strict=True)))
print("message of not   ", dict(zip(FEATURES, M[NOT].tolist(), strict=True)))
for word, fit in zip(WORDS, x @ P[OUTPUT], strict=True):
    print(f"{word:>8} fits the pattern of output by {fit:.1f}")

assert torch.allclose(P @ x.T, (x @ W_Q) @ (x @ W_K).T, rtol=0, atol=1e-12)
assert torch.linalg.matrix_rank(W_P) <= 2  # four wide, but no more than d = 2 directions in it
assert torch.linalg.matrix_rank(W_M) <= 2

# %% [markdown]
# Attention without queries, keys and values is two lines. Note the scale: it stays $1/\sqrt d$ with the channel width
# $d = 2$, although a pattern is four wide.


# %%
def pattern_message_attention(x, W_P, W_M, mask, d):
    logits = (x @ W_P) @ x.T / math.sqrt(d)
    return (logits.masked_fill(~mask, -math.inf).softmax(-1) @ (x @ W_M)).sum(0)


standard = heads
factored = ga.FactoredHeads.of(heads)  # P = (x W_Q) W_K^T and M = (x W_V) W_O, in two steps each
merged = ga.MergedHeads.of(heads)  # P = x W_P and M = x W_M, multiplied out
expected = pattern_message_attention(x, merged.W_P, merged.W_M, mask, d=2)

for form in (standard, factored, merged):
    y = ga.MessagePassingAttention(form)(x, g)
    assert torch.allclose(y, expected, rtol=0, atol=1e-12)
    print(f"{type(form).__name__:>13}: the same updates")

# %% [markdown]
# Real models keep the thin matrices, because a state of 4,096 numbers and a channel of 128 make $W_P$ sixteen times as
# expensive as $W_Q$ and $W_K$ together. For *thinking* about a head, patterns and messages are the shorter description.
#
# ## 8. Change the graph, not the layer
#
# The layer never asked where the edges came from. Every "kind of attention" below is the same layer with the same
# parameters over another graph. Only the set of edges changes.
#
# * **window**: a token hears the last two tokens, itself included.
# * **strict causal**: a token hears those before it, but not itself.
# * **tree**: a token hears itself and its ancestors. Two continuations of *Llamas do* are computed at once here: "*not*" and
#   "*output words*". Neither hears the other.
# * **grammar**: a graph drawn with networkx, from any source you like. Edges may run to the left.

# %%
grammar = nx.DiGraph(
    [("Llamas", "output"), ("not", "output"), ("do", "output"), ("words", "output"), ("output", "words")]
)
graphs = {
    "window(5, 2)": ga.patterns.window(5, 2),
    "strict_causal(5)": ga.patterns.strict_causal(5),
    "tree": ga.patterns.tree([-1, LLAMAS, DO, DO, OUTPUT]),  # the parent of each word; -1 has none
    "grammar": ga.convert.from_networkx(grammar, order=WORDS),
}
results = {name: layer(x, graph) for name, graph in graphs.items()}

figure, axes = plt.subplots(4, 2, figsize=(11, 11), width_ratios=[1.6, 1])
for (name, graph), (left, right) in zip(graphs.items(), axes, strict=True):
    draw.arcs(graph, left, WORDS, title=name)
    draw_table(right, results[name], WORDS, FEATURES, aspect="auto")
axes[0, 1].set_title("what the layer then adds")
plt.show()

# %% [markdown]
# What each graph changes:
#
# * window: *output* still hears *not*, so it learns that it is denied. Its subject is out of earshot, so it does not learn
#   that it is plural.
# * strict causal: *Llamas* hears nobody. **A token that hears nobody receives exactly 0.** (The formula of section 4, taken
#   literally, divides 0 by 0 there.)
# * tree: *output* no longer hears *not*. On this branch the sentence reads "Llamas do output words", and nothing is denied.
# * grammar: *Llamas*, *do* and *not* hear nobody. *words* hears its verb alone, with the share 1, and takes over all of it.

# %%
DENIAL, MANY, DOING = FEATURES.index("denial"), FEATURES.index("many"), FEATURES.index("doing")

assert results["window(5, 2)"][OUTPUT, DENIAL] > 0.5
assert results["window(5, 2)"][OUTPUT, MANY] == 0
assert torch.equal(results["strict_causal(5)"][LLAMAS], torch.zeros(4))
assert results["tree"][OUTPUT, DENIAL] == 0
assert results["tree"][OUTPUT, MANY] > 0
assert math.isclose(results["grammar"][LAST, DOING], x[OUTPUT, DOING])
for name, graph in graphs.items():  # and each of them equals matrix attention with that graph's mask
    by_mask = pattern_message_attention(x, merged.W_P, merged.W_M, graph.mask(), d=2)
    hears = graph.in_degree() > 0
    assert torch.allclose(results[name][hears], by_mask[hears], rtol=0, atol=1e-12)
    assert by_mask[~hears].isnan().all()  # 0 / 0: the layer does better than the formula
    assert not results[name][~hears].any()

# %% [markdown]
# Graphs are sets of edges, so they can be joined (`|`), intersected (`&`) and subtracted (`-`). Let us **cut one edge**,
# *not* $\to$ *output*, and look at the listening distribution of *output* before and after:
#
# $$w'_{ij} = \frac{w_{ij}}{1 - w_{i,\mathit{cut}}}$$
#
# The shares of the others grow, all by the same factor, until they add up to 1 again. Cutting an edge is therefore not the
# same as muting a message (weight kept, message set to 0): a cut edge hands its share to the rest.

# %%
cut = g - ga.convert.from_edge_index(torch.tensor([[NOT], [OUTPUT]]), 5)
assert cut.num_edges == g.num_edges - 1

q, (k, v) = heads.receive(x[None]), heads.send(x[None])
shares = {}
for name, graph in (("before", g), ("after", cut)):
    _, info = ga.attend(q, k, v, graph, return_info=True)
    src, dst = graph.edge_index
    shares[name] = torch.zeros(5).index_add(
        0, src[dst == OUTPUT], info.weights()[0, 0, dst == OUTPUT]
    )  # of head 0

others = [LLAMAS, DO, OUTPUT]
assert torch.allclose(shares["after"][others], shares["before"][others] / (1 - shares["before"][NOT]))
assert shares["after"][NOT] == 0
assert math.isclose(shares["after"].sum(), 1.0)

figure, ax = plt.subplots(figsize=(7, 3))
for offset, (name, share) in zip((-0.2, 0.2), shares.items(), strict=True):
    bars = ax.bar(
        [word + offset for word in range(4)],
        share[:4],
        width=0.38,
        color=[BLUE, ORANGE][offset > 0],
        label=name,
    )
    ax.bar_label(bars, fmt="%.2f", padding=2)
ax.set_xticks(range(4), WORDS[:4])
ax.set(ylabel="share of listening", ylim=(0, 1), title="whom 'output' listens to, before and after the cut")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 9. A trained model
#
# The package ships a small language model. It has learned to predict the next token on the source code of Python's standard
# library, so English is not its home, but it will do. Each of its layers is one round of message passing (*communication*:
# attention) followed by a small network at each node, an MLP (*computation*). So far the order of the tokens did not matter to
# a head; here each head also adds to every logit a learned number for the distance between the two tokens.
#
# Its tokens are pieces of words, found by counting: frequent words are one piece, others fall into several. `␣` marks a
# space.

# %%
model, vocabulary = ga.model.load_trained()
sentence = torch.tensor([vocabulary.encode("Llamas do not output words")])
pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces(sentence[0])]

num_layers, num_heads = model.config.num_layers, model.config.num_heads
print(
    f"{num_layers} layers of {num_heads} heads, states of {model.config.width} numbers, d = {model.config.head_dim}"
)
print(f"{len(pieces)} nodes:", " | ".join(pieces))

# %% [markdown]
# Nobody wrote down what its heads look for. But we can watch them: `model.listen` returns the weight of every edge in every
# head. Below is the head that listens most to **the token before its own**. We do not say in advance which one that is, but
# look for it: on random tokens, where meaning cannot help, measure how much weight goes along the edges `dst - 1 -> dst`.
# (The first token can hear only itself, whatever the head.)


# %%
def strongest(scores):
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return layer, head


previous = ga.model.previous_token_scores(model)
layer_number, head_number = strongest(previous)

line = ga.patterns.causal(len(pieces))
listened = model.listen(sentence, line)[layer_number][0, :, head_number]  # a weight for each edge

figure, ax = plt.subplots(figsize=(11, 3.6))
title = f"layer {layer_number}, head {head_number}: who listens to whom (line width = weight)"
draw.arcs(line, ax, pieces, listened, title=title)
plt.show()
print(f"mean weight on the token before: {previous[layer_number, head_number]:.2f} (on random tokens)")
assert previous.max() > 0.2

# %% [markdown]
# ### The induction head
#
# Knowing which token came before is half of a famous circuit. Let the model read a text for the second time. To predict the
# next piece it would help to find the earlier place where its own piece stood, and to listen to **the piece after it**: what
# followed then is likely to follow now. A head that does this is called an *induction head*. It needs two rounds of message
# passing. In the first, every token hears what stands before it. In the second, a receiver looks for a sender whose
# predecessor, as learned in the first round, is the receiver's own piece.
#
# `induction_scores` measures it for every head: on random tokens repeated once, the mean weight that a token of the second
# copy gives to the edge just described.

# %%
induction = ga.model.induction_scores(model, length=32)
layer_number, head_number = strongest(induction)

figure, ax = plt.subplots(figsize=(6, 2.6))
names = [f"head {h}" for h in range(num_heads)]
draw_table(
    ax,
    induction,
    [f"layer {number}" for number in range(num_layers)],
    names,
    title="induction score of every head",
)
plt.show()
print(f"the strongest: layer {layer_number}, head {head_number}")
assert induction.max() > 0.2
assert layer_number > 0  # it needs a round before its own

# %% [markdown]
# Here it is on our sentence, said twice. For each token of the second copy we draw the strongest of its in-edges in that
# head: in orange if it comes from the piece *after* the same piece in the first copy, in grey if not.

# %%
n = len(pieces)
twice = sentence.repeat(1, 2)
line = ga.patterns.causal(2 * n)
src, dst = line.edge_index
listened = model.listen(twice, line)[layer_number][0, :, head_number]

best = [int(torch.where(dst == receiver, listened, -1.0).argmax()) for receiver in range(n, 2 * n)]
strong = [(int(src[e]), int(dst[e])) for e in best]
found = [receiver - sender == n - 1 for sender, receiver in strong]

figure, ax = plt.subplots(figsize=(13, 3.4))
title = f"layer {layer_number}, head {head_number}: the strongest in-edge of each token of the second copy"
strongest_edges = ga.convert.from_edge_index(torch.tensor(strong).T, 2 * n)
draw.arcs(
    strongest_edges,
    ax,
    pieces * 2,
    listened[best],
    lit=[edge for edge, yes in zip(strong, found, strict=True) if yes],
    title=title,
)
plt.show()
print(f"{sum(found)} of {n} listen to the piece after their own earlier occurrence")
assert sum(found) > n / 2

# %% [markdown]
# ### The same model over a window
#
# No parameter changes now, only the graph: every token hears the last eight, itself included. We say 32 random tokens twice.
# The edges that the induction head needs run over 31 tokens: they are gone. Can the layers hand the information on in several
# hops instead? Ask the graph: `window ** 2` has an edge wherever two hops lead.

# %%
length = 32
generator = torch.Generator().manual_seed(1)
first = torch.randint(model.config.vocabulary_size, (64, length), generator=generator)
repeated = torch.cat([first, first], dim=1)  # 64 random texts, each said twice

causal, window = ga.patterns.causal(2 * length), ga.patterns.window(2 * length, 8)
src, dst = (window**num_layers).edge_index
print(
    f"{num_layers} hops reach {(dst - src).max()} tokens back, the edges of the induction head {length - 1}"
)
assert (dst - src).max() < length - 1
assert ga.model.induction_scores(model, length=length, graph=window).max() == 0


def surprise(graph):
    """Minus the logarithm of the probability that the model gave to the token that came, for each position, mean over texts."""
    chances = model(repeated, graph)[:, :-1].log_softmax(-1)
    return -chances.gather(-1, repeated[:, 1:, None])[..., 0].mean(0)


# %% [markdown]
# The tokens are random, so in the first copy there is nothing to know. (The model does worse there than even guessing,
# because it expects text.) In the second copy everything could be known. The lower the curve, the better the prediction.

# %%
runs = {"causal": surprise(causal), "window(64, 8)": surprise(window)}

figure, ax = plt.subplots(figsize=(9, 3.8))
for (name, curve), colour, marker in zip(runs.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
    ax.plot(range(1, 2 * length), curve, color=colour, marker=marker, markersize=4, label=name)
ax.axvline(length - 0.5, color=GREY, linestyle="--")
ax.axhline(math.log(len(vocabulary)), color=GREY, linestyle=":", label="even guessing")
ax.set_ylim(0)
ax.text(length, 0.2, "second copy begins", color="#555555", va="bottom")
ax.set(
    xlabel="position of the predicted token",
    ylabel="surprise",
    title="random tokens, said twice: one model, two graphs",
)
ax.legend(frameon=False, loc="lower left")
plt.show()


def gain(curve):
    """How much less surprising the second copy is than the first."""
    return (curve[: length - 1].mean() - curve[length:].mean()).item()


for name, curve in runs.items():
    print(f"{name:>14}: the second copy is less surprising by {gain(curve):.2f}")
assert gain(runs["causal"]) > 1 > gain(runs["window(64, 8)"])

# %% [markdown]
# Over the causal graph the model recognises the second copy, if by no means every token of it: its surprise comes down to about
# that of even guessing. Over the window it cannot, however good its heads are: what a model can know is decided by its graph,
# before any number is learned. Exercise 5 gives the lost edges back.
#
# **In short.** An attention mask is a graph. Along each of its edges a message travels, with a weight that the receiver shares
# out among its in-edges. A receiver's state gains the sum of what arrives, over all heads. Dense matrices are one way to
# compute this, edge lists are another, and the graph is yours to choose.
#
# ## 10. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/01_attention_is_message_passing.py).
#
# **1. The other direction.** Build the graph in which each of the five tokens hears itself and all tokens *after* it, from
# `ga.patterns.causal(5)`, with two characters.

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert all(src >= dst for src, dst in answer.edge_index.T.tolist()), "some token hears one before it"
assert answer.num_dst == 5, "five tokens"
assert answer.num_edges == 15, "an edge is missing: a token hears itself too"
print("right:\n", answer, sep="")

# %% [markdown]
# **2. One edge.** Over the causal graph *output* learns that it is denied. Which one edge `(src, dst)` must be cut so that the
# layer, both heads together, adds no denial to *output*?

# %% tags=["exercise"]
answer = None  # your turn: a pair such as (LLAMAS, OUTPUT)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

less = g - ga.convert.from_edge_index(torch.tensor([answer]).T, 5)
assert layer(x, g)[OUTPUT, DENIAL] > 0.5
assert layer(x, less)[OUTPUT, DENIAL] == 0, "output still hears of a denial"
print(f"right: without the edge {WORDS[answer[0]]} -> {WORDS[answer[1]]} nothing is denied")

# %% [markdown]
# **3. Hearsay.** Over `window(5, 2)` a token hears itself and its left neighbour. Apply the layer twice, each time adding
# the update to the state. Whose *first* states can have influenced the final state of *words*? Give a set of positions.
# (Hint: print `ga.patterns.window(5, 2) ** 2`.)

# %% tags=["exercise"]
answer = None  # your turn: a set such as {LAST}

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
near = ga.patterns.window(5, 2)


def two_rounds(state):
    state = state + layer(state, near)
    return state + layer(state, near)


influence = set()
for token in range(5):  # change one token's state, and see whether words ends up elsewhere
    changed = x.clone()
    changed[token] += 1.0
    if not torch.equal(two_rounds(changed)[LAST], two_rounds(x)[LAST]):
        influence.add(token)
assert set(answer) == influence, f"not quite: changing {[WORDS[t] for t in influence]} changes words"
print("right:", ", ".join(WORDS[token] for token in sorted(influence)))

# %% [markdown]
# **4. Loud and quiet.** The softmax is told how sharply to choose by the scale in front of the overlaps, which was
# $1/\sqrt 2$. Give two scales: one with which *output* listens to its four senders exactly equally in head 0, and one with
# which it gives more than 99.9 % to *not*.

# %% tags=["exercise"]
answer = None  # your turn: two numbers (even, sharp)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

src, dst = g.edge_index
found = []
for scale in answer:
    _, info = ga.attend(q, k, v, g, scale=scale, return_info=True)
    found.append(info.weights()[0, 0, dst == OUTPUT])
    print(f"scale {scale}:", ", ".join(f"{WORDS[j]} {share:.3f}" for j, share in enumerate(found[-1])))
assert torch.allclose(found[0], torch.full((4,), 0.25)), "the first is not even"
assert found[1][NOT] > 0.999, "the second is not sharp enough"

# %% [markdown]
# **5. Give the induction head its edges back.** Build a graph over the 64 tokens of section 9 with **fewer than 600 edges**
# (the causal graph has 2,080) over which the model is better on the second copy than on the first by more than 1. A graph is a
# rule: `ga.TokenGraph.from_rule(lambda b, h, dst, src: ..., 64)` has an edge wherever the condition on the positions `dst` and
# `src` is true (`b` and `h` are sample and head, not needed here). Graphs are joined by `|`. Fewer edges need not be worse:
# fewer senders compete for a listener.

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 64 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

runs["your graph"] = surprise(answer)
for name, graph in (("causal", causal), ("window(64, 8)", window), ("your graph", answer)):
    print(
        f"{name:>14}: {graph.num_edges:>4} edges, less surprised by the second copy by {gain(runs[name]):.2f}"
    )
assert answer.num_edges < 600, "too many edges"
assert gain(runs["your graph"]) > 1, "the second copy is still a surprise"

# %% [markdown]
# ## Sources
#
# * A. Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017: the matrix form, many heads.
# * J. Gilmer et al., [Neural Message Passing for Quantum Chemistry](https://arxiv.org/abs/1704.01212), 2017: message,
#   aggregate, update.
# * C. McCormick, *Patterns and Messages*, parts 1 and 2, 2025 (S0 and S1 in the docstrings of this library): the split of
#   $W_O$, patterns, messages, and the sentence about llamas.
# * *Attention: All you need to know*, far.in.net, 2025 (S4), perspective 4, after A. Karpathy: the seven steps (S4.17).
# * C. Olsson et al., [In-context Learning and Induction Heads](https://arxiv.org/abs/2209.11895), 2022.

# %% [markdown]
# ---
# [the book](README.md) | next: [Four perspectives on one run](03_four_perspectives.ipynb)
