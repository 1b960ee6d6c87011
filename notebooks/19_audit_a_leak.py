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
# # Audit a model that leaks
#
# A colleague shows you a small causal model. It has learned to predict coin tosses, each from those before it, and its loss is almost
# zero. This is not a good model, it is a crime: nobody can predict a fair coin. Somewhere the model reads the future. But where?
# Three people have checked its attention mask.
#
# A correct mask does not make a model causal: a normalisation, a convolution or a padded batch may carry information from one token
# to another. `ga.audit` examines the model itself. It measures the pairs of tokens along which information **actually** flows, and
# compares them with a graph.
#
# How does it measure them? The derivative of the output of receiver `dst` with respect to the input of sender `src` is a block of
# the Jacobian. Where no information flows, the block is not merely small but exactly zero. So a block that is not zero **is** a
# flow. The audit groups the receivers so that few backward passes are enough, and makes two further tests: it changes the input of
# a sender, and it replaces it by NaN. All tests run on a few inputs. Section 6 shows what that leaves open.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb), or its main sentence: a mask is a graph.
#
# **Afterwards you can** find where a model leaks, and say what an audit without a leak leaves open.
#
# before: [18. Change the graph of a trained model](18_change_the_graph.ipynb) | [the book](README.md) | next: [20. Sinks are one edge](20_sinks_are_one_edge.ipynb)

# %%
import copy
import math

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import to_rgb
from pictures import BLUE, GREY, RED, use_house_style
from torch import nn
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import draw

use_house_style()
_ = torch.manual_seed(0)
T, WIDTH = 12, 16
causal = ga.patterns.causal(T)

# %% [markdown]
# ## 1. The scene
#
# Here are two models: a clean one, of two layers of attention along the causal graph, and the suspect with the excellent loss. A fair
# coin carries one bit, $\log 2 = 0.69$ nats, so no causal model has a smaller loss on new tosses.


# %%
class Layer(nn.Module):
    """Attention along a graph, and then an MLP on each token."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        self.attention = ga.MessagePassingAttention(ga.StandardHeads(WIDTH, 2), backend="auto")
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x):
        x = x + self.attention(x, self.graph)
        return x + self.mlp(x)


class OverTime(nn.Module):
    """Adds the output of a module that mixes tokens, [B, T, width] -> [B, T, width]."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x.mT).mT


clean = nn.Sequential(Layer(causal), Layer(causal))
suspect = nn.Sequential(Layer(causal), OverTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)))


