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
# # What a GNN person asks
#
# Attention is message passing along the edges of its mask. Someone who knows graph neural networks (GNNs) then asks five things.
# Does a deep transformer *over-smooth*? Does the *Weisfeiler-Leman* test bound what it can tell apart? Is its attention static, as
# in GAT, or dynamic, as in GATv2? Where do edge features go? And what are positional encodings on a graph? All five are one
# question: **which theorems about graph neural networks hold for attention, and which does it escape?** Each section answers a part
# of it on a graph of at most 8 tokens, and then checks the answer on the trained model that ships with the package, or on a layer of
# torch_geometric or of the library.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb) and the first section of
# [notebook 14](14_one_limiting_case.ipynb). You should have seen a graph neural network before.
#
# **Afterwards you can** answer what a graph-learning audience asks about attention: over-smoothing, Weisfeiler-Leman, GATv2, edge features, positions.
#
# before: [14. Attention, one case of message passing; an MLP, another](14_one_limiting_case.ipynb) | [the book](README.md) | next: [16. Induction heads](16_induction_heads.ipynb)

# %%
import math

import matplotlib.pyplot as plt
import networkx as nx
import torch
from pictures import BLUE, GREY, ORANGE, RED, draw_mask, draw_pairs, draw_ring, draw_table, use_house_style
from torch import nn
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import attend, draw, patterns

use_house_style()  # before torch_geometric, whose import warns of a missing progress bar
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, TransformerConv  # noqa: E402
from torch_geometric.transforms import AddRandomWalkPE  # noqa: E402

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
n, width = 8, 16

# %% [markdown]
# ## 1. Over-smoothing
#
# A graph convolution (GCN) averages each node with its neighbours. After many layers all nodes point in one direction, and nothing
# tells them apart (Li et al. 2018). Attention averages too: its weights are positive and sum to 1. Here are three graphs of 8 tokens
# to compare: all pairs, the causal graph, and a causal window of three tokens.

# %%
GRAPHS = {"complete": patterns.full(n), "causal": patterns.causal(n), "window of 3": patterns.window(n, 3)}
draw_pairs(GRAPHS.values(), draw.arcs, GRAPHS, links_height=0.8)
plt.show()

# %% [markdown]
# Look at token 0, the top row of each mask. In the complete graph it attends to all tokens. In the other two graphs it attends only
# to itself, which will decide where the states go.
#
# We stack layers of attention with random matrices. The message matrix is orthogonal: it rotates all states together and changes
# neither lengths nor angles, so what changes the angles is averaging. The number to watch is the **spread**: the mean distance of the
# states, scaled to length 1, from their mean. It is near 1 for random states, and 0 if all states point in one direction.


# %%
def spread(x):
    directions = functional.normalize(x, dim=-1)
    return (directions - directions.mean(0)).norm(dim=-1).mean().item()


def run_stack(graph, layers, parts=(), seed=0, x=None):
    """The states before the first and after each layer of random attention, with these parts of a transformer."""
    random = torch.Generator().manual_seed(seed)

    def normed(x):
        return functional.rms_norm(x, (width,)) if "norm" in parts else x

    def updated(x, update):
        return x + update if "residual" in parts else update

    states = [torch.randn(graph.num_dst, width, generator=random) if x is None else x]
    for _ in range(layers):
        W_Q, W_K, W_V, *W_1 = torch.randn(7, width, width, generator=random) / math.sqrt(width)
        W_V, _ = torch.linalg.qr(W_V)
        W_2 = torch.randn(4 * width, width, generator=random) / math.sqrt(4 * width)
        q, k, v = ((normed(states[-1]) @ W)[None, None] for W in (W_Q, W_K, W_V))
        x = updated(states[-1], attend(q, k, v, graph)[0, 0])
        if "MLP" in parts:
            x = updated(x, functional.gelu(normed(x) @ torch.cat(W_1, 1)) @ W_2)
        states.append(x)
    return states


def run_gcn(graph, layers, seed=0):
    random = torch.Generator().manual_seed(seed)
    states = [torch.randn(graph.num_dst, width, generator=random)]
    for _ in range(layers):
        conv = GCNConv(width, width, bias=False)
        rotation = torch.linalg.qr(torch.randn(width, width, generator=random))[0]
        conv.load_state_dict({"lin.weight": rotation})
        states.append(conv(states[-1], graph.edge_index).detach())
    return states


# %%
LAYERS, SEEDS = 32, range(5)


def median_spread(run, *arguments):
    runs = [[spread(x) for x in run(*arguments, seed=seed)] for seed in SEEDS]
    return torch.tensor(runs).median(0).values


alone = {name: median_spread(run_stack, graph, LAYERS) for name, graph in GRAPHS.items()}
gcn = median_spread(run_gcn, GRAPHS["causal"], LAYERS)
PARTS = [(), ("norm", "MLP"), ("residual",), ("residual", "norm", "MLP")]
helped = {parts: median_spread(run_stack, GRAPHS["causal"], LAYERS, parts) for parts in PARTS}

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.9), sharey=True)
for (name, values), colour in zip(alone.items(), (RED, BLUE, ORANGE), strict=True):
    left.plot(values.clamp(min=1e-16), color=colour, label=f"attention, {name}")
