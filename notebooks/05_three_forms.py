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
# each pair out, and two things are left for each token: a **pattern**, which says whom it listens to, and a **message**, which
# says what it tells. That is the shorter description, and the same function.
#
# Whether one also *computes* it that way is a question of cost, which [notebook 09](09_why_thin_factors.ipynb) answers. This one
# shows three forms of one head that give the same numbers, where patterns and messages arise in each, what can be read from
# them, and where the story ends: rotated queries and keys.
#
# The names and the forms are those of Chris McCormick's two articles *Patterns and Messages* ("the source text" below). You
# need [notebook 01](01_attention_is_message_passing.ipynb) and the first two sections of
# [notebook 02](02_many_heads_many_graphs.ipynb).
#
# **Afterwards you can** read a head as what it looks for and what it says.
#
# before: [Four perspectives on one run](04_four_perspectives.ipynb) | [the book](README.md) | next: [Matrix multiplication is message passing](06_matrix_multiplication_is_message_passing.ipynb)

# %%
import math
import warnings

import matplotlib.pyplot as plt
import torch
from pictures import draw_product
from torch.nn import functional

import gnn_attention as ga

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
from gnn_attention.interpret import circuits  # noqa: E402

torch.set_grad_enabled(False)  # nothing is trained here
torch.set_default_dtype(torch.float64)  # so that "equal" can mean equal to twelve digits

BLUE, ORANGE, RED, GREEN, GREY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#999999"
plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.constrained_layout.use": True})


# %% [markdown]
# Our material is the first layer of the trained model that ships with the package, listening to one sentence. `x` are the
# states that the layer is given.

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
# The first step cuts $W_O$ into a block of rows for each head. The second moves a bracket: instead of mixing short values and
# projecting the mixture, project every value first and mix the results. What is mixed now has a meaning of its own, without the
# weights: it is what token $j$ tells through head $h$, its **message**, as wide as a state.

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
# ## 2. Merging two projections into one
#
# $W_V^h$ squeezes a state into a few numbers, $W_O^h$ makes it wide again. Multiplied out they are one square matrix, the **message projection**
# $W_M$. $W_Q^h$ and $W_K^h$ are merged in the same way into the **pattern projection** $W_P$. Here they are, drawn to scale. On
# the left, what is stored and trained; on the right, what it amounts to.

# %% tags=["S1.7", "S1.10"]
X = ("X", n, width, GREY)
figure, axes = plt.subplots(2, 2, figsize=(13, 5.4))
thin_message = [
    X,
    (r"$W_V$", width, d, ORANGE),
    (r"$W_O$", d, width, ORANGE),
    "=",
    ("messages M", n, width, ORANGE),
]
draw_product(axes[0, 0], thin_message, "values, then output")
draw_product(
    axes[0, 1],
    [X, (r"$W_M$", width, width, ORANGE), "=", ("messages M", n, width, ORANGE)],
    "one message projection",
)
thin_pattern = [
    X,
    (r"$W_Q$", width, d, BLUE),
    (r"$W_K^\top$", d, width, BLUE),
    "=",
    ("patterns P", n, width, BLUE),
]
draw_product(axes[1, 0], thin_pattern, "queries, then keys")
draw_product(
    axes[1, 1],
    [X, (r"$W_P$", width, width, BLUE), "=", ("patterns P", n, width, BLUE)],
    "one pattern projection",
)
plt.show()

# %% [markdown]
# A pattern is as wide as a state because it *describes* a state: the one that its receiver looks for. How well a sender fits is
# a dot product of the two. And the channel width $d$ has not vanished: it is the **rank** of both square matrices, and it stays
# in the scale $1 / \sqrt d$.

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
# For one receiver $x_q$ and one head, the source text prints three lines:
#
# $$\text{standard} \quad \text{softmax}\Big( \frac{x_q W_Q \; (X W_K)^\top}{\sqrt d} \Big) \; X W_V \; W_O$$
#
# $$\text{factored} \quad \text{softmax}\Big( \frac{\overbrace{x_q W_Q W_K^\top}^{p} X^\top}{\sqrt d} \Big) \;
# \overbrace{X W_V W_O}^{M}$$
#
# $$\text{merged} \quad \text{softmax}\Big( \frac{\overbrace{x_q W_P}^{p} X^\top}{\sqrt d} \Big) \; \overbrace{X W_M}^{M}$$
#
# The standard form never has a pattern or a message in its hands: it compares in the short space of the channels, and it mixes
# before it widens. In the other two forms patterns and messages exist. All three run through the same layer, over any graph,
# with any change of the logits (here the model's own: a learned number for each distance).


