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
# Somebody shows you a small causal model. It has learned to guess coin tosses, each from those before it, and its loss went to almost
# nothing. That is not a good model. That is a crime: nobody can foresee a coin. Somewhere the future comes in. But where? The
# attention mask, you are told, has been checked by three people.
#
# Whether a model is causal is not a matter of reading its mask: a normalisation, a convolution or a padded batch may carry
# something across. `ga.audit` asks the model itself: it finds the pairs of tokens along which information **really** flows and
# compares them with a graph.
#
# What does it look at? The derivative of receiver `dst`'s output with respect to sender `src`'s input is a block of the
# Jacobian. Where no information flows it is zero, not small: exactly zero, in float64. So a block that is not zero **is** a flow.
# The audit groups receivers so that few backward passes suffice, and calls two further witnesses: it changes a sender, and it
# poisons one with NaN. All this happens at a few inputs. What that leaves open is section 6.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb), or its one sentence: a mask is a graph.
#
# **Afterwards you can** find where a model leaks, and say what an audit without a leak leaves open.
#
# before: [Change the graph of a trained model](18_change_the_graph.ipynb) | [the book](README.md) | next: [Sinks are one edge](20_sinks_are_one_edge.ipynb)

# %%
import copy
import math
import warnings

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional

import gnn_attention as ga

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
_ = torch.manual_seed(0)
T, WIDTH = 12, 16
causal = ga.patterns.causal(T)
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "figure.constrained_layout.use": True})

# %% [markdown]
# ## 1. The scene
#
# Here are two models: one that nobody suspects, two layers of attention over the causal graph, and the one with the marvellous
# loss. A fair coin carries one bit, $\log 2 = 0.69$ nats. No causal model gets below that.


# %%
class Layer(nn.Module):
    """Attention over a graph, then an MLP on each token."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        self.attention = ga.MessagePassingAttention(ga.StandardHeads(WIDTH, 2), backend="auto")
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x):
        x = x + self.attention(x, self.graph)
        return x + self.mlp(x)


class OverTime(nn.Module):
    """Something that mixes tokens, [B, T, width] -> [B, T, width]."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x.mT).mT


clean = nn.Sequential(Layer(causal), Layer(causal))
suspect = nn.Sequential(Layer(causal), OverTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)))


# %%
def guesses_coins(body, steps=120):
    """The loss of each step while a model with this body learns to guess the next of fresh coin tosses."""
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


curves = {"nobody suspects it": (guesses_coins(clean), BLUE), "the suspect": (guesses_coins(suspect), ORANGE)}
figure, ax = plt.subplots(figsize=(7.5, 2.8))
for name, (curve, colour) in curves.items():
    ax.plot(curve, color=colour, label=name)
ax.axhline(math.log(2), color=GREY, linestyle="--", label="a coin: log 2")
ax.set(xlabel="step of training", ylabel="loss", ylim=(0, 1), title="guessing coin tosses")
ax.legend(frameon=False)
plt.show()
assert min(curves["nobody suspects it"][0]) > 0.6
assert curves["the suspect"][0][-1] < 0.1

# %% [markdown]
# On real text nobody would have noticed: a leak of one token looks like a clever model, until it has to write, and the future
# that it used to read is not there. So let us not wait for coins.
#
# ## 2. The witness, and an alibi
#
# First the model that nobody suspects. The verdict counts pairs of two different tokens: that a token may know of itself goes
# without saying. So `causal(12)`, which has 78 edges, allows 66 pairs.

# %%
print(ga.audit(clean, causal, (T, WIDTH)))

# %% [markdown]
# ## 3. The usual suspect: the mask
#
# A common mistake: `src <= dst + 1`. The verdict names every leak, its way, and the part of the model where it enters.

# %%
off_by_one = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + 1, T)
verdict = ga.audit(nn.Sequential(Layer(causal), Layer(off_by_one)), causal, (T, WIDTH))
print(verdict)
assert verdict.leaks
assert not verdict.exact

# %% [markdown]
# But the mask of our suspect *was* checked, and it is right: its attention is perfectly causal. What else does it have?

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
# A convolution with padding on *both* sides. It stands beside attention, where no mask shows it, and reads the next token. (A BatchNorm in
# training leaks as well, since its mean is over all tokens.) Case closed, and here is the evidence: the size of each block of the
# Jacobian, a row for each receiver. Blue may be there. Orange must not.