left.plot(gcn, ":", color=GREY, label="GCN, causal")
left.set(title="attention alone", ylabel="spread", yscale="log", ylim=(1e-14, 5))
for (parts, values), look in zip(helped.items(), ("-", "--", "-.", ":"), strict=True):
    right.plot(values, look, color=BLUE, label=" + ".join(("attention", *parts)))
right.set(title="the causal graph, with the other parts of a transformer")
for ax in (left, right):
    ax.set(xlabel="layers")
    ax.legend(frameon=False, fontsize=9)
plt.show()

for parts, values in helped.items():
    print(
        f"spread on the causal graph after 32 layers: {values[32]:.2f} with",
        " + ".join(("attention", *parts)),
    )
assert max(helped[()][32], helped["norm", "MLP"][32]) < 1e-6
assert helped["residual",][32] > 0.01
assert helped["residual", "norm", "MLP"][32] > 0.3

# %% [markdown]
# Compare the slopes on the left. The red line, the complete graph, bends down: the exponent of the spread more than doubles in each
# layer, until it reaches the precision of the machine. This is the theorem of Dong et al. (2021): pure attention converges to rank one
# *doubly exponentially*. As the states approach each other, so do the logits, and equal weights on the complete graph give every token
# the same mean at once. On the causal graph and the window, the lines become straight: the collapse is only exponential, which
# Wu et al. (2024) prove for masked attention. GCN on the causal graph, in grey, falls at the same rate.

# %%
digits = -alone["complete"][1:5].log10()
print("complete graph: the spread is 10^-d, d after 1, 2, 3 layers:", *(f"{d:.1f}" for d in digits[:3]))
assert (digits[1:] > 2 * digits[:-1]).all()
rates = [(values[32] / values[16]) ** (1 / 16) for values in (alone["causal"], gcn)]
print("causal graph, factor per layer: attention {:.2f}, GCN {:.2f}".format(*rates))
assert all(abs(rate - 0.5) < 0.03 for rate in rates)

# %% [markdown]
# Why a half? Near the limit the logits are equal, and the weights of the causal graph are a triangular matrix with $1/(i+1)$ on the
# diagonal. Its eigenvalues are this diagonal: 1, 1/2, 1/3, ... The first belongs to the limit. The second is the weight of token 1
# for itself, and it is the rate. The limit is not the mean of the tokens. Token 0 attends to itself alone, so it keeps its own state,
# up to the rotation that all tokens share. Every other token loses some of its own state in each layer and takes over some of token
# 0's. In the end, all states are the state of the **first token**.

# %%
means = GRAPHS["causal"].mask().double() / GRAPHS["causal"].in_degree()[:, None]
assert torch.allclose(torch.linalg.eigvals(means).real.sort().values, 1 / torch.arange(8, 0, -1), atol=1e-6)
states = run_stack(GRAPHS["causal"], LAYERS)
for layer in (0, 2, 4, 8):
    away = (states[layer] - states[layer][0]).norm(dim=-1).max() / states[0][0].norm()
    print(f"{layer} layers: no token is farther from the first than {away:.2f} of its length")
assert (states[-1] - states[-1][0]).norm() < 1e-8

convolved = run_gcn(GRAPHS["causal"], LAYERS)[-1].norm(dim=-1)
assert torch.allclose((convolved / convolved[0]) ** 2, GRAPHS["causal"].in_degree().double(), atol=1e-6)

# %% [markdown]
# (The last line checks GCN: its states end in the same direction, but with lengths proportional to $\sqrt{\text{degree}}$.)
#
# On the right of the picture, compare the two lines with a residual stream, near the top, with the two without one. A residual stream
# alone slows the collapse, and with norm and MLP it nearly stops it. Norm and MLP without a residual stream do not help this random
# network.
#
# What does a trained model do? Ours has 2 layers. To see more of them, we also apply the two in turn, up to 16 layers in all, for
# which it was not trained.

# %%
model, vocabulary = ga.model.load_trained()
model = model.double().requires_grad_(False)
TEXT = "Return the number of words in a line, and raise an error if one of them is not in the list of known words."
tokens = torch.tensor([vocabulary.encode(TEXT)])
graph = patterns.causal(tokens.shape[1])


def run_trained(layers, whole):
    x = model.embedding(tokens)
    for layer in range(layers):
        block = model.blocks[layer % 2]
        update = block.attention(block.attention_norm(x), graph)
        x = x + update if whole else update
        x = x + block.mlp(block.mlp_norm(x)) if whole else x
    return spread(x[0])


for layers in (0, 1, 2, 4, 8, 16):
    print(
        f"{layers:>2} layers: whole {run_trained(layers, True):.2f}, attention alone {run_trained(layers, False):.2f}"
    )
