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
# # Patterns and messages, in three forms
#
# Attention is printed with four matrices for each head: query, key, value, output. They are only ever used in pairs. Multiply
# each pair out, and two vectors are left for each token: a **pattern**, which says what the token looks for, and a **message**,
# which says what it sends. That description is shorter, and it is the same function.
#
# Whether one also *computes* it in this form is a question of cost, which [notebook 09](09_why_thin_factors.ipynb) answers. This
# notebook shows three forms of one head that give the same numbers, where patterns and messages arise in each, what can be read
# from them, and where the story ends: at rotated queries and keys.
#
# The names and the forms are those of Chris McCormick's two articles *Patterns and Messages* ("the source text" below), and the
# illustrations show what his show, with the sizes of Llama 3 8B that he uses: states of 4,096 numbers and 32 heads of 128. You
# need [notebook 01](01_attention_is_message_passing.ipynb) and the first two sections of
# [notebook 02](02_many_heads_many_graphs.ipynb).
#
# **Afterwards you can** read a head as what it looks for and what it says.
#
# before: [04. Four perspectives on one run](04_four_perspectives.ipynb) | [the book](README.md) | next: [06. Matrix multiplication is message passing](06_matrix_multiplication_is_message_passing.ipynb)

# %%
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import SVG
from pictures import BLUE, GREY, ORANGE, draw_table, use_house_style
from torch.nn import functional

import gnn_attention as ga

use_house_style()
torch.set_grad_enabled(False)  # nothing is trained here
torch.set_default_dtype(torch.float64)  # so that "equal" can mean equal to twelve digits


# %% [markdown]
# Our material is the first layer of the trained model that ships with the package, applied to one sentence. `x` are the
# states that the layer receives.

# %%
model, vocabulary = ga.model.load_trained()
model = model.double()


def states_of(text):
    """The tokens of a text, and the states that they bring to the first layer."""
    tokens = torch.tensor(vocabulary.encode(text))
    return [piece.replace(" ", "␣") for piece in vocabulary.pieces(text)], model.blocks[0].attention_norm(
        model.embedding(tokens)
    )


pieces, x = states_of("Llamas do not output words")
heads, position = model.layers[0].heads, model.layers[0].score_mod
n, width, d = len(pieces), heads.width, heads.head_dim
graph = ga.patterns.causal(n)
print(heads)
print(n, "tokens:", " | ".join(pieces))

# %% [markdown]
# ## 1. From side by side to a sum
#
# $$\text{Concat}(\text{head}_1, \dots) W_O = \sum_h \text{head}_h W_O^h = \sum_h \text{weights}_h \, (X W_V^h W_O^h)$$
#
# The first step cuts $W_O$ into one block of rows for each head. The second moves a bracket: instead of mixing short values and
# projecting the mixture, project every value first and mix the results. What is mixed now has a meaning that does not depend on the
# weights: it is what token $j$ sends through head $h$, its **message**, and it is as wide as a state.

# %%
q, (k, v) = heads.receive(x[None])[0], (part[0] for part in heads.send(x[None]))
logits = (q @ k.mT) * heads.scale
weights = logits.masked_fill(~graph.mask(), -math.inf).softmax(-1)  # [head, dst, src]

side_by_side = torch.cat(list(weights @ v), dim=-1) @ heads.W_O.flatten(0, 1)
sum_of_heads = sum(weights[h] @ v[h] @ heads.W_O[h] for h in range(heads.num_heads))
messages = v @ heads.W_O  # [head, src, width]
sum_of_messages = (weights @ messages).sum(0)

assert torch.allclose(side_by_side, sum_of_heads, rtol=0, atol=1e-12)
assert torch.allclose(side_by_side, sum_of_messages, rtol=0, atol=1e-12)
print(
    "a value:",
    list(v[0, 0].shape),
    "  a message:",
    list(messages[0, 0].shape),
    "  a state:",
    list(x[0].shape),
)

