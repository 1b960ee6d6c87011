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
# # Four perspectives on one run
#
# People who explain attention tell four different stories. It is a **search**: every token looks things up among the others. It
# is **routing**: information is read from one stream and written to another. It is a pair of **transforms**: two matrices,
# coupled by a softmax. It is a **message exchange**: nodes send to each other along the edges of a graph.
#
# Do they talk about the same thing? This notebook runs one sentence through a trained model **once**, keeps all tensors, and
# reads them four times. Nothing is computed twice: the words change, and the tensors stay.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** translate between search, routing, transforms and message exchange.
#
# before: [03. Build a transformer from message passing](03_build_a_transformer.ipynb) | [the book](README.md) | next: [05. Patterns and messages, in three forms](05_three_forms.ipynb)

# %%
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from matplotlib.colors import ListedColormap
from pictures import COLOURS, GREY, draw_streams, use_house_style

import gnn_attention as ga
from gnn_attention import draw

use_house_style()
torch.set_grad_enabled(False)  # nothing is trained here

model, vocabulary = ga.model.load_trained()
model = model.double()  # so that "equal" can mean equal to ten digits
TEXT = "Llamas do not output words"
tokens = torch.tensor([vocabulary.encode(TEXT)])
pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces(TEXT)]
n = len(pieces)
print(n, "tokens:", " | ".join(pieces))

# %% tags=["hide-input"] jupyter={"source_hidden": true}
BLUE, RED = "#0072B2", "#D55E00"
STORIES = {  # the cells of the table at which each story looks, and what it says of them
    "search": "{dst} looks along its row:\nwho has what I need?\n{src} fits best, and gets {share:.0%}.",
    "routing": "One edge: what is read from\nthe stream of {src} is\nwritten to the stream of {dst}.",
    "transforms": "The whole table: it mixes the\nrows of a matrix of updates,\n$Y = \\sigma(X W_P X^T) \\; X W_M$.",
    "message exchange": "A node: {src} receives from\nthe {row} senders of its row and\nsends to the {column} of its column.",
}


def draw_table(ax, table, names, title, limit):
    """A square table of numbers: blue above zero, orange below, grey where it holds nan."""
    ax.imshow(table, cmap=COLOURS, vmin=-limit, vmax=limit)
    ax.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.tick_params(length=0)
    ax.set(title=title, xlabel="src (sender)", ylabel="dst (receiver)")