assert run_trained(2, whole=True) > 0.7
assert run_trained(16, whole=True) > 0.6
assert run_trained(16, whole=False) < 0.1

# %% [markdown]
# The trained model keeps most of its spread, and its attention without the rest loses it. The theorem holds for attention, and a
# transformer escapes it through the residual stream.

# %% [markdown]
# ## 2. Weisfeiler-Leman
#
# The **Weisfeiler-Leman test** (1-WL) colours nodes. All nodes begin with one colour. In every round, the new colour of a node stands
# for its own colour and the multiset of its neighbours' colours. If two nodes keep equal colours and all features are equal, no
# message passing can tell them apart (Xu et al. 2019, Morris et al. 2019). The classic example is two triangles and a hexagon: every
# node has two neighbours of the one colour, so all colours stay equal.

# %%
triangles = ga.convert.from_networkx(nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(3)))
hexagon = ga.convert.from_networkx(nx.cycle_graph(6))
PAIR = {"two triangles": triangles, "a hexagon": hexagon, "both, to a transformer": patterns.full(6)}
draw_pairs(PAIR.values(), draw_ring, PAIR, links_height=0.85)
plt.show()


# %%
def colour_classes(graph, rounds=8):
    """1-WL in five lines: the colour of each token, from the colours of its in-neighbours."""
    senders = [row.nonzero().flatten().tolist() for row in graph.mask()]
    colours = [()] * graph.num_dst
    for _ in range(rounds):
        signatures = [
            (colours[i], tuple(sorted(colours[j] for j in senders[i]))) for i in range(len(colours))
        ]
        colours = [sorted(set(signatures)).index(signature) for signature in signatures]
        colours = [(colour,) for colour in colours]
    return colours


def count_different(x):
    """The number of different rows, up to rounding."""
    return len({tuple(row) for row in ((x[:, None] - x).norm(dim=-1) < 1e-6).tolist()})


either = ga.algebra.disjoint_sum(triangles, hexagon)
equal_states = torch.ones(12, width)
print("colours of two triangles and a hexagon, 12 nodes together:", len(set(colour_classes(either))))
deep = run_stack(either, 4, ("residual", "norm", "MLP"), x=equal_states)[-1]
print("different outputs of 4 layers of a transformer along these edges:", count_different(deep))
sums = attend(*torch.ones(3, 1, 1, 12, width), either, normaliser="identity")[0, 0]
print("different outputs of a sum without a quotient:", count_different(sums))
assert len(set(colour_classes(either))) == count_different(deep) == count_different(sums) == 1

# %% [markdown]
# The theorem holds: along these edges, neither attention nor a sum tells the graphs apart. A transformer on the complete graph, on the
# right of the picture, knows even less, because its mask is the same for both graphs. But the theorem assumes *equal* features. A
# sentence has different tokens, and if the states differ, so do the outputs:

# %%
x = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
apart = [run_stack(graph, 1, x=x)[-1] for graph in (triangles, hexagon)]
print(
    "different states, the same for both graphs: outputs differ by up to",
    f"{(apart[0] - apart[1]).abs().max():.1f}",
)
assert count_different(torch.cat(apart)) == 10  # nodes 1 and 4 have the same neighbours in both graphs

# %% [markdown]
# **The causal mask has a colour for every token.** Token $i$ has $i + 1$ in-neighbours, itself included, so a single round gives each
# token a colour of its own. On a causal path, where a token attends to itself and to the token before it, this takes 7 rounds. So
# 1-WL finds the position of a token from the mask alone. Can attention do the same?

# %%
causal, path_to_right = patterns.causal(n), patterns.window(n, 2)
for name, graph in {"causal": causal, "causal path": path_to_right}.items():
    numbers = [len(set(colour_classes(graph, rounds))) for rounds in range(8)]
    outputs = count_different(run_stack(graph, 8, ("residual", "norm", "MLP"), x=torch.ones(n, width))[-1])
    print(f"{name:>11}: colours after 0 to 7 rounds {numbers}; different outputs of 8 layers: {outputs}")
    assert numbers[-1] == n
    assert outputs == 1

# %% [markdown]
# It cannot. A mean of equal values is the same value, however many there are: weights that sum to 1 cannot count. Among the
# aggregations that Xu et al. compare, attention is a *mean*, which is weaker than a sum and weaker than 1-WL. The strict form of
# [notebook 14](14_one_limiting_case.ipynb) shows where the count is lost. Its message is a pair, and the sum of the second part is the
# denominator $\sum_{j \to i} e^{a_{ij}}$. If all logits are 0, this is the number of in-neighbours, and the quotient divides by it.
# The next cell brings the number back in three ways: it keeps the denominator, leaves the quotient out, or marks one token.

