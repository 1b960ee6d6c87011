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
# A language model reads a row of [tokens](../docs/glossary.md#token). At some points each token looks at other tokens and takes something over from
# them. That step is called **attention**, and it is usually written with large matrices.
#
# A graph neural network has nodes, and [edges](../docs/glossary.md#edge) between them. At some points each node receives [messages](../docs/glossary.md#message) along its edges and
# changes its [state](../docs/glossary.md#state). That step is called **message passing**.
#
# They are the same step. This notebook goes from a graph of five words to a layer of torch_geometric, and checks each of
# its claims by running it: where a cell has an `assert`, the claim holds if the cell runs.
#
# You need some Python and a rough idea of what a matrix product is. You need to know neither graphs nor transformers.
#
# **Afterwards you can** compute attention for one receiver by hand, and say why it is message passing.
#
# [the book](README.md) | next: [02. Many heads, many graphs](02_many_heads_many_graphs.ipynb)

# %%
import inspect
import math
import textwrap

import matplotlib.pyplot as plt
import networkx as nx
import torch
from pictures import RED, draw_table, use_house_style
from torch_geometric.nn import MessagePassing

import gnn_attention as ga
from gnn_attention import draw

use_house_style()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that "equal" can mean equal to twelve digits
torch.set_grad_enabled(False)  # nothing is trained here
torch.set_printoptions(precision=2, sci_mode=False)

# %% [markdown]
# The library draws graphs (`draw.arcs`: tokens on a line with arrows); `draw_table`, a table of numbers as colours, is in
# [pictures.py](pictures.py).
#
# ## 1. Who attends to whom
#
# $$\text{edge } \mathit{src} \to \mathit{dst}: \quad \mathit{dst} \text{ attends to } \mathit{src}$$
#
# Five words on a line are five **nodes**. (In a language model a node is a *token*: a word or a piece of one.) An **edge**
# `src -> dst` lets the [receiver](../docs/glossary.md#receiver) `dst` attend to the [sender](../docs/glossary.md#sender) `src`. In a model that writes from left to right, every token
# attends to itself and to all tokens before it, because those after it do not exist yet. This graph is called *[causal](../docs/glossary.md#causal)*.

# %%
WORDS = ["Llamas", "do", "not", "output", "words"]
LLAMAS, DO, NOT, OUTPUT, LAST = range(5)

edges = [(src, dst) for dst in range(5) for src in range(5) if src <= dst]

for word in range(5):
    print(f"{WORDS[word]:>6} attends to", ", ".join(WORDS[src] for src, dst in edges if dst == word))
print(len(edges), "edges")

# %% [markdown]
# ## 2. The same thing as a mask
#
# $$\text{mask}[\mathit{dst}, \mathit{src}] = \text{True} \iff \text{there is an edge } \mathit{src} \to \mathit{dst}$$
#
# Put the receivers in rows and the senders in columns, and fill a cell for each edge. That table is what the transformer
# literature calls an **attention [mask](../docs/glossary.md#mask)**. The picture shows one edge twice, in orange: *output* attends to *Llamas*.

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
    title="a graph: an arrow from each sender to its receiver",
)
draw_table(right, mask, WORDS, WORDS, title="the same graph as a mask", mask=mask, digits=None)
right.add_patch(plt.Rectangle((LLAMAS - 0.5, OUTPUT - 0.5), 1, 1, color=RED))
right.set(xlabel="src (sender)", ylabel="dst (receiver)")
plt.show()