def draw_four_readings(graph, weights, dense, names, src, dst):
    """The run once, as mask and as arcs, with one edge in orange; below, where each of the four stories looks."""
    figure = plt.figure(figsize=(12.4, 8.4))
    above, below = figure.subfigures(2, 1, height_ratios=[1.35, 1])
    left, right = above.subplots(1, 2, width_ratios=[1, 1.75])
    draw_table(left, dense.masked_fill(~graph.mask(), math.nan), names, "one head of the run, as a mask", 1.0)
    left.add_patch(plt.Rectangle((src - 0.5, dst - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=3))
    draw.arcs(graph, right, names, weights, lit=[(src, dst)], title="the same head, as a graph")
    rows, columns = torch.meshgrid(torch.arange(len(names)), torch.arange(len(names)), indexing="ij")
    looks = {
        "search": rows == dst,
        "routing": (rows == dst) & (columns == src),
        "transforms": rows >= 0,
        "message exchange": (rows == src) | (columns == src),
    }
    counts = {"row": int(graph.mask()[src].sum()), "column": int(graph.mask()[:, src].sum())}
    words = {"src": names[src], "dst": names[dst], "share": dense[dst, src], **counts}
    for ax, (story, caption) in zip(below.subplots(1, 4), STORIES.items(), strict=True):
        cells = (graph.mask().double() + (graph.mask() & looks[story])).masked_fill(~graph.mask(), math.nan)
        colours = ListedColormap(["#D8E6F0", RED]).with_extremes(bad="white")
        ax.pcolormesh(cells.flip(0), cmap=colours, vmin=1, vmax=2, edgecolor="white", linewidth=0.8)
        ax.set_title(story, fontweight="bold")
        ax.set(xticks=[], yticks=[], aspect="equal")
        ax.spines[:].set_visible(False)
        ax.set_xlabel(caption.format(**words), fontsize=10.5)
    plt.show()


# %% [markdown]
# ## 1. One run, read four times
#
# The model cuts the words into pieces: these are its tokens, and the nodes of our graph. `ga.trace.record` calls the model and
# keeps what every edge of every attention layer carried. To have something to point at, we fix one receiver, *out*, and one
# head: the head of the last layer in which *out* attends most to some other token.

# %%
run = ga.trace.record(model, tokens)
call = run.layers[1]
shares = call.dense(call.weights())[0]  # [head, dst, src], 0 where there is no edge
receiver, sender = pieces.index("␣out"), pieces.index("␣not")
other_tokens = torch.arange(n) != receiver
head = int(shares[:, receiver, other_tokens].amax(-1).argmax())
assert int(shares[head, receiver].argmax()) == sender
print(run)
print(f"layer 1, head {head}: {pieces[receiver]!r} attends most to {pieces[sender]!r}")

# %% tags=["hide-input"] jupyter={"source_hidden": true}
draw_four_readings(call.graph, call.weights()[0, :, head], shares[head], pieces, sender, receiver)

# %% [markdown]
# Above is the run, drawn once: a row of the mask for each receiver and a column for each sender, and beside it the same edges
# as arcs. The orange edge is the same in both. Below is where each of the four stories looks:
#
# * the **search** stands at a receiver and looks along a row;
# * **routing** follows one edge, from stream to stream;
# * the **transforms** take the table as a whole;
# * the **message exchange** stands at a node, which has a row *and* a column.
#
# Each story has names of its own for the parts. The names in one line of this table belong to **one tensor**: not to equal
# tensors, but to the same place in the computer's memory. A story that has no use for a part has no name for it.

# %%
lines = [f"<th>{title}</th>" for title in ["here", *ga.trace.VIEWS]]
for term in ga.trace.GLOSSARY:
    words = {view: getattr(term, view.replace(" ", "_")) for view in ga.trace.VIEWS}
    parts = [call.terms(view)[word] for view, word in words.items() if word]
    # a product of two matrices is kept as its factors
    addresses = {getattr(part, "left", part).data_ptr() for part in parts}
    if parts:
        assert len(addresses) == 1
        names = [f"<code>{term.name}</code>", *(word or "" for word in words.values())]
        lines += ["</tr><tr>", *(f"<td>{name}</td>" for name in names)]
display({"text/html": f"<table><tr>{''.join(lines)}</tr></table>"}, raw=True)

# %% [markdown]
# `q`, `k`, `v` and `z` have 32 numbers for each token and head, the overlaps and weights have one for each edge and head, and the
# update has 128 for each token, as a state has. The last three belong to the transforms alone (section 4). Now the stories, one
# after the other.

# %% [markdown]
# ## 2. A soft search
#
# *Some token before me may know what I need.* The receiver has a **query**; every token has a **key**, which says what it has to
# offer. Query times key is a **relevance score**. The best match could take everything: a *ranking* with a single winner. But
# the winner jumps when the scores change a little, and a jump has no gradient, so nothing can be learned from it. Therefore the
# ranking is made **soft**: every token gets a share. And the tokens to which the receiver must not attend are **masked**.
#
# Does the mask matter? Only for a receiver that would otherwise attend to the future. So we look for the receiver that would do
# so most. (A relevance score is the bare product $k_j \cdot q_i$. The softmax is given the *logit*: the score, scaled, plus a
# number that this model has learned for the distance.)

# %% tags=["S4.8"]
every = call.pair_logits()[0]  # [head, dst, src], seen or not
ahead = every.softmax(-1).masked_fill(call.graph.mask(), 0.0).sum(-1)
searching, searcher = divmod(int(ahead.argmax()), n)  # a head, a receiver
relevance, logits = call.overlap()[0, searching, searcher], every[searching, searcher]
allowed_senders = call.graph.mask()[searcher]

hard = torch.zeros(n, dtype=torch.float64)
hard[logits.argmax()] = 1.0
soft = logits.softmax(0)
masked = logits.masked_fill(~allowed_senders, -math.inf).softmax(0)

for stage in (hard, soft, masked):
    assert math.isclose(stage.sum(), 1.0)
assert not masked[~allowed_senders].any()
assert torch.allclose(masked, shares[searching, searcher])  # this is what the model used
winners = [pieces[int(stage.argmax())] for stage in (soft, masked)]
assert winners[0] != winners[1]
changed = (every.argmax(-1) != every.masked_fill(~call.graph.mask(), -math.inf).argmax(-1)).sum()
print(f"head {searching}, {pieces[searcher]!r}: the mask makes {winners[1]!r} the winner, not {winners[0]!r}")
print(f"so it does for {changed} of {n * len(every)} receivers in this layer")

# %% tags=["S4.8"]
figure, axes = plt.subplots(1, 4, figsize=(13, 3.1))
stages = {
    "relevance scores": relevance,
    "1. the best match": hard,
    "2. softly ranked": soft,
    "3. masked, softly ranked": masked,
}
for ax, (title, numbers) in zip(axes, stages.items(), strict=True):
    ax.bar(range(n), numbers, color=[BLUE if yes else GREY for yes in allowed_senders])
    ax.set_xticks(range(n), pieces, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    ax.set_title(title)
    ax.set_ylabel("score" if numbers is relevance else "share")
figure.suptitle(
    f"the search of {pieces[searcher]!r} (blue: tokens it may attend to, grey: tokens after it)", fontsize=11
)
plt.show()

# %% [markdown]
# The shares then mix the **values** of the tokens, which gives the search result. An output matrix **interprets** it: it leads
# back into the space of the states.

# %%
search_terms = call.terms("search")
mixture = sum(share * value for share, value in zip(masked, search_terms["value"][0, searching], strict=True))
assert torch.allclose(mixture, search_terms["mixture result"][0, searching, searcher])
print("a value is", len(mixture), "numbers wide, a state", run.states[0].shape[-1])

# %% [markdown]
# ## 3. Streams, and what is routed between them
#
# Look at the whole model now. Every token has a **state**. No block replaces it: each block only *adds* an update. With
# $B$ blocks (attention and MLP each count as one) a token has $B + 1$ states, one after the other. They are its **residual
# stream**.
#
# $$x^{(0)} \to x^{(1)} \to \dots \to x^{(B)}, \qquad x^{(b+1)} = x^{(b)} + y^{(b)}$$

# %%
updates = [phase.update for phase in run.phases]
assert len(run.states) == len(updates) + 1 == 2 * model.config.num_layers + 1
for before, update, after in zip(run.states, updates, run.states[1:], strict=False):
    assert torch.allclose(before + update, after)
assert torch.allclose(sum(updates), run.states[-1] - run.states[0])
print(
    f"{len(updates)} blocks, {len(run.states)} states of every token; all updates sum to the last state minus the first"
)

# %% [markdown]
# Most pictures of transformers show a tower of blocks. Turn the picture inside out: put the **streams in the middle**, one for
# each token, from its embedding (the state it starts with) at the bottom to the prediction at the top. The blocks are detours.
# A blue line **reads** from one stream, at the sender, and **writes** to another, at the receiver: attention. An orange line
# leaves a stream and comes back to the same one: the MLP. The width of a line is the length of the vector that is written.


# %% tags=["S4.11"]
def predicted(state):
    """The token that the model would predict if this state were the last."""
    return [
        piece.replace(" ", "␣")
        for piece in vocabulary.pieces(model.unembedding(model.norm(state)).argmax(-1).tolist())
    ]


figure, ax = plt.subplots(figsize=(12, 6))
draw_streams(ax, run, pieces, predicted(run.states[-1][0]))
ax.set_title("bottom: the tokens; top: the token that each predicts to come next")
plt.show()
assert torch.equal(
    model.unembedding(model.norm(run.states[-1])), run.output
)  # the top of the picture is the model's answer

# %% [markdown]
# Every line of attention leads to the right or straight up: nothing reaches a token from the tokens after it. And between two
# streams there is no orange line at all. **Only attention moves information from token to token.**
#
# All states live in one space. So any of them can be read like the last one, with the *unembedding* (a matrix that gives
# every token of the vocabulary a logit), to see what the model would predict if it stopped there. This is called the *logit
# lens*. Here is the stream of the last token:

# %%
for number, state in enumerate(run.states):
    chances = model.unembedding(model.norm(state))[0, -1].softmax(-1)
    top = chances.topk(3)
    words = [repr(piece) for piece in vocabulary.pieces(top.indices.tolist())]
    print(
        f"state {number}: ",
        ", ".join(f"{word} {chance:.2f}" for word, chance in zip(words, top.values.tolist(), strict=True)),
    )

# %% [markdown]
# What does a state *hold*? To test for one thing in particular, train a **probe**: a linear map that reads it off the states. Here
# the probe reads which token came before. (The tokens are random, so that the answer cannot be guessed. One half of the texts
# trains the probe, the other half tests it.)

# %% tags=["S4.12"]
random_tokens = torch.randint(len(vocabulary), (48, 96), generator=torch.Generator().manual_seed(1))
before = model.embedding(random_tokens)[:, :-1].flatten(0, 1)


def explained_share(state):
    """The share of the variance of the token before that a linear probe reads off a state."""
    x, y = (part - part.mean(0) for part in (state[:, 1:].flatten(0, 1), before))
    half = len(x) // 2
    probe = torch.linalg.lstsq(x[:half], y[:half]).solution
    return 1 - ((x[half:] @ probe - y[half:]).square().sum() / y[half:].square().sum()).item()


shares_explained = [explained_share(state) for state in model.states(random_tokens)]
names = ["embedding", *(f"after {phase.name} {phase.layer}" for phase in run.phases)]
figure, ax = plt.subplots(figsize=(7.5, 2.5))
ax.barh(range(len(shares_explained)), shares_explained, color=BLUE)
ax.set_yticks(range(len(shares_explained)), names)
ax.invert_yaxis()
ax.axvline(0, color="black", linewidth=0.8)
ax.set(title="a probe for the token before", xlabel="explained share of the variance (1 would be all of it)")
plt.show()
assert shares_explained[0] < 0.02 < 0.05 < shares_explained[1]  # an embedding knows nothing of its neighbour

# %% [markdown]
# The embedding of a token holds nothing of its neighbour (the probe has memorised its training texts, and on new ones predicts
# worse than the mean). The state after the first round of communication does.
#
# ## 4. Two coupled transforms
#
# The third story is for mathematicians. Write the layer down once with all its matrices, receivers in rows:
#
# $$Y = \sum_h \sigma\big(X \, \underbrace{W_Q W_K^\top}_{W_P} X^\top\big) \; X \, \underbrace{W_V W_O}_{W_M}$$
#
# Only products occur. $W_P$ (the **attention transform**) turns two states into a score, $W_M$ (the **information transform**)
# turns one state into an update for another token. $\sigma$, the softmax with scale and mask, couples the two.
#
# (Our source writes states as columns and so has $W_A = W_P^\top$, $W_I = W_M^\top$, and receivers in the columns of every
# matrix. [Notebook 06](06_matrix_multiplication_is_message_passing.ipynb) translates.)

# %%
block, heads = model.blocks[1], call.heads
x = block.attention_norm(run.phases[2].before)[0]  # the input of the layer: the states, scaled to one length
W_P, W_M = heads.pattern_matrix().full(), heads.message_matrix().full()

distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp(-model.config.reach, model.config.reach)
position = block.attention.score_mod.table[:, distance + model.config.reach]  # a number for each distance

A = x @ W_P @ x.T * heads.scale + position
U = x @ W_M
sigma = A.masked_fill(~call.graph.mask(), -math.inf).softmax(-1)
Y = (sigma @ U).sum(0)

# %%
assert torch.allclose(A, call.pair_logits()[0])
assert torch.allclose(call["attention transform"].full(), W_P)
assert torch.allclose(call["information transform"].full(), W_M)
assert torch.allclose(call["update matrix"][0], U)
assert torch.allclose(sigma, shares)
assert torch.allclose(Y, call.terms("transforms")["mixture of updates"][0])

figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.2))
draw_table(axes[0], A[head], pieces, f"score matrix of head {head}: all pairs", A[head].abs().max())
draw_table(
    axes[1],
    sigma[head].masked_fill(~call.graph.mask(), math.nan),
    pieces,
    "after mask and softmax: edges",
    1.0,
)
plt.show()