# %%
q, k, v = torch.zeros(1, 1, n, width), torch.zeros(1, 1, n, width), torch.ones(1, 1, n, width)
out, info = attend(q, k, v, causal, return_info=True)
assert count_different(out[0, 0]) == 1
print("the denominator:          ", info.lse.exp()[0, 0].round(decimals=6).tolist())
no_quotient = attend(q, k, v, causal, normaliser="sigmoid")[0, 0, :, 0]
print("sigmoid, not softmax:     ", no_quotient.tolist())
v = functional.one_hot(torch.zeros(n, dtype=torch.long), 2).double()
v[1:] = torch.tensor([0.0, 1.0])
marked = attend(q, k, v[None, None], causal)[0, 0, :, 0]
print("one token that differs: 1 /", (1 / marked).round(decimals=6).tolist())
for counts in (info.lse.exp()[0, 0], 2 * no_quotient, 1 / marked):
    assert torch.allclose(counts, torch.arange(1.0, n + 1))

# %% [markdown]
# The third way needs no new layer. If the first token differs from the others, its share in the mean of token $i$ is $1 / (i + 1)$.
# So a causal model can learn positions without a positional encoding, and Haviv et al. (2022) find that it does. Our trained model
# shows both the bound and the escape. If its input is one word 8 times, it predicts the same at every position, although its scores
# depend on distances. With another word first, all positions differ.

# %%
the, llama = (vocabulary.encode(word)[0] for word in (" the", " llama"))
repeated, with_start = (model(torch.tensor([ids]))[0] for ids in ([the] * 8, [llama] + [the] * 7))
assert (repeated - repeated[0]).abs().max() < 1e-10
print(
    "different predictions: one word 8 times",
    count_different(repeated),
    "; another word first",
    count_different(with_start),
)
assert count_different(with_start) == 8

# %% [markdown]
# ## 3. GAT and GATv2: static or dynamic
#
# Three ways to compute the logit of an edge $j \to i$:
#
# | | logit | who is preferred |
# |---|---|---|
# | GAT | $\text{LeakyReLU}(a_{\text{dst}} \cdot W x_i + a_{\text{src}} \cdot W x_j)$ | *static*: the same sender by all receivers |
# | GATv2 | $a \cdot \text{LeakyReLU}(W_{\text{dst}} x_i + W_{\text{src}} x_j)$ | *dynamic* |
# | attention | $q_i \cdot k_j / \sqrt d$ | *dynamic* |
#
# In GAT the receiver adds one number to all its logits. LeakyReLU is monotone, so the order of the senders is that of
# $a_{\text{src}} \cdot W x_j$, whoever receives. GATv2 (Brody et al. 2022) moves the nonlinearity inside. The problem that separates
# them is **dictionary lookup**: four senders have a key and a value each, four receivers have a key, and each must output the value
# of the sender with its key. The keys, and the values (4 of 8), are drawn at random in every step.


# %%
KEYS, VALUES, BATCH = 4, 8, 64
lookup = patterns.cross(KEYS, KEYS)


def draw_dictionaries(random):
    """Senders, receivers and answers of a batch of dictionaries, one after another."""
    keys = torch.rand(BATCH, KEYS, generator=random).argsort(-1)
    values = torch.rand(BATCH, VALUES, generator=random).argsort(-1)[:, :KEYS]
    senders = torch.cat([functional.one_hot(keys, KEYS), functional.one_hot(values, VALUES)], -1)
    answers = values.gather(1, keys.argsort(-1))
    return senders.double().flatten(0, 1), torch.eye(KEYS, width).repeat(BATCH, 1), answers.flatten()


def train(layer, steps=300):
    """Train a layer and a readout; return the share of right answers on new dictionaries, and one of them with its weights."""
    random, readout = torch.Generator().manual_seed(0), nn.Linear(width, VALUES)
    edges = (lookup.edge_index[:, None] + KEYS * torch.arange(BATCH)[:, None]).flatten(1)
    optimizer = torch.optim.Adam([*layer.parameters(), *readout.parameters()], lr=0.02)
    for step in range(steps + 1):  # the last batch is a test
        senders, receivers, answers = draw_dictionaries(random)
        out, (_, weights) = layer((senders, receivers), edges, return_attention_weights=True)
        if step < steps:
            optimizer.zero_grad()
            functional.cross_entropy(readout(out), answers).backward()
            optimizer.step()
    right = (readout(out).argmax(-1) == answers).double().mean().item()
    return right, weights.detach().view(BATCH, KEYS, KEYS)[1], senders.view(BATCH, KEYS, -1)[1]


torch.manual_seed(0)
widths = (KEYS + VALUES, width)  # of senders and of receivers
NETWORKS = {
    "GAT": GATConv(widths, width, add_self_loops=False),
    "GATv2": GATv2Conv(widths, width, add_self_loops=False),
    "attention": ga.MessagePassingAttention(ga.StandardHeads(width, 1, source_width=KEYS + VALUES)),
}
results = {name: train(layer) for name, layer in NETWORKS.items()}

