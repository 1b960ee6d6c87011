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
# # Matrix multiplication is message passing
#
# Attention is *explained* with nodes and messages, and *computed* with matrix products. How can these be one thing? A
# matrix product already **is** message passing, along a graph whose edges are the entries of the first factor.
#
# This notebook reads a product in two ways and finds both of them in attention. It measures when matrices are faster and
# when edges are. And it clears up two points that the literature often gets wrong: who is left out of a sum, and whether
# vectors are rows or columns.
#
# It follows the note *Multi-headed attention as matrix multiplication* ("the text" below). You need to know what a matrix
# product is. [Notebook 01](01_attention_is_message_passing.ipynb) helps.
#
# **Afterwards you can** read any matrix as a weighted graph, and convert rows to columns.
#
# before: [05. Patterns and messages, in three forms](05_three_forms.ipynb) | [the book](README.md) | next: [07. Why the square root?](07_why_the_square_root.ipynb)

# %%
import math
import timeit

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, ORANGE, RED, draw_table, use_house_style
from torch import nn

import gnn_attention as ga
from gnn_attention import draw

use_house_style()
torch.manual_seed(0)
torch.set_grad_enabled(False)  # nothing is trained here
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # so that times can be compared
GREEN = "#009E73"

# %% [markdown]
# ## 1. First reading: who is similar to whom
#
# $$(AB)_{ij} = a_i \cdot b_j$$
#
# Put the vectors $a_1 \dots a_n$ into the rows of $A$, and $b_1 \dots b_m$ into the columns of $B$. An entry of the product is
# a row of $A$ times a column of $B$, and a dot product of two vectors measures how similar they are. So $AB$ is the table of
# **all pairwise similarities** of two sets, which may have different sizes. Below are vectors of four English and six German words.
# Words of the same meaning point in the same direction, apart from a little noise.

# %% tags=["S4.23"]
GERMAN = ["das", "lama", "gibt", "keine", "worte", "aus"]
ENGLISH = ["the", "llama", "no", "words"]
german = torch.randn(6, 32)
english = german[[0, 1, 3, 4]] + 0.3 * torch.randn(4, 32)

similarity = english @ german.T
assert similarity.shape == (4, 6)
for i in range(4):
    for j in range(6):
        assert math.isclose(similarity[i, j], sum(english[i] * german[j]))

alignment = (similarity / math.sqrt(32)).softmax(-1)
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.2))
draw_table(left, similarity, ENGLISH, GERMAN, "similarities: every row with every row", limit=40, digits=0)
draw_table(right, alignment, ENGLISH, GERMAN, "after a softmax of each row: an alignment")
plt.show()
assert [GERMAN[column] for column in alignment.argmax(1).tolist()] == ["das", "lama", "keine", "worte"]

# %% [markdown]
# This is **cross-attention**: the receivers (English) and the senders (German) are different tokens. Its graph has two sides,
# and here every receiver attends to every sender. Attention began this way, in translation.

# %%
cross = ga.patterns.cross(4, 6)
translated = ga.attend(english[None, None], german[None, None], german[None, None], cross)[0, 0]
assert torch.allclose(translated, alignment @ german)
print(cross)

# %% [markdown]
# ## 2. Second reading: what each node receives
#
# $$(AB)_{i,:} = \sum_j A_{ij} \, B_{j,:}$$
#
# Now the rows of $B$ are the states of nodes, and the row $i$ of $A$ holds weights. Row $i$ of the product is a weighted sum of
# the rows of $B$: node $i$ receives from node $j$ with the weight $A_{ij}$. **$A$ is a weighted graph.** Where it is zero, there is
# no edge, and nothing is received. The product is one round of message passing; its three steps are in the loop below.

# %%
A = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.3, 0.7, 0.0], [0.2, 0.0, 0.8, 0.0]])
B = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]])

graph = ga.convert.from_mask(A != 0)  # mask[dst, src]
received = torch.zeros(4, 3)
for src, dst in graph.edge_index.T.tolist():
    message = A[dst, src] * B[src]  # message: along each edge
    received[dst] += message  # aggregate: a sum at each receiver