# %% [markdown]
# A score $x_i W_P x_j^\top$ is linear in each of the two states, and so a quadratic form of the states of all tokens; its rank is at most
# the width of a channel. It need not be the same in both directions. Split $W_P$ in two: the **symmetric** half says how well
# two tokens match, in either direction; the **antisymmetric** half says *who* attends to *whom*. In a random matrix, the
# antisymmetric half has half of the sum of squares. In our trained heads it has that or somewhat less: direction is a large
# part of what they look for.

# %%
for layer, trained in enumerate(model.layers):
    full = trained.heads.pattern_matrix().full()
    matching, direction = (full + full.mT) / 2, (full - full.mT) / 2
    share = direction.square().sum((1, 2)) / full.square().sum((1, 2))
    assert torch.allclose(
        matching.square().sum((1, 2)) + direction.square().sum((1, 2)), full.square().sum((1, 2))
    )
    print(f"layer {layer}: antisymmetric share of each head:", ", ".join(f"{value:.2f}" for value in share))

# %% [markdown]
# ## 5. A message exchange
#
# The fourth story is the one this library is built on. There is a **network**: one node for each token, and an edge $j \to i$
# wherever the mask lets $i$ attend to $j$. A node's state is its residual stream. Attention is the **protocol** by which the nodes
# communicate. Its seven steps, which [notebook 01](01_attention_is_message_passing.ipynb) computes by hand, are the last column of
# the table in section 1. ([The page](../docs/explore.html) that `gnn-attention explore "Llamas do not output words"` writes draws
# all seven steps of any edge, with their numbers.) Here they are for *out* and its seven senders:

# %%
steps = call.terms("message exchange")
assert list(steps) == [
    "receiving channel",
    "sending channel",
    "channel overlap",
    "listening distribution",
    "outgoing message",
    "mixed incoming message",
    "state update",
]
edges = [(src, dst) for src, dst in call.edge_index.T.tolist() if dst == receiver]
channel, sending = steps["receiving channel"][0, head, receiver], steps["sending channel"][0, head]
overlap = call.overlap(edges)[0, :, head]
logit = call.logits(edges, heads=head)[0, :, 0]
listening = call.weights(edges, heads=head)[0, :, 0]
outgoing = steps["outgoing message"][0, head]

for (src, _), fit, number, share in zip(edges, overlap, logit, listening, strict=True):
    near = position[head, receiver, src]
    assert math.isclose(fit, channel @ sending[src], abs_tol=1e-9)  # step 3, as in notebook 01
    assert math.isclose(number, fit * heads.scale + near, abs_tol=1e-9)  # what step 4 is given
    print(f"{pieces[src]!r:>8}: overlap {fit:6.2f}, distance {near:+5.2f}, share {share:.2f}")
incoming = sum(share * outgoing[src] for (src, _), share in zip(edges, listening, strict=True))
assert math.isclose(listening.sum(), 1.0)
assert torch.allclose(incoming, steps["mixed incoming message"][0, head, receiver])
update = sum(steps["mixed incoming message"][0, h, receiver] @ heads.W_O[h] for h in range(heads.num_heads))
assert torch.allclose(update, steps["state update"][0, receiver])