# %%
entries = results["GAT"][2]
names = [f"{'ABCD'[entry[:KEYS].argmax()]}: {entry[KEYS:].argmax()}" for entry in entries]
figure, axes = plt.subplots(1, 4, figsize=(14, 3.3), width_ratios=[1.6, 1, 1, 1])
as_tokens = ga.convert.from_edge_index(lookup.edge_index + torch.tensor([[0], [KEYS]]), 2 * KEYS)
draw.arcs(as_tokens, axes[0], [*names, *(f"{key}?" for key in "ABCD")], title="four senders, four receivers")
for ax, (name, (right, weights, _)) in zip(axes[1:], results.items(), strict=True):
    draw_table(ax, weights, [f"{key}?" for key in "ABCD"], names, f"{name}: {right:.0%} right")
    ax.set_xlabel("src (sender)")
plt.show()
assert results["GAT"][0] < 0.4
assert min(results["GATv2"][0], results["attention"][0]) > 0.99
assert len(results["GAT"][1].argmax(1).unique()) == 1
assert len(results["attention"][1].argmax(1).unique()) == KEYS

# %% [markdown]
# On the left are the 8 tokens of one dictionary. Every receiver attends to every sender, so this part of the mask is full, and the
# tables show the weights on it. In the table of GAT, all four rows have their largest number in the same column, so the readout
# can do little more than guess one of the four values. The other two tables have one large number in each row, at the sender with the
# key of the receiver.
#
# How dynamic is attention that was trained on text? For each head of the trained model, we compare all pairs of tokens of our sentence,
# without mask and distance, and count how many different senders are the favourite of some receiver. A static head would have 1.

# %%
run = ga.trace.record(model, tokens)
print(f"different favourites, of {tokens.shape[1]} tokens:")
for layer, block in enumerate(model.blocks):
    x = block.attention_norm(run.phases[2 * layer].before)
    q, (k, _) = block.attention.heads.receive(x), block.attention.heads.send(x)
    favourites = [len(head.unique()) for head in (q @ k.mT)[0].argmax(-1)]
    print(f"layer {layer}, heads 0 to 3: {favourites}")
    assert min(favourites) > 1

# %% [markdown]
# No head is static. The two heads with the most favourites, heads 0 and 3 of layer 1, are the induction heads of
# [notebook 16](16_induction_heads.ipynb): they look up where the present word occurred before, which is a dictionary lookup.

# %% [markdown]
# ## 4. Edge features
#
# A molecule has bonds of several types, and a sentence has distances. In attention, a feature $e_{ij}$ of an edge can go to two places:
#
# $$a_{ij} = \frac{q_i \cdot k_j}{\sqrt d} + b(e_{ij}) \qquad \text{(the score)} \qquad\qquad
# \text{message}_{ij} = v_j + e_{ij} W_E \qquad \text{(the message)}$$
#
# Here is the hexagon again, with one edge that differs from the others: the pair 0 and 1 has a double bond.

# %%
src, dst = hexagon.edge_index
is_double = (src + dst == 1).double()
bonds = torch.zeros(6, 6)
bonds[dst, src] = 1 + is_double
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.4), width_ratios=[1, 2])
draw_table(left, bonds, range(6), range(6), "bonds", limit=3, digits=0, mask=hexagon.mask())
left.tick_params(axis="x", rotation=0)
draw.arcs(hexagon, right, lit=[(0, 1), (1, 0)], title="the double bond in red")
plt.show()

# %% [markdown]
# The two cells with a 2 in the mask are the two red arcs. `attend` takes a number for each edge as `bias`, and features of edges as
# `edge_attr`, with matrices for what they add to keys (`edge_key`) and to messages (`edge_value`). All nodes begin equal:

# %%
q, k, v = torch.ones(3, 1, 1, 6, 4).unbind()
on_score, info = attend(q, k, v, hexagon, bias=2 * is_double, return_info=True)
on_message = attend(q, k, v, hexagon, edge_attr=is_double[:, None], edge_value=torch.ones(1, 1, 4))
print("weights with a bias:", sorted({round(weight, 2) for weight in info.weights().flatten().tolist()}))
print(
    "different outputs: on the score",
    count_different(on_score[0, 0]),
    "; on the message",
    count_different(on_message[0, 0]),
)
assert (count_different(on_score[0, 0]), count_different(on_message[0, 0])) == (1, 2)

# %% [markdown]
# The bias changes the weights, but not a mean of equal values. It says *whom* to attend to, and only a feature on the message says
# *what* the bond is. `TransformerConv` of torch_geometric uses one matrix for both places:

# %%
torch.manual_seed(0)
conv = TransformerConv(width, 4, edge_dim=3, root_weight=False, bias=False).requires_grad_(False)
x, edge_attr = torch.randn(6, width), torch.randn(hexagon.num_edges, 3)
q, k, v = (linear(x)[None, None] for linear in (conv.lin_query, conv.lin_key, conv.lin_value))
W_E = conv.lin_edge.weight.T[None]
ours = attend(q, k, v, hexagon, edge_attr=edge_attr, edge_key=W_E, edge_value=W_E)[0, 0]
assert torch.allclose(ours, conv(x, hexagon.edge_index, edge_attr), rtol=0, atol=1e-12)
print("equal to TransformerConv with edge_dim=3")

