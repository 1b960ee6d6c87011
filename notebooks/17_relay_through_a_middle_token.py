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
# # Relaying through a middle token
#
# The message of a token depends on its *own* state alone, and is the same for all receivers. How, then, does a token receive
# information from tokens to which it has no edge? By a **relay**: in one layer a token in the middle adds a message to its state, and
# in the next layer its own message carries it on.
#
# This chapter follows single contributions through two layers and cuts edges on their path. At the end we can say what a relay can do,
# and how much information fits through it.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb); [notebook 11](11_how_many_layers.ipynb) asks how far relays
# reach.
#
# **Afterwards you can** follow one contribution through two layers, and cut it.
#
# before: [16. Induction heads](16_induction_heads.ipynb) | [the book](README.md) | next: [18. Change the graph of a trained model](18_change_the_graph.ipynb)

# %%
import math

import matplotlib.pyplot as plt
import networkx as nx
import torch
from pictures import BLUE, GREY, ORANGE, RED, draw_table, use_house_style
from torch import nn
from torch.autograd.functional import jacobian

import gnn_attention as ga
from gnn_attention import analyse, draw, patterns
from gnn_attention.interpret import trace

use_house_style()
torch.manual_seed(0)
torch.set_num_threads(1)
WORDS = ["Llamas", "do", "not", "output", "words"]
LLAMAS, DO, NOT, OUTPUT, LAST = range(5)


# %% [markdown]
# ## 1. A message is made by its sender
#
# $$M_j = x_j W_V W_O \qquad\Rightarrow\qquad \frac{\partial M_j}{\partial x_q} = 0 \quad \text{for } j \ne q$$
#
# The query of the receiver is not in the formula of a message. A receiver decides only *how much weight* each message gets. To check
# this, we measure how the message of each token, and then the update of each token, depends on the state of each token.

# %%
width = 12
heads = ga.StandardHeads(width, 2).double()
x = torch.randn(5, width, dtype=torch.float64)
causal = patterns.causal(5)


def dependence(step):
    """Return the norm of every block of the derivative, ``[dst, src]``."""
    return jacobian(step, x).norm(dim=(1, 3))


message = dependence(lambda x: ga.FactoredHeads.of(heads).messages(x[None])[0].sum(0))
update = dependence(lambda x: ga.MessagePassingAttention(heads)(x, causal))
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.9))
for ax, name, table in ((axes[0], "message", message), (axes[1], "update", update)):
    title = f"how the {name} of a token (row)\ndepends on the state of a token (column)"
    draw_table(ax, table, WORDS, WORDS, title, limit=float(table.max()), mask=table > 0)
plt.show()

assert torch.equal(message > 0, torch.eye(5, dtype=torch.bool))
assert torch.equal(update > 0, causal.mask())

# %% [markdown]
# The left table is diagonal: a message depends on its sender. The right table is the causal mask: an update depends on all senders of
# its receiver.
#
# So the message from *output* to *words* in the first layer depends on *output* alone. In the second layer this is different, because
# the state of *output* then contains what *output* received in the first.
#
# ## 2. Two rounds, two edges
#
# Here is a network in which only a relay is possible. The first round has one edge, *not* $\to$ *output*, and the second has one edge,
# *output* $\to$ *words*. There is no edge from *not* to *words* in either round.


# %%
def edge(src, dst, n=5):
    return ga.convert.from_edge_index(torch.tensor([[src], [dst]]), n)


figure, axes = plt.subplots(2, 2, figsize=(12, 5.2), width_ratios=(1, 2.6))
for row, number, graph in zip(axes, (1, 2), (edge(NOT, OUTPUT), edge(OUTPUT, LAST)), strict=True):
    draw.mask(graph, row[0], WORDS, title=f"round {number}: the mask")
    draw.arcs(graph, row[1], WORDS, title=f"round {number}: the same graph as arcs")
plt.show()
draw.layers(
    [edge(NOT, OUTPUT), edge(OUTPUT, LAST)], 2, token=LAST, labels=WORDS, title="two rounds, unrolled"
)

# %%
first, second = (ga.MessagePassingAttention(ga.StandardHeads(width, 2).double()) for _ in range(2))


def two_rounds(graph_1, graph_2):
    """Return a function of states in which each round adds its update to the states."""

    def run(x):
        x = x + first(x, graph_1)
        return x + second(x, graph_2)

    return run