assert torch.equal(received, A @ B)  # update: the sum itself

figure, axes = plt.subplots(1, 3, figsize=(12, 2.9), width_ratios=[4, 3, 3])
draw_table(axes[0], A, range(4), range(4), "A: a row for each receiver", digits=1, mask=A != 0)
draw_table(axes[1], B, range(4), range(3), "B: the states", digits=1)
draw_table(axes[2], received, range(4), range(3), "A @ B: what each node receives", digits=1)
for ax in (axes[0], axes[2]):  # node 2
    ax.add_patch(
        plt.Rectangle((-0.5, 1.5), len(ax.get_xticks()), 1, fill=False, edgecolor=RED, linewidth=2.5)
    )
plt.show()

weights = A[graph.edge_index[1], graph.edge_index[0]]
draw.arcs(
    graph,
    weights=weights,
    lit=[(1, 2), (2, 2)],
    title="A as a graph: node 2 receives from nodes 1 and 2 (line width = weight)",
)

# %% [markdown]
# Much follows from this reading. The product $A_2 (A_1 B)$ is two rounds, and since $(A_2 A_1) B$ is the same, the graph
# $A_2 A_1$ holds the [paths](../docs/glossary.md#path) of two edges. A matrix that is mostly zeros, a **sparse** one, is a graph with few edges. And the
# identity is the graph in which each node receives only from itself.

# %%
two_rounds = A @ (A @ B)
assert torch.allclose((A @ A) @ B, two_rounds)
assert ga.convert.from_mask(A @ A != 0) == graph @ graph  # `@` of two graphs: two hops
assert torch.equal(torch.eye(4) @ B, B)
print("one hop ", graph.edge_index.T.tolist())
print("two hops", (graph @ graph).edge_index.T.tolist())

# %% [markdown]
# ## 3. Attention is one of each
#
# $$S = \frac{Q K^\top}{\sqrt d} \;\text{(first reading)}, \quad A = \text{softmax}(S), \quad O = A V \;\text{(second reading)}$$
#
# The first product asks how similar every query is to every key. The softmax turns each row into shares. The second product is
# message passing with these shares as weights. The exponentials give the shares up to a factor, $w_j \propto \exp(S_{ij})$; dividing
# the row by its sum gives the shares.

# %%
n, width, d = 6, 16, 8
states = torch.randn(n, width)
W_Q, W_K, W_V = (torch.randn(width, d) / 2 for _ in range(3))
Q, K, V = states @ W_Q, states @ W_K, states @ W_V

S = Q @ K.T / math.sqrt(d)
mass = S.exp()
A = mass / mass.sum(1, keepdim=True)
O = A @ V  # noqa: E741

heads = ga.StandardHeads.from_arrays(W_Q[None], W_K[None], W_V[None], torch.eye(d, width)[None])
layer = ga.MessagePassingAttention(heads, backend="message_passing")
assert torch.allclose(A, S.softmax(1))
assert torch.allclose(layer(states, ga.patterns.full(n))[:, :d], O)
print("edge by edge = by matrices")

# %% [markdown]
# ## 4. Loop or matrix?
#
# Many programs compute the same numbers. Here are four, for causal attention. The first visits every **edge**, the
# second every **query**. The third has no loop: it computes the full table and removes the pairs without an edge. The fourth gathers and
# scatters along the list of edges, as graph libraries do.


# %%
def by_edges_in_python(q, k, v, graph):
    """One edge after the other."""
    out, total = torch.zeros_like(v), torch.zeros(len(q))
    for src, dst in graph.edge_index.T.tolist():
        mass = math.exp(q[dst] @ k[src] / math.sqrt(q.shape[1]))
        out[dst] += mass * v[src]
        total[dst] += mass
    return out / total[:, None]


def by_queries(q, k, v, graph):
    """One receiver after the other, as in the textbook's loop."""
    mask, out = graph.mask(), []
    for i in range(len(q)):
        senders = mask[i]
        weights = (k[senders] @ q[i] / math.sqrt(q.shape[1])).softmax(0)
        out.append(weights @ v[senders])
    return torch.stack(out)