# %% [markdown]
# Seen in this way, a head is two processes. Query and key decide *whom* a token attends to (blue, here and in all pictures of this
# chapter). Value and output decide *what* is sent (orange). They meet once, when the weights multiply the messages. The sum over all
# heads is added to the state of the receiver, which stays on the left as the *residual*.

# %% tags=["S1.3"] mystnb={"image": {"alt": "The query-key process makes weights, the value-output process makes messages; the weighted sum over 32 heads is added to the state."}}
SVG("../docs/illustrations/two-processes.svg")

# %% [markdown]
# Change a matrix on the left, and no message changes. Change one on the right, and no weight does (exercise 3).
#
# ## 2. Merging two projections into one
#
# $W_V^h$ squeezes a state into a few numbers, and $W_O^h$ makes it wide again. Multiplied out, they are one square matrix, the
# **message projection** $W_M$. In the same way $W_Q^h$ and $W_K^h$ become the **pattern projection** $W_P$. The two pictures are to
# scale: what is stored and trained is thin, and what it amounts to is square.

# %% tags=["S1.7"] mystnb={"image": {"alt": "Five states times two thin matrices, or times one square matrix, are the same five messages."}}
SVG("../docs/illustrations/message-projection.svg")

# %% tags=["S1.10"] mystnb={"image": {"alt": "One state times two thin matrices, or times one square matrix, is the same pattern, which is compared with all states."}}
SVG("../docs/illustrations/pattern-projection.svg")

# %% [markdown]
# A pattern is as wide as a state because it *describes* a state: the one that its receiver looks for. How well a sender fits is
# a dot product of the two. And the width $d$ of a head has not vanished: it is the **[rank](../docs/glossary.md#rank)** of both square matrices, and it stays
# in the scale $1 / \sqrt d$. Here are both matrices in our smaller model, in which a state has 128 numbers and a head 32:

# %%
W_P, W_M = heads.W_Q @ heads.W_K.mT, heads.W_V @ heads.W_O
P, M = x @ W_P, x @ W_M
assert torch.allclose(P @ x.T * heads.scale, logits, rtol=0, atol=1e-12)
assert torch.allclose(M, messages, rtol=0, atol=1e-12)
print("ranks of the four pattern matrices:", torch.linalg.matrix_rank(W_P).tolist(), "of", width)
print("ranks of the four message matrices:", torch.linalg.matrix_rank(W_M).tolist(), "of", width)

# %% [markdown]
# ## 3. Three forms
#
# For one receiver $x_q$ and one head, there are three ways to write the same output $o$. Follow a column from top to bottom: the bars
# are vectors, and the boxes are matrices and formulas.

# %% tags=["S1.21"] mystnb={"image": {"alt": "Three columns: the standard form compares queries with keys, the refactored and the merged form compare patterns with states and sum messages."}}
SVG("../docs/illustrations/three-forms.svg")

# %% [markdown]
# The **standard** form never has a pattern or a message in its hands: it compares in the short space of the head, and it mixes
# before it widens. In the other two forms patterns and messages exist. The library calls the second one **factored**, because it keeps
# both factors of each matrix, and the third one **merged**. All three run through the same layer, over any graph, with any change of the
# logits (here the model's own: a learned number for each distance).

# %%
forms = {"standard": heads, "factored": ga.FactoredHeads.of(heads), "merged": ga.MergedHeads.of(heads)}
expected = ga.MessagePassingAttention(heads, position)(x, graph)

for name, form in forms.items():
    receives, (sends, carries) = form.receive(x[None])[0], (part[0] for part in form.send(x[None]))
    update = ga.MessagePassingAttention(form, position)(x, graph)
    assert torch.allclose(update, expected, rtol=0, atol=1e-12)
    where = "no P, no M" if name == "standard" else "P is what a receiver brings, M what a sender sends"
    print(
        f"{name:>8}: compares {list(receives.shape)} with {list(sends.shape)}, mixes {list(carries.shape)}: {where}"
    )
    if name != "standard":
        assert torch.allclose(receives, P, rtol=0, atol=1e-12)
        assert torch.allclose(sends, x.expand_as(sends))
        assert torch.allclose(carries, M, rtol=0, atol=1e-12)

