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
# # Attention, one case of message passing; an MLP, another
#
# Attention is a special case of message passing. **What is special about it, what does it save, and what does it give up?** With
# another message, the same code computes graph attention, edge convolution or the mean of the neighbours. With another function in place
# of the softmax, and with senders that never change, it computes the other half of a transformer: the MLP, the small network at each node.
# Both halves of a transformer layer are then one operation over two graphs.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb), and some of [notebook
# 13](13_communication_and_computation.ipynb).
#
# **Afterwards you can** write graph layers, GAT among them, and an MLP with the same two functions.
#
# before: [13. Communication and computation](13_communication_and_computation.ipynb) | [the book](README.md) | next: [15. What a GNN person asks](15_what_a_gnn_person_asks.ipynb)

# %%
import inspect
import sys
import textwrap

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, ORANGE, RED, use_house_style, write_numbers
from torch import nn
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import draw, patterns

use_house_style()  # before torch_geometric, whose import warns of a missing progress bar
from torch_geometric.nn import EdgeConv, GATConv, MessagePassing  # noqa: E402

sys.path.append("..")  # the examples are beside the notebooks, not in the package
from examples import pairwise  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## 1. The general form
#
# $$y_i = \text{update}\Big(\underset{j \to i}{\text{aggregate}} \ \text{message}(x_i, x_j)\Big)$$
#
# In message passing the message of an edge may depend on **both of its ends**, in any form, and on nothing else. Is attention of this
# form? Not as it is usually written, $y_i = \sum_{j \to i} w_{ij} v_j$: the denominator of the weight $w_{ij}$ is a sum over *all*
# in-neighbours of $i$. Look at a graph of seven tokens, as a mask and as arcs. Row 3 of the mask and the orange arcs
# are the same four edges, the in-edges of token 3:

# %%
width, n = 12, 7
graph = patterns.window(n, 3) | patterns.sinks(n, 1)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[1, 1.9])
draw.mask(graph, left)
draw.arcs(graph, right, lit=[(0, 3), (1, 3), (2, 3), (3, 3)])
plt.show()

# %% [markdown]
# Only the two ends of the edge from token 0 to token 3 may change its message. But its weight also changes with the state of token 1:

# %%
x = torch.randn(n, width, dtype=torch.float64)
heads = ga.StandardHeads(width, 3).double()
other = x.clone()
other[1] = torch.randn(width, dtype=torch.float64)

weights = []
for states in (x, other):
    q, (k, v) = heads.receive(states[None]), heads.send(states[None])
    out, info = ga.attend(q, k, v, graph, return_info=True)
    edge = graph.edge_index.T.tolist().index([0, 3])
    weights.append(info.weights()[0, 0, edge].item())
print("the weight of the edge 0 -> 3: {:.4f}; after a change of token 1: {:.4f}".format(*weights))
assert weights[0] != weights[1]

# %% [markdown]
# But the denominator is a sum over in-edges as well, so it can be aggregated together with the rest:
#
# $$\underbrace{\big(e^{a_{ij}} v_j, \ e^{a_{ij}}\big)}_{\text{message}} \quad \to \quad
#   \underbrace{\sum_{j \to i}}_{\text{aggregate}} \quad \to \quad
#   \underbrace{\frac{\text{first sum}}{\text{second sum}}}_{\text{update}} \qquad a_{ij} = \frac{q_i \cdot k_j}{\sqrt d}$$
#
# The **message** is a pair, and depends on the two ends alone. The **aggregation** is a sum. The **update** is a quotient. With this,
# attention is message passing in the strict sense. In torch_geometric these are eight lines, and there is no softmax in them. [Notebook
# 01](01_attention_is_message_passing.ipynb) derives them from the general form in its sections 5 and 6 and computes one receiver by hand:


# %%
class StrictAttention(MessagePassing):
    def forward(self, q, k, v, edge_index):
        return self.propagate(edge_index, q=q, k=k, v=v)

    def message(self, q_i, k_j, v_j):  # depends on both ends, and on nothing else
        mass = ((q_i * k_j).sum(-1, keepdim=True) / q_i.shape[-1] ** 0.5).exp()
        return torch.cat([mass * v_j, mass], dim=-1)

    def update(self, sums):
        return sums[..., :-1] / sums[..., -1:]


strict = StrictAttention(aggr="sum")

