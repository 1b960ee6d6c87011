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
# They are stories about the same numbers. This notebook runs one sentence through a trained model once, keeps everything that
# was computed, and reads it four times. Nothing is computed twice, as we shall check: the words change, the tensors stay.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** translate between search, routing, transforms and message exchange.
#
# before: [Many heads, many graphs](02_many_heads_many_graphs.ipynb) | [the book](README.md) | next: [Patterns and messages, in three forms](05_three_forms.ipynb)

# %%
import math
import warnings

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap
from pictures import draw_streams

import gnn_attention as ga
from gnn_attention import draw

torch.set_grad_enabled(False)  # nothing is trained here
warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for

model, vocabulary = ga.model.load_trained()
model = model.double()  # so that "equal" can mean equal to ten digits
TEXT = "Llamas do not output words"
tokens = torch.tensor([vocabulary.encode(TEXT)])
pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces(TEXT)]
n = len(pieces)
print(n, "tokens:", " | ".join(pieces))

# %% tags=["hide-input"] jupyter={"source_hidden": true}
BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"  # told apart by colour-blind eyes too
COLOURS = LinearSegmentedColormap.from_list("orange-white-blue", [ORANGE, "white", BLUE])
COLOURS.set_bad("#E4E4E4")  # where there is no edge
plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.constrained_layout.use": True})


def draw_table(ax, table, names, title, limit):
    """A square table of numbers: blue above zero, orange below, grey where it holds nan."""
    ax.imshow(table, cmap=COLOURS, vmin=-limit, vmax=limit)
    ax.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.tick_params(length=0)
    ax.set(title=title, xlabel="src (sender)", ylabel="dst (receiver)")


# %% [markdown]
# ## 1. One run
#
# The model cuts the words into pieces: these are its tokens, and the nodes of our graph. `ga.trace.record` calls the model and
# keeps what every edge of every attention layer carried.

# %%
run = ga.trace.record(model, tokens)
print(run)
for call in run.layers:
    print(call)

# %% [markdown]
# A layer's record can be *told* in the words of each of the four views. Where a view has no word for a part, that part does not
# appear in its story. (The shapes: one text, 66 edges, 4 heads, 11 tokens, channels of 32 numbers, states of 128.)

# %%
call = run.layers[1]
for view in ga.trace.VIEWS:
    print(view)
    for name, tensor in call.terms(view).items():
        print(f"    {name:<26} {list(tensor.shape)}")

# %% [markdown]
# The four stories hold the **same tensors**, not equal ones: for every part of attention, all views point to one place in the
# computer's memory.

# %%
for term in ga.trace.GLOSSARY:
    words = {view: getattr(term, view.replace(" ", "_")) for view in ga.trace.VIEWS}
    parts = [call.terms(view)[word] for view, word in words.items() if word]
    # a product of two matrices is kept as its factors
    addresses = {getattr(part, "left", part).data_ptr() for part in parts}
    if parts:
        assert len(addresses) == 1
        print(f"{len(parts)} names, 1 tensor:", ", ".join(filter(None, words.values())))

# %% [markdown]
# Now the stories, one after the other. To have something to point at we fix one receiver, *out*, and one head: the head of this
# layer in which it listens most to some other token.

# %%
receiver = pieces.index("␣out")
shares = call.dense(call.weights())[0]  # [head, dst, src], 0 where there is no edge
other_tokens = torch.arange(n) != receiver
head = int(shares[:, receiver, other_tokens].amax(-1).argmax())
heard_most = pieces[int(shares[head, receiver].argmax())]
print(f"layer 1, head {head}: {pieces[receiver]!r} listens most to {heard_most!r}")
assert heard_most == "␣not"

# %% [markdown]
# ## 2. A soft search
#
# *Some token before me may know what I need.* The receiver puts a **query**; every token has put up a **key**, which says what
# it has to offer. Query times key is a **relevance score**. The best match could win alone: a *ranking* with a single winner.
# But a winner changes by a jump when the scores change a little, and nothing can be learned from a jump. So the ranking is made
# **soft**: every token gets a share. And what the receiver may not see is taken out: **masked**.
#
# Does the last step matter? Only for a receiver that would rather have looked at the future. So we look for the one that would have
# looked there most. (A relevance score is the bare product $k_j \cdot q_i$. What the softmax is given is that, scaled, plus this
# model's number for the distance: the *logit*.)

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
figure, axes = plt.subplots(1, 4, figsize=(13, 2.9))
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
figure.suptitle(
    f"{pieces[searcher]!r} searches (blue: the tokens it may see, grey: those after it)", fontsize=11
)
plt.show()

# %% [markdown]
# The **values** of the tokens are then mixed by these shares: that is the search result. An output matrix **interprets** it,
# back in the space of the states.