def by_matrices(q, k, v, graph):
    """All pairs at once; the pairs without an edge are discarded."""
    logits = q @ k.T / math.sqrt(q.shape[1])
    return logits.masked_fill(~graph.mask(), -math.inf).softmax(-1) @ v


# %%
def by_gather_and_scatter(q, k, v, graph):
    """All edges at once."""
    src, dst = graph.edge_index
    mass = ((q[dst] * k[src]).sum(-1) / math.sqrt(q.shape[1])).exp()
    total = torch.zeros(len(q)).index_add(0, dst, mass)
    return torch.zeros_like(v).index_add(0, dst, (mass / total[dst])[:, None] * v[src])


PROGRAMS = {by_edges_in_python: "o-", by_queries: "s-", by_gather_and_scatter: "^-", by_matrices: "D-"}


def seconds(program, n, graph):
    """The best of three runs, with heads of width 64. The mask and the list of edges are computed before."""
    q, k, v = torch.randn(3, n, 64).unbind(0)
    _ = graph.mask(), graph.edge_index
    return min(timeit.repeat(lambda: program(q, k, v, graph), number=1, repeat=3))


q, k, v = torch.randn(3, 40, 64).unbind(0)
for graph in (ga.patterns.causal(40), ga.patterns.window(40, 5)):
    for program in PROGRAMS:
        assert torch.allclose(program(q, k, v, graph), by_matrices(q, k, v, graph)), program

# %% [markdown]
# On the causal graph, half of all pairs are edges. We measure all four on one core. The times in the picture depend on the
# computer; the asserts check only which program is faster.

# %% tags=["S3.4"]
SIZES = [16, 32, 64, 128, 256, 512, 1024]
times = {program: [] for program in PROGRAMS}
for size in SIZES:
    for program in PROGRAMS:
        is_skipped = program is by_edges_in_python and size > 128
        times[program].append(math.nan if is_skipped else seconds(program, size, ga.patterns.causal(size)))

figure, ax = plt.subplots(figsize=(7.5, 4.2))
for (program, look), colour in zip(PROGRAMS.items(), (RED, ORANGE, GREEN, BLUE), strict=True):
    ax.loglog(
        SIZES,
        [1000 * time for time in times[program]],
        look,
        color=colour,
        label=program.__name__.replace("_", " "),
        base=2,
    )
ax.set_yscale("log", base=10)
ax.set(xlabel="tokens", ylabel="milliseconds", title="causal attention, four programs, one core")
ax.legend(frameon=False)
plt.show()
assert times[by_matrices][-1] < times[by_queries][-1]
assert times[by_matrices][-1] < times[by_gather_and_scatter][-1]
assert times[by_queries][3] < times[by_edges_in_python][3]

# %% [markdown]
# The text that this section follows is right: on a graph that is nearly full, one large product beats every loop, although it
# computes twice as much as is needed. Processors are built for products. Gathering copies 64 numbers to each end of every edge,
# and copying is slow.
#
# But the table has $n^2$ cells, whatever the graph. Over a window every token attends to at most 16 tokens, itself included, and
# the number of edges grows like $n$. Now the edges win as soon as the text is long enough. The last curve is this library's own
# attention, which reads the edges of the graph and needs no table.


# %%
def by_attend(q, k, v, graph):
    """The library's attention, which chooses its kernel itself."""
    return ga.attend(q[None, None], k[None, None], v[None, None], graph)[0, 0]


LONG = [64, 256, 1024, 4096]
SPARSE = {by_queries: "s-", by_gather_and_scatter: "^-", by_matrices: "D-", by_attend: "v-"}
window_of = {size: ga.patterns.window(size, 16) for size in LONG}
long_times = {program: [seconds(program, size, window_of[size]) for size in LONG] for program in SPARSE}

figure, ax = plt.subplots(figsize=(7.5, 4.2))
for (program, look), colour in zip(SPARSE.items(), (ORANGE, GREEN, BLUE, "black"), strict=True):
    ax.loglog(
        LONG,
        [1000 * time for time in long_times[program]],
        look,
        color=colour,
        label=program.__name__.replace("_", " "),
        base=2,
    )
