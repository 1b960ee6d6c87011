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
# A token that is listened to says something about *itself*. It cannot shape its message for whoever listens: all messages are
# made before anybody has listened. How then does a token come to know of tokens that it has no edge to? By relay. In one layer
# the token in the middle takes something over into its own state; in the next it passes that on, as a part of what it is now.
#
# This notebook follows single contributions through two layers, knocks out edges on the way, and shows what a relay cannot do.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb); [notebook 11](11_how_many_layers.ipynb) asks how far relays
# reach.
#
# **Afterwards you can** follow one contribution through two layers, and cut it.
#
# before: [Induction heads](16_induction_heads.ipynb) | [the book](README.md) | next: [Change the graph of a trained model](18_change_the_graph.ipynb)

# %%
import math
import warnings

import matplotlib.pyplot as plt
import networkx as nx
import torch
from torch import nn
from torch.autograd.functional import jacobian

import gnn_attention as ga

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
from gnn_attention import analyse, draw, patterns  # noqa: E402
from gnn_attention.interpret import trace  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(1)
BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"
WORDS = ["Llamas", "do", "not", "output", "words"]
LLAMAS, DO, NOT, OUTPUT, LAST = range(5)


# %%
def draw_table(ax, table, rows, columns, title="", digits=2):
    """A table of sizes: darker is larger, grey is exactly zero."""
    top = float(table.max())
    ax.imshow(
        table.where(table > 0, math.nan),
        cmap=plt.get_cmap("Blues").with_extremes(bad="#E4E4E4"),
        vmin=0,
        vmax=1.2 * top,
    )
    ax.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(length=0)
    ax.set_title(title, fontsize=11)
    for r, row in enumerate(table.tolist()):
        for c, value in enumerate(row):
            if value:
                ax.text(
                    c,
                    r,
                    f"{value:.{digits}f}",
                    ha="center",
                    va="center",
                    color="white" if value > 0.7 * top else "black",
                )


# %% [markdown]
# ## 1. A message is made by its sender
#
# $$M_j = x_j W_V W_O \qquad\Rightarrow\qquad \frac{\partial M_j}{\partial x_q} = 0 \quad \text{for } j \ne q$$
#
# Left: how each message depends on each token's state. It is the diagonal. The query of a listener is not in the formula, so no
# listener has a part in what it is told; it has one only in *how loudly* it hears it. Right: what arrives in the end, the
# update, does depend on others: on all that the receiver may hear.

# %%
width = 12
heads = ga.StandardHeads(width, 2).double()
x = torch.randn(5, width, dtype=torch.float64)
causal = patterns.causal(5)


def dependence(step):
    """The size of every block of the derivative, [of whose result, on whose state]."""
    return jacobian(step, x).norm(dim=(1, 3))


message = dependence(lambda x: ga.FactoredHeads.of(heads).messages(x[None])[0].sum(0))
update = dependence(lambda x: ga.MessagePassingAttention(heads)(x, causal))
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.9), layout="constrained")
draw_table(
    left, message, WORDS, WORDS, "how the message of a token (row)\ndepends on the state of a token (column)"
)
draw_table(
    right, update, WORDS, WORDS, "how the update of a token (row)\ndepends on the state of a token (column)"
)
plt.show()

assert torch.equal(message > 0, torch.eye(5, dtype=torch.bool))
assert torch.equal(update > 0, causal.mask())

# %% [markdown]
# So what *words* hears from *output* in the first layer is about *output* alone. In the second layer it is another matter: then
# the state of *output* holds what *output* has heard.
#
# ## 2. Two rounds, two edges
#
# Here is a network in which only a relay is possible. In the first round there is one edge, *not* $\to$ *output*. In the second
# there is one edge, *output* $\to$ *words*. Nobody ever has an edge from *not* to *words*.


# %%
def edge(src, dst, n=5):
    return ga.convert.from_edge_index(torch.tensor([[src], [dst]]), n)


draw.layers([edge(NOT, OUTPUT), edge(OUTPUT, LAST)], 2, token=LAST, labels=WORDS, title="only a relay")