# %% [markdown]
# One graph could agree by accident. So we compare the class with `ga.attend` on a hundred random graphs of up to 40 tokens, with up to
# three heads:

# %%
random = torch.Generator().manual_seed(0)
largest_difference, edges, isolated = 0.0, 0, 0
for _ in range(100):
    size, number = torch.randint(2, 41, (), generator=random), torch.randint(1, 4, (), generator=random)
    g = ga.convert.from_mask(torch.rand(size, size, generator=random) < torch.rand((), generator=random))
    q, k, v = torch.randn(3, 1, number, size, 8, dtype=torch.float64, generator=random)
    by_messages, by_library = strict(q, k, v, g.edge_index), ga.attend(q, k, v, g)
    has_senders = g.in_degree() > 0
    difference = (by_messages - by_library)[:, :, has_senders].abs()
    largest_difference = max([largest_difference, *difference.flatten().tolist()])
    assert by_messages[:, :, ~has_senders].isnan().all()
    assert not by_library[:, :, ~has_senders].any()
    edges, isolated = edges + g.num_edges, isolated + int((~has_senders).sum())
assert largest_difference < 1e-12
print(f"100 graphs, {edges} edges: the largest difference is below 1e-12")
print(f"{isolated} receivers have no in-edge: there the quotient is 0 / 0, and the library gives 0")

# %% [markdown]
# (Real kernels first subtract the largest logit of each receiver, because $e^{a}$ overflows for large logits. This changes no quotient.)
#
# The other layers of this notebook differ in the logit $a$ and in the message. The examples of the library have a class that takes the two
# separately, `pairwise.PairwiseMessages`: you give it two functions of an edge, `logit` and `message`, and the name of a normaliser, which
# turns the logits of all in-edges into weights. The class multiplies each message by its weight, and the sum follows:

# %%
print(textwrap.dedent(inspect.getsource(pairwise.PairwiseMessages.message)))

# %% [markdown]
# Four layers that were published under four names are choices of these two functions. We write each of them in this form and check it
# against its usual implementation.

# %%
attention = pairwise.PairwiseMessages.of(heads)  # logit: x_dst W_P x_src, message: x_src W_M
assert torch.allclose(attention(x, graph), ga.MessagePassingAttention(heads)(x, graph), rtol=0, atol=1e-12)

gat = GATConv(width, 5, add_self_loops=False, bias=False).double()
W, a_src, a_dst = gat.lin.weight.T, gat.att_src[0, 0], gat.att_dst[0, 0]
graph_attention = pairwise.PairwiseMessages(
    message=lambda x_dst, x_src: x_src @ W,
    logit=lambda x_dst, x_src: functional.leaky_relu(x_dst @ W @ a_dst + x_src @ W @ a_src, 0.2),
)
assert torch.allclose(graph_attention(x, graph), gat(x, graph.edge_index), rtol=0, atol=1e-12)

mlp = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 5)).double()
usual = EdgeConv(mlp, aggr="add")  # made first, because it draws new weights for the MLP
edge_convolution = pairwise.PairwiseMessages(
    message=lambda x_dst, x_src: mlp(torch.cat([x_dst, x_src - x_dst], dim=-1))
)
assert torch.allclose(edge_convolution(x, graph), usual(x, graph.edge_index), rtol=0, atol=1e-12)

mean = pairwise.PairwiseMessages(
    message=lambda x_dst, x_src: x_src, logit=lambda x_dst, x_src: torch.zeros_like(x_src[..., 0])
)
degree = graph.in_degree()[:, None]
assert torch.allclose(mean(x, graph), graph.mask().double() @ x / degree, rtol=0, atol=1e-12)
print("attention, graph attention, edge convolution, mean of the neighbours: all equal to their usual form")

