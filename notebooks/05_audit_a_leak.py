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
# A causal model must not see the future. Whether it does is not a matter of reading its mask: the mask may be right and a
# normalisation, a convolution or a padded batch may still carry something across. `ga.audit` asks the model itself: it finds
# the pairs of tokens along which information **really** flows and compares them with a graph.
#
# How can that be exact? The derivative of receiver `dst`'s output with respect to sender `src`'s input is a block of the
# Jacobian. Where no information flows it is zero, not small: exactly zero, in float64. The audit groups receivers so that few
# backward passes suffice, and calls two further witnesses: it changes a sender, and it poisons one with NaN.
#
# **Afterwards you can** prove that a model is causal, or name its leaks.
#
# before: [Change the graph of a trained model](04_change_the_graph.ipynb) | [the book](README.md) | next: [Sinks are one edge](16_sinks_are_one_edge.ipynb)

# %%
import warnings

import torch
from torch import nn

import gnn_attention as ga

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
_ = torch.manual_seed(0)
T, WIDTH = 12, 16
causal = ga.patterns.causal(T)

# %% [markdown]
# ## 1. A clean model
#
# The verdict counts pairs of two different tokens: that a token may know of itself goes without saying. So `causal(12)`, which
# has 78 edges, allows 66 pairs.


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


clean = nn.Sequential(Layer(causal), Layer(causal))
print(ga.audit(clean, causal, (T, WIDTH)))

# %% [markdown]
# ## 2. A mask that is off by one
#
# A common mistake: `src <= dst + 1`. The verdict names every leak, its way, and the part of the model where it enters.

# %%
off_by_one = ga.TokenGraph.from_rule(lambda b, h, dst, src: src <= dst + 1, T)
verdict = ga.audit(nn.Sequential(Layer(causal), Layer(off_by_one)), causal, (T, WIDTH))
print(verdict)
assert verdict.leaks
assert not verdict.exact

# %% [markdown]
# ## 3. Leaks that no mask shows
#
# Here attention is perfectly causal. What leaks is beside it: a convolution with padding on both sides reads the next token. (A
# BatchNorm in training leaks as well, since its mean is over all tokens.)


# %%
class OverTime(nn.Module):
    """Something that mixes tokens, [B, T, width] -> [B, T, width]."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x.mT).mT


both_sides = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
past_only = nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(WIDTH, WIDTH, 3))
for name, inner in {"Conv1d, padding=1": both_sides, "Conv1d, padded on the left": past_only}.items():
    verdict = ga.audit(nn.Sequential(Layer(causal), OverTime(inner)), causal, (T, WIDTH))
    print(
        f"{name}: {len(verdict.leaks)} leaks" + (f", the first: {verdict.leaks[0]}" if verdict.leaks else "")
    )

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
# ## 6. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/05_audit_a_leak.py).
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
# before: [Change the graph of a trained model](04_change_the_graph.ipynb) | [the book](README.md) | next: [Sinks are one edge](16_sinks_are_one_edge.ipynb)