# %%
first, second = (ga.MessagePassingAttention(ga.StandardHeads(width, 2).double()) for _ in range(2))


def two_rounds(graph_1, graph_2):
    """A function from states to states: each round adds what was heard."""

    def run(x):
        x = x + first(x, graph_1)
        return x + second(x, graph_2)

    return run


nothing = edge(NOT, OUTPUT) - edge(NOT, OUTPUT)
for name, graphs in {
    "both edges": (edge(NOT, OUTPUT), edge(OUTPUT, LAST)),
    "not -> output is cut": (nothing, edge(OUTPUT, LAST)),
    "output -> words is cut": (edge(NOT, OUTPUT), nothing),
    "the rounds swapped": (edge(OUTPUT, LAST), edge(NOT, OUTPUT)),
}.items():
    size = dependence(two_rounds(*graphs))[LAST, NOT].item()
    print(f"{name:>23}: the state of 'words' depends on 'not' by {size:.3f}")
    assert (size > 0) == (name == "both edges")

# %% [markdown]
# A cut anywhere on the way ends it, exactly. So does the wrong order: a relay cannot pass on what it has not heard yet.
#
# ## 3. How much comes which way?
#
# On a full causal graph there are many ways, and the same token is heard along several at once. If we hold the weights $w$ of
# both layers fixed, everything else is linear, and the final state falls apart into one term for each way:
#
# $$x_t'' = x_t \;+\; \underbrace{\sum_j w^1_{tj} \, x_j W^1_M}_{\text{heard in round 1}}
#   \;+\; \underbrace{\sum_j w^2_{tj} \, x_j W^2_M}_{\text{heard in round 2}}
#   \;+\; \underbrace{\sum_q \sum_j w^2_{tq} \, w^1_{qj} \, x_j W^1_M W^2_M}_{
#   \text{told by } j \text{ to } q, \text{ then by } q \text{ to } t}$$
#
# (and a sum over heads everywhere). The last term is the relays. With $W^1_M W^2_M$ between them, two heads act as one that
# neither layer has; such pairs are called *virtual heads*. Below is the size of each term for $t = $ *words*.


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

rows = ["heard in round 1", "heard in round 2", *(f"relayed by {word}" for word in WORDS)]
sizes = torch.cat([round_1[None], round_2[None], relayed]).norm(dim=-1)
figure, ax = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
draw_table(ax, sizes, rows, WORDS, "what arrives at 'words': which way (row), from whom (column)")
plt.show()
print(
    f"the terms add up to the final state; relayed by another: {relayed[:t].norm(dim=-1).sum() / sizes.sum():.0%} of all lengths"
)

# %% [markdown]
# (*Relayed by words* itself means: heard in round 1, and in round 2 from oneself.) Now mute one edge, *not* $\to$ *output* in
# round 1: it keeps its weight and says nothing. With fixed weights exactly one cell of the table disappears. In truth *more*
# changes: *output* is in another state now, so it also offers something else in round 2, and is listened to more or less.

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
print(f"what is left, {(change[t] - cell).norm():.3f}, comes from other weights")
for head in range(2):
    before, after = w2[head, t, OUTPUT], w2_after[head, t, OUTPUT]
    print(f"  weight of output -> words in round 2, head {head}: {before:.3f}, without the edge {after:.3f}")
assert [i for i in range(5) if change[i].abs().max() > 1e-12] == [OUTPUT, LAST]
assert (change[t] - cell).norm() > 1e-3

# %% [markdown]
# Both effects matter. A relay can pass a message on (the cell), and it can be *chosen because of* what it has heard (the
# weights). The induction heads of the trained model live on the second.
#
# ## 4. A relay in the trained model
#
# [Notebook 16](16_induction_heads.ipynb) finds a head that listens to the token after the earlier occurrence of its own. Take
# random tokens said twice; the receiver is $t$ in the second copy, its own token stood at $j = t - 48$ before, and it listens
# to $q = j + 1$. There is an edge $j \to t$ too, but that is not the way taken. In layer 0, $q$ hears $j$: *the one before me
# is j*. In layer 1, $t$ looks for someone who says so.
#
# We mute one edge into $q$ in layer 0 and look at how much $t$ still listens to $q$, in the strongest induction head. First the
# edge $j \to q$, then for comparison the edges from other tokens just before.