# %% [markdown]
# In the strict form, all four aggregate by a sum:
#
# | layer | message of the edge $j \to i$ | update | $a_{ij}$ depends on |
# |---|---|---|---|
# | mean of the neighbours | $(x_j, \ 1)$ | quotient | |
# | graph attention (GAT) | $(e^{a_{ij}} W x_j, \ e^{a_{ij}})$ | quotient | both ends, through a sum |
# | **attention** | $(e^{a_{ij}} v_j, \ e^{a_{ij}})$ | quotient, then $W_O$ | **both ends, through a product** |
# | edge convolution | $\text{MLP}(x_i, \ x_j - x_i)$ | none | |
#
# In attention both ends decide *how much* is sent. *What* is sent, $v_j$, is a linear function of the sender alone.
#
# ## 2. What attention saves
#
# The vector $v_j$ does not depend on the receiver. So it can be computed **once for each token** and not once for each edge. The
# logit is a product of two vectors, $q_i$ and $k_j$, which are computed once for each token, too. That is why attention is fast. Here
# are the same numbers in the general form, which computes everything for each edge:

# %%
tokens = 64
for name, g in {"causal": patterns.causal(tokens), "window(64, 8)": patterns.window(tokens, 8)}.items():
    shapes = []
    layer = pairwise.PairwiseMessages.of(heads)
    layer.message_of.register_forward_hook(
        lambda module, ends, output, shapes=shapes: shapes.append(output.shape[-3])
    )
    layer(torch.randn(tokens, width, dtype=torch.float64), g)
    assert shapes == [g.num_edges]
    print(f"{name:>14}: {shapes[0]:>5} messages are computed, where attention computes {tokens}")

# %% [markdown]
# ## 3. What attention gives up
#
# A sender sends the same to all receivers, times a number. In one head all that leaves a token lies on one line (rank 1); with $H$
# heads it lies in a space of at most $H$ dimensions. A message that depends on both ends has no such limit. The cell below takes what one
# token sends to ten receivers as ten rows, and computes their rank:

# %% tags=["S4.18"]
receivers, sender = 10, 4


def sent(layer, graph, states):
    """What travels along the edges out of one sender, [receiver, width]."""
    recorded_messages = []
    hook = layer.register_message_forward_hook(
        lambda module, inputs, output: recorded_messages.append(output)
    )
    layer(states, graph)
    hook.remove()
    return recorded_messages[0][graph.edge_index[0] == sender]


states, everyone = torch.randn(receivers, 12, dtype=torch.float64), patterns.full(receivers)
ranks = {}
for number in (1, 2, 3, 6):
    layer = pairwise.PairwiseMessages.of(ga.StandardHeads(12, number).double())
    ranks[f"{number} head{'s' * (number > 1)}"] = int(torch.linalg.matrix_rank(sent(layer, everyone, states)))
layer = pairwise.PairwiseMessages(pairwise.BothEnds(12, 32, 12).double())
ranks["both ends"] = int(torch.linalg.matrix_rank(sent(layer, everyone, states)))
print(ranks)
assert list(ranks.values()) == [1, 2, 3, 6, 10]

# %% [markdown]
# Does that matter? Here is a task in which it does. A sender has a row of 8 numbers. There are 8 receivers, numbered from 0, and each
# must receive the row *rotated* by as many places as its number. A message that depends on both ends can be rotated for its receiver, and
# we can write this message down without training:

# %%
ROW = 8
turned = torch.stack([torch.eye(ROW).roll(places, 1) for places in range(ROW)])  # [receiver, from, to]
everyone = patterns.cross(ROW, 2)  # 8 receivers, 2 senders
names = torch.eye(ROW)  # the states of the receivers: their numbers, one-hot


def rows_and_answers(samples, generator):
    """The states of the two senders, and what each receiver should receive."""
    row = torch.randn(samples, ROW, generator=generator)
    full = functional.pad(row, (0, 1))  # the last place is 1 for the silent sender alone
    silent = functional.one_hot(torch.tensor(ROW), ROW + 1).float().expand(samples, -1)
    return torch.stack([full, silent], dim=1), torch.einsum("sf,lft->slt", row, turned)


turning = pairwise.PairwiseMessages(
    message=lambda x_dst, x_src: torch.einsum("...l,...f,lft->...t", x_dst, x_src[..., :ROW], turned)
)
senders, answers = rows_and_answers(1024, torch.Generator().manual_seed(0))
turned_messages = turning((senders, names.expand(1024, -1, -1)), everyone)
assert torch.allclose(turned_messages, answers, atol=1e-6)
print("a message that depends on both ends: every receiver gets exactly its row")