ax.set_yscale("log", base=10)
ax.set(xlabel="tokens", ylabel="milliseconds", title="attention over window(n, 16), one core")
ax.legend(frameon=False)
plt.show()
assert long_times[by_gather_and_scatter][-1] < long_times[by_matrices][-1]
assert long_times[by_attend][-1] < long_times[by_matrices][-1]

# %% [markdown]
# ## 5. A sum that leaves the token itself out
#
# The text writes the output of token $i$ as a sum over **all others**, and then computes it with the full table:
#
# $$o_i = \sum_{j \neq i} w_j \, W_V v_j \qquad\text{and}\qquad O = A V$$
#
# These are different: in $AV$ the sum includes $j = i$. In the formula this is easy to overlook. As graphs the two are easy to
# tell apart: the first has no self loops, the second has them.

# %% tags=["S3.6"]
everyone, no_self_graph = ga.patterns.full(n), ga.patterns.no_self(n)
assert no_self_graph == everyone - ga.patterns.self_loops(n)

with_self, without = layer(states, everyone)[:, :d], layer(states, no_self_graph)[:, :d]
assert torch.allclose(with_self, A @ V)
assert not torch.allclose(without, A @ V, atol=0.1)

diagonal = torch.full((n,), -math.inf).diag()
assert torch.allclose(without, (S + diagonal).softmax(1) @ V)  # leave a pair out before the softmax
print(f"largest difference between the two: {(with_self - without).abs().max():.2f}")

# %% [markdown]
# A sender can be left out before or after the softmax, and the results differ again. **Without the edge**, the softmax never sees
# the sender, and the others share its part. **Muted**, the full table is computed, and the diagonal of $A$ is then set to 0. Now
# the weights of a row no longer add up to 1.

# %% tags=["S3.6"]
muted_weights = A.clone().fill_diagonal_(0.0)
muted = muted_weights @ V
assert not torch.allclose(muted, without, atol=0.1)
assert torch.allclose(without, muted / muted_weights.sum(1, keepdim=True))
print(
    "sum of the remaining weights of each row:",
    [round(remainder, 2) for remainder in muted_weights.sum(1).tolist()],
)
print(f"largest difference between no edge and a muted one: {(without - muted).abs().max():.2f}")

# %% [markdown]
# ## 6. Rows or columns
#
# A vector can be a row or a column, and each text has its own convention. One more sentence of the same text: "row $i$ of $I W^Q$
# is $W^Q \cdot v_i$". It mixes the two. With states as **rows**, row $i$ of $X W$ is $v_i W$; written with columns that is
# $W^\top v_i$.

# %%
X, W = torch.randn(5, 8), torch.randn(8, 8)
assert torch.allclose((X @ W)[2], X[2] @ W)
assert torch.allclose((X @ W)[2], W.T @ X[2])
assert not torch.allclose((X @ W)[2], W @ X[2], atol=0.1)

linear = nn.Linear(8, 3, bias=False)  # torch: states in rows, and the weight stored for columns
assert torch.allclose(linear(X), X @ linear.weight.T)
print("nn.Linear(8, 3).weight is", list(linear.weight.shape), "and multiplies columns")

# %% [markdown]
# The whole of attention in both conventions, for the same tokens:
#
# $$\text{rows} \quad Y = \text{softmax}_{\text{rows}}\Big(\frac{X W_Q W_K^\top X^\top}{\sqrt d}\Big) X W_V W_O \qquad
# \text{columns} \quad Y = W_O^\top W_V X \; \text{softmax}_{\text{columns}}\Big(\frac{X^\top W_K^\top W_Q X}{\sqrt d}\Big)$$
#
# (In the second line $W_Q$, $W_K$ and $W_V$ are the transposes of those in the first, and $W_O$ is the same.) With columns
# everything is mirrored: keys stand before queries, the graph's table is `[src, dst]` (networkx's adjacency matrix, as it
# were), and the columns of the weights add up to 1.