# %% [markdown]
# The merged form has two matrices for each head and no output projection. The whole layer is a function of ten lines:


# %% tags=["S0.9"]
def attention(x, W_P, W_M, mask, d):
    """States [T, width], pattern and message matrices [heads, width, width], mask[dst, src]: the update of every token."""
    update = torch.zeros_like(x)
    for pattern_matrix, message_matrix in zip(W_P, W_M, strict=True):
        patterns = x @ pattern_matrix
        messages = x @ message_matrix
        logits = patterns @ x.T / math.sqrt(d)
        weights = logits.masked_fill(~mask, -math.inf).softmax(dim=-1)
        update += weights @ messages
    return update


ours = ga.MessagePassingAttention(heads)(x, graph)
assert torch.allclose(attention(x, W_P, W_M, graph.mask(), d), ours, rtol=0, atol=1e-12)
assert not torch.allclose(
    attention(x, W_P, W_M, graph.mask(), width), ours, atol=1e-2
)  # the scale stays that of the head
print("the same updates, and not if the scale were that of the model's width")

# %% [markdown]
# ## 4. Whose pattern is it, and how long?
#
# A logit is $x_i W_P x_j^\top$, with the receiver $i$ on the left and the sender $j$ on the right. The bracket can stand on
# either side. $(x_i W_P)$ is the **receiver's** pattern: what does $i$ look for? $(x_j W_P^\top)$ is the **sender's**: which receivers
# should attend to $j$? The logits are the same, and the matrices are each other's transpose.

# %%
receivers, senders = ga.FactoredHeads.of(heads), ga.FactoredHeads.of(heads, side="sender")
P_receiver, P_sender = receivers.patterns(x[None])[0], senders.patterns(x[None])[0]

assert torch.allclose(P_sender, x @ W_P.mT, rtol=0, atol=1e-12)
assert torch.allclose(P_receiver @ x.T, x @ P_sender.mT, rtol=0, atol=1e-12)
assert not torch.allclose(P_receiver, P_sender, atol=0.1)
assert torch.allclose(ga.MessagePassingAttention(senders, position)(x, graph), expected, rtol=0, atol=1e-12)
print("the same logits from patterns of the receivers and from patterns of the senders; the patterns differ")

# %% [markdown]
# The difference matters when a text is written token by token. The receiver is new each time, and the senders were there before. So a
# pattern that is to be computed once and kept must be the sender's. (The source text defines its patterns on the receiver's
# side, $p = x W_P$, and then [caches](../docs/glossary.md#cache) them. It has changed the side without saying so, and with it the matrix.)
#
# A dot product rewards the right direction, and also sheer length:
#
# $$p_i \cdot x_j = |p_i| \; |x_j| \, \cos(p_i, x_j)$$
#
# "Inspecting the magnitude of pattern vectors could be interesting", says the text. Let us look, at a longer text.

# %%
CODE = '''
def longest(words, most=None):
    """The longest word, and where it stands."""
    best, place = "", -1
    for number, word in enumerate(words):
        if most is not None and len(word) > most:
            continue
        if len(word) > len(best):
            best, place = word, number
    return best, place
'''
code_pieces, y = states_of(CODE)
line = ga.patterns.causal(len(code_pieces))
src, dst = line.edge_index
P_code = receivers.patterns(y[None])[0]  # [head, token, width]

cosine = functional.cosine_similarity(P_code[:, dst], y[src], dim=-1)
product = P_code[:, dst].norm(dim=-1) * y[src].norm(dim=-1) * cosine
assert torch.allclose(product, (P_code[:, dst] * y[src]).sum(-1), rtol=0, atol=1e-9)
print(len(code_pieces), "tokens")
lengths = P_code.norm(dim=-1)
for h, of_head in enumerate(lengths):
    print(f"head {h}: patterns from {of_head.min():5.1f} to {of_head.max():5.1f} long")