# %% [markdown]
# Attention must send one message to all receivers. (There is a second, silent sender, so that a receiver can turn a head off: the
# weights of a softmax sum to 1, so a receiver needs some sender to which it can give them.) With $H$ heads, the rows that the 8
# receivers get have rank at most $H + 1$. So whatever the heads have learned, they cannot be better than the best approximation of that
# rank, which the singular values give. A simple solution lets each head serve one receiver, which leaves $1 - H / 8$ of the error. We
# train and see.


# %%
def error_after_training(number, seed, steps=300):
    """Train attention on new rows in every step; return the mean squared error on 2048 more (an answer of 0 gives 1)."""
    torch.manual_seed(seed)
    heads = ga.StandardHeads(ROW, number, head_dim=8, value_dim=8, source_width=ROW + 1)
    layer, generator = ga.MessagePassingAttention(heads, backend="dense"), torch.Generator().manual_seed(seed)

    def error(samples):
        senders, answers = rows_and_answers(samples, generator)
        return (layer((senders, names.expand(samples, -1, -1)), everyone) - answers).pow(2).mean()

    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        error(64).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return error(2048).item()


COUNTS = (1, 2, 4, 8)
errors = {number: [error_after_training(number, seed) for seed in range(2)] for number in COUNTS}
energy = torch.linalg.svdvals(answers).pow(2)  # [sample, singular value], largest first
least = {number: (energy[:, number + 1 :].sum() / energy.sum()).item() for number in COUNTS}

# %%
figure, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
ax.plot(
    COUNTS, [1 - h / 8 for h in COUNTS], "--", color=GREY, label="1 - H / 8: a head for each of H receivers"
)
ax.plot(
    COUNTS, list(least.values()), ":", color=RED, label="lower bound: the best approximation of rank H + 1"
)
for seed, marker in enumerate("os"):
    ax.plot(
        COUNTS,
        [values[seed] for values in errors.values()],
        marker,
        color=BLUE,
        label=None if seed else "attention, trained",
    )
ax.plot(COUNTS, [0.0] * 4, "D", color=ORANGE, markersize=5, label="a message that depends on both ends")
ax.set(xlabel="heads", ylabel="mean squared error", xticks=COUNTS, ylim=(-0.05, 1.05))
ax.legend(frameon=False, fontsize=9)
plt.show()
for number, values in errors.items():
    print(
        f"{number} head{'s' * (number > 1)}: error {values[0]:.2f} and {values[1]:.2f}; bound {least[number]:.2f}; 1 - H / 8 = {1 - number / 8:.2f}"
    )
    assert min(values) > least[number] - 0.02

# %% [markdown]
# Trained heads do as well as the simple solution or a little better, and stay far from the bound until every receiver has a head of
# its own. Transformers live with the limit by using several heads. They have a second means, in their other half: a token may receive
# more than it needs, and pick out its part afterwards, in the MLP.
#
# ## 4. The other half
#
# An MLP of one hidden layer, $y = W_2 \, \phi(W_1 x + b_1) + b_2$, written as a sum over its hidden neurons:
#
# $$y = \sum_{j} \phi(x \cdot p_j + b_j) \; m_j \;+\; b_2
#   \qquad p_j = \text{row } j \text{ of } W_1, \quad m_j = \text{column } j \text{ of } W_2$$
#
# Each neuron has a **pattern** $p_j$, which is compared with the token by a dot product, and a **message** $m_j$, which it adds
# to the token's state, weighted by how well the pattern fits. It is a *sender*. The neurons are nodes that never change, every
# token attends to all of them, and the function $\phi$ (such as GELU, which keeps large numbers and maps those well below zero to
# nearly 0) stands where attention has its softmax.

# %%
model, vocabulary = ga.model.load_trained()
block = model.blocks[1]
nodes = pairwise.StaticNodes.of(block.mlp)  # of nn.Sequential(Linear, GELU, Linear)
pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces("Llamas do not output words")]

with torch.no_grad():
    run = ga.trace.record(model, torch.tensor([vocabulary.encode("Llamas do not output words")]))
    state = block.mlp_norm(run.phases[-1].before)[0]
    assert torch.allclose(nodes(state), block.mlp(state), atol=1e-4)
    assert torch.allclose(nodes(state), run.phases[-1].update[0], atol=1e-4)
print(
    f"{len(pieces)} tokens attend to {len(nodes.patterns)} static nodes: {len(pieces) * len(nodes.patterns)} edges, the same update"
)