# %%
trained, _ = ga.model.load_trained()
length, samples = 48, 16
generator = torch.Generator().manual_seed(0)
once = torch.stack(
    [torch.randperm(trained.config.vocabulary_size, generator=generator)[:length] for _ in range(samples)]
)
tokens = torch.cat([once, once], dim=1)
head = int(ga.model.induction_scores(trained)[1].argmax())
receivers = range(8, 48, 8)  # where q stands, in the first copy


@torch.no_grad()
def listening_weights(q, muted=None):
    """The weight of q -> t in layer 1, the mean over the texts, if one edge into q says nothing in layer 0."""
    t = q - 1 + length
    interventions = () if muted is None else trace.mute([(muted, q)], layers=0)
    run = trace.record(trained, tokens, interventions=interventions)
    return run.layers[1].weights([(q, t)], heads=head).mean().item()


# %%
results = {"nothing": [listening_weights(q) for q in receivers]}
for back in (1, 2, 3, 4):
    results[f"{back} back"] = [listening_weights(q, q - back) for q in receivers]
means = [sum(values) / len(values) for values in results.values()]

figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.bar(range(len(means)), means, color=[BLUE, RED, GREY, GREY, GREY])
for i, values in enumerate(results.values()):
    ax.plot([i] * len(values), values, "k_", markersize=9, alpha=0.6)
ax.set_xticks(range(len(means)), list(results))
ax.set(xlabel="muted in layer 0: the edge into q from", ylabel="weight of q → t in layer 1", ylim=(0, 1))
plt.show()
for name, mean in zip(results, means, strict=True):
    print(f"muted {name:>7}: weight of q -> t {mean:.2f}")
assert means[1] < 0.2 * means[0]
assert means[1] < means[2] < means[3] < means[4]
assert means[4] > 0.9 * means[0]

# %% [markdown]
# One edge of the first layer, between two *other* tokens, decides whether $t$ listens to $q$ in the second. (Muting tokens
# farther back disturbs the state of $q$ as well, and the less the farther they are. Each dash is one place of $q$.)
#
# ## 5. Shares along all ways
#
# Two summaries of a run follow what came from where through all layers at once, relays included. Both give a token, in each
# layer, half of what it was and half of what it hears. **Rollout** multiplies the shares along every way and adds up the ways.
# **Flow** asks how much could pass at most, as through pipes. On the network of section 2, with one way of two edges, both can
# be done without a computer: $\frac12 \cdot \frac12$, and the narrowest pipe, $\frac12$.


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
    """The share of each token in the receiver's last state: shares multiplied along each way, ways added up."""
    weights = [call.weights()[0].mean(-1) for call in calls]  # the mean over heads
    graphs = [call.graph for call in calls]
    return analyse.influence(graphs, len(calls), 0.5, weights, receivers=[receiver])[0]


@torch.no_grad()
def flow(calls, src, dst):
    """How much could pass from src to dst at most, through pipes as wide as the shares."""
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
# And on the trained model, for the sentence that this library uses everywhere. What the last token heard directly, in the last
# layer alone, is not what it knows of:

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

figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
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
# These are summaries of weights alone: they do not know what the messages say. The table of section 3 does.
#
# ## 6. A relay is narrow
#
# If relays are that good, why not save edges? Below, 8 tokens in two groups of four. Nobody in the second group hears the
# first: all that it learns comes through relays, tokens that hear everyone in round 1 and are heard by everyone in round 2.
# Four senders hold $4 \times 12 = 48$ numbers. How many of them can vary independently at the receivers? That is the rank of
# the derivative. The state of a relay has 12 numbers, so one relay lets 12 pass, whatever is sent.