print(f"states from {y.norm(dim=-1).min():.1f} to {y.norm(dim=-1).max():.1f} long")

# %% [markdown]
# The states were normalised before they came here, so they are all about equally long. The patterns are not. What does the
# length do? That depends on *whose* pattern it is. These are the receivers', and the length of a receiver's pattern multiplies *all*
# of its logits by the same factor. So it does not change who fits best, but **how sharply** the receiver attends: a long
# pattern makes the softmax sharp, and a pattern near 0 makes it even. It acts as an *inverse temperature*, a
# factor in front of all logits ([notebook 07](07_why_the_square_root.ipynb), section 4), and each receiver has its own.
#
# To see it, we count the senders to which a receiver effectively attends, $e^{\text{entropy}}$, as a share of those that its graph
# allows: 1 means that it attends to all of them evenly. Below are the last 32 receivers, with punctuation in orange: in head 0 on the left,
# in all heads on the right. (The model's numbers for distances are left out, because they would blur the picture.)

# %% tags=["S1.16"]
layer = ga.MessagePassingAttention(heads)
_, (_, edge_weights) = layer(y, line, return_attention_weights=True)
table = torch.zeros(heads.num_heads, len(y), len(y))
table[:, dst, src] = edge_weights.T
effective = torch.special.entr(table).sum(-1).exp() / line.in_degree()
late = slice(len(y) - 32, None)
punctuation = torch.tensor(
    [not any(map(str.isalnum, piece.replace(r"\n", ""))) for piece in code_pieces]
)  # \n: the end of a line

figure, (left, right) = plt.subplots(1, 2, figsize=(13, 3.8), width_ratios=[1.7, 1])
colours = [ORANGE if mark else BLUE for mark in punctuation[late]]
left.bar(range(32), lengths[0, late], color=colours)
left.set_xticks(
    range(32),
    [piece[:8] for piece in code_pieces[late]],
    rotation=75,
    ha="right",
    rotation_mode="anchor",
    fontsize=8,
)
left.set(ylabel="length of the pattern in head 0", ylim=(0, None))
for h in range(heads.num_heads):
    for mark, colour, marker in ((False, BLUE, "o"), (True, ORANGE, "s")):
        here = punctuation[late] == mark
        label = {False: "pieces of words", True: "punctuation, line ends, indents"}[mark] if h == 0 else None
        right.plot(
            lengths[h, late][here], effective[h, late][here], marker, color=colour, markersize=4, label=label
        )
right.set(xlabel="length of the pattern, all four heads", ylabel="share of senders, effectively")
right.legend(frameon=False, loc="lower left", fontsize=9)
plt.show()

# %% tags=["S1.16"]
ranks = [numbers[:, late].flatten().argsort().argsort().double() for numbers in (lengths, effective)]
correlation = torch.corrcoef(torch.stack(ranks))[0, 1]
assert correlation < -0.6
print(f"rank correlation of the two: {correlation:.2f}")

for h in (0, 1):
    of_marks, of_words = lengths[h, punctuation].mean(), lengths[h, ~punctuation].mean()
    print(f"head {h}: patterns of punctuation are {of_marks:.1f} long, of word pieces {of_words:.1f}")
    assert of_marks > 1.5 * of_words

# %% [markdown]
# In heads 0 and 1 punctuation attends sharply (brackets, commas, line ends); word pieces spread their attention almost
# evenly.
#
# And the patterns that are *cached*? Those are the ones that the text speaks of, and they are the **senders'**. Is the lesson the
# same? The length of a sender's pattern is a factor of one logit of each receiver: the one for this sender. All receivers attend more to
# a sender with a long pattern that fits, so here the length decides *who wins*. Give all patterns the same length, and look again for the
# sender to which each receiver attends most, its favourite:


# %% tags=["S1.16"]
def favourites_lost(patterns_of_receivers, patterns_of_senders, states):
    """The share of receivers whose favourite changes when all patterns get one length: theirs, the senders'."""
    past, unit = line.mask(), functional.normalize
    true = (patterns_of_receivers @ states.T).masked_fill(~past, -math.inf).argmax(-1)
    with_unit_receivers = unit(patterns_of_receivers, dim=-1) @ states.T
    with_unit_senders = states @ unit(patterns_of_senders, dim=-1).mT
    return [
        (fits.masked_fill(~past, -math.inf).argmax(-1) != true).double().mean(-1)
        for fits in (with_unit_receivers, with_unit_senders)
    ]


P_cached = senders.patterns(y[None])[0]  # [head, token, width], as a cache would hold them
of_receivers, of_senders = favourites_lost(P_code, P_cached, y)
for h in range(heads.num_heads):
    print(
        f"head {h}: cached patterns from {P_cached[h].norm(dim=-1).min():4.1f} to {P_cached[h].norm(dim=-1).max():4.1f} long; "
        f"at one length {of_senders[h]:.0%} of the receivers have another favourite"
    )
assert (of_receivers == 0).all()
assert (of_senders > 0.5).all()

# %% [markdown]
# So both halves are true, and they are opposites: the length of what a receiver looks for is its **temperature**, and the length of
# what a sender answers to is its **loudness**. "Inspecting the magnitude of pattern vectors" was a good idea.
#
# ## 5. What does a pattern look for, what does a message say?
#
# A pattern and a message are as wide as a state, and so is every embedding. So both can be read without running the model. A message,
# dotted with the *unembedding*, says which words it makes likelier. A pattern, dotted with the embeddings, says which words it fits best.
# (`gnn_attention.interpret.circuits` has functions for this.) Here is one head of the second layer:

# %% tags=["S0.7"]
words = vocabulary.pieces(range(len(vocabulary)))
embeddings = [
    block.attention_norm(model.embedding.weight) for block in model.blocks
]  # as layers 0 and 1 see them
unembedding = model.unembedding.weight * model.norm.weight
read = [ga.FactoredHeads.of(layer.heads) for layer in model.layers]

for word in (" for", " name", " return"):
    one = embeddings[1][vocabulary.encode(word)][None]
    says = (unembedding @ read[1].messages(one)[0, 3, 0]).topk(4).indices
    fits = (embeddings[1] @ read[1].patterns(one)[0, 3, 0]).topk(4).indices
    says, fits = ([words[i] for i in best.tolist()] for best in (says, fits))
    print(f"layer 1, head 3, {word!r:>9}: the message says {says!s:36} the pattern fits {fits}")

# %% [markdown]
# The message of a word says this word, or a relative of it: the head **copies**. The list of words that a pattern fits looks like
# noise. A few words can deceive, so let us count over the whole vocabulary: for which share of all words $w$ does the message of $w$
# say $w$ itself before all others, and which share of patterns fits $w$ itself best?
#
# There is a reason for the noise. The patterns of layer 1 are not compared with embeddings, but with states to which layer 0 has added
# something: the messages of other tokens. So compare them with what they really meet. The table on the right asks: among the messages
# that a head of layer 0 sends for each word of the vocabulary, which one fits the pattern of $w$ best?


# %% tags=["S1.11"]
def share_of_itself(vectors, candidates):
    """The share of words whose vector has its largest dot product with the candidate of the same word."""
    return ((vectors @ candidates.mT).argmax(-1) == torch.arange(len(words))).double().mean(-1)