# %% [markdown]
# So this is what the two phases of a layer are, side by side:
#
# | | attention | MLP |
# |---|---|---|
# | senders | the tokens, another text each time | static nodes, learned once |
# | pattern, message | computed from the sender's state | parameters |
# | edges | the mask | all (a bipartite graph: nodes to tokens) |
# | weights | softmax: shares of 1 | GELU: each alone |
# | strict form | message $(e^a v_j, e^a)$, sum, quotient | message $\phi(a) \, m_j$, sum, no quotient |
#
# The last two rows are a real difference. Under the softmax senders **compete**: one more sender that fits well lowers the weights of
# the others, and the weights always sum to 1. Under GELU a token may give large weights to many nodes, or to almost none. The left
# picture shows the nodes with the largest weights in the last MLP of the trained model; the right picture shows, for each token, its
# 512 weights in order of size.

# %%
with torch.no_grad():
    weights = functional.gelu(state @ nodes.patterns.T + nodes.bias)  # [token, node]
strongest = weights.abs().amax(0).topk(14).indices

figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 4.2), layout="constrained", width_ratios=[1.25, 1])
top = float(weights.abs().max())
left.imshow(weights[:, strongest], cmap="Blues", vmin=0, vmax=1.2 * top, aspect="auto")
left.set_yticks(range(len(pieces)), pieces)
left.set_xticks(range(14), strongest.tolist(), rotation=60, fontsize=9)
left.set(xlabel="static node", title="weights of the edges from node to token")
left.tick_params(length=0)
write_numbers(left, weights[:, strongest], least=0.3, dark=0.7 * top)
for row in weights:
    right.plot(row.sort(descending=True).values, color=BLUE, alpha=0.4)
right.axhline(0, color=GREY, linewidth=1)
right.set(
    xlabel="nodes, in order of weight",
    ylabel="weight",
    title="a few nodes get large weights, most get almost none",
)
plt.show()
large, sums = (weights.abs() > 0.5).double().mean().item(), weights.sum(1)
print(
    f"weights beyond ±0.5: {large:.0%}; the weights of a token sum to a number from {sums.min():.0f} to {sums.max():.0f}"
)

# %% [markdown]
# What does a node send? Its message is as wide as a state, so the unembedding turns it into logits of tokens, as it does with a
# state. Here are the nodes to which the last token of the sentence gives the largest weights, and the tokens that their messages
# make more likely.

# %%
with torch.no_grad():
    for node in weights[-1].topk(4).indices.tolist():
        likely = model.unembedding(nodes.messages[node] * model.norm.weight).topk(5).indices
        words = ", ".join(repr(vocabulary.decode([token])) for token in likely.tolist())
        print(f"node {node:>3}, weight {weights[-1, node]:.1f}: more likely become {words}")

# %% [markdown]
# ## 5. A graph for the MLP
#
# If an MLP is message passing over a complete bipartite graph, it can have a *sparser* graph as well, in which each token attends to
# some of the nodes. (If a small network chooses groups of nodes for each token, this is called a *mixture of experts*.) Let every
# token attend only to the $k$ nodes with its largest weights. How much of the update is left?

# %%
with torch.no_grad():
    full_update, distances = nodes(state), []
    counts = [8, 16, 32, 64, 128, 256, 512]
    for k in counts:
        chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(1, weights.abs().topk(k).indices, True)
        sparse = ga.convert.from_mask(chosen)  # [token, node]: from nodes to tokens
        distances.append(
            ((nodes(state, sparse) - full_update).norm() / (full_update - nodes.update_bias).norm()).item()
        )

figure, ax = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
ax.plot(counts, distances, "o-", color=BLUE)
ax.set(
    xscale="log",
    xticks=counts,
    xlabel="nodes to which each token attends",
    ylabel="error, as a share of the update",
    ylim=(-0.03, 1),
)
ax.set_xticks(counts, counts)
ax.minorticks_off()
plt.show()
for k, error in zip(counts, distances, strict=True):
    print(f"{k:>3} of 512 nodes: error {error:.0%}")
assert distances[-1] < 1e-5
assert sorted(distances, reverse=True) == distances
assert distances[0] < 0.6
assert distances[counts.index(64)] > 0.2
below_zero = (
    (weights.clamp(max=0) @ nodes.messages).norm() / (full_update - nodes.update_bias).norm()
).item()
print(
    f"the messages of all nodes with weights below zero sum to {below_zero:.0%} of the length of the update"
)