no_edges = edge(NOT, OUTPUT) - edge(NOT, OUTPUT)
for name, graphs in {
    "both edges": (edge(NOT, OUTPUT), edge(OUTPUT, LAST)),
    "not -> output is cut": (no_edges, edge(OUTPUT, LAST)),
    "output -> words is cut": (edge(NOT, OUTPUT), no_edges),
    "the rounds swapped": (edge(OUTPUT, LAST), edge(NOT, OUTPUT)),
}.items():
    size = dependence(two_rounds(*graphs))[LAST, NOT].item()
    print(f"{name:>23}: the state of 'words' depends on 'not' by {size:.3f}")
    assert (size > 0) == (name == "both edges")

# %% [markdown]
# A cut anywhere on the path makes the dependence exactly zero. So does the wrong order, because a relay cannot pass on what it has not
# received yet.
#
# ## 3. How much arrives along each path?
#
# A full causal graph has many paths, and a token receives contributions of the same sender along several of them. If the weights $w$ of
# both layers are held fixed, everything else is linear, and the final state is a sum with one term for each path:
#
# $$x_t'' = x_t \;+\; \underbrace{\sum_j w^1_{tj} \, x_j W^1_M}_{\text{received in round 1}}
#   \;+\; \underbrace{\sum_j w^2_{tj} \, x_j W^2_M}_{\text{received in round 2}}
#   \;+\; \underbrace{\sum_q \sum_j w^2_{tq} \, w^1_{qj} \, x_j W^1_M W^2_M}_{
#   \text{relayed along } j \to q \to t}$$
#
# (with a sum over heads in each term). The last term contains the relays. Through the product $W^1_M W^2_M$ two heads act as one head
# that neither layer has; such pairs are called *virtual heads*. The table below shows the length of each term for $t = $ *words*.