# %%
def influence(body):
    """The norm of each block of the Jacobian, ``[dst, src]``: how far a sender's input moves a receiver's output."""
    x = torch.randn(1, T, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    blocks = torch.autograd.functional.jacobian(copy.deepcopy(body).double(), x)
    return blocks[0, :, :, 0].norm(dim=(1, 3))


suspects = {
    "nobody suspects it": clean,
    "a mask off by one": nn.Sequential(Layer(causal), Layer(off_by_one)),
    "padding on both sides": suspect,
}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.8))
future = torch.ones(T, T).triu(1).bool()
for ax, (name, body) in zip(axes, suspects.items(), strict=True):
    influence_mask = influence(body) > 0
    picture = torch.ones(T, T, 3)
    picture[influence_mask & ~future] = torch.tensor([0.0, 0.447, 0.698])
    picture[influence_mask & future] = torch.tensor([0.835, 0.369, 0.0])
    ax.imshow(picture)
    ax.set(
        title=f"{name}: {int((influence_mask & future).sum())} leaks",
        xlabel="src (sender)",
        ylabel="dst (receiver)",
    )
    assert (influence_mask & future).any() == (name != "nobody suspects it")
plt.show()

# %% [markdown]
# ## 4. The other direction: edges that nobody uses
#
# A model may also hear *less* than it is allowed to. That is no leak, but worth knowing: here the graph allows everything in the
# past, while two layers of `window(3)` reach only four tokens back.

# %%
narrow = nn.Sequential(*(Layer(ga.patterns.window(T, 3)) for _ in range(2)))
verdict = ga.audit(narrow, causal, (T, WIDTH))
print(f"leaks: {len(verdict.leaks)}, unused: {len(verdict.unused)} of {causal.num_edges - T}")
assert not verdict.leaks
print(ga.audit(narrow, ga.patterns.window(T, 3), (T, WIDTH)))

# %% [markdown]
# ## 5. The model that ships
#
# From the command line: `gnn-attention audit "causal(16)"`. The same from Python, over token ids: two layers, so the graph may be
# used twice, and a causal graph used twice is causal.

# %%
model, _ = ga.model.load_trained()
print(ga.audit(model, ga.patterns.causal(16), (16,)))

# %% [markdown]
# ## 6. Make the audit miss a leak
#
# The audit has found every leak so far. Can you hide one? It sees the model at two random inputs, whose numbers are drawn from a
# normal distribution. So put the leak behind a gate that such numbers hardly ever open:


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
# At a threshold of 5 none of the three witnesses has seen anything, the verdict is `ok`, and the gate reads the future whenever it opens. (One standard normal number in 3.5 million
# is above 5.) So remember what each verdict says. A leak is a fact: at this input, information crossed that pair. *No leak* is no proof;
# it says that none showed at the inputs that were tried. An audit refutes, as any test does.
#
# What helps is to try the inputs that matter. `inputs=` takes states or token ids of your own, beside the random ones: real texts,
# long ones, padded ones, and whatever the code of the model treats as a special case.

# %%
loud = torch.full((1, T, WIDTH), 6.0)
verdict = ga.audit(Gate(5), ga.patterns.self_loops(T), (T, WIDTH), inputs=loud)
print(f"with an input that opens the gate: {len(verdict.leaks)} of {T - 1} leaks found; {verdict.leaks[0]}")
assert len(verdict.leaks) == T - 1

# %% [markdown]
# ## 7. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/19_audit_a_leak.py).
#
# **1. A norm over everything.** Put `nn.LayerNorm((T, WIDTH))` between the two layers of section 1: it takes its mean and its
# spread over all tokens. How many pairs leak?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

normed = nn.Sequential(Layer(causal), nn.LayerNorm((T, WIDTH)), Layer(causal))
verdict = ga.audit(normed, causal, (T, WIDTH))
assert answer == len(verdict.leaks), "not that many"
print("right:", answer)

# %% [markdown]
# **2. The wrong way round.** A layer is built with `ga.patterns.window(T, 3).T` and audited against `window(T, 3)`: somebody
# mistook rows for columns. Give the graph of the pairs that leak.

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

verdict = ga.audit(Layer(ga.patterns.window(T, 3).T), ga.patterns.window(T, 3), (T, WIDTH))
leaks = {(leak.src, leak.dst) for leak in verdict.leaks}
assert leaks == set(map(tuple, answer.edge_index.T.tolist())), "other pairs leak"
print("right:", answer.num_edges, "pairs")

# %% [markdown]
# **3. Two rounds in one.** The two narrow layers of section 4 are exact against `window(T, 3)`, used twice. Against which window
# are they exact when it may be used only *once* (`layers=1`)?

# %% tags=["exercise"]
answer = None  # your turn: the w of window(T, w)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert ga.audit(narrow, ga.patterns.window(T, answer), (T, WIDTH), layers=1).exact, "not exact"
print(f"right: window(T, {answer})")

# %% [markdown]
# ---
# before: [Change the graph of a trained model](18_change_the_graph.ipynb) | [the book](README.md) | next: [Sinks are one edge](20_sinks_are_one_edge.ipynb)