# %%
def train_on_coins(body, steps=120):
    """Train a model with this body to predict coin tosses, and return the loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2, WIDTH), copy.deepcopy(body), nn.Linear(WIDTH, 2))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        coins = torch.randint(2, (128, T))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(coins)[:, :-1].flatten(0, 1), coins[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


curves = {"clean model": (train_on_coins(clean), BLUE), "suspect": (train_on_coins(suspect), RED)}
figure, ax = plt.subplots(figsize=(7.5, 2.8))
for name, (curve, colour) in curves.items():
    ax.plot(curve, color=colour, label=name)
ax.axhline(math.log(2), color=GREY, linestyle="--", label="a coin: log 2")
ax.set(xlabel="step of training", ylabel="loss", ylim=(0, 1), title="predicting coin tosses")
ax.legend(frameon=False)
plt.show()
assert min(curves["clean model"][0]) > 0.6
assert curves["suspect"][0][-1] < 0.1

# %% [markdown]
# The clean model stays at the loss of a coin (dashed), and the suspect falls far below it. On real text this would not have been noticed:
# a leak of one token looks like a good model, until the model generates text and the next token is not there to be read.
#
# ## 2. An audit of the clean model
#
# We first audit the clean model. The verdict counts pairs of two different tokens, since every token may depend on itself. So
# `causal(12)`, which has 78 edges, allows 66 pairs.

# %%
print(ga.audit(clean, causal, (T, WIDTH)))

# %% [markdown]
# ## 3. The usual suspect: the mask
#
# A common mistake is `src <= dst + 1`. On six tokens, the mask and the arcs show what it adds: the red edges come from the next token.

# %%
small = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + 1, 6, name="src <= dst + 1")
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1, 1.8))
draw.mask(small, left)
draw.arcs(small, right, lit=(small - ga.patterns.causal(6)).edge_index.T.tolist())
plt.show()

# %% [markdown]
# The verdict on a model with this mask names every leak, its path, and the part of the model where it enters.

# %%
off_by_one = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + 1, T)
verdict = ga.audit(nn.Sequential(Layer(causal), Layer(off_by_one)), causal, (T, WIDTH))
print(verdict)
assert verdict.leaks
assert not verdict.exact

# %% [markdown]
# But the mask of our suspect is correct: its attention is causal. What else does it contain?

# %%
print(suspect[1])
both_sides = suspect[1].inner
past_only = nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(WIDTH, WIDTH, 3))
verdicts = {}
for name, inner in {"Conv1d, padding=1": both_sides, "Conv1d, padded on the left": past_only}.items():
    verdict = ga.audit(nn.Sequential(Layer(causal), OverTime(inner)), causal, (T, WIDTH))
    verdicts[name] = verdict
    print(
        f"{name}: {len(verdict.leaks)} leaks" + (f", the first: {verdict.leaks[0]}" if verdict.leaks else "")
    )
assert len(verdicts["Conv1d, padding=1"].leaks) == T - 1
assert verdicts["Conv1d, padded on the left"].exact

# %% [markdown]
# It contains a convolution with padding on *both* sides. The convolution is not part of attention, so no mask shows it, and it reads the
# next token. (A BatchNorm in training leaks as well, since its mean is over all tokens.) The case is closed, and here is the evidence:
# the blocks of the Jacobian that are not zero, with a row for each receiver. Blue cells are permitted, and red cells are leaks.


# %%
def influence(body):
    """Return the norm of each block of the Jacobian, ``[dst, src]``."""
    x = torch.randn(1, T, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    blocks = torch.autograd.functional.jacobian(copy.deepcopy(body).double(), x)
    return blocks[0, :, :, 0].norm(dim=(1, 3))


suspects = {
    "clean model": clean,
    "a mask off by one": nn.Sequential(Layer(causal), Layer(off_by_one)),
    "padding on both sides": suspect,
}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.8))
future = torch.ones(T, T).triu(1).bool()
for ax, (name, body) in zip(axes, suspects.items(), strict=True):
    influence_mask = influence(body) > 0
    picture = torch.ones(T, T, 3)
    picture[influence_mask & ~future] = torch.tensor(to_rgb(BLUE))
    picture[influence_mask & future] = torch.tensor(to_rgb(RED))
    ax.imshow(picture)
    ax.set(
        title=f"{name}: {int((influence_mask & future).sum())} leaks",
        xlabel="src (sender)",
        ylabel="dst (receiver)",
    )
    assert (influence_mask & future).any() == (name != "clean model")
plt.show()

# %% [markdown]
# ## 4. The other direction: edges that nobody uses
#
# A model may also use *fewer* edges than its graph has. This is not a leak, but it is worth knowing. Here the graph allows all earlier
# tokens, while two layers of `window(T, 3)` reach only four tokens back.

# %%
narrow = nn.Sequential(*(Layer(ga.patterns.window(T, 3)) for _ in range(2)))
verdict = ga.audit(narrow, causal, (T, WIDTH))
print(f"leaks: {len(verdict.leaks)}, unused: {len(verdict.unused)} of {causal.num_edges - T}")
assert not verdict.leaks
print(ga.audit(narrow, ga.patterns.window(T, 3), (T, WIDTH)))

# %% [markdown]
# ## 5. The model that ships
#
# The model that ships with the library is audited in the same way, here with token ids as inputs. It has two layers, so information may
# take two hops, and two hops along a causal graph are causal. The command is `gnn-attention audit "causal(16)"`.

# %%
model, _ = ga.model.load_trained()
print(ga.audit(model, ga.patterns.causal(16), (16,)))

# %% [markdown]
# ## 6. Make the audit miss a leak
#
# The audit has found every leak so far. Can you hide one? It runs the model on two random inputs, whose numbers are drawn from a
# normal distribution. So put the leak behind a gate that such numbers almost never open:


# %%
class Gate(nn.Module):
    """Reads the next token, where the first number of that token is above a threshold."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def forward(self, x):
        following = functional.pad(x[:, 1:], (0, 0, 0, 1))
        return x + following.where(following[..., :1] > self.threshold, 0.0)