# %%
class TwoLayers(nn.Module):
    """Attention alone, twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, graph):
        x = x + self.first(x, graph)
        return x + self.second(x, graph)


model = TwoLayers()
with torch.no_grad():
    run = trace.record(model, x, causal)
    w1, w2 = (layer.dense(layer.weights())[0] for layer in run.layers)  # [heads, dst, src]
    M1, M2 = (layer.heads.message_matrix().full() for layer in (first, second))  # [heads, width, width]

    t = LAST
    round_1 = torch.einsum("hj,jd,hde->je", w1[:, t], x, M1)  # [from j, width]
    round_2 = torch.einsum("hj,jd,hde->je", w2[:, t], x, M2)
    relayed = torch.einsum("gq,hqj,jd,hde,gef->qjf", w2[:, t], w1, x, M1, M2)  # [through q, from j, width]

# %%
assert torch.allclose(
    x[t] + round_1.sum(0) + round_2.sum(0) + relayed.sum((0, 1)), run.output[t], rtol=0, atol=1e-10
)

rows = ["received in round 1", "received in round 2", *(f"relayed by {word}" for word in WORDS)]
sizes = torch.cat([round_1[None], round_2[None], relayed]).norm(dim=-1)
figure, ax = plt.subplots(figsize=(7.5, 4.4))
title = "what arrives at 'words': from each sender (column), along each path (row)"
draw_table(ax, sizes, rows, WORDS, title, limit=float(sizes.max()), mask=sizes > 0)
plt.show()
share = relayed[:t].norm(dim=-1).sum() / sizes.sum()
print(f"the terms add up to the final state; {share:.0%} of their lengths are relayed by another token")

# %% [markdown]
# The row *relayed by words* holds what *words* received in round 1 and sent to itself in round 2. Grey cells are zero, since a
# token relays only what comes before it.
#
# Now mute one edge, *not* $\to$ *output* in round 1: it keeps its weight, but its message is zero. With fixed weights, exactly one cell
# of the table disappears. In fact *more* changes: the state of *output* is different now, so its key in round 2 is different too,
# and so is the weight of the edge to *words*.

# %%
with torch.no_grad():
    muted = trace.record(model, x, causal, interventions=trace.mute([(NOT, OUTPUT)], layers=0))
    change = run.output - muted.output
    cell = relayed[OUTPUT, NOT]
    w2_after = muted.layers[1].dense(muted.layers[1].weights())[0]

print(
    "states that change:",
    ", ".join(word for word, row in zip(WORDS, change, strict=True) if row.abs().max() > 1e-12),
)
print(
    f"at 'words': the change has length {change[t].norm():.3f}, the cell of the table {cell.norm():.3f}; ",
    end="",
)
print(f"the rest, {(change[t] - cell).norm():.3f}, is due to other weights")
for head in range(2):
    before, after = w2[head, t, OUTPUT], w2_after[head, t, OUTPUT]
    print(f"  weight of output -> words in round 2, head {head}: {before:.3f}, without the edge {after:.3f}")
assert [i for i in range(5) if change[i].abs().max() > 1e-12] == [OUTPUT, LAST]
assert (change[t] - cell).norm() > 1e-3

# %% [markdown]
# Both effects matter. A relay passes a message on (the cell), and the message can change *how much weight the relay gets* (the
# weights). The induction heads of the trained model use the second effect.
#
# ## 4. A relay in the trained model
#
# [Notebook 16](16_induction_heads.ipynb) finds a head that attends to the token after an earlier copy of the current one. Repeat
# 48 random tokens; let $t$ be a receiver in the second copy, $j = t - 48$ its earlier copy, and $q = j + 1$ the token after it, to which
# $t$ attends. There is an edge $j \to t$ too, but the information takes another path. In layer 0, $q$ attends to $j$ and so stores
# its predecessor in its state. In layer 1, $t$ attends to the token whose predecessor is a copy of $t$.
#
# We mute one edge into $q$ in layer 0, and measure the weight of $q \to t$ in layer 1 in the strongest induction head. We first mute
# the edge $j \to q$, and then, as a control, the edges from the tokens before $j$.

# %%
trained, _ = ga.model.load_trained()
length, samples = 48, 16
generator = torch.Generator().manual_seed(0)
once = torch.stack(
    [torch.randperm(trained.config.vocabulary_size, generator=generator)[:length] for _ in range(samples)]
)
tokens = torch.cat([once, once], dim=1)
head = int(ga.model.induction_scores(trained)[1].argmax())
positions = range(8, 48, 8)  # positions of q in the first copy


@torch.no_grad()
def induction_weight(q, muted=None):
    """Return the mean weight of q -> t in layer 1 over the texts, with the edge muted -> q of layer 0 muted."""
    t = q - 1 + length
    interventions = () if muted is None else trace.mute([(muted, q)], layers=0)
    run = trace.record(trained, tokens, interventions=interventions)
    return run.layers[1].weights([(q, t)], heads=head).mean().item()


# %%
results = {"nothing": [induction_weight(q) for q in positions]}
for back in (1, 2, 3, 4):
    results[f"q - {back}"] = [induction_weight(q, q - back) for q in positions]
means = [sum(values) / len(values) for values in results.values()]

figure, ax = plt.subplots(figsize=(6, 3))
ax.bar(range(len(means)), means, color=[BLUE, RED, GREY, GREY, GREY])
for i, values in enumerate(results.values()):
    ax.plot([i] * len(values), values, "k_", markersize=9, alpha=0.6)
ax.set_xticks(range(len(means)), list(results))
ax.set(
    xlabel="sender of the edge into q that is muted in layer 0",
    ylabel="weight of q → t in layer 1",
    ylim=(0, 1),
)
plt.show()
for name, mean in zip(results, means, strict=True):
    print(f"muted: {name:>7}, weight of q -> t {mean:.2f}")
assert means[1] < 0.2 * means[0]
assert means[1] < means[2] < means[3] < means[4]
assert means[4] > 0.9 * means[0]

# %% [markdown]
# A single edge of the first layer, between two *other* tokens, decides whether $t$ attends to $q$ in the second (red bar). Muting the
# edges from farther tokens changes the weight less, the farther they are. Each dash is one position of $q$.
#
# ## 5. Shares along all paths
#
# Two summaries of a run follow contributions through all layers at once, relays included. Both assume that in each layer half of a state
# is the old state, and half is what the token receives. **Rollout** multiplies the shares along every path and adds up the paths.
# **Flow** treats the shares as capacities of pipes, and computes how much can pass at most. In the network of section 2, with one path
# of two edges, both can be computed by hand: rollout is $\frac12 \cdot \frac12$, and flow is the narrowest pipe, $\frac12$.


# %%
class Rounds(nn.Module):
    """One round of attention for each graph."""

    def __init__(self, graphs):
        super().__init__()
        self.graphs = graphs
        self.rounds = nn.ModuleList(
            ga.MessagePassingAttention(ga.StandardHeads(width, 2).double()) for _ in graphs
        )

    def forward(self, x):
        for layer, graph in zip(self.rounds, self.graphs, strict=True):
            x = x + layer(x, graph)
        return x


# %%
@torch.no_grad()
def rollout(calls, receiver):
    """Return the share of each token in the last state of the receiver: a sum over paths of products of shares."""
    weights = [call.weights()[0].mean(-1) for call in calls]  # the mean over heads
    graphs = [call.graph for call in calls]
    return analyse.influence(graphs, len(calls), 0.5, weights, receivers=[receiver])[0]


@torch.no_grad()
def flow(calls, src, dst):
    """Return the maximum flow from src to dst through pipes whose capacities are the shares."""
    pipes = nx.DiGraph()
    for level, call in enumerate(calls):
        shares = call.dense(call.weights())[0].mean(0) / 2
        shares += torch.eye(len(shares)) / 2
        for receiver, sender in shares.nonzero().tolist():
            pipes.add_edge((level, sender), (level + 1, receiver), capacity=float(shares[receiver, sender]))
    return nx.maximum_flow_value(pipes, (0, src), (len(calls), dst))


with torch.no_grad():
    only_relay = trace.record(Rounds([edge(NOT, OUTPUT), edge(OUTPUT, LAST)]), x)
share, pipe = rollout(only_relay.layers, LAST)[NOT].item(), flow(only_relay.layers, NOT, LAST)
print(f"from 'not' to 'words': rollout {share:.2f}, flow {pipe:.2f}")
assert (share, pipe) == (0.25, 0.5)

# %% [markdown]
# The same two summaries for the trained model and the sentence that this library uses everywhere. Grey bars show what the last token
# receives directly, in the last layer alone.

# %%
_, vocabulary = ga.model.load_trained()
sentence = torch.tensor([vocabulary.encode("Llamas do not output words")])
pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces(sentence[0])]
last = len(pieces) - 1
with torch.no_grad():
    run = trace.record(trained, sentence)
directly = rollout(run.layers[1:], last)
rolled = rollout(run.layers, last)
flows = torch.tensor([flow(run.layers, token, last) for token in range(len(pieces))])

figure, ax = plt.subplots(figsize=(9, 3))
for offset, (name, values), colour in zip(
    (-0.27, 0, 0.27),
    {"last layer alone": directly, "rollout, both layers": rolled, "flow, both layers": flows}.items(),
    (GREY, BLUE, ORANGE),
    strict=True,
):
    ax.bar([i + offset for i in range(len(pieces))], values, width=0.26, color=colour, label=name)
ax.set_xticks(range(len(pieces)), pieces)
ax.set(ylabel="share", title=f"where the state of {pieces[-1]!r} comes from")
ax.legend(frameon=False)
plt.show()
assert abs(rolled.sum() - 1) < 1e-5
assert (flows >= rolled - 1e-6).all()

# %% [markdown]
# Over two layers the shares are more even than the weights of the last layer alone (grey), since early tokens also arrive through
# relays; flow is never below rollout. Both summaries use the weights alone and ignore the content of the messages. The table of
# section 3 includes it.
#
# ## 6. A relay is narrow
#
# Relays save edges. What do they cost? Consider 8 tokens in two groups of four, and no edges between the groups: all information passes
# through relays, which attend to all senders in round 1, and to which all receivers attend in round 2. The four senders hold
# $4 \times 12 = 48$ numbers. How many of them can vary independently at the receivers? This is the rank of the derivative. The state of
# a relay has 12 numbers, so 12 numbers pass through one relay, whatever is sent.


# %%
def numbers_that_pass(relays, width=12, group=4, through_relays=True):
    """Return the rank of d(second group) / d(first group) after two rounds, and the number of edges."""
    total = 2 * group + relays
    senders, receivers = range(group), range(group, 2 * group)
    middle = range(2 * group, total)
    if through_relays:
        rounds = [[(s, m) for s in senders for m in middle], [(m, d) for m in middle for d in receivers]]
    else:
        rounds = [[(s, d) for s in senders for d in receivers]] * 2
    torch.manual_seed(1)
    graphs = [ga.convert.from_edge_index(torch.tensor(edges).T, total) for edges in rounds]
    network = Rounds(graphs)
    states = torch.randn(total, width, dtype=torch.float64)
    derivative = jacobian(network, states)[group : 2 * group, :, :group].reshape(group * width, group * width)
    return int(torch.linalg.matrix_rank(derivative, rtol=1e-9)), sum(len(edges) for edges in rounds)


for relays in (1, 2, 3, 4):
    rank, count = numbers_that_pass(relays)
    print(f"relays: {relays}, edges: {count:>2}, {rank:>2} of 48 numbers pass")
    assert rank == min(12 * relays, 48)
rank, count = numbers_that_pass(0, through_relays=False)
print(f"direct:    edges: {count:>2}, {rank:>2} of 48 numbers pass")
assert rank == 48

# %% [markdown]
# One relay connects all pairs with 8 edges instead of 32, and a quarter of the numbers passes. Reach is not bandwidth. In graph neural
# networks this is known as *over-squashing*; [notebook 12](12_sparse_against_dense.ipynb) trains models on graphs of different reach.
#
# **The answer.** A token receives information from beyond its edges through relays, one layer for each hop. A relay can pass a
# message on, or be selected because of a message that it received, as in an induction head. It can pass no more numbers than its
# state has.
#
# ## 7. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/17_relay_through_a_middle_token.py).
#
# **1. Keep a secret** (medium, 5 minutes). Take two layers of `causal(5)`. Which edges must be cut, the same in both layers and as few
# as possible, so that *words* does not depend on *do*?
#
# <details><summary>Hint</summary>
#
# List the paths from *do* to *words* with at most two edges that are not self loops, and cut one edge of each.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a list of (src, dst)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

left = patterns.causal(5) - ga.convert.from_edge_index(torch.tensor(answer).T, 5)
assert DO not in analyse.receptive_field(left, LAST, 2), f"a path is left: {analyse.witness(left, DO, LAST)}"
assert len(answer) == 3, "fewer edges are enough"
print("right: one edge of each of the three paths", answer)

# %% [markdown]
# **2. Rollout and flow by hand** (easy, 3 minutes). A chain has four tokens and three rounds, and in every round a token attends only
# to the one before it. What are rollout and flow from the first token to the last?
#
# <details><summary>Hint</summary>
#
# There is one path of three edges, and the share of each edge is one half.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: two numbers (rollout, flow)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

chain = patterns.window(4, 2) - patterns.self_loops(4)
with torch.no_grad():
    run = trace.record(Rounds([chain] * 3), x[:4])
results = (rollout(run.layers, 3)[0].item(), flow(run.layers, 0, 3))
assert math.isclose(answer[0], results[0], rel_tol=1e-6), (
    "one path has three edges, and each has a share of one half"
)
assert math.isclose(answer[1], results[1], rel_tol=1e-6), "how wide is the narrowest pipe?"
print("right:", answer)

# %% [markdown]
# **3. Enough relays** (easy, 3 minutes). Seven senders and seven receivers have states of 12 numbers, as in section 6. How many relays
# are needed so that at least half of the 84 numbers can pass?
#
# <details><summary>Hint</summary>
#
# Each relay lets as many numbers pass as its state has.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number of relays

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert numbers_that_pass(answer, group=7)[0] >= 42, "too few numbers pass"
assert numbers_that_pass(answer - 1, group=7)[0] < 42, "one relay less is enough"
print(f"right: {answer} relays let {numbers_that_pass(answer, group=7)[0]} numbers pass")

# %% [markdown]
# **4. The terms of another token** (hard, 15 minutes, code). Section 3 computes the terms for *words*. Write the terms for *output*, in
# the same three tensors, whose sum and the state of *output* are its final state.
#
# <details><summary>Hint</summary>
#
# Only the index of the receiver changes: `w1[:, t]` and `w2[:, t]` are the weights of all edges into token `t`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: (received in round 1, received in round 2, relayed), of shapes [5, 12], [5, 12] and [5, 5, 12]

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

parts = [part.sum(tuple(range(part.dim() - 1))) for part in answer]
with torch.no_grad():
    states = trace.record(model, x, causal).output
assert torch.allclose(x[OUTPUT] + sum(parts), states[OUTPUT], rtol=0, atol=1e-10), "the sum is another state"
assert answer[2].shape == (5, 5, width), "the relayed term has a row for each relay and sender"
print(f"right: {answer[2][:OUTPUT].norm(dim=-1).sum():.2f} of length are relayed by other tokens")

# %% [markdown]
# ## Sources
#
# * C. McCormick, *Patterns and Messages*, part 2, 2025: messages are created by the context, not extracted from it (S1.8), and
#   some are meant for tokens still to come (S1.9).
# * N. Elhage et al., *A Mathematical Framework for Transformer Circuits*, 2021: the expansion into paths, virtual attention
#   heads.
# * S. Abnar and W. Zuidema, [Quantifying Attention Flow in Transformers](https://arxiv.org/abs/2005.00928), 2020: rollout and
#   flow.
# * U. Alon and E. Yahav, [On the Bottleneck of Graph Neural Networks](https://arxiv.org/abs/2006.05205), 2021: over-squashing.

# %% [markdown]
# ---
# before: [16. Induction heads](16_induction_heads.ipynb) | [the book](README.md) | next: [18. Change the graph of a trained model](18_change_the_graph.ipynb)