# %%
def by_columns(X, W_Q, W_K, W_V, W_O, adjacency):
    """States in columns [width, T]; W_Q, W_K [d, width], W_V, W_O [value, width]; adjacency[src, dst]."""
    scores = X.T @ W_K.T @ W_Q @ X / math.sqrt(len(W_Q))
    weights = scores.masked_fill(~adjacency, -math.inf).softmax(0)
    return W_O.T @ W_V @ X @ weights


W_O = torch.randn(d, width) / 2
heads = ga.StandardHeads.from_arrays(
    W_Q[None], W_K[None], W_V[None], W_O[None]
)  # layout="row" unless said otherwise
tree = ga.patterns.tree([-1, 0, 0, 1, 1, 2])
rows = ga.MessagePassingAttention(heads)(states, tree)
columns = by_columns(states.T, W_Q.T, W_K.T, W_V.T, W_O, tree.mask().T)
assert torch.allclose(rows, columns.T)

mirrored = ga.StandardHeads.from_arrays(W_Q.T[None], W_K.T[None], W_V.T[None], W_O.T[None], layout="column")
assert torch.equal(ga.MessagePassingAttention(mirrored)(states, tree), rows)
print("the same updates; a loader needs to know the layout, because a square matrix does not show it")

# %% [markdown]
# Four small points that texts leave open or get wrong, and that the cell below settles:
#
# * Queries and keys may have another width than values. For a head, the width is usually that of the states divided by the number
#   of heads, so that all heads together are as wide as a state: in the first transformer, 8 heads of 64 make 512.
# * The outputs of the heads may be put side by side, without an output matrix. That is a layer too.
# * Each head has an output matrix of its own. Does it have an output bias of its own? Any parts of $b_O$ that add up to it give the
#   same sum over the heads, so no single part has a meaning.
# * One text writes the sum in the softmax up to $i$ where it means $T$. For a causal mask this is the same, for others it is not.

# %% tags=["S2.7", "S3.8", "S4.5", "S4.9"]
wide_values = torch.randn(2, width, 7)  # queries and keys of 3 numbers, values of 7
W = [torch.randn(2, width, 3), torch.randn(2, width, 3), wide_values]
side_by_side = ga.MessagePassingAttention(ga.StandardHeads.from_arrays(*W))(states, tree)
assert side_by_side.shape == (n, 2 * 7)

W_O, output_bias = torch.randn(2, 7, width), torch.randn(width)
for split in (
    output_bias,
    torch.stack([output_bias, 0 * output_bias]),
    torch.stack([5 * output_bias, -4 * output_bias]),
):
    biased = ga.MessagePassingAttention(ga.StandardHeads.from_arrays(*W, W_O, b_O=split))(states, tree)
    by_blocks = side_by_side[:, :7] @ W_O[0] + side_by_side[:, 7:] @ W_O[1] + output_bias
    assert torch.allclose(biased, by_blocks)

for name, graph in {
    "causal": ga.patterns.causal(n),
    "window, both sides": ga.patterns.window(n, 2, causal=False),
}.items():
    mass = S.exp() * graph.mask()  # [i, j]
    up_to_i = mass / mass.tril().sum(1, keepdim=True)
    over_all = mass / mass.sum(1, keepdim=True)
    print(
        f"{name}: up to i, the weights of a receiver sum to {up_to_i.sum(1).min():.2f} .. {up_to_i.sum(1).max():.2f}"
    )
    assert torch.allclose(up_to_i, over_all) == (name == "causal")

# %% [markdown]
# One more point concerns something that is *missing*. We have left out positions all along. What then distinguishes the first
# token from the last? Shuffle the tokens, and shuffle the graph with them: the updates come out shuffled, and nothing else
# changes. A layer of attention has no order in it. **Only the graph breaks this symmetry**, and the full graph does not: shuffle its
# tokens and it is the same graph.