# %% tags=["S1.3", "S1.21"]
def draw_flow(ax, title, looks, tells):
    """Two columns that meet only at the top: what decides who is heard, and what decides what is said; bold: p and M."""
    for column, boxes, colour in ((0, looks, BLUE), (1.4, tells, ORANGE)):
        for row, text in enumerate(boxes):
            bold = "bold" if text in ("p", "M") else "normal"
            box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "alpha": 0.35, "edgecolor": "black"}
            ax.text(column, row, text, ha="center", va="center", fontsize=10, fontweight=bold, bbox=box)
            if row:
                ax.annotate("", (column, row - 0.28), (column, row - 0.72), arrowprops={"arrowstyle": "->"})
    top = max(len(looks), len(tells)) - 0.1
    ax.text(0.7, top, "weights times what is told = o", ha="center", va="center", fontsize=10)
    for column, boxes in ((0, looks), (1.4, tells)):
        ax.annotate("", (0.7, top - 0.25), (column, len(boxes) - 0.65), arrowprops={"arrowstyle": "->"})
    ax.set(xlim=(-0.8, 2.2), ylim=(-0.6, 5.4), title=title)
    ax.set_axis_off()


figure, axes = plt.subplots(1, 3, figsize=(12, 4.6))
soft, every = r"softmax($\,\cdot\,/\sqrt{d}\,$)", r"$p\,X^\top$: p with all states X"
keys = r"$q\,K^\top$: q with all keys K"
draw_flow(axes[0], "standard", ["$x_q$, X", "$W_Q$, $W_K$", keys, soft], ["X", "$W_V$", "mix, then $W_O$"])
draw_flow(
    axes[1],
    "factored",
    ["$x_q$", r"$W_Q$, then $W_K^\top$", "p", every, soft],
    ["X", "$W_V$, then $W_O$", "M"],
)
draw_flow(axes[2], "merged", ["$x_q$", "$W_P$", "p", every, soft], ["X", "$W_M$", "M"])
plt.show()

# %% [markdown]
# In all three the blue column and the orange column are two processes that never touch until the end: change a matrix on the left, and no
# message changes; change one on the right, and no weight does (exercise 3).

# %%
forms = {"standard": heads, "factored": ga.FactoredHeads.of(heads), "merged": ga.MergedHeads.of(heads)}
expected = ga.MessagePassingAttention(heads, position)(x, graph)

for name, form in forms.items():
    receives, (sends, tells) = form.receive(x[None])[0], (part[0] for part in form.send(x[None]))
    update = ga.MessagePassingAttention(form, position)(x, graph)
    assert torch.allclose(update, expected, rtol=0, atol=1e-12)
    where = "no P, no M" if name == "standard" else "P is what a receiver brings, M what a sender tells"
    print(
        f"{name:>8}: compares {list(receives.shape)} with {list(sends.shape)}, mixes {list(tells.shape)}: {where}"
    )
    if name != "standard":
        assert torch.allclose(receives, P, rtol=0, atol=1e-12)
        assert torch.allclose(sends, x.expand_as(sends))
        assert torch.allclose(tells, M, rtol=0, atol=1e-12)

# %% [markdown]
# ## 4. All of it in ten lines
#
# The final formulation has two matrices for each head and no output projection. As a plain function:


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
# ## 5. Whose pattern is it?
#
# A logit is $x_i W_P x_j^\top$, with the receiver $i$ on the left and the sender $j$ on the right. One may put the bracket on
# either side. $(x_i W_P)$ is the **receiver's** pattern: what does $i$ look for? $(x_j W_P^\top)$ is the **sender's**: by whom
# does $j$ want to be heard? The numbers are the same, and the matrices are each other's transpose.

# %%
receivers, senders = ga.FactoredHeads.of(heads), ga.FactoredHeads.of(heads, side="sender")
P_receiver, P_sender = receivers.patterns(x[None])[0], senders.patterns(x[None])[0]