# %% [markdown]
# The table is not symmetric: *output* attends to *Llamas*, but *Llamas* does not attend to *output*. So it matters which
# index comes first, and two conventions exist. Attention masks and this library say `mask[dst, src]`. The [adjacency matrix](../docs/glossary.md#adjacency-matrix) of graph theory,
# which networkx computes, says `A[src, dst]`: it is the **transpose**. A transposed mask is a classic bug, and on a
# symmetric graph no test will find it.

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
FEATURES = ["noun", "verb", "negation", "plural"]
x = torch.tensor(
    [  # noun verb negation plural
        [1.0, 0.0, 0.0, 1.0],  # Llamas: a noun, and more than one
        [0.0, 0.5, 0.0, 0.0],  # do: half a verb
        [0.0, 0.0, 1.0, 0.0],  # not: a negation
        [0.0, 1.0, 0.0, 0.0],  # output: a verb
        [0.8, 0.0, 0.0, 1.0],  # words: a noun, and more than one
    ]
)
# one row for each feature, one column for each of two channels (W_O: the other way round)
W_Q = torch.tensor(
    [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
)  # a verb looks for a noun (2) and a negation (3)
W_K = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # a noun and a negation can be found
W_V = torch.tensor(
    [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
)  # a sender says whether it is plural, and whether it is a negation
W_O = torch.tensor(
    [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
)  # the update goes into the columns plural and negation

# %% [markdown]
# The four small matrices are one attention **[head](../docs/glossary.md#head)**. They make it a piece of grammar: a verb looks for its subject and for
# a negation. If it finds a plural subject, it becomes plural, and if it finds a negation, it becomes negated.
#
# Attention is then a protocol of seven steps. Picture a room in which everybody speaks at once: the receiver tunes to a channel, and
# hears those best who send on it. The names on the left come from this picture, and the usual names are on the right. Here are the steps
# for the receiver *output*:
#
# | | step | formula | usual name |
# |---|---|---|---|
# | 1 | **receiving channel** of the receiver $i$ | $q_i = x_i W_Q$ | [query](../docs/glossary.md#query) |
# | 2 | **sending channel** of every sender $j$ | $k_j = x_j W_K$ | [key](../docs/glossary.md#key) |
# | 3 | **channel overlap** of the two | $a_{ij} = q_i \cdot k_j$ | [logit](../docs/glossary.md#logit) (elsewhere also: score) |
# | 4 | **listening distribution** over the [in-edges](../docs/glossary.md#in-edge) of $i$ | $w_{ij} = \text{softmax}_j (a_{ij} / \sqrt d)$ | [weights](../docs/glossary.md#weight) |
# | 5 | **outgoing message** of every sender | $v_j = x_j W_V$ | [value](../docs/glossary.md#value) |
# | 6 | **mixed incoming message** | $z_i = \sum_{j \to i} w_{ij} v_j$ | head output |
# | 7 | **state [update](../docs/glossary.md#update)** | $y_i = z_i W_O$ | output projection |
#
# Here $d = 2$ is the width of a channel. The *logit* of an edge is what goes into the [softmax](../docs/glossary.md#softmax): wherever we say it below, the
# $1 / \sqrt d$ is in it. The *softmax* turns numbers into shares: exponentials, divided by their sum. Steps 1 to 4 decide
# **whom the receiver attends to**, and steps 5 to 7 decide **what it receives**.

# %%
senders = [src for src, dst in edges if dst == OUTPUT]  # the in-edges of "output": a list, not a matrix

receiving_channel = x[OUTPUT] @ W_Q  # 1
print("output receives on the channel", receiving_channel.tolist())

mass = {}
for j in senders:
    sending_channel = x[j] @ W_K  # 2
    overlap = receiving_channel @ sending_channel  # 3
    mass[j] = math.exp(overlap / math.sqrt(2))
    print(f"{WORDS[j]:>8} sends on the channel {sending_channel.tolist()}: overlap {overlap:.1f}")

# %% [markdown]
# *not* fits best (3), *Llamas* fits well (2), *do* and *output* itself do not fit at all (0). The softmax turns this into
# shares that add up to 1, and the shares mix the messages.

# %%
listening = {j: mass[j] / sum(mass.values()) for j in senders}  # 4
mixed = torch.zeros(2)
for j in senders:
    outgoing_message = x[j] @ W_V  # 5
    mixed += listening[j] * outgoing_message  # 6
    print(f"{listening[j]:6.1%} of {WORDS[j]:>6}, whose message is {outgoing_message.tolist()}")

update = mixed @ W_O  # 7
assert math.isclose(sum(listening.values()), 1.0)
print("\nmixed incoming message", mixed)
print("state before", x[OUTPUT], "\nstate after ", x[OUTPUT] + update)

# %% [markdown]
# After one round *output* is still a verb, and now it is also mostly negated and a little plural. It knows these two things
# only because they were sent to it. Nothing in this computation was a large matrix: there were four edges.
#
# The overlap of step 3 exists for any two tokens, also where there is no edge. *words* would fit quite well, but the sum of
# step 4 runs over the in-edges alone, so *output* receives nothing from it.

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
# exactly 0, since $e^{-\infty} = 0$; multiplying the exponentials by a mask of ones and zeros does the same. What is left are the sums over in-edges. The two functions below compute the same.


# %%
def by_matrices(x, W_Q, W_K, W_V, W_O, mask):
    logits = (x @ W_Q) @ (x @ W_K).T / math.sqrt(W_Q.shape[1])
    table = logits.masked_fill(~mask, -math.inf).softmax(-1)
    return table @ (x @ W_V) @ W_O, table


updates_too, table = by_matrices(x, W_Q, W_K, W_V, W_O, mask)
assert torch.allclose(updates, updates_too, rtol=0, atol=1e-12)
assert torch.allclose(weights, table[edge_index[1], edge_index[0]], rtol=0, atol=1e-12)

# %% [markdown]
# The left table shows the weights, one row for each receiver; the shares of a row add up to 1. The right table shows what
# the state of each token gains.
#
# *Llamas*, *not* and *words* look for nothing: their receiving channel is 0, so all overlaps are 0, and they attend equally to
# all their senders. A softmax cannot attend to nobody.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4))
draw_table(left, table, WORDS, WORDS, title="weights (listening distributions)", mask=mask)
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
# a full graph the matrix form is faster, because computers are good at matrix products. On a [sparse](../docs/glossary.md#sparse) graph it does work
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
# `edge_update` is steps 3 and 4: overlap and listening distribution. (`call.apply_score_mod`, `call.bias` and `call.features` are where a
# change of the logits by edge would come in; we use none here. `call.normalise` is the softmax.) `message` is what travels along an edge:
# the sender's message, times its weight. Then comes `aggregate`, step 6, which is a plain sum and not printed. `update` is step 7. Steps
# 1, 2 and 5 happen at the nodes, before anything travels.
#
# The layer of the library gives the same numbers. It takes our graph object, or the plain `edge_index` that PyG users have.
# With `backend="message_passing"` it calls the methods above; without it, the layer computes the same numbers with the fastest kernel.

# %%
heads = ga.StandardHeads.from_arrays(W_Q[None], W_K[None], W_V[None], W_O[None])  # [None]: a list of one head
layer = ga.MessagePassingAttention(heads, backend="message_passing")

y, (_, layer_weights) = layer(x, g, return_attention_weights=True)
assert torch.allclose(y, updates, rtol=0, atol=1e-12)
assert torch.allclose(layer_weights[:, 0], weights, rtol=0, atol=1e-12)
assert torch.equal(layer(x, edge_index), y)
print(layer)

# %% [markdown]
# ## 6. Strictly message passing
#
# $$y_i = \frac{\sum_{j \to i} e^{a_{ij}} v_j}{\sum_{j \to i} e^{a_{ij}}} \, W_O, \qquad a_{ij} = \frac{q_i \cdot k_j}{\sqrt d}$$
#
# Look at the formula of section 5 again: a message may depend on $x_i$ and $x_j$. The weight $w_{ij}$ depends on more. Its denominator
# is a sum over **all** in-neighbours of $i$, which is why `edge_update` runs before `message`. Attention still has the strict form if the
# division waits until the end: the message is the pair of $e^{a_{ij}} v_j$ and $e^{a_{ij}}$, the [aggregation](../docs/glossary.md#aggregate) is a sum, and the update is
# the quotient of the two sums.


# %%
class StrictAttention(MessagePassing):
    def forward(self, q, k, v, edge_index):
        return self.propagate(edge_index, q=q, k=k, v=v)

    def message(self, q_i, k_j, v_j):  # depends on x_i and x_j alone
        mass = ((q_i * k_j).sum(-1, keepdim=True) / math.sqrt(q_i.shape[-1])).exp()
        return torch.cat([mass * v_j, mass], dim=-1)

    def update(self, sums):
        return sums[..., :-1] / sums[..., -1:]


q, k, v = x @ W_Q, x @ W_K, x @ W_V
strict = StrictAttention()
assert torch.allclose(strict(q, k, v, edge_index) @ W_O, updates, rtol=0, atol=1e-12)

messages = strict.message(q[OUTPUT], k[senders], v[senders])
print("message to output   e^a v          e^a")
for name, row in zip([*WORDS[: len(senders)], "sum"], [*messages, messages.sum(0)], strict=True):
    print(f"{name:>17}  {row[0]:5.2f}  {row[1]:5.2f}  {row[2]:6.2f}")
print("quotient:", strict.update(messages.sum(0)), "  the mixed message of section 3:", mixed)

# %% [markdown]
# No message in this table depends on another row. The exponentials overflow if logits are large. Libraries therefore subtract the largest
# logit of each receiver first, which changes no quotient; to find it takes one more round of messages, aggregated by a maximum.
# [Notebook 25](25_attention_from_primitives.ipynb) changes the parts of this formula, one at a time.
#
# **In short.** An attention mask is a graph. Along each of its edges a message travels, with a weight that the receiver shares
# out among its in-edges. Dense matrices compute this, and so do lists of edges. What several heads do side by
# side, and what happens when the graph changes, is in [notebook 02](02_many_heads_many_graphs.ipynb).
#
# ## 7. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/01_attention_is_message_passing.py).
#
# **1. The other direction** (easy, 2 minutes). Build the graph in which each of the five tokens attends to itself and to all tokens
# *after* it, from `ga.patterns.causal(5)`, with two characters.
#
# <details><summary>Hint</summary>
#
# Section 2 says what turns rows into columns.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert all(src >= dst for src, dst in answer.edge_index.T.tolist()), "some token attends to one before it"
assert answer.num_dst == 5, "five tokens"
assert answer.num_edges == 15, "an edge is missing: a token attends to itself too"
print("right:\n", answer, sep="")

# %% [markdown]
# **2. Flat and sharp** (easy, 5 minutes). The scale in front of the overlaps, which was $1/\sqrt 2$, decides how sharply the softmax chooses. Give
# two scales: one with which *output* attends to its four senders exactly equally, and one with which it gives more than 99.9 % to
# *not*.
#
# <details><summary>Hint</summary>
#
# Shares are equal if all logits are equal. For the second, try some large numbers.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: two numbers (flat, sharp)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

q, (k, v) = heads.receive(x[None]), heads.send(x[None])
dst = g.edge_index[1]
weights_of_output = []
for scale in answer:
    _, info = ga.attend(q, k, v, g, scale=scale, return_info=True)
    weights_of_output.append(info.weights()[0, 0, dst == OUTPUT])
    print(
        f"scale {scale}:",
        ", ".join(f"{WORDS[j]} {share:.3f}" for j, share in enumerate(weights_of_output[-1])),
    )
assert torch.allclose(weights_of_output[0], torch.full((4,), 0.25)), "the first is not flat"
assert weights_of_output[1][NOT] > 0.999, "the second is not sharp enough"

# %% [markdown]
# **3. By hand** (medium, 10 minutes). *do* is half a verb. Which tokens does it attend to? Give its shares for *Llamas* and for itself,
# to two digits. Paper and a calculator are enough.
#
# <details><summary>Hint</summary>
#
# Start with its receiving channel, $x_i W_Q$, which is half of that of *output*. It has two in-edges, so the softmax has two terms.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: two numbers (Llamas, do)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert abs(sum(answer) - 1) < 0.011, "the shares of a receiver add up to 1"
assert all(abs(share - true) < 0.0051 for share, true in zip(answer, table[DO, :2].tolist(), strict=True)), (
    "not these: the overlap with Llamas is half of that of output, and step 4 divides by a root"
)
print("right: do attends to Llamas with {:.2f}, to itself with {:.2f}".format(*answer))

# %% [markdown]
# **4. Large logits** (medium, 10 minutes, code). With logits of 1,000, `edge_by_edge` returns nan, since $e^{1000}$ is infinite. Write
# its softmax so that it works for all logits: a function `answer(logits, dst, n)` that returns a weight for each edge.
#
# <details><summary>Hint</summary>
#
# Subtract the largest logit of each receiver before the exponential. `torch.full((n,), -math.inf).scatter_reduce(0, dst, logits, "amax")`
# is one number for each receiver; `[dst]` gathers it to the edges.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of logits [edges], dst [edges] and the number of nodes

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

logits = ((x @ W_Q)[edge_index[1]] * (x @ W_K)[edge_index[0]]).sum(-1) / math.sqrt(2)
assert torch.allclose(answer(logits, edge_index[1], 5), weights), "these are not the weights of section 4"
large = answer(1000 * logits, edge_index[1], 5)
assert not large.isnan().any(), (
    "a weight is nan: subtract the largest logit of each receiver, not of all edges"
)
assert math.isclose(large.sum(), 5.0), "the shares of a receiver add up to 1"
print("right: one more round of messages, aggregated by a maximum")

# %% [markdown]
# ## Sources
#
# * A. Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017: the matrix form.
# * J. Gilmer et al., [Neural Message Passing for Quantum Chemistry](https://arxiv.org/abs/1704.01212), 2017: message,
#   aggregate, update.
# * C. McCormick, *Patterns and Messages*, part 2, 2025 (S1 in the docstrings of this library): the sentence about llamas.
# * *Attention: All you need to know*, far.in.net, 2025 (S4), perspective 4, after A. Karpathy: the seven steps (S4.17).

# %% [markdown]
# ---
# [the book](README.md) | next: [02. Many heads, many graphs](02_many_heads_many_graphs.ipynb)