# %% [markdown]
# Eight nodes of 512 give about half of the update. The error falls slowly after that, because part of the update is spread over the many
# weights just below zero: each of them is tiny, but their messages add up to about a third of it. This model was trained to attend to
# all its nodes. Under ReLU, the weights below zero would be exactly zero, and their nodes could be left out without any error.

# %% [markdown]
# ## 6. In between
#
# Both changes can be made one at a time.
#
# **Softmax, but static senders.** Hold a context fixed, and its tokens are static nodes, each with a pattern and a message. A cache of
# keys and values is such a set of nodes. If learned nodes of this kind are added to the real ones, this is called *persistent memory* or
# *prefix tuning*.

# %%
heads = ga.StandardHeads(width, 3).double()
context, newcomers = torch.randn(9, width, dtype=torch.float64), torch.randn(4, width, dtype=torch.float64)
cached = [pairwise.StaticNodes.of_context(heads, context, head) for head in range(3)]

attended = ga.MessagePassingAttention(heads)((context, newcomers), patterns.cross(4, 9))
assert torch.allclose(sum(nodes(newcomers) for nodes in cached), attended, rtol=0, atol=1e-12)
print("attention to a context = static nodes under a softmax, summed over heads")

# %% [markdown]
# **GELU, but senders from the context.** For each receiver this is an MLP whose two matrices come from the tokens to which it
# attends: a *contextual MLP*. The edges are still those of the mask.

# %%
contextual = pairwise.PairwiseMessages.of(heads, normaliser="gelu")
causal = patterns.causal(9)
update = contextual(context, causal)

i, mlp_sum = 5, torch.zeros(width, dtype=torch.float64)
for head in range(3):
    by = pairwise.StaticNodes.of_context(heads, context[: i + 1], head, "gelu")  # the senders of token 5
    W_1, W_2 = by.patterns, by.messages.T
    mlp = nn.Sequential(
        nn.Linear(width, i + 1, bias=False), nn.GELU(), nn.Linear(i + 1, width, bias=False)
    ).double()
    mlp[0].weight.data, mlp[2].weight.data = W_1.data, W_2.data
    mlp_sum = mlp_sum + mlp(context[i])
assert torch.allclose(update[i], mlp_sum, rtol=0, atol=1e-12)
print(
    f"to token {i} each head is an MLP with {i + 1} hidden neurons, one for every token to which it attends"
)

# %% [markdown]
# **The answer.** The message of attention is special: $v_j$ depends on the sender alone, and the receiver only decides by which number
# it is multiplied. This **saves** most of the work: along the causal graph of 64 tokens, attention computes 64 messages instead of 2,080.
# It **gives up** variety: in one head, all that leaves a token lies on one line, so a sender cannot send different directions to
# different receivers. The MLP is the same operation over another graph, with senders that never change, and without the quotient.
#
# ## 7. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/14_one_limiting_case.py).
#
# **1. The plain mean** (easy, 2 minutes). For which `W_Q` is attention, whatever the other matrices, the plain mean of the messages
# that arrive? Give a tensor of shape `[1, 12, 4]`.
#
# <details><summary>Hint</summary>
#
# All weights of a receiver are equal if all its logits are.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a tensor [1, 12, 4]

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

W_K, W_V, W_O = torch.randn(1, 12, 4), torch.randn(1, 12, 4), torch.randn(1, 4, 12)
layer = ga.MessagePassingAttention(ga.StandardHeads.from_arrays(answer, W_K, W_V, W_O))
states = torch.randn(n, 12)
expected = graph.mask().float() @ (states @ W_V[0] @ W_O[0]) / graph.in_degree()[:, None]
assert torch.allclose(layer(states, graph), expected, atol=1e-4), (
    "some token still gives one sender a larger weight than another"
)
print("right")

# %% [markdown]
# **2. A message that depends on both ends** (medium, 5 minutes, code). Write the message with which the sum over in-edges is $\sum_{j \to i} (x_j - x_i)$: how
# the senders of a token differ from it. (On a graph this is how heat flows.)
#
# <details><summary>Hint</summary>
#
# The function gets the states of both ends of all edges at once, `[edges, width]` each.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of x_dst and x_src

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

