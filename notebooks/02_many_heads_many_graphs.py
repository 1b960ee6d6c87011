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
# # Many heads, many graphs
#
# [Notebook 01](01_attention_is_message_passing.ipynb) followed one head over one graph: five words, and a verb that looks
# for its subject and for a negation. If several heads run side by side, do they interfere with each other? Can a head be read
# like a sentence? And what happens to a layer if an edge is [cut](../docs/glossary.md#cut), or if the layer gets another graph altogether?
#
# The same five words answer all three questions. At the end a trained model answers the last one too.
#
# **Afterwards you can** read a head's matrices, and say what changes when its graph does.
#
# before: [01. Attention is message passing](01_attention_is_message_passing.ipynb) | [the book](README.md) | next: [03. Build a transformer from message passing](03_build_a_transformer.ipynb)

# %%
import math

import matplotlib.pyplot as plt
import networkx as nx
import torch
from pictures import BLUE, GREY, ORANGE, draw_table, use_house_style

import gnn_attention as ga
from gnn_attention import draw

use_house_style()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that "equal" can mean equal to twelve digits
torch.set_grad_enabled(False)  # nothing is trained here
torch.set_printoptions(precision=2, sci_mode=False)

# %% [markdown]
# Words, states, graph and head of notebook 01, once more:

# %%
WORDS = ["Llamas", "do", "not", "output", "words"]
LLAMAS, DO, NOT, OUTPUT, LAST = range(5)
FEATURES = ["noun", "verb", "negation", "plural"]
x = torch.tensor([[1, 0, 0, 1], [0, 0.5, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0.8, 0, 0, 1]])
W_Q = torch.tensor(
    [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
)  # a verb looks for a noun (2) and a negation (3)
W_K = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # a noun and a negation can be found
W_V = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])  # "I am plural", "I am a negation"
W_O = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]])  # into the columns plural and negation

g = ga.patterns.causal(5)
mask = g.mask()

# %% [markdown]
# ## 1. Many heads
#
# $$\text{Concat}(z^0, z^1, \dots) W_O = \sum_h z^h W_O^h$$
#
# One head asks one question, and in it a sender has one message for all its receivers, however different they are. So models
# run several heads side by side over the same graph, counted from 0. Ours was head 0. Here is head 1, in which nouns and
# negations look for a verb.

# %%
W_Q2 = torch.tensor([[3.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]])  # a noun and a negation look for
W_K2 = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])  # a verb,
W_V2 = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])  # which says how much of a verb it is,
W_O2 = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])  # and this goes into the column verb

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
# block of rows for each head, and the product becomes a **sum**. Heads do not mix: each adds its own messages to
# the state, and without one head exactly its own part is missing.

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
# ## 2. Patterns and messages
#
# $$W_P = W_Q W_K^\top, \quad P = X W_P \qquad\qquad W_M = W_V W_O, \quad M = X W_M$$
#
# $$\text{logits} = \frac{P X^\top}{\sqrt d}, \qquad Y = \sum_h \text{softmax}(\text{logits}_h) M_h$$
#
# $W_Q$ and $W_K$ are only ever used as a product, and so are $W_V$ and $W_O$. Multiply them out, and queries, keys and
# values disappear. (Models that rotate queries and keys by position put a [rotation](../docs/glossary.md#rotation) between the two: see notebook 05.)
# What is left has names of its own:
#
# * the **[pattern](../docs/glossary.md#pattern)** of a receiver is a description of the state it looks for. It is as wide as a state, so the two can be
#   compared by a dot product;
# * the **message** of a sender is what it would add to the state of a receiver that attends to nobody else.
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
# "A *verb* looks for a *noun* (2) and for a *negation* (3). *Negation* adds *negation*, *plural* adds *plural*." That is the
# whole head. The pattern of *output*, dotted with the states, gives the overlaps that we found by hand:

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
# Attention without queries, keys and values is two lines. Note the [scale](../docs/glossary.md#scale): it stays $1/\sqrt d$ with the channel width
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
# ## 3. Change the graph, not the layer
#
# The layer never asked where the edges came from. Every "kind of attention" below is the same layer with the same
# parameters over another graph. Only the set of edges changes.
#
# * **[window](../docs/glossary.md#window)**: a token attends to the last two tokens, itself included.
# * **strict causal**: a token attends to those before it, but not to itself.
# * **tree**: a token attends to itself and to its ancestors. Two continuations of *Llamas do* are computed at once here: "*not*"
#   and "*output words*". Neither attends to the other.
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
# * window: *output* still attends to *not*, so it learns that it is negated. Its subject is outside the window, so it does not
#   learn that it is plural.
# * strict causal: *Llamas* attends to nobody. **A token without in-edges receives exactly 0.** (The formula with matrices, taken
#   literally, divides 0 by 0 there.)
# * tree: *output* no longer attends to *not*. On this branch the sentence reads "Llamas do output words", and nothing is negated.
# * grammar: *Llamas*, *do* and *not* attend to nobody. *words* attends to its verb alone, with the share 1, and takes over all of
#   it.