# %% tags=["S4.25"]
attention, order = ga.MessagePassingAttention(heads), torch.randperm(n)
for graph in (tree, ga.patterns.causal(n), ga.patterns.full(n)):
    shuffled = ga.convert.from_mask(graph.mask()[order][:, order])
    assert torch.allclose(attention(states[order], shuffled), attention(states, graph)[order])
    same = shuffled == graph
    print(f"{graph.name}: {'the same graph' if same else 'another graph'} when its tokens are shuffled")
    assert same == (graph.name == f"full({n})")

# %% [markdown]
# ## 7. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/06_matrix_multiplication_is_message_passing.py).
#
# **1. Count the paths** (easy, 3 minutes). If $A$ holds only ones and zeros, $(A A)_{ij}$ counts the paths of two edges from $j$ to $i$. In the
# causal graph of 5 tokens (self loops included), how many paths of *three* edges lead from token 0 to token 4?
#
# <details><summary>Hint</summary>
#
# Raise the matrix to the third power, or choose the two tokens in between, with repetition.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

ones = ga.patterns.causal(5).mask().double()
assert answer == (ones @ ones @ ones)[4, 0], "not this number of paths; print the product of three masks"
print("right:", answer, "paths")

# %% [markdown]
# **2. Do nothing** (easy, 2 minutes). Over which graph of 6 tokens is attention's mixed message $A V$ exactly $V$, whatever the queries and keys?
#
# <details><summary>Hint</summary>
#
# The weights of a receiver add up to 1, also if it has a single in-edge.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

for seed in range(3):
    q, k, v = torch.randn(3, 1, 1, 6, 8, generator=torch.Generator().manual_seed(seed)).unbind(0)
    assert torch.allclose(ga.attend(q, k, v, answer), v), "a token attends to another token"
print("right:", answer.name)

# %% [markdown]
# **3. Load a layer of another library** (medium, 5 minutes, code). It stores `C_Q`, `C_K`, `C_V` for columns, $q = C_Q x$. Which `W_Q` gives the same
# queries as `x @ W_Q`, for states in rows? Give all three.
#
# <details><summary>Hint</summary>
#
# Transpose $q = C_Q x$.
#
# </details>

# %% tags=["exercise"]
C_Q, C_K, C_V = torch.randn(3, 4, 16).unbind(0)
answer = None  # your turn: (W_Q, W_K, W_V)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

for ours, theirs in zip(answer, (C_Q, C_K, C_V), strict=True):
    assert ours.shape == (16, 4), "the shape differs"
    assert torch.allclose(states @ ours, torch.stack([theirs @ x for x in states])), "the queries differ"
print("right")

# %% [markdown]
# **4. A product without a product** (medium, 10 minutes, code). Write `answer(edge_index, weights, B)`: the product $A B$ from the edges
# and their weights, without building $A$.
#
# <details><summary>Hint</summary>
#
# Gather the row of $B$ at the sender of each edge, multiply it by the weight, and add it to the row of the receiver with `index_add`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of edge_index [2, edges], weights [edges] and B [nodes, width]

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

asymmetric = torch.rand(6, 6).tril(-1)
pairs = asymmetric.nonzero().T.flip(0)  # row 0 holds the senders
states = torch.randn(6, 3)
product = answer(pairs, asymmetric[pairs[1], pairs[0]], states)
assert torch.allclose(product, asymmetric @ states), "are senders and receivers the right way round?"
print("right: message passing is a matrix product")

# %% [markdown]
# ## Sources
#
# * *Multi-headed attention as matrix multiplication*: the two readings, and the two slips of sections 5 and 6.
# * *Attention: All you need to know*, far.in.net, 2025: the column convention. Its formula is printed once as
#   $X^\top W_K W_Q X$; the transpose on $W_K$ belongs there.
# * D. Bahdanau et al., [Neural Machine Translation by Jointly Learning to Align and
#   Translate](https://arxiv.org/abs/1409.0473), 2014: alignments.
# * J. Kepner and J. Gilbert (eds.), *Graph Algorithms in the Language of Linear Algebra*, SIAM, 2011: graphs as matrices.

# %% [markdown]
# ---
# before: [05. Patterns and messages, in three forms](05_three_forms.ipynb) | [the book](README.md) | next: [07. Why the square root?](07_why_the_square_root.ipynb)