# %%
search_terms = call.terms("search")
mixture = sum(share * value for share, value in zip(masked, search_terms["value"][0, searching], strict=True))
assert torch.allclose(mixture, search_terms["mixture result"][0, searching, searcher])
print("a value is", len(mixture), "numbers wide, a state", run.states[0].shape[-1])

# %% [markdown]
# ## 3. Streams, and what is routed between them
#
# Look at the whole model now. Every token has a **state**, and nothing ever replaces it: each block only *adds* an update. With
# $B$ blocks (attention and MLP each count as one) a token runs through $B + 1$ states. This sequence is its **residual
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
# leaves a stream and comes back to the same one: the MLP. The widths are the sizes of what is written.


# %% tags=["S4.11"]
def said(state):
    """The token that the model would predict if this state were the last."""
    return [
        piece.replace(" ", "␣")
        for piece in vocabulary.pieces(model.unembedding(model.norm(state)).argmax(-1).tolist())
    ]


figure, ax = plt.subplots(figsize=(12, 6))
draw_streams(ax, run, pieces, said(run.states[-1][0]))
ax.set_title("streams at the centre: below the tokens, above what each predicts to come next")
plt.show()
assert torch.equal(
    model.unembedding(model.norm(run.states[-1])), run.output
)  # the top of the picture is the model's answer

# %% [markdown]
# Every line of attention leads to the right or straight up: a token is told nothing by those after it. And between two streams
# there is no orange line at all. **Only attention moves information from token to token.**
#
# If all states live in one space, any of them can be read out like the last one, by the *unembedding* (a matrix that gives
# every token of the vocabulary a logit), to see what the model would say if it stopped there. (This way of looking is called
# the *logit lens*.) Here is the last token's stream:

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
# What does a state *hold*? One can ask for something in particular, and train a **probe**: a linear map that is to read it off the
# states. Here: which token came before? (On random tokens, so that it cannot be guessed; one half of the texts teaches the probe,
# the other half is the exam.)

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
figure, ax = plt.subplots(figsize=(7.5, 2.2))
ax.barh(range(len(shares_explained)), shares_explained, color=BLUE)
ax.set_yticks(range(len(shares_explained)), names)
ax.invert_yaxis()
ax.axvline(0, color="black", linewidth=0.8)
ax.set(title="how much of the token before a probe finds in a state")
plt.show()
assert shares_explained[0] < 0.02 < 0.05 < shares_explained[1]  # an embedding knows nothing of its neighbour

# %% [markdown]
# In its embedding a token knows nothing of its neighbour (the probe has memorised its training texts, and on new ones predicts worse
# than the mean); after the first
# round of communication it does.
#
# ## 4. Two coupled transforms
#
# The third story is for mathematicians. Write the layer down once with all its matrices, receivers in rows:
#
# $$Y = \sum_h \sigma\big(X \, \underbrace{W_Q W_K^\top}_{W_P} X^\top\big) \; X \, \underbrace{W_V W_O}_{W_M}$$
#
# Only products occur. $W_P$ (the **attention transform**) turns two states into a score, $W_M$ (the **information transform**)
# turns one state into an update for somebody else. $\sigma$, the softmax with scale and mask, couples the two. That is all.
#
# (Our source writes states as columns and so has $W_A = W_P^\top$, $W_I = W_M^\top$, and receivers in the columns of every
# matrix. [Notebook 06](06_matrix_multiplication_is_message_passing.ipynb) translates.)

# %%
block, heads = model.blocks[1], call.heads
x = block.attention_norm(run.phases[2].before)[
    0
]  # what the layer was given: the states, brought to one length
W_P, W_M = heads.pattern_matrix().full(), heads.message_matrix().full()

distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp(-model.config.reach, model.config.reach)
position = block.attention.score_mod.table[
    :, distance + model.config.reach
]  # a learned number for each distance

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
# A score $x_i W_P x_j^\top$ need not be the same in both directions. Split $W_P$ in two: the **symmetric** half says how well
# two tokens match, whoever asks; the **antisymmetric** half says *who* listens to *whom*. For a matrix of random numbers the
# second holds half of the size (of the sum of squares). In our trained heads it holds that or somewhat less: direction is no
# small part of what they look for.

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
# wherever the mask lets $i$ hear $j$. A node's state is its residual stream. Attention is the **protocol** by which the nodes
# talk, in seven steps:
#
# All seven steps of any edge, drawn and with their numbers: [the page](../docs/explore.html) that `gnn-attention explore "Llamas do not output words"` writes.