# %%
VERB, NEGATION, PLURAL = range(1, 4)  # columns of a state

assert results["window(5, 2)"][OUTPUT, NEGATION] > 0.5
assert results["window(5, 2)"][OUTPUT, PLURAL] == 0
assert torch.equal(results["strict_causal(5)"][LLAMAS], torch.zeros(4))
assert results["tree"][OUTPUT, NEGATION] == 0
assert results["tree"][OUTPUT, PLURAL] > 0
assert math.isclose(results["grammar"][LAST, VERB], x[OUTPUT, VERB])
for name, graph in graphs.items():  # and each of them equals matrix attention with that graph's mask
    by_mask = pattern_message_attention(x, merged.W_P, merged.W_M, graph.mask(), d=2)
    has_senders = graph.in_degree() > 0
    assert torch.allclose(results[name][has_senders], by_mask[has_senders], rtol=0, atol=1e-12)
    assert by_mask[~has_senders].isnan().all()  # 0 / 0: the layer does better than the formula
    assert not results[name][~has_senders].any()

# %% [markdown]
# Graphs are sets of edges, so they can be joined (`|`), intersected (`&`) and subtracted (`-`). Let us **cut one edge**,
# *not* $\to$ *output*, and look at the weights of *output* before and after:
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

other_words = [LLAMAS, DO, OUTPUT]
assert torch.allclose(
    shares["after"][other_words], shares["before"][other_words] / (1 - shares["before"][NOT])
)
assert shares["after"][NOT] == 0
assert math.isclose(shares["after"].sum(), 1.0)

# %%
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
ax.set(ylabel="weight", ylim=(0, 1), title="weights of the receiver 'output', before and after the cut")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 4. A trained model
#
# The package ships a small language model. It has learned to predict the next token on the source code of Python's standard
# library. English is not what it was trained on, but it is enough for this sentence. Each of its layers is one round of message passing (*communication*:
# attention) followed by a small network at each node, an [MLP](../docs/glossary.md#mlp) (*computation*). So far the order of the tokens did not matter to
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
# head. Below is the head that attends most to **the previous token**. We do not say in advance which one that is, but
# search for it: on random tokens, where meaning cannot help, we measure how much weight the edges `dst - 1 -> dst` get.
# (The first token can only attend to itself, in every head.)


# %%
def strongest(scores):
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return layer, head


previous = ga.model.previous_token_scores(model)
layer_number, head_number = strongest(previous)

line = ga.patterns.causal(len(pieces))
weights = model.listen(sentence, line)[layer_number][0, :, head_number]  # a weight for each edge

figure, ax = plt.subplots(figsize=(11, 3.6))
title = f"layer {layer_number}, head {head_number}: line width = weight"
draw.arcs(line, ax, pieces, weights, title=title)
plt.show()
print(f"mean weight on the previous token: {previous[layer_number, head_number]:.2f} (on random tokens)")
assert previous.max() > 0.2