all_messages, all_patterns = (
    torch.stack([getattr(form, name)(states[None])[0] for form, states in zip(read, embeddings, strict=True)])
    for name in ("messages", "patterns")
)  # [layer, head, word, width]
copied = share_of_itself(all_messages, unembedding)
fitted = torch.stack([share_of_itself(*pair) for pair in zip(all_patterns, embeddings, strict=True)])
written = all_messages[0] * model.blocks[1].attention_norm.weight  # layer 1 scales the numbers of each state
composed = torch.stack([share_of_itself(all_patterns[1], of_head) for of_head in written], dim=1)

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.9), width_ratios=[1.6, 1])
names = [f"{number}.{h}" for number in range(2) for h in range(4)]
places = torch.arange(8)
left.bar(places - 0.2, copied.flatten(), 0.38, color=ORANGE, label="the message of a word says the word")
left.bar(places + 0.2, fitted.flatten(), 0.38, color=BLUE, label="the pattern of a word fits its embedding")
left.set_xticks(places, names)
left.set(xlabel="layer.head", ylabel=f"share of {len(words):,} words", ylim=(0, 0.8))
left.legend(frameon=False, loc="upper left")
draw_table(right, composed, names[4:], names[:4], "the pattern of a word fits its message", limit=0.8)
right.set(xlabel="message of layer.head", ylabel="pattern of layer.head")
plt.show()

# %% tags=["S1.11"]
assert (copied[1, [0, 3]] > 0.5).all()
assert copied[0].max() < 0.01
assert copied[1, [1, 2]].max() < 0.01
assert fitted.max() < 0.1
assert (composed[[0, 3]][:, [2, 3]] > 0.4).all()
assert composed[[1, 2]].max() < 0.01
assert composed[:, :2].max() < 0.01
previous = model.layers[0].score_mod.table[:, 17].tolist()  # 17: at the distance of one token
print(f"heads 0 and 3 of layer 1 copy {copied[1, 0]:.0%} and {copied[1, 3]:.0%} of all words")
print("what the heads of layer 0 add to the logit of the token before:", [round(b, 1) for b in previous])
assert min(previous[2:]) > 2 > 2 * max(map(abs, previous[:2]))

# %% [markdown]
# Now the patterns speak. Heads 0 and 3 of layer 1 look for *their own word, as heads 2 and 3 of layer 0 pass it on*. And those two heads
# attend to the token before: the model has learned a large number for a distance of 1. So a token $w$ of layer 1 looks for a place whose
# *predecessor* was $w$, and copies the word that stands there. Such a pair is an **induction head**, which
# [notebook 16](16_induction_heads.ipynb) finds by running the model. Here it was read from the matrices alone.
#
# Much else cannot be read in this way, and it would be dishonest to leave that out: the other six heads do not copy words, and no single
# word tells what their patterns look for. An embedding is only what a state begins as. Still, this is the use of staying *in the space of
# the model*: patterns can be compared with messages, heads with heads, and all of them with words.
#
# ## 6. What the softmax is for
#
# The source text gives two reasons for the softmax. The second is right: it makes matching a **competition**. A sender's share
# falls when another one fits better, although nothing about itself has changed.

# %% tags=["S1.17"]
calm = torch.tensor([0.5, 0.0, 1.0, 0.2]).softmax(0)
boosted = torch.tensor([0.5, 0.0, 1.0, 3.0]).softmax(0)
assert (boosted[:3] < calm[:3]).all()
print(
    "shares before:",
    [round(share, 2) for share in calm.tolist()],
    " and after the last fits better:",
    [round(s, 2) for s in boosted.tolist()],
)

# %% [markdown]
# The first reason was that the output of a head always has the same size, whatever the number of tokens. That is only half
# true. A weighted mean of messages is never longer than the longest message: this is an upper **bound**. But a receiver that attends
# evenly to many tokens receives the mean of many vectors that point in all directions, and these cancel. Random messages of width 64:

# %% tags=["S1.17"]
generator = torch.Generator().manual_seed(0)
counts = [1, 4, 16, 64, 256, 1024]
even, sharp, longest = [], [], []
for count in counts:
    vectors = torch.randn(64, count, 64, generator=generator)
    fits = torch.randn(64, count, generator=generator)
    even.append(vectors.mean(1).norm(dim=-1).mean())
    sharp.append(torch.einsum("bs,bsw->bw", (10 * fits).softmax(-1), vectors).norm(dim=-1).mean())
    longest.append(vectors.norm(dim=-1).max())
    assert even[-1] <= longest[-1]
    assert sharp[-1] <= longest[-1]

figure, ax = plt.subplots(figsize=(7, 3.2))
for values, look, colour, label in (
    (longest, ":", GREY, "the longest message: the bound"),
    (sharp, "s-", BLUE, "sharp weights"),
    (even, "o-", ORANGE, "even weights"),
):
    ax.loglog(counts, values, look, color=colour, base=2)
    ax.text(1200, values[-1], label, color="#555555" if colour == GREY else colour, va="center")
ax.set_xticks(counts, counts)
ax.set_yticks([0.25, 1, 4], ["0.25", "1", "4"])
ax.set(xlabel="tokens attended to", ylabel="mean length of the output", xlim=(0.9, 16000))
ax.minorticks_off()
plt.show()
print(f"even weights: {even[0]:.2f} with one token, {even[-1]:.2f} with 1024")
assert math.isclose(
    even[-1] * 32, 7.97, rel_tol=0.02
)  # a random vector of width 64 is 7.97 long, and a mean of 1024 is a 32nd of that

# %% [markdown]
# ## 7. Where patterns end: rotations
#
# The text takes its sizes from Llama 3. But Llama rotates queries and keys by angles that grow with the position (RoPE), so
# that a logit depends on the **distance** of the two tokens. The rotation stands *between* $W_Q$ and $W_K^\top$:
#
# $$q_i R_{i-j} k_j^\top = x_i \underbrace{W_Q R_{i-j} W_K^\top}_{W_P(i - j)} x_j^\top$$
#
# There is not one pattern matrix, but one for each distance. A pattern that was computed once would be right for one receiver
# only, and the library refuses to make it:

# %%
torch.manual_seed(0)
turned = ga.StandardHeads(width, 4, num_kv_heads=2, rotary=ga.rotary.Rotary()).double()
try:
    ga.FactoredHeads.of(turned, side="sender")
except ValueError as error:
    print(error)

q, (k, _) = turned.receive(x[None])[0], turned.send(x[None])
k = k[0].repeat_interleave(2, dim=0)  # two query heads share a key
for i, j in ((10, 10), (10, 9), (10, 0), (3, 8)):
    at_distance = turned.pattern_matrix(i - j).full()
    assert torch.allclose(x[i] @ at_distance @ x[j], (q[:, i] * k[:, j]).sum(-1))

# %%
matrices = torch.stack([turned.pattern_matrix(distance).full()[0] for distance in range(65)])
change = (matrices - matrices[0]).flatten(1).norm(dim=-1) / matrices[0].norm()
figure, ax = plt.subplots(figsize=(7, 3.2))
ax.plot(change, color=BLUE, marker="o", markersize=3)
ax.set(
    xlabel="distance dst - src, in tokens",
    ylabel="difference of $W_P$(distance)\nfrom $W_P$(0), as a share",
    ylim=(0, None),
)
plt.show()
print(f"already one step away it differs by {change[1]:.0%}")

# %% [markdown]
# Why can *keys* be cached in such a model? Because a rotation by $i - j$ is one by $i$ undone by one by $j$: each side can turn
# its own thin vector by its own position, once and for all. A sender's pattern goes a step further, through $W_Q^\top$, and the
# receiver's rotation would have to come before that.
#
# Messages are not rotated and remain as they were. One more detail of Llama: four query heads share one $W_K$ and one $W_V$ (*grouped
# heads*, 8 for 32), but each has its own block of $W_O$. So their values are the same, and their messages are not. In our small layer two
# heads share:

# %%
W_M = turned.message_matrix().full()
values = turned.send(x[None])[1]
assert values.shape[1] == 2  # heads 0 and 1 share the first
assert not torch.allclose(W_M[0], W_M[1], atol=1e-2)
print(f"{values.shape[1]} sets of values, {W_M.shape[0]} message matrices")

# %% [markdown]
# ## 8. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/05_three_forms.py).
#
# **1. The factors are not unique** (medium, 5 minutes). Multiply $W_Q$ by any invertible matrix $R$, `d` by `d`, from the right. By which matrix
# must $W_K$ be multiplied from the right so that no logit changes? (So nobody can say what a single number of a query means,
# while $W_P$ has a meaning.)
#
# <details><summary>Hint</summary>
#
# Write $(W_Q R)(W_K S)^\top = W_P$ and solve for $S$.
#
# </details>

# %% tags=["exercise"]
R = torch.randn(d, d, generator=torch.Generator().manual_seed(1))
answer = None  # your turn: a matrix made from R

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

changed = ga.StandardHeads.from_arrays(heads.W_Q @ R, heads.W_K @ answer, heads.W_V, heads.W_O)
assert torch.allclose(changed.pattern_matrix().full(), heads.pattern_matrix().full(), atol=1e-8), (
    "the logits change"
)
print("right: other queries, other keys, the same patterns")

# %% [markdown]
# **2. One message alone** (medium, 5 minutes, code). Suppose that token 6 attended to token 3 and to no other token, through head 0 alone. What would be added to
# its state? Give the 128 numbers from `x` and the matrices of `heads`. No weight is needed: why?
#
# <details><summary>Hint</summary>
#
# What is the softmax of a single logit? What remains is one row of $M = X W_V W_O$.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a tensor of 128 numbers

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

alone = ga.StandardHeads.from_arrays(*(W[:1] for W in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O)))
one_edge = ga.convert.from_edge_index(torch.tensor([[3], [6]]), n)
assert torch.allclose(answer, ga.MessagePassingAttention(alone)(x, one_edge)[6]), "something else is added"
print("right: the weight is 1, whatever the logit; so it is the message of the sender")

# %% [markdown]
# **3. A head that sends nothing** (easy, 5 minutes, code). Change one of the four matrices of `heads` such that every weight stays as it is and head
# 2 sends nothing to any token. Give the four matrices.
#
# <details><summary>Hint</summary>
#
# Which two matrices stand in the orange process of the first picture? All four have the shape `[head, ..., ...]`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: (W_Q, W_K, W_V, W_O)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

quiet = ga.StandardHeads.from_arrays(*answer)
run = ga.trace.record(ga.MessagePassingAttention(quiet), x, graph).layers[0]
before = ga.trace.record(ga.MessagePassingAttention(heads), x, graph).layers[0]
assert torch.equal(run.weights(), before.weights()), "a weight has changed"
assert not run.results(2).any(), "head 2 still sends something"
assert torch.allclose(run.update, before.update - before.results(2)[:, :, 0]), "another head has changed too"
print("right: whom a token attends to, and what is sent, are two independent processes")

# %% [markdown]
# ## Sources
#
# * C. McCormick, *Refactoring the Attention Equations: Patterns and Messages*, and part 2, *Token Communication*, 2025.
# * N. Elhage et al., [A Mathematical Framework for Transformer
#   Circuits](https://transformer-circuits.pub/2021/framework/index.html), 2021: QK and OV circuits.
# * J. Su et al., [RoFormer](https://arxiv.org/abs/2104.09864), 2021: rotations. J. Ainslie et al.,
#   [GQA](https://arxiv.org/abs/2305.13245), 2023: grouped heads.

# %% [markdown]
# ---
# before: [04. Four perspectives on one run](04_four_perspectives.ipynb) | [the book](README.md) | next: [06. Matrix multiplication is message passing](06_matrix_multiplication_is_message_passing.ipynb)