# %% [markdown]
# **Relative positions are edge features.** In a sentence, every edge has the feature `dst - src`, its distance. ALiBi subtracts from the
# score a slope times the distance. T5 and our trained model add a learned number for each head and distance (T5: range of distances), and
# Graphormer does so on molecules, with the length of a shortest path. The next cell computes ALiBi, and both layers of the trained
# model, as attention with a bias for each edge:

# %%
q, k, v = torch.randn(3, 1, 4, n, width)
src, dst = causal.edge_index
slopes = torch.tensor(ga.score_mods.alibi_slopes(4))
as_feature = attend(q, k, v, causal, bias=-slopes[:, None] * (dst - src))
assert torch.allclose(
    as_feature, attend(q, k, v, causal, score_mod=ga.score_mods.alibi(tuple(slopes.tolist())))
)

for layer, state in zip(model.layers, (run.phases[0].before, run.phases[2].before), strict=True):
    graph = patterns.causal(tokens.shape[1])
    src, dst = graph.edge_index
    reach = layer.score_mod.table.shape[1] // 2
    distance = (dst - src).clamp(max=reach)
    q, (k, v) = layer.heads.receive(state), layer.heads.send(state)
    update = layer.heads.collect(attend(q, k, v, graph, bias=layer.score_mod.table[:, reach + distance]))
    assert torch.allclose(update, layer(state, graph), rtol=0, atol=1e-10)
print("ALiBi, and the relative positions of the trained model: a bias for each edge gives the same")

# %% [markdown]
# ## 5. Positional encodings
#
# A node of a graph has no number, so what is its position? A common answer is its entries in the eigenvectors of the **Laplacian**
# $L = D - A$ (degrees minus adjacency matrix) with the smallest eigenvalues. A sentence, as an undirected graph, is a path, and there
# these eigenvectors are cosines:

# %%
path = (patterns.window(n, 2) | patterns.window(n, 2).T) & patterns.no_self(n)
ring = ga.convert.from_networkx(nx.cycle_graph(n))


def laplacian_eigenvectors(graph, count):
    """The first eigenvectors after the constant one, of an undirected graph, [node, count]."""
    adjacency = graph.mask().double()
    _, vectors = torch.linalg.eigh(adjacency.sum(1).diag() - adjacency)
    return vectors[:, 1 : count + 1]


vectors, place = laplacian_eigenvectors(path, 3), torch.arange(n)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.5), width_ratios=[1, 1.5, 1.6])
draw_mask(left, path, "a path")
draw.arcs(path, middle, title="the same path as arcs")
for number, colour in enumerate((BLUE, ORANGE, RED)):
    cosine = functional.normalize(torch.cos(math.pi * (number + 1) * (place + 0.5) / n), dim=0)
    sign = (cosine @ vectors[:, number]).sign()
    assert torch.allclose(sign * vectors[:, number], cosine, atol=1e-8)
    right.plot(place, sign * vectors[:, number], "o-", color=colour, label=f"eigenvector {number + 1}")
right.set(title="the first three eigenvectors are cosines", xlabel="node", ylim=(-0.72, 0.55))
right.legend(frameon=False, fontsize=9, ncols=3, loc="lower center")
plt.show()

# %% [markdown]
# Eigenvector $k$ makes $k$ half waves along the path. The sines and cosines of the first transformer are of the same kind, with other
# frequencies. Note the `sign` in the code: if $u$ is an eigenvector, so is $-u$, and the Laplacian prefers neither. On the path, the
# blue curve upside down is the blue curve from right to left, so this encoding does not say which end is the beginning.
#
# A second encoding has no signs: the probability that a random walk is back at its node after 1, 2, 3, ... steps. How many nodes can
# a transformer along the edges of the graph tell apart, if such an encoding is its only feature?

# %%
walks = AddRandomWalkPE(walk_length=8)
EXAMPLES = {"path of 8": path, "ring of 8": ring, "triangles and hexagon": either}
for name, graph in EXAMPLES.items():
    size = graph.num_dst
    features = {
        "none": torch.ones(size, 1),
        "walks": walks(ga.convert.to_pyg(graph)).random_walk_pe.double(),
        "Laplacian": laplacian_eigenvectors(graph, size - 1),
    }
    told_apart = {}
    for kind, feature in features.items():
        x = feature @ torch.randn(feature.shape[1], width, generator=torch.Generator().manual_seed(0))
        told_apart[kind] = count_different(run_stack(graph, 2, ("residual", "norm", "MLP"), x=x)[-1])
    print(f"{name:>21}, {size:>2} nodes: {told_apart}; colours of 1-WL: {len(set(colour_classes(graph)))}")

# %% [markdown]
# Without features, all nodes have the same output. Walks tell the nodes of a path apart by their distance from the nearer end. They also
# tell the triangles from the hexagon, which 1-WL cannot do, because a walk in a triangle can be back after three steps. On a ring,
# all nodes have the same place, and so the same walks. The Laplacian tells all nodes apart, but only by an arbitrary choice: of signs,
# and of a basis where eigenvalues repeat.
#
# **The causal order needs more.** This Laplacian ignores directions. Without directions, the causal graph is complete: its eigenvalues
# are 0 and seven times 8, and every vector of sum 0 is an eigenvector. The **magnetic Laplacian** keeps the direction of an edge as an
# angle: the edge becomes the complex number $e^{2 \pi i q}$ in one direction and $e^{-2 \pi i q}$ in the other.