for threshold in (0, 1, 5):
    verdict = ga.audit(Gate(threshold), ga.patterns.self_loops(T), (T, WIDTH))
    print(f"threshold {threshold}: {len(verdict.leaks)} of {T - 1} leaks found")
assert verdict.ok
assert not verdict.poisoned

# %% [markdown]
# At a threshold of 5, all three tests find nothing and the verdict is `ok`, but the gate still reads the future whenever it opens. (One
# standard normal number in 3.5 million is above 5.) So each verdict must be read with care. A leak is a fact: for this input,
# information flowed along this pair. *No leak* is not a proof; it means that no leak showed for the inputs that were tried. Like
# any test, an audit can refute a claim and cannot prove it.
#
# The remedy is to test the inputs that matter. `inputs=` takes your own states or token ids beside the random ones: real texts, long
# texts, padded texts, and everything that the code of the model treats as a special case.

# %%
opening = torch.full((1, T, WIDTH), 6.0)
verdict = ga.audit(Gate(5), ga.patterns.self_loops(T), (T, WIDTH), inputs=opening)
print(f"with an input that opens the gate: {len(verdict.leaks)} of {T - 1} leaks found; {verdict.leaks[0]}")
assert len(verdict.leaks) == T - 1

# %% [markdown]
# **The answer.** The suspect reads the future through a convolution, which no check of its mask could find. An audit found it, together
# with the module where the leak enters. It cannot show that a model is causal; it can only fail to find a leak.
#
# ## 7. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/19_audit_a_leak.py).
#
# **1. A norm over all tokens** (easy, 3 minutes). Put `nn.LayerNorm((T, WIDTH))` between the two layers of section 1. It computes its
# mean and variance over all tokens. How many pairs leak?
#
# <details><summary>Hint</summary>
#
# After this norm, every token depends on every other. Count the pairs that are not in the causal graph.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

normed = nn.Sequential(Layer(causal), nn.LayerNorm((T, WIDTH)), Layer(causal))
verdict = ga.audit(normed, causal, (T, WIDTH))
assert answer == len(verdict.leaks), "another number of pairs leaks"
print("right:", answer)

# %% [markdown]
# **2. A transposed mask** (medium, 5 minutes). A layer is built with `ga.patterns.window(T, 3).T` and audited against `window(T, 3)`:
# its author confused rows and columns. Write the graph of the pairs that leak.
#
# <details><summary>Hint</summary>
#
# Graphs can be subtracted. Which edges do both windows have?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

verdict = ga.audit(Layer(ga.patterns.window(T, 3).T), ga.patterns.window(T, 3), (T, WIDTH))
leaks = {(leak.src, leak.dst) for leak in verdict.leaks}
assert leaks == set(map(tuple, answer.edge_index.T.tolist())), "other pairs leak"
print("right:", answer.num_edges, "pairs")

# %% [markdown]
# **3. Two layers as one** (medium, 5 minutes). The two narrow layers of section 4 are exact for two hops along `window(T, 3)`. For
# which window are they exact with a *single* hop (`layers=1`)?
#
# <details><summary>Hint</summary>
#
# How many tokens back do two hops along the window reach?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: the w of window(T, w)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert ga.audit(narrow, ga.patterns.window(T, answer), (T, WIDTH), layers=1).exact, "not exact"
print(f"right: window(T, {answer})")

# %% [markdown]
# **4. A leak of your own** (medium, 10 minutes, code). Write a module that leaks from the last token to the first, and from no other
# token to an earlier one, on inputs `[batch, T, WIDTH]`.
#
# <details><summary>Hint</summary>
#
# Add a multiple of `x[:, -1]` to `x[:, 0]`, and change no other token. `torch.cat` puts the tokens together again.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: an nn.Module

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

verdict = ga.audit(answer, causal, (T, WIDTH))
leaks = [(leak.src, leak.dst) for leak in verdict.leaks]
assert leaks == [(T - 1, 0)], f"the leaks are {leaks[:3]}"
print("right: one leak, from the last token to the first")

# %% [markdown]
# ---
# before: [18. Change the graph of a trained model](18_change_the_graph.ipynb) | [the book](README.md) | next: [20. Sinks are one edge](20_sinks_are_one_edge.ipynb)