# %%
steps = call.terms("message exchange")
print(f"receiver {pieces[receiver]!r}, head {head}\n")
for number, (name, tensor) in enumerate(steps.items(), 1):
    print(f"{number}. {name}: {list(tensor.shape)}")
assert list(steps) == [
    "receiving channel",
    "sending channel",
    "channel overlap",
    "listening distribution",
    "outgoing message",
    "mixed incoming message",
    "state update",
]

# %%
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
# The **channel overlap** of step 3 is defined for any two nodes, edge or not; only the listening distribution of step 4 looks
# at the edges, and it is given more: the overlap is scaled, and the model adds its number for the distance. (A sender may be heard for
# being near although it does not fit at all.) Of this sentence's pairs just over half are edges.
#
# Sending and receiving are the two ends of one edge, so the same weights can be read from either end: *whom does this node
# hear?* (its in-edges, whose shares add up to 1) and *who hears this node?* (its out-edges, which need not add up to anything).

# %%
assert call.graph.num_edges == n * (n + 1) // 2
print(f"{call.graph.num_edges} edges; overlaps: {call.overlap()[0, head].numel()} pairs")

sender = pieces.index("␣not")
hears, heard_by = shares[head, receiver], shares[head, :, sender]
print(f"{pieces[receiver]!r} hears with shares that sum to {hears.sum():.2f}")
print(f"{pieces[sender]!r} is heard with shares that sum to {heard_by.sum():.2f}")

src, dst = call.edge_index
lit = [(int(s), int(d)) for s, d in zip(src, dst, strict=True) if d == receiver]
figure, axes = plt.subplots(2, 1, figsize=(11, 6))
draw.arcs(
    call.graph,
    axes[0],
    pieces,
    call.weights()[0, :, head],
    lit=lit,
    title=f"orange: whom {pieces[receiver]!r} hears",
)
lit = [(int(s), int(d)) for s, d in zip(src, dst, strict=True) if s == sender]
draw.arcs(
    call.graph,
    axes[1],
    pieces,
    call.weights()[0, :, head],
    lit=lit,
    title=f"orange: who hears {pieces[sender]!r}",
)
plt.show()

# %% [markdown]
# A whole model is then an alternation: in a **communication phase** the nodes exchange messages along the edges, in a
# **computation phase** each node thinks for itself.

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
# The stories differ in who *drives*. In a search the receiver does: it seeks. In routing the mechanism itself coordinates what moves
# between streams. In a message exchange the units send as much as they listen. And each story can say that there is a limit to it:
# a token puts up **one** key for all queries (search), the **same** information is read from a stream whoever it is for (routing), all
# that leaves a sender through a head points in **one** direction (messages; [notebook 14](14_one_limiting_case.ipynb) counts). Only the
# transforms leave the units out, which is right for *what* is computed and wrong for *how it is learned*: a product of two thin
# matrices learns differently from one square matrix, though it is the same function
# ([notebook 09](09_why_thin_factors.ipynb), section 4).
#
# **Are there others?** "Dear reader, do you know of any?", the text ends. Here is one. Hold the weights fixed, and what is left is
# *diffusion on a graph*: a linear map of the states, which a sparse product computes, and which mixes but never creates. Everything that is
# not linear in attention is in the choice of the weights.

# %% tags=["S4.24"]
src, dst = call.edge_index
spread = torch.zeros(
    n, n * heads.num_heads, dtype=torch.float64
)  # a row for each receiver, its senders by head
for h in range(heads.num_heads):
    spread[dst, h * n + src] = call.weights()[0, :, h]
told_by_all = U.flatten(0, 1)  # what each sender tells through each head
assert torch.allclose(torch.sparse.mm(spread.to_sparse(), told_by_all), call.update[0])

other = torch.randn(n, heads.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def diffuse(states):
    """The update with the weights held fixed."""
    return spread @ (states @ W_M).flatten(0, 1)


assert torch.allclose(diffuse(2 * x - 3 * other), 2 * diffuse(x) - 3 * diffuse(other))
print(
    f"{spread.count_nonzero()} numbers of {spread.numel()} are not zero: {len(src)} edges, {heads.num_heads} heads"
)

# %% [markdown]
# ## 7. The glossary
#
# Here is the whole dictionary. The first column is what this library calls a part, the second what TransformerLens calls it, a
# library for looking into models. Every word opens the same tensor: `call["query"]`, `call["receiving channel"]`.

# %% tags=["S0.10"]
head_line = ["here", "TransformerLens", *ga.trace.VIEWS]
rows = [
    [term.name, term.hook or "-", *(getattr(term, view.replace(" ", "_")) or "-" for view in ga.trace.VIEWS)]
    for term in ga.trace.GLOSSARY
]
widths = [max(len(row[column]) for row in [head_line, *rows]) for column in range(len(head_line))]
for row in [head_line, *rows]:
    print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())