mask = graph.mask().float()
expected = mask @ states - mask.sum(1, keepdim=True) * states
assert torch.allclose(pairwise.PairwiseMessages(answer)(states, graph), expected, atol=1e-5), (
    "not the sum of differences"
)
print("right: attention cannot send this message, because it depends on the receiver")

# %% [markdown]
# **3. Static nodes by hand** (medium, 10 minutes). Two static nodes under ReLU that compute $|x|$ for a state of one number: give their patterns and
# messages, each a tensor of shape `[2, 1]`.
#
# <details><summary>Hint</summary>
#
# $|x| = \text{ReLU}(x) + \text{ReLU}(-x)$.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: (patterns, messages)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

numbers = torch.linspace(-3, 3, 13)[:, None]
nodes = pairwise.StaticNodes(*answer, normaliser="relu")
assert torch.allclose(nodes(numbers), numbers.abs()), "not |x|"
print("right: |x| =", nodes(numbers).flatten().tolist()[::3], "...")

# %% [markdown]
# **4. Without the quotient** (medium, 10 minutes, code). Leave the update of `StrictAttention` out. What breaks? Write a class with two methods, `forward` and
# `message`, that returns $\sum_{j \to i} e^{a_{ij}} v_j$ alone. Then say what happens if 1 is added to *every* logit. Attention does not
# change. By which factor does your sum grow? Give both, the class and the factor.
#
# <details><summary>Hint</summary>
#
# Copy `StrictAttention`, send the first half of the pair, and delete `update`: without it, PyG returns the sum. For the factor,
# write $e^{a + 1}$ as a product.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: (a subclass of MessagePassing, a number)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
layer, factor = answer[0](aggr="sum"), answer[1]

g = patterns.causal(6)
q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
sums = layer(q, k, v, g.edge_index)
mass = (q @ k.mT / 2).exp() * g.mask()
assert torch.allclose(sums, mass @ v), "not the sum of e^a v"
# one channel more, which adds 1 to each logit: 5 channels are scaled by the root of 5, and 4 by the root of 4
one = torch.full((1, 1, 6, 1), 5**0.25, dtype=torch.float64)
longer_q, longer_k = torch.cat([q * (5 / 4) ** 0.5, one], -1), torch.cat([k, one], -1)
assert torch.allclose(
    ga.attend(longer_q, longer_k, v, g), ga.attend(q, k, v, g)
)  # the quotient does not notice
assert torch.allclose(layer(longer_q, longer_k, v, g.edge_index), factor * sums), "another factor"
totals = layer(q, k, torch.ones_like(v), g.edge_index)[0, 0, :, 0]
print("right. Attention maps values of 1 to 1. Your sum maps them, for tokens 0 to 5, to")
print(
    "   ",
    ", ".join(f"{total:.1f}" for total in totals),
    "\nsince each token has one in-edge more than the token before.",
)

# %% [markdown]
# ## Sources
#
# * P. Battaglia et al., [Relational inductive biases, deep learning, and graph networks](https://arxiv.org/abs/1806.01261),
#   2018, and J. Gilmer et al., [Neural Message Passing](https://arxiv.org/abs/1704.01212), 2017: the general form.
# * P. Veličković et al., [Graph Attention Networks](https://arxiv.org/abs/1710.10903), 2018. Y. Wang et al., [Dynamic Graph CNN
#   for Learning on Point Clouds](https://arxiv.org/abs/1801.07829), 2019: edge convolution.
# * *Attention: All you need to know*, far.in.net, 2025 (S4): one message for all receivers (S4.18), the contextual MLP (S4.21),
#   after a remark of A. Karpathy's that an MLP is attention over fixed keys and values.
# * M. Geva et al., [Transformer Feed-Forward Layers Are Key-Value Memories](https://arxiv.org/abs/2012.14913), 2021. S.
#   Sukhbaatar et al., [Augmenting Self-attention with Persistent Memory](https://arxiv.org/abs/1907.01470), 2019. X. Li and P.
#   Liang, [Prefix-Tuning](https://arxiv.org/abs/2101.00190), 2021.

# %% [markdown]
# ---
# before: [13. Communication and computation](13_communication_and_computation.ipynb) | [the book](README.md) | next: [15. What a GNN person asks](15_what_a_gnn_person_asks.ipynb)