# %%
def magnetic_vector(graph, q):
    """The first eigenvector of the magnetic Laplacian of a graph, turned so that node 0 has the angle 0."""
    forward = graph.mask().double()
    either_way = ((forward + forward.T) > 0).double()
    hermitian = torch.polar(either_way, 2 * math.pi * q * (forward - forward.T))
    _, vectors = torch.linalg.eigh(either_way.sum(1).diag() - hermitian)
    return vectors[:, 0] / vectors[0, 0]


strict = patterns.strict_causal(n)
undirected = (strict | strict.T).mask().double()
eigenvalues = torch.linalg.eigvalsh(undirected.sum(1).diag() - undirected)
assert torch.allclose(eigenvalues, torch.tensor([0.0] + [8.0] * 7), atol=1e-9)
directed = {
    "the causal path, q = 1/16": magnetic_vector(path_to_right & strict, 1 / 16),
    "the causal graph, q = 1/4": magnetic_vector(strict, 1 / 4),
}
figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.7))
for ax, (name, vector) in zip(axes, directed.items(), strict=True):
    ax.add_patch(plt.Circle((0, 0), 1, fill=False, color=GREY))
    ax.plot(vector.real, vector.imag, "o", color=BLUE)
    for token, value in enumerate(vector.tolist()):
        ax.text(1.17 * value.real, 1.17 * value.imag, str(token), ha="center", va="center")
    ax.set(title=name, aspect="equal", xlim=(-1.35, 1.35), ylim=(-0.35, 1.35), xlabel="real part")
axes[0].set_ylabel("imaginary part")
plt.show()

rotary = ga.rotary.Rotary(frequencies=(2 * math.pi / 16,))
turned = rotary.turn(torch.tensor([[1.0, 0.0]]).expand(n, 2), place)
for vector in directed.values():
    assert torch.allclose(torch.view_as_real(vector), turned, atol=1e-6)

# %% [markdown]
# Follow the numbers along the circles. In both graphs, the entry of each token is that of the token before, rotated by the same angle.
# So this encoding is a **rotation by the position**. The assertion in the last line compares it with the rotary positions (RoPE) of
# [notebook 05](05_three_forms.ipynb), and they are equal.
#
# **The answer.**
#
# | about graph neural networks | about attention | what escapes it |
# |---|---|---|
# | deep averaging over-smooths | holds: doubly exponentially on the complete graph; by a half per layer on the causal one, towards the first token | the residual stream |
# | message passing is bounded by 1-WL | holds for equal features | different tokens, positions |
# | a mean cannot count neighbours | holds, even where 1-WL counts | a first token that differs; weights without a quotient |
# | GAT is static | does not hold: a product is dynamic, as GATv2 is | |
# | edge features belong on the message | holds: a bias on the score changes no mean of equal values | features on the message, `edge_value` |
# | Laplacian eigenvectors are positions | holds on a path (cosines), and not for the causal order | the magnetic Laplacian: a rotation by the position |

# %% [markdown]
# ## 6. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/15_what_a_gnn_person_asks.py).
#
# **1. Two limits** (easy, 5 minutes). Build a causal graph of 8 tokens, in which all but two tokens attend to themselves and at least
# one other, such that deep attention alone ends in exactly two different states.
#
# <details><summary>Hint</summary>
#
# A token that attends only to itself keeps its state. What if there are two such tokens, and each of the others reaches only one of
# them? A batch of two documents has this mask.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 8 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_dst == 8, "8 tokens"
assert not answer.mask().triu(1).any(), "a token attends to a later one"
assert answer.mask().diagonal().all(), "a token does not attend to itself"
assert (answer.in_degree() == 1).sum() == 2, "not two tokens that attend only to themselves"
assert count_different(run_stack(answer, 200)[-1]) == 2, "not two limits"
print("right: each document ends in its own first token")

# %% [markdown]
# **2. Count by attention** (medium, 10 minutes). Write a function of a graph that returns the number of in-neighbours of each token
# as a tensor, and uses `attend` and nothing else that knows the graph. It must be right for isolated tokens, too.
#
# <details><summary>Hint</summary>
#
# Section 2 has two ways: `attend(..., return_info=True)` returns the logarithm of the denominator as `info.lse`, and some normalisers
# do not divide. What are the weights of `normaliser="sigmoid"` if all logits are 0?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

random = torch.Generator().manual_seed(0)
for _ in range(10):
    graph = ga.convert.from_mask(torch.rand(12, 12, generator=random) < 0.15)
    assert torch.allclose(answer(graph).flatten(), graph.in_degree().double()), (
        "another number of in-neighbours"
    )