# %% [markdown]
# The **channel overlap** of step 3 is defined for any two nodes, edge or not. Only the listening distribution of step 4 looks at
# the edges, and it is given more than the overlap: the overlap is scaled, and the model adds its number for the distance. (A
# sender may get a large share because it is near, although it does not fit at all.)
#
# Sending and receiving are the two ends of one edge, so the same weights can be read from either end. *To whom does this node
# attend?* Its in-edges say it, and their shares add up to 1. *Who attends to this node?* Its out-edges say it, and their shares
# may have any sum.

# %%
assert call.graph.num_edges == n * (n + 1) // 2
received, sent_shares = shares[head, receiver], shares[head, :, sender]
print(f"{call.graph.num_edges} edges; overlaps: {call.overlap()[0, head].numel()} pairs")
print(f"the shares of the in-edges of {pieces[receiver]!r} sum to {received.sum():.2f}")
print(f"the shares of the out-edges of {pieces[sender]!r} sum to {sent_shares.sum():.2f}")

src, dst = call.edge_index
ends = {
    f"orange: the in-edges of {pieces[receiver]!r}, which attends to their senders": dst == receiver,
    f"orange: the out-edges of {pieces[sender]!r}, to which their receivers attend": src == sender,
}
figure, axes = plt.subplots(2, 1, figsize=(11, 6))
for ax, (title, chosen) in zip(axes, ends.items(), strict=True):
    lit = call.edge_index.T[chosen].tolist()
    draw.arcs(call.graph, ax, pieces, call.weights()[0, :, head], lit=lit, title=title)