# %% [markdown]
# ### The induction head
#
# To know the previous token is half of a famous circuit. Let the model read a text that contains the same passage twice. To
# predict the next piece, it helps to find the earlier position of the same piece, and to attend to **the piece after it**: what
# followed then is likely to follow now. A head that does this is called an *[induction head](../docs/glossary.md#induction-head)*. It needs two rounds of message
# passing. In the first, every token attends to the token before it. In the second, a receiver looks for a sender whose
# previous token, as learned in the first round, is the receiver's own piece.
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
# Here it is on our sentence, repeated once. For each token of the second copy we draw the strongest of its in-edges in that
# head: in orange if it comes from the piece *after* the same piece in the first copy, in grey if not.

# %%
n = len(pieces)
twice = sentence.repeat(1, 2)
line = ga.patterns.causal(2 * n)
src, dst = line.edge_index
weights = model.listen(twice, line)[layer_number][0, :, head_number]

best = [int(torch.where(dst == receiver, weights, -1.0).argmax()) for receiver in range(n, 2 * n)]
strong = [(int(src[e]), int(dst[e])) for e in best]
matches_earlier = [receiver - sender == n - 1 for sender, receiver in strong]

figure, ax = plt.subplots(figsize=(13, 3.4))
title = f"layer {layer_number}, head {head_number}: the strongest in-edge of each token of the second copy"
strongest_edges = ga.convert.from_edge_index(torch.tensor(strong).T, 2 * n)
draw.arcs(
    strongest_edges,
    ax,
    pieces * 2,
    weights[best],
    lit=[edge for edge, yes in zip(strong, matches_earlier, strict=True) if yes],
    title=title,
)
plt.show()
print(f"{sum(matches_earlier)} of {n} attend to the piece after their own earlier occurrence")
assert sum(matches_earlier) > n / 2

# %% [markdown]
# ### The same model over a window
#
# No parameter changes now, only the graph: every token attends to the last eight, itself included. The text is 32 random tokens,
# repeated once. The edges that the induction head needs span 31 tokens, so they are gone. Can the layers pass the information on in
# several hops instead? Ask the graph: `window ** 2` has an edge wherever two hops lead.

# %%
length = 32
generator = torch.Generator().manual_seed(1)
first = torch.randint(model.config.vocabulary_size, (64, length), generator=generator)
repeated = torch.cat([first, first], dim=1)  # 64 random texts, each repeated once

causal, window = ga.patterns.causal(2 * length), ga.patterns.window(2 * length, 8)
src, dst = (window**num_layers).edge_index
print(
    f"{num_layers} hops reach {(dst - src).max()} tokens back, the edges of the induction head {length - 1}"
)
assert (dst - src).max() < length - 1
assert ga.model.induction_scores(model, length=length, graph=window).max() == 0


def loss_by_position(graph):
    """The loss at each position, averaged over the texts: minus the log-probability of the token that came."""
    log_probabilities = model(repeated, graph)[:, :-1].log_softmax(-1)
    return -log_probabilities.gather(-1, repeated[:, 1:, None])[..., 0].mean(0)


# %% [markdown]
# The tokens are random, so in the first copy nothing can be known. (The [loss](../docs/glossary.md#loss) there is above chance level, because the model
# expects text.) In the second copy everything could be known. The lower the curve, the better the prediction.

# %%
runs = {"causal": loss_by_position(causal), "window(64, 8)": loss_by_position(window)}