print("right: without the quotient, attention counts")

# %% [markdown]
# **3. GAT without its LeakyReLU** (medium, 10 minutes). Without the nonlinearity, the logit of GAT is
# $a_{\text{dst}} \cdot h_i + a_{\text{src}} \cdot h_j$. Write it as attention: a function of the states `h` `[n, width]` and two
# vectors `a_dst` and `a_src` that returns queries and keys `[n, 2]` whose products are these logits. Before you run the check: how
# much does a weight depend on its receiver?
#
# <details><summary>Hint</summary>
#
# A sum of two numbers is a product of two pairs: $u + v = (u, 1) \cdot (1, v)$.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of h, a_dst, a_src that returns (q, k)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

h, a_dst, a_src = torch.randn(n, width), torch.randn(width), torch.randn(width)
q, k = answer(h, a_dst, a_src)
assert q.shape == k.shape == (n, 2), "two numbers for each token"
assert torch.allclose(q @ k.T, (h @ a_dst)[:, None] + h @ a_src), "not the logits of GAT"
weights = (q @ k.T).softmax(-1)
assert torch.allclose(weights, weights[:1].expand(n, n))
print("right: the receiver's number cancels in the softmax, so all receivers have the same weights")

# %% [markdown]
# **4. Structure for a transformer** (hard, 15 minutes). Two triangles and a hexagon, again with equal states, but now every node
# attends to every node. Write a function of the graph that returns features `[36, F]` of the edges of `patterns.full(6)`, in the order
# of its `edge_index`, such that one layer of attention that adds them to its messages tells the two graphs apart. Names of nodes must
# not matter: if the nodes are permuted, the outputs must stay equal.
#
# <details><summary>Hint</summary>
#
# One number for each edge is enough. The edges of the graph itself will not do, because every node has two of them in both graphs, and
# their mean is the same. Which pairs are at most two edges apart? `patterns.k_hop` returns such a graph, and its `mask()[dst, src]` says
# for lists `dst` and `src` which pairs are its edges.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of a TokenGraph of 6 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"


def outputs_for(graph):
    features = answer(graph).double()
    identity = torch.eye(features.shape[1])[None]
    q, v = torch.ones(2, 1, 1, 6, features.shape[1])
    return attend(q, q, v, patterns.full(6), edge_attr=features, edge_value=identity)[0, 0]


order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
outputs = [outputs_for(graph) for graph in (triangles, hexagon)]
assert all(count_different(x) == 1 for x in outputs), (
    "nodes of one graph differ, although they have the same place in it"
)
assert count_different(torch.cat(outputs)) == 2, "the two graphs look the same"
for graph, x in zip((triangles, hexagon), outputs, strict=True):
    permuted = ga.convert.from_mask(graph.mask()[order][:, order])
    assert torch.allclose(outputs_for(permuted), x), "the names of nodes matter"
print("right: an edge feature on the message brings the structure back, and passes 1-WL")

# %% [markdown]
# ## Sources
#
# * Over-smoothing: Q. Li et al., [Deeper Insights into Graph Convolutional Networks](https://arxiv.org/abs/1801.07606), 2018;
#   Y. Dong et al., [Attention is Not All You Need](https://arxiv.org/abs/2103.03404), 2021; X. Wu et al., [On the Role of Attention
#   Masks and LayerNorm in Transformers](https://arxiv.org/abs/2405.18781), 2024.
# * Weisfeiler-Leman: K. Xu et al., [How Powerful are Graph Neural Networks?](https://arxiv.org/abs/1810.00826), 2019; C. Morris et
#   al., [Weisfeiler and Leman Go Neural](https://arxiv.org/abs/1810.02244), 2019; A. Haviv et al., [Transformer Language Models
#   without Positional Encodings Still Learn Positional Information](https://arxiv.org/abs/2203.16634), 2022.
# * S. Brody et al., [How Attentive are Graph Attention Networks?](https://arxiv.org/abs/2105.14491), 2022: GATv2.
# * Edge features: Y. Shi et al., [Masked Label Prediction](https://arxiv.org/abs/2009.03509), 2021 (`TransformerConv`); O. Press et
#   al., [ALiBi](https://arxiv.org/abs/2108.12409), 2022; C. Ying et al., [Graphormer](https://arxiv.org/abs/2106.05234), 2021.
# * Positions: V. P. Dwivedi and X. Bresson, [A Generalization of Transformer Networks to Graphs](https://arxiv.org/abs/2012.09699),
#   2021 (Laplacian); V. P. Dwivedi et al., [Graph Neural Networks with Learnable Structural and Positional
#   Representations](https://arxiv.org/abs/2110.07875), 2022 (walks); S. Geisler et al., [Transformers Meet Directed
#   Graphs](https://arxiv.org/abs/2302.00049), 2023 (magnetic Laplacian).

# %% [markdown]
# ---
# before: [14. Attention, one case of message passing; an MLP, another](14_one_limiting_case.ipynb) | [the book](README.md) | next: [16. Induction heads](16_induction_heads.ipynb)