plt.show()

# %% [markdown]
# A whole model is then an alternation: in a **communication phase** the nodes exchange messages along the edges, in a
# **computation phase** each node changes its own state, alone.

# %%
for phase in run.phases:
    share = phase.update.norm(dim=-1) / phase.before.norm(dim=-1)
    print(
        f"layer {phase.layer}, {phase.name:>13}: the update is {share.mean():.2f} times as long as the state"
    )
assert [phase.name for phase in run.phases] == ["communication", "computation"] * model.config.num_layers

# %% [markdown]
# ## 6. Which story, when?
#
# | perspective | stands | asks | use it to think about |
# |---|---|---|---|
# | search | at the receiver, looking out | where is what I need? | what a query matches; keys, values, retrieval |
# | routing | above, outside of all tokens | what moves from where to where? | circuits, what a state holds at some depth |
# | transforms | outside of the computation | which function is it? | rank, eigenvalues, what two heads do in a row |
# | message exchange | at any node, sender or receiver | who talks to whom? | masks, sparsity, leaks, cost, other graphs |
#
# **The answer.** The four stories speak of the same tensors: every name in a line of the table in section 1 is the same memory. They
# differ in who *acts*. In a search the receiver acts: it seeks. In routing it is the mechanism, which moves
# information between streams. In a message exchange it is both ends: nodes send as well as receive. And each story can express a
# limit of attention: a token has **one** key for all queries (search); the **same** information is read from a stream for all
# receivers (routing); all that leaves a sender through a head points in **one** direction (messages; [notebook
# 14](14_one_limiting_case.ipynb) counts). Only the transforms have no tokens in them. That is right for *what* is computed and
# wrong for *how it is learned*: a product of two thin matrices learns differently from one square matrix, though it is the
# same function ([notebook 09](09_why_thin_factors.ipynb), section 4).
#
# **Are there others?** The text ends with the question "Dear reader, do you know of any?" Here is one. Hold the weights fixed, and what is
# left is *diffusion on a graph*: a linear map of the states, computed by a sparse product. Everything in attention that is not linear
# is in the choice of the weights.

# %% tags=["S4.24"]
src, dst = call.edge_index
spread = torch.zeros(
    n, n * heads.num_heads, dtype=torch.float64
)  # row: a receiver; columns: its senders, by head
for h in range(heads.num_heads):
    spread[dst, h * n + src] = call.weights()[0, :, h]
messages = U.flatten(0, 1)  # one of each sender, through each head
assert torch.allclose(torch.sparse.mm(spread.to_sparse(), messages), call.update[0])