figure, ax = plt.subplots(figsize=(9, 3.8))
for (name, curve), colour, marker in zip(runs.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
    ax.plot(range(1, 2 * length), curve, color=colour, marker=marker, markersize=4, label=name)
ax.axvline(length - 0.5, color=GREY, linestyle="--")
ax.axhline(math.log(len(vocabulary)), color=GREY, linestyle=":", label="chance level")
ax.set_ylim(0)
ax.text(length, 0.2, "second copy begins", color="#555555", va="bottom")
ax.set(
    xlabel="position of the predicted token",
    ylabel="loss",
    title="random tokens, repeated once: one model, two graphs",
)
ax.legend(frameon=False, loc="lower left")
plt.show()


def gain(curve):
    """How much lower the loss is on the second copy than on the first."""
    return (curve[: length - 1].mean() - curve[length:].mean()).item()


for name, curve in runs.items():
    print(f"{name:>14}: the loss on the second copy is lower by {gain(curve):.2f}")
assert gain(runs["causal"]) > 1 > gain(runs["window(64, 8)"])

# %% [markdown]
# Over the causal graph the model recognises the second copy, though by no means every token of it: its loss comes down to about
# chance level. Over the window it cannot, however good its heads are: the graph decides what a model can know, before any
# number is learned. Exercise 3 gives the lost edges back.
#
# **In short.** Heads do not mix: a receiver's state gains the sum of what arrives, over all heads. Patterns and messages say what
# a head looks for and what it sends, in the space of the states. And a layer runs over any graph: the graph is yours to choose.
#
# ## 5. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/02_many_heads_many_graphs.py).
#
# **1. One edge** (easy, 3 minutes). Over the causal graph *output* learns that it is negated. Which one edge `(src, dst)` must be cut so that the
# layer, both heads together, adds no negation to *output*?
#
# <details><summary>Hint</summary>
#
# Which sender is a negation?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a pair such as (LLAMAS, OUTPUT)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

less = g - ga.convert.from_edge_index(torch.tensor([answer]).T, 5)
assert layer(x, g)[OUTPUT, NEGATION] > 0.5
assert layer(x, less)[OUTPUT, NEGATION] == 0, "output is still negated"
print(f"right: without the edge {WORDS[answer[0]]} -> {WORDS[answer[1]]} nothing is negated")

# %% [markdown]
# **2. Two hops** (medium, 5 minutes). Over `window(5, 2)` a token attends to itself and to its left neighbour. Apply the layer twice, and add
# the update to the state each time. Whose *first* states can have influenced the final state of *words*? Give a set of positions.
#
# <details><summary>Hint</summary>
#
# Print `ga.patterns.window(5, 2) ** 2`: it has an edge for each path of two edges.
#
# </details>

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
# **3. Give the induction head its edges back** (hard, 15 minutes, code). Build a graph over the 64 tokens of section 4 with **fewer
# than 600 edges** (the causal graph has 2,080) over which the model is better on the second copy than on the first by more than 1. A graph is a
# rule: `ga.TokenGraph.from_rule(lambda b, h, dst, src: ..., 64)` has an edge wherever the condition on the positions `dst` and
# `src` is true (`b` and `h` are sample and head, not needed here). Graphs are joined by `|`. Fewer edges need not be worse:
# fewer senders compete for the weight of a receiver.
#
# <details><summary>Hint</summary>
#
# Which distance do the edges of the induction head have, if 32 tokens are repeated? Join them with a narrow window.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 64 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

runs["your graph"] = loss_by_position(answer)
for name, graph in (("causal", causal), ("window(64, 8)", window), ("your graph", answer)):
    print(
        f"{name:>14}: {graph.num_edges:>4} edges, the loss on the second copy is lower by {gain(runs[name]):.2f}"
    )
assert answer.num_edges < 600, "too many edges"
assert gain(runs["your graph"]) > 1, "the loss on the second copy is still high"

# %% [markdown]
# ## Sources
#
# * A. Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017: many heads.
# * C. McCormick, *Patterns and Messages*, parts 1 and 2, 2025 (S0 and S1 in the docstrings of this library): the split of
#   $W_O$, patterns, messages, and the sentence about llamas.
# * C. Olsson et al., [In-context Learning and Induction Heads](https://arxiv.org/abs/2209.11895), 2022.

# %% [markdown]
# ---
# before: [01. Attention is message passing](01_attention_is_message_passing.ipynb) | [the book](README.md) | next: [03. Build a transformer from message passing](03_build_a_transformer.ipynb)