assert torch.allclose(P_sender, x @ W_P.mT, rtol=0, atol=1e-12)
assert torch.allclose(P_receiver @ x.T, x @ P_sender.mT, rtol=0, atol=1e-12)
assert not torch.allclose(P_receiver, P_sender, atol=0.1)
assert torch.allclose(ga.MessagePassingAttention(senders, position)(x, graph), expected, rtol=0, atol=1e-12)
print("the same logits from patterns of the receivers and from patterns of the senders; the patterns differ")

# %% [markdown]
# The difference counts when a text is written token by token. The receiver is new each time, the senders have been there. So a
# pattern that is to be computed once and kept must be the sender's. (The source text defines its patterns on the receiver's
# side, $p = x W_P$, and then caches them: it has changed the side on the way, and with it the matrix.)
#
# ## 6. How long is a pattern?
#
# A dot product rewards the right direction, and also sheer length:
#
# $$p_i \cdot x_j = |p_i| \; |x_j| \, \cos(p_i, x_j)$$
#
# "Inspecting the magnitude of pattern vectors could be interesting", says the text. Let us look, at somewhat more tokens.

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
# The states have been normalised before they come here, so they are all about equally long. The patterns are not. What does the
# length do? That depends on *whose* pattern it is. These are the receivers', and the length of a receiver's pattern multiplies *all*
# its logits alike. So it does not change who fits best, but **how sharply** the receiver listens: a long
# pattern makes the softmax sharp, a pattern near 0 makes it even. It acts as an *inverse temperature*, a
# factor in front of all logits ([notebook 07](07_why_the_square_root.ipynb), section 4), and one of the receiver's own.
#
# To see it we count the senders that a receiver effectively hears, $e^{\text{entropy}}$, as a share of those it may hear: 1 if
# it listens evenly. Below are the last 32 receivers. (Without the model's numbers for distances, which would blur the picture.)

# %% tags=["S1.16"]
layer = ga.MessagePassingAttention(heads)
_, (_, listened) = layer(y, line, return_attention_weights=True)
table = torch.zeros(heads.num_heads, len(y), len(y))
table[:, dst, src] = listened.T
effective = torch.special.entr(table).sum(-1).exp() / line.in_degree()
late = slice(len(y) - 32, None)

figure, (left, right) = plt.subplots(1, 2, figsize=(13, 3.8), width_ratios=[1.7, 1])
looks = zip((BLUE, ORANGE, GREEN, RED), ("o", "s", "^", "D"), strict=True)
for h, (colour, marker) in enumerate(looks):
    left.plot(range(32), lengths[h, late], marker, color=colour, markersize=4, label=f"head {h}")
    right.plot(lengths[h, late], effective[h, late], marker, color=colour, markersize=4)
left.set_xticks(
    range(32),
    [piece[:8] for piece in code_pieces[late]],
    rotation=75,
    ha="right",
    rotation_mode="anchor",
    fontsize=7,
)
left.set(ylabel="length of the pattern", title="who listens sharply, in which head", ylim=(0, None))
left.legend(frameon=False, ncols=4, fontsize=8)
right.set(
    xlabel="length of the pattern",
    ylabel="share effectively heard",
    title="a long pattern listens sharply",
)
plt.show()

# %% tags=["S1.16"]
ranks = [numbers[:, late].flatten().argsort().argsort().double() for numbers in (lengths, effective)]
correlation = torch.corrcoef(torch.stack(ranks))[0, 1]
assert correlation < -0.6
print(f"rank correlation of the two: {correlation:.2f}")

signs = torch.tensor(
    [not any(map(str.isalnum, piece.replace(r"\n", ""))) for piece in code_pieces]
)  # \n: the end of a line
for h in (0, 1):
    print(
        f"head {h}: patterns of signs are {lengths[h, signs].mean():.1f} long, of words {lengths[h, ~signs].mean():.1f}"
    )
    assert lengths[h, signs].mean() > 1.5 * lengths[h, ~signs].mean()

# %% [markdown]
# In heads 0 and 1 punctuation attends sharply (brackets, commas, line ends); word pieces spread their attention almost
# evenly. Tripling the pattern is the same as tripling the inverse temperature, exactly:

# %%
angles = (
    functional.normalize(P_code[0], dim=-1) @ y.T
)  # what is left of the logits when every pattern has length 1
tripled = (3 * P_code[0] @ y.T / math.sqrt(d)).softmax(-1)
assert torch.allclose(tripled, (angles * 3 * lengths[0, :, None] / math.sqrt(d)).softmax(-1))
assert torch.equal(
    angles.argmax(-1), (P_code[0] @ y.T).argmax(-1)
)  # whom it fits best does not depend on its length
print("the length of a receiver's pattern changes how sharply it listens, not whom it prefers")

# %% [markdown]
# And the patterns that are *cached*? Those are the ones the text speaks of, and they are the **senders'**. Is the lesson the same? The
# length of a sender's pattern stands in one logit of each receiver: its own. A sender with a long pattern is heard more by everybody, so
# here the length decides *who wins*. Bring all of them to one length, and ask every receiver for its favourite again:


# %% tags=["S1.16"]
def favourites_lost(patterns_of_receivers, patterns_of_senders, states):
    """The share of receivers whose favourite changes when all patterns get one length: theirs, the senders'."""
    past, unit = line.mask(), functional.normalize
    true = (patterns_of_receivers @ states.T).masked_fill(~past, -math.inf).argmax(-1)
    receivers_alike = unit(patterns_of_receivers, dim=-1) @ states.T
    senders_alike = states @ unit(patterns_of_senders, dim=-1).mT
    return [
        (fits.masked_fill(~past, -math.inf).argmax(-1) != true).double().mean(-1)
        for fits in (receivers_alike, senders_alike)
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
# So both halves are true, and they are opposites: the length of what a receiver looks for is its **temperature**, the length of what a
# sender answers to is its **loudness**. "Inspecting the magnitude of pattern vectors" was a good idea.
#
# **What does a pattern look for?** It is as wide as a state, and so is every embedding. So it can be read: which words of the
# vocabulary fit it best? And a message, dotted with the *unembedding*, says which words it makes likelier. (`circuits.top_tokens` takes
# the best by dot product. Nothing is run here: two products with matrices of the model.)

# %% tags=["S0.7", "S1.11"]
words = vocabulary.pieces(range(len(vocabulary)))
unembedding = model.unembedding.weight * model.norm.weight
for number, head in ((0, 0), (0, 3), (1, 0), (1, 2)):
    every_word = model.blocks[number].attention_norm(model.embedding.weight)
    form = ga.FactoredHeads.of(model.layers[number].heads)
    for token in (" do", " if", " return"):
        one = every_word[vocabulary.encode(token)][None]
        looks = circuits.top_tokens(form.patterns(one)[0, head, 0], every_word, 4).tokens
        says = circuits.top_tokens(form.messages(one)[0, head, 0], unembedding, 4).tokens
        looks, says = ([words[i] for i in found.tolist()] for found in (looks, says))
        print(f"{number}.{head} {token!r:>9} looks for {looks!s:42} says {says}")
        if (number, head, token) == (0, 0, " do"):
            assert looks == [" elif", " if", " If", " while"]
        if (number, head, token) == (1, 0, " do"):
            assert says[:2] == ["do", " do"]

# %% [markdown]
# In head 0 of layer 0 ` do` looks for the words that open a block. In head 2 of layer 1 ` return` looks for what opens a bracket or a
# text. And in head 0 of layer 1, an induction head, ` do` *says* `do`, ` do`: it copies. Much else cannot be read, and it would be
# dishonest to leave it out: a pattern is compared with states, and an embedding is only what a state begins as. Still, this is what "everything
# stays in the space of the model" buys.

# %% [markdown]
# ## 7. What the softmax is for
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
# true. It can never be longer than the longest message, since it is a weighted mean of messages: this is an upper **bound**.
# But whoever listens to many evenly hears a mean of many vectors that point in all directions, and these cancel. Random
# messages of width 64:

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

figure, ax = plt.subplots(figsize=(7, 3.6))
ax.loglog(counts, longest, ":", color=GREY, label="the longest message (bound)", base=2)
ax.loglog(counts, sharp, "s-", color=ORANGE, label="sharp listening", base=2)
ax.loglog(counts, even, "o-", color=BLUE, label="even listening", base=2)
ax.set(
    xlabel="tokens heard",
    ylabel="mean length of what arrives",
    title="the softmax bounds the size, it does not fix it",
)
ax.legend(frameon=False)
plt.show()
print(f"even listening: {even[0]:.2f} with one token, {even[-1]:.2f} with 1024")
assert math.isclose(
    even[-1] * 32, 7.97, rel_tol=0.02
)  # a random vector of width 64 is 7.97 long, a mean of 1024 a 32nd of that

# %% [markdown]
# ## 8. Where patterns end: rotations
#
# The text takes its sizes from Llama 3. But Llama rotates queries and keys by angles that grow with the position (RoPE), so
# that a logit depends on the **distance** of the two tokens. The rotation stands *between* $W_Q$ and $W_K^\top$:
#
# $$q_i R_{i-j} k_j^\top = x_i \underbrace{W_Q R_{i-j} W_K^\top}_{W_P(i - j)} x_j^\top$$
#
# There is not one pattern matrix, but one for each distance. A pattern that was computed once would be right for one listener
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
    xlabel="distance dst - src",
    ylabel="relative difference",
    title="how far $W_P$(distance) is from $W_P$(0)",
    ylim=(0, None),
)
plt.show()
print(f"already one step away it differs by {change[1]:.0%}")