other = torch.randn(n, heads.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def diffuse(states):
    """The update with the weights held fixed."""
    return spread @ (states @ W_M).flatten(0, 1)


assert torch.allclose(diffuse(2 * x - 3 * other), 2 * diffuse(x) - 3 * diffuse(other))
print(
    f"{spread.count_nonzero()} numbers of {spread.numel()} are not zero: {len(src)} edges, {heads.num_heads} heads"
)

# %% [markdown]
# ## 7. Other dictionaries
#
# The table of section 1 is the dictionary of the four stories: every name in it opens the same tensor. TransformerLens, a library for
# looking into models, has names as well:

# %% tags=["S0.10"]
assert call["query"].data_ptr() == call["receiving channel"].data_ptr() == call["q"].data_ptr()
hooks = {term.name: term.hook for term in ga.trace.GLOSSARY if term.hook}
for name, hook in hooks.items():
    print(f"{name:>7}  {hook}")

# %% [markdown]
# The texts from which this library was written have words of their own. *P&M* is Patterns and Messages, *proj.* the note on
# projections, *A as M* is Attention as matrix multiplication, and *All* is All you need to know:
#
# | here | in the texts |
# |---|---|
# | state | word vector, input vector (P&M); activation (proj.); residual stream (All) |
# | logits | $P_i X^\top$ (P&M); **score** (proj.); similarity $S$ (A as M); relevance score, without the scale (All) |
# | weights | **scores**, $\alpha$ (P&M); attention (proj.); $w_j$, $A$ (A as M); soft result ranking, $\tilde A$ (All) |
# | $z$ | weighted value (proj.); $O$ (A as M); mixture result, mixed incoming message (All) |
# | update of one head | $o_i$ (P&M); attention out (proj.) |
# | pattern matrix $W_P$ | $W^P$, $W^{QK}$ (P&M); attention transform $W_A = W_P^\top$ (All) |
# | pattern $x W_P$ | **pattern** $P$ (P&M) |
# | message matrix $W_M$ | $W^M$, $W^{VO}$ (P&M); information transform $W_I = W_M^\top$ (All) |
# | message $x W_M$ | **message** $M$ (P&M); update $u_i$ (All, where a *message* is our value) |
#
# Beware of three words. A **score** goes into the softmax in one text and comes out of it in another: this library says *logits* and
# *weights*. A **pattern** is, in much of the literature (`hook_pattern` above), the table of weights after the softmax; here it is
# the vector $x W_P$, which describes what a receiver looks for. And a **message** is one of four vectors of an edge $j \to i$: with
# the weight or without it, in the channel of the head or in the space of the states.
#
# | | in the channel, 32 numbers | in the space of the states, 128 numbers |
# |---|---|---|
# | without the weight | $v_j = x_j W_V$, the outgoing message of the seven steps | $x_j W_M$, the message of P&M and of this library |
# | with the weight | $w_{ij} v_j$, which PyG's `message()` returns | $w_{ij} x_j W_M$, what the edge adds to the receiver: `carried` |

# %% tags=["S1.27"]
edge = (sender, receiver)
layer = ga.MessagePassingAttention(heads, block.attention.score_mod, backend="message_passing")
returned = []
layer.register_message_forward_hook(lambda module, inputs, output: returned.append(output))
layer(x, call.graph)  # torch_geometric calls message(): a row for each edge, for each head
row = call.edge_index.T.tolist().index(list(edge))

share = shares[head, receiver, sender]
value, message, W_O = outgoing[sender], U[head, sender], heads.W_O[head]
weighted, carried = returned[0][row, head], call.carried([edge], head)[0, 0, 0]
assert torch.allclose(weighted, share * value)  # down: the weight
assert torch.allclose(carried, share * message)
assert torch.allclose(message, value @ W_O)  # to the right: W_O
assert torch.allclose(carried, weighted @ W_O)
assert (len(value), len(weighted), len(message), len(carried)) == (32, 32, 128, 128)
print(f"down: times {share:.2f}; to the right: times W_O, {list(W_O.shape)}")

# %% [markdown]
# The upper two are the sender's alone, the same for all receivers. The lower two have the weight in them, so they belong to
# one edge.
#
# ## 8. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/04_four_perspectives.py).
#
# **1. The longest update** (easy, 3 minutes). Which of the four phases adds the longest update to the last token? Give the layer and the name of
# the phase, such as `(0, "computation")`.
#
# <details><summary>Hint</summary>
#
# `run.phases` is a list of four. Each has a `layer`, a `name` and an `update` of shape `[1, tokens, 128]`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: (layer, name)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
longest = max(run.phases, key=lambda phase: phase.update[0, -1].norm())

for phase in run.phases:
    print(f"layer {phase.layer}, {phase.name:>13}: {phase.update[0, -1].norm():5.2f} long")
assert tuple(answer) == (longest.layer, longest.name), "another one is longer"
print("right:", answer)

# %% [markdown]
# **2. Translate** (easy, 2 minutes). A paper on routing speaks of the *information routed*. What is it in the words of the message exchange?
#
# <details><summary>Hint</summary>
#
# Find it in the table of section 1, and stay in its line.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a string

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer in steps, f"a message exchange has no such word; it has {', '.join(steps)}"
assert steps[answer].data_ptr() == call.terms("routing")["information routed"].data_ptr(), (
    "that is another tensor"
)
print("right:", answer)

# %% [markdown]
# **3. Attending to the future** (medium, 5 minutes). Take layer 1 and the head from above. Which pair `(src, dst)` that is *not* an edge has the
# largest channel overlap? (`call.overlap()[0, head]` is the table `[dst, src]`.)
#
# <details><summary>Hint</summary>
#
# Set the cells of the table where `call.graph.mask()` is True to $-\infty$; `argmax` of the rest is `dst * n + src`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a pair (src, dst)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
absent = call.overlap()[0, head].masked_fill(call.graph.mask(), -math.inf)

assert not call.graph.mask()[answer[1], answer[0]], "that is an edge"
assert absent[answer[1], answer[0]] == absent.max(), "another pair has a larger overlap"
print(
    f"right: {pieces[answer[1]]!r} would attend to {pieces[answer[0]]!r}, with an overlap of {absent.max():.2f}"
)

# %% [markdown]
# **4. Routing, written** (medium, 10 minutes, code). Write a function `route(src, dst)` that returns what layer 1 moves from the stream of `src` to the stream
# of `dst`, summed over its heads: 128 numbers. You have the states `x`, the matrices `heads.W_V[h]` and `heads.W_O[h]`, and the
# weights `shares[h, dst, src]`. The sum over all senders must be the update of the layer.
#
# <details><summary>Hint</summary>
#
# Read with `W_V`, multiply by the weight, write with `W_O`, and sum over `range(heads.num_heads)`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of src and dst

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

for dst in range(n):
    total = sum(answer(src, dst) for src in range(n))
    assert torch.allclose(total, call.update[0, dst]), (
        f"the sum over all senders is not the update of token {dst}"
    )
assert torch.allclose(answer(sender, receiver), call.carried([(sender, receiver)])[0, 0].sum(0)), (
    "not this edge"
)
print(
    f"right: from {pieces[sender]!r} to {pieces[receiver]!r} moves a vector of length {answer(sender, receiver).norm():.2f}"
)

# %% [markdown]
# ## Sources
#
# * *Attention: All you need to know*, far.in.net, 2025: the four perspectives and most of their words.
# * D. Bahdanau et al., [Neural Machine Translation by Jointly Learning to Align and
#   Translate](https://arxiv.org/abs/1409.0473), 2014, and A. Vaswani et al., [Attention Is All You
#   Need](https://arxiv.org/abs/1706.03762), 2017: the search.
# * N. Elhage et al., [A Mathematical Framework for Transformer
#   Circuits](https://transformer-circuits.pub/2021/framework/index.html), 2021: residual streams, and the two transforms.
# * A. Karpathy, Stanford CS25 lecture, 2023: the message exchange, communication and computation.
# * C. McCormick, *Patterns and Messages*, parts 1 and 2, 2025.
# * nostalgebraist, *interpreting GPT: the logit lens*, 2020.

# %% [markdown]
# ---
# before: [03. Build a transformer from message passing](03_build_a_transformer.ipynb) | [the book](README.md) | next: [05. Patterns and messages, in three forms](05_three_forms.ipynb)