assert call["query"].data_ptr() == call["receiving channel"].data_ptr() == call["q"].data_ptr()

# %% [markdown]
# The texts that this library was written from have words of their own, and some words mean different things in different texts:
#
# | here | Patterns and Messages | the note on projections | Attention as matrix multiplication | All you need to know |
# |---|---|---|---|---|
# | state | word vector, input vector | activation | input vector $v_i$ | internal representation, residual stream |
# | logits | logits $P_i X^\top$ | **score** | similarity $S$ | relevance score, overlap (without the scale) |
# | weights | **scores**, $\alpha$ | attention | weights $w_j$, $A$ | soft result ranking, attention matrix $\tilde A$ |
# | $z$ | | weighted value | $O$ | mixture result, mixed incoming message |
# | update, of one head | $o_i$ | attention out | | |
# | pattern matrix $W_P$ | $W^P$, $W^{QK}$ | | | attention transform $W_A = W_P^\top$ |
# | pattern $x W_P$ | **pattern** $P$ | | | |
# | message matrix $W_M$ | $W^M$, $W^{VO}$ | | | information transform $W_I = W_M^\top$ |
# | message $x W_M$ | **message** $M$ | | | update $u_i$ (its *message* is our value) |
#
# Beware of two of them. A **score** is what goes into the softmax in one text and what comes out of it in another: this library
# says *logits* and *weights*. (An overlap is the product alone; scaled, it is a logit.) And a **pattern** is, in much of the literature (`hook_pattern` above), the table of weights
# after the softmax. Here it is always the vector $x W_P$, which describes what a receiver looks for.
#
# A third has four meanings, and notebooks 01 and 02 need all of them. A **message** is, of one edge $j \to i$, in the channel of the head
# or in the space of the states, without the weight or with it:

# %% tags=["S1.27"]
edge = [(pieces.index("␣not"), receiver)]
share = call.weights(edge, heads=head)[0, 0, 0]
layer = ga.MessagePassingAttention(heads, block.attention.score_mod, backend="message_passing")
sent = []
layer.register_message_forward_hook(lambda module, inputs, output: sent.append(output))
layer(x, call.graph)  # torch_geometric calls message(): a row for each edge, for each head
at = call.edge_index.T.tolist().index(list(edge[0]))
four = {
    "v_j = x_j W_V, a value: the outgoing message of the seven steps": outgoing[edge[0][0]],
    "w_ij v_j, a weighted value: what PyG's message() returns": sent[0][at, head],
    "x_j W_M, the re-projected value: Patterns and Messages, this library": U[head, edge[0][0]],
    "w_ij x_j W_M, what the edge adds to the receiver: `carried`": call.carried(edge, head)[0, 0, 0],
}
for meaning, vector in four.items():
    print(f"{len(vector):4} numbers, {vector.norm():5.2f} long: {meaning}")
value, weighted, message, carried = four.values()
assert torch.allclose(weighted, share * value)
assert torch.allclose(message, value @ heads.W_O[head])
assert torch.allclose(carried, share * message)
assert torch.allclose(carried, weighted @ heads.W_O[head])

# %% [markdown]
# The second and the fourth have the weight of the edge in them, and so belong to one edge. The first and the third are the sender's, the
# same for all its receivers. $W_O$ leads from the first to the third, and from the second to the fourth. Patterns and Messages takes the
# word from graph networks and gives it to the *re-projected* value on purpose: only that lives where the states live.
#
# ## 8. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/04_four_perspectives.py).
#
# **1. The longest update.** Which of the four phases adds the longest update to the last token? Give the layer and the name of
# the phase, such as `(0, "computation")`.

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
# **2. Translate.** A paper on routing speaks of the *information routed*. What is it in the words of the message exchange?

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
# **3. If it could hear the future.** Take layer 1 and the head from above. Which pair `(src, dst)` that is *no* edge has the
# largest channel overlap? (`call.overlap()[0, head]` is the table `[dst, src]`.)

# %% tags=["exercise"]
answer = None  # your turn: a pair (src, dst)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
absent = call.overlap()[0, head].masked_fill(call.graph.mask(), -math.inf)

assert not call.graph.mask()[answer[1], answer[0]], "that is an edge"
assert absent[answer[1], answer[0]] == absent.max(), "another pair has a larger overlap"
print(
    f"right: {pieces[answer[1]]!r} would listen to {pieces[answer[0]]!r}, with an overlap of {absent.max():.2f}"
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
# before: [Many heads, many graphs](02_many_heads_many_graphs.ipynb) | [the book](README.md) | next: [Patterns and messages, in three forms](05_three_forms.ipynb)