# %% [markdown]
# Why can *keys* be cached in such a model? Because a rotation by $i - j$ is one by $i$ undone by one by $j$: each side can turn
# its own thin vector by its own position, once and for all. A sender's pattern goes a step further, through $W_Q^\top$, and the
# receiver's rotation would have to come before that.
#
# Messages are not rotated and remain as they were. One more detail of Llama: several query heads share one $W_V$ (*grouped
# heads*), but each has its own block of $W_O$. So their values are the same, and their messages are not.

# %%
W_M = turned.message_matrix().full()
values = turned.send(x[None])[1]
assert values.shape[1] == 2  # heads 0 and 1 share the first
assert not torch.allclose(W_M[0], W_M[1], atol=1e-2)
print(f"{values.shape[1]} sets of values, {W_M.shape[0]} message matrices")

# %% [markdown]
# ## 9. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/05_three_forms.py).
#
# **1. The factors are not unique.** Multiply $W_Q$ by any invertible matrix $R$, `d` by `d`, from the right. By which matrix
# must $W_K$ be multiplied from the right so that no logit changes? (So nobody can say what a single channel of a query means,
# while $W_P$ has a meaning.)

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
# **2. A message, heard alone.** If token 6 heard token 3 and nobody else, through head 0 alone, what would its state gain? Give
# the 128 numbers from `x` and the matrices of `heads`. No weight is needed: why?

# %% tags=["exercise"]
answer = None  # your turn: a tensor of 128 numbers

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

alone = ga.StandardHeads.from_arrays(*(W[:1] for W in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O)))
one_edge = ga.convert.from_edge_index(torch.tensor([[3], [6]]), n)
assert torch.allclose(answer, ga.MessagePassingAttention(alone)(x, one_edge)[6]), "it gains something else"
print("right: a share of 1, whatever the logit; so it is the message of the sender")

# %% [markdown]
# **3. Say nothing, hear everything.** Change one of the four matrices of `heads` such that every weight stays as it is and head
# 2 tells nothing to anybody. Give the four matrices.

# %% tags=["exercise"]
answer = None  # your turn: (W_Q, W_K, W_V, W_O)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

quiet = ga.StandardHeads.from_arrays(*answer)
run = ga.trace.record(ga.MessagePassingAttention(quiet), x, graph).layers[0]
before = ga.trace.record(ga.MessagePassingAttention(heads), x, graph).layers[0]
assert torch.equal(run.weights(), before.weights()), "somebody listens to somebody else now"
assert not run.results(2).any(), "head 2 still says something"
assert torch.allclose(run.update, before.update - before.results(2)[:, :, 0]), "another head has changed too"
print("right: who is listened to, and what is said, are two independent processes")

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
# before: [Four perspectives on one run](04_four_perspectives.ipynb) | [the book](README.md) | next: [Matrix multiplication is message passing](06_matrix_multiplication_is_message_passing.ipynb)