# %%
def numbers_that_pass(relays, width=12, group=4, through_relays=True):
    """The rank of d(second group) / d(first group) after two rounds."""
    total = 2 * group + relays
    sends, hears = range(group), range(group, 2 * group)
    middle = range(2 * group, total)
    if through_relays:
        rounds = [[(s, m) for s in sends for m in middle], [(m, d) for m in middle for d in hears]]
    else:
        rounds = [[(s, d) for s in sends for d in hears]] * 2
    torch.manual_seed(1)
    graphs = [ga.convert.from_edge_index(torch.tensor(edges).T, total) for edges in rounds]
    network = Rounds(graphs)
    states = torch.randn(total, width, dtype=torch.float64)
    derivative = jacobian(network, states)[group : 2 * group, :, :group].reshape(group * width, group * width)
    return int(torch.linalg.matrix_rank(derivative, rtol=1e-9)), sum(len(edges) for edges in rounds)


for relays in (1, 2, 3, 4):
    rank, count = numbers_that_pass(relays)
    print(f"{relays} relays: {count:>2} edges, {rank:>2} of 48 numbers pass")
    assert rank == min(12 * relays, 48)
rank, count = numbers_that_pass(0, through_relays=False)
print(f"direct:   {count:>2} edges, {rank:>2} of 48 numbers pass")
assert rank == 48

# %% [markdown]
# One relay reaches everyone with 8 edges instead of 32, and lets a quarter through. Reach is not bandwidth. In graph neural
# networks this is known as *over-squashing*; [notebook 12](12_sparse_against_dense.ipynb) trains models on graphs of several
# reaches.
#
# ## 7. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/17_relay_through_a_middle_token.py).
#
# **1. Keep a secret.** Two layers over `causal(5)`. Which edges must be cut, the same in both layers and as few as possible, so
# that *words* cannot know of *do*?

# %% tags=["exercise"]
answer = None  # your turn: a list of (src, dst)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

left = patterns.causal(5) - ga.convert.from_edge_index(torch.tensor(answer).T, 5)
assert DO not in analyse.receptive_field(left, LAST, 2), f"it is told along {analyse.witness(left, DO, LAST)}"
assert len(answer) == 3, "fewer will do"
print("right: one edge of each of the three ways", answer)

# %% [markdown]
# **2. Without a computer.** A chain of four tokens, three rounds, and in every round a token hears only the one before it. What are
# rollout and flow from the first token to the last?

# %% tags=["exercise"]
answer = None  # your turn: two numbers (rollout, flow)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

chain = patterns.window(4, 2) - patterns.self_loops(4)
with torch.no_grad():
    run = trace.record(Rounds([chain] * 3), x[:4])
results = (rollout(run.layers, 3)[0].item(), flow(run.layers, 0, 3))
assert math.isclose(answer[0], results[0], rel_tol=1e-6), "one way of three edges, and each passes on a half"
assert math.isclose(answer[1], results[1], rel_tol=1e-6), "how wide is the narrowest pipe?"
print("right:", answer)

# %% [markdown]
# **3. Enough relays.** Seven senders, seven receivers, states of 12 numbers, as in section 6. How many relays are needed so
# that at least half of the 84 numbers can pass?

# %% tags=["exercise"]
answer = None  # your turn: a number of relays

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert numbers_that_pass(answer, group=7)[0] >= 42, "too few pass"
assert numbers_that_pass(answer - 1, group=7)[0] < 42, "one relay less would do"
print(f"right: {answer} relays let {numbers_that_pass(answer, group=7)[0]} numbers pass")

# %% [markdown]
# ## Sources
#
# * C. McCormick, *Patterns and Messages*, part 2, 2025: messages are created by the context, not extracted from it (S1.8), and
#   some are meant for tokens still to come (S1.9).
# * N. Elhage et al., *A Mathematical Framework for Transformer Circuits*, 2021: the expansion into ways, virtual attention
#   heads.
# * S. Abnar and W. Zuidema, [Quantifying Attention Flow in Transformers](https://arxiv.org/abs/2005.00928), 2020: rollout and
#   flow.
# * U. Alon and E. Yahav, [On the Bottleneck of Graph Neural Networks](https://arxiv.org/abs/2006.05205), 2021: over-squashing.

# %% [markdown]
# ---
# before: [Induction heads](16_induction_heads.ipynb) | [the book](README.md) | next: [Change the graph of a trained model](18_change_the_graph.ipynb)
