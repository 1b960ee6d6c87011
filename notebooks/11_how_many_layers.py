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
# # How many layers until the last token reaches the first?
#
# A sparse graph is cheap because most pairs of tokens are not connected. Information can still travel between them in several
# layers: what a token receives in one layer becomes part of the message that it sends in the next. One layer is one hop, and in a
# model of $L$ layers information travels along paths of at most $L$ edges. So a question about a model, *which tokens can
# [influence](../docs/glossary.md#influence) this one?*, becomes a question about a graph: *from which nodes is this node reached in $L$ steps?* How many layers
# does a graph need until the last token depends on the first, and which graph needs the fewest for its edges?
#
# You need the first two sections of [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** compute the reach of a mask before training anything.
#
# before: [10. The zoo: attention masks as graphs](10_the_zoo.ipynb) | [the book](README.md) | next: [12. Sparse against dense, trained](12_sparse_against_dense.ipynb)

# %%
import math
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, ORANGE, RED, use_house_style

from gnn_attention import analyse, attend, draw, patterns
from gnn_attention.convert.expressions import parse

use_house_style()

# %% [markdown]
# ## 1. One hop per layer
#
# In `window(8, 3)` a token attends to itself and the two tokens before it. Here is that graph twice: as a mask and as arcs.

# %%
small = patterns.window(8, 3)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 2))
draw.mask(small, left)
draw.arcs(small, right)
plt.show()

# %% [markdown]
# Neither picture shows what several layers do. For that, the network is *unrolled*: every layer is a row of the same tokens, and
# the edges run from one row to the next. In the picture below, of a longer window, every state that can influence the last token
# at the top is blue. In the bottom row these tokens are its **receptive field**, which grows by two tokens with each layer.
#
# On [the page](../docs/explore.html) that `gnn-attention explore` writes, *Reach* shows the same for any graph and token, layer by layer.

# %%
window = patterns.window(12, 3)
draw.layers(window, 3)

# %% [markdown]
# Each layer adds $w - 1$ tokens, where $w$ is the width of the window. After $L$ layers the last of $n$ tokens is reached by
#
# $$\min(n, \; L (w - 1) + 1)$$
#
# tokens, and the first token reaches the last after $\lceil (n - 1) / (w - 1) \rceil$ layers.

# %%
for layers in range(1, 5):
    field = analyse.receptive_field(window, 11, layers)
    print(f"layers: {layers}, tokens that reach token 11: {field.tolist()}")
    assert len(field) == min(12, layers * 2 + 1)

for n, w in [(12, 3), (100, 4), (4096, 512)]:
    num_layers = analyse.layers_between(patterns.window(n, w), 0, n - 1)
    assert num_layers == math.ceil((n - 1) / (w - 1))
    print(f"window({n}, {w}): {num_layers} layers from the first token to the last")

# %% [markdown]
# A path from the first token to the last is a **witness** that the first can influence the last. It lists the tokens that pass
# the information on, one for each layer.

# %%
path = analyse.witness(window, 0, 11)
print(" -> ".join(map(str, path)))
draw.arcs(window, lit=list(pairwise(path)), title="a shortest path from the first token to the last")

# %% [markdown]
# ## 2. Does a model respect the graph?
#
# The receptive field says which tokens *can* have an influence. Let us check it in a network. We run $L$ layers of attention with
# random matrices, each of which adds its output to the state, and take the derivative of the last token's state with respect to
# every input token. The derivative must be exactly zero for tokens outside the receptive field, and must not be zero inside.


# %%
def influence(graph, layers, width=8):
    """How strongly the last token's final state depends on each input token: the size of the derivative."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(layers, 3, width, width, generator=generator, dtype=torch.float64) / math.sqrt(
        width
    )
    x = torch.randn(graph.num_dst, width, generator=generator, dtype=torch.float64, requires_grad=True)
    state = x
    for W_Q, W_K, W_V in weights:
        q, k, v = ((state @ W)[None, None] for W in (W_Q, W_K, W_V))
        state = state + attend(q, k, v, graph)[0, 0]
    state[-1].sum().backward()
    return x.grad.norm(dim=1)


figure, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
LOOKS = (("o-", BLUE), ("s--", ORANGE), ("^-.", RED), ("D:", GREY))
for layers, (look, colour) in zip((1, 2, 3, 4), LOOKS, strict=True):
    strength = influence(window, layers)
    assert strength.nonzero()[:, 0].tolist() == analyse.receptive_field(window, 11, layers).tolist()
    ax.plot(
        torch.where(strength > 0, strength, math.nan),
        look,
        color=colour,
        label="1 layer" if layers == 1 else f"{layers} layers",
    )
ax.set(
    xlabel="input token",
    ylabel="influence on token 11",
    yscale="log",
    xticks=range(12),
    title="a mark for each token whose influence is not 0",
)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Each curve has a mark exactly where the receptive field has a token. The curves show something else: with two layers or more, the
# farthest tokens have the least influence. A single path leads from there to the last token, and many lead from near tokens. Reach
# says that an influence is possible, not that it is strong; [chapter 22](22_reach_is_not_influence.ipynb) measures the difference.
#
# ## 3. Fewer layers, or fewer edges?
#
# A wider window reaches farther and costs more. Other graphs reach as far with fewer edges. Here are five graphs of 256 tokens.

# %%
n = 256
GRAPHS = {
    "causal(256)": "causal",
    "window(256, 9)": "a narrow window",
    "window(256, 9) | sinks(256, 1)": "the window and a sink",
    "sparse_strided(256, 16)": "strides of 16",
    "log_sparse(256)": "powers of two",
}
for text in GRAPHS:
    graph = parse(text)
    depth = analyse.layers_to_full_reach(graph)
    print(
        f"{text:>31}: {graph.num_edges / n:6.1f} senders per token, {depth:>3} layers to reach every later token"
    )

# %% [markdown]
# A sink costs one edge for each token and looks like a shortcut, but is not one. Every token attends to the sink, but the sink, as the
# first token of a causal graph, attends only to itself, so its messages carry nothing about other tokens. Strides of
# $\sqrt n$ reach all tokens in two layers with at most $2 \sqrt n$ senders, and powers of two in about $\log_2 n$ layers with
# $\log_2 n$ senders.

# %%
assert analyse.layers_to_full_reach(parse("window(256, 9) | sinks(256, 1)")) >= analyse.layers_to_full_reach(
    parse("window(255, 9)")
)
assert analyse.layers_to_full_reach(parse("log_sparse(256)")) <= math.log2(n)

figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), sharey=True)
for ax, text in zip(axes, ["window(256, 9)", "sparse_strided(256, 16)", "log_sparse(256)"], strict=True):
    draw.hops(parse(text), ax=ax)
plt.show()

# %% [markdown]
# Each panel counts, layer by layer, the tokens that reach a token: a straight line for the window, a jump for the strides, and a
# doubling for powers of two. Note the three scales.
#
# The next picture has a mark for each graph. A graph farther to the right costs more in each layer, and one higher up needs more
# layers. A model pays for the product of the two.

# %%
CHOICES = {
    "window": ([f"window(256, {w})" for w in (3, 5, 9, 17, 33, 65, 129)], "o"),
    "strides": ([f"sparse_strided(256, {stride})" for stride in (4, 8, 16, 32, 64)], "s"),
    "powers of two": (["log_sparse(256)"], "D"),
    "causal": (["causal(256)"], "^"),
}
figure, ax = plt.subplots(figsize=(7, 4.4))
for (label, (texts, marker)), colour in zip(CHOICES.items(), [BLUE, RED, ORANGE, GREY], strict=True):
    graphs = [parse(text) for text in texts]
    costs = [graph.num_edges / n for graph in graphs]
    ax.plot(
        costs,
        [analyse.layers_to_full_reach(g) for g in graphs],
        marker,
        color=colour,
        linestyle=":",
        label=label,
    )
ax.set(
    xscale="log", yscale="log", xlabel="edges per token and layer", ylabel="layers to reach every later token"
)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Windows lie on a line: half the layers for twice the edges. Strides and powers of two lie below it. None of them is best in
# everything: powers of two cost the fewest edges in all, and causal attention the fewest layers.
#
# ## 4. Layers with different graphs
#
# The layers of a model need not share a graph. A **butterfly** needs two senders for each token and layer: in layer $k$ a token
# attends to itself and to the token whose number differs in one binary digit, the $k$-th. After $\log_2 n$ layers every token is
# reached by every other. No graph with two senders per token does it in fewer layers, because each layer at most doubles the
# receptive field.

# %%
factors = [patterns.butterfly_factor(16, level) for level in range(4)]
assert all(factor.in_degree().unique().tolist() == [2] for factor in factors)
assert analyse.layers_to_full_reach(factors) == 4
draw.layers(factors, 4, token=5, title="a butterfly: four layers, each with a graph of its own")

# %% [markdown]
# Exactly one path leads from any token to any other. The order of the layers does not matter here, but it can. In the first graph
# below, a token attends to its own chunk of four tokens; in the second, to the last token of every earlier chunk, its *summary*.

# %%
assert analyse.path_counts(factors, 4).unique().tolist() == [1]

chunk, summaries = patterns.chunked(16, 4), patterns.summary_tokens(16, 4, 1)
for names, order in (
    ("chunk, then summaries", [chunk, summaries]),
    ("summaries, then chunk", [summaries, chunk]),
):
    field = analyse.receptive_field(order, 13, 2)
    print(f"{names}: {len(field):>2} tokens reach token 13: {field.tolist()}")
assert len(analyse.receptive_field([chunk, summaries], 13, 2)) == 14  # itself and all tokens before it

# %% [markdown]
# If the chunk comes first, the last token of each chunk collects its chunk and then sends it to all later chunks. In the other
# order the summaries are sent before they contain anything. A model whose layers alternate does both in turn, and the wrong
# start costs it one layer.
#
# ## 5. Pairs that no depth connects
#
# Some tokens never reach each other, however deep the model is. In a packed row that is the purpose: documents must not mix.
# A forgotten edge has the same symptom. `never_hears` returns these pairs as a graph.

# %%
packed = patterns.documents([5, 4, 3]) & patterns.window(12, 3)
never = analyse.never_hears(packed)
assert analyse.layers_to_full_reach(packed) is None
assert never == patterns.causal(12) - patterns.documents(
    [5, 4, 3]
)  # exactly the pairs of different documents

figure, axes = plt.subplots(1, 2, figsize=(9, 4.7))
draw.mask(packed, axes[0])
draw.mask(never, axes[1], title="src does not reach dst in any number of layers")
plt.show()

# %% [markdown]
# A single edge across the border between two documents lets everything that reaches its sender leak through. The witness names it.

# %%
leak = packed | patterns.global_tokens(12, [4])
path = analyse.witness(leak, 0, 10)
print("token 0, of the first document, reaches token 10, of the last, along", " -> ".join(map(str, path)))
draw.layers(leak, len(path) - 1, token=10)

# %% [markdown]
# **The answer.** The last token depends on the first as soon as a path of one edge per layer leads from the first to the last. A
# window needs $\lceil (n - 1) / (w - 1) \rceil$ layers, strides two, powers of two about $\log_2 n$, and a sink changes nothing.
# All of this is known before anything is trained.
#
# ## 6. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/11_how_many_layers.py).
#
# **1. A long text** (easy, 3 minutes). A model has 24 layers, all with the same window: a token attends to the last 129 tokens,
# itself included. How long may a text be, at most, so that the first token reaches the last?
#
# <details><summary>Hint</summary>
#
# Solve the formula of section 1 for $n$: the field after 24 layers must hold all tokens.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number of tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert analyse.layers_between(patterns.window(answer, 129), 0, answer - 1) == 24, (
    "not within 24 layers, or in less"
)
assert analyse.layers_between(patterns.window(answer + 1, 129), 0, answer) == 25, "there is room for more"
print("right:", answer, "tokens")

# %% [markdown]
# **2. A sink that relays** (medium, 5 minutes). In section 3 the sink did not help because it attends only to itself. Build a graph
# of 64 tokens, not necessarily causal, in which every token except token 0 attends to at most 10 tokens, and every token is reached
# by every other after two layers.
#
# <details><summary>Hint</summary>
#
# Let one token attend to all others, and all others to it. `patterns.global_tokens` has an option for graphs that are not causal.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 64 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_dst == 64, "64 tokens"
assert answer.in_degree()[1:].max() <= 10, "a token attends to more than 10 tokens"
assert analyse.diameter(answer) is not None, "some token never reaches another"
assert analyse.diameter(answer) <= 2, f"it takes {analyse.diameter(answer)} layers"
print("right:", answer.num_edges, "edges")

# %% [markdown]
# **3. A path through powers of two** (medium, 5 minutes). In `log_sparse(64)` a token attends to itself and to the tokens 1, 2, 4,
# 8, ... before it. Write a shortest path from token 0 to token 63: the list of its tokens, both ends included.
#
# <details><summary>Hint</summary>
#
# 63 is a sum of powers of two. Each term is one hop.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a list of tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
powers = patterns.log_sparse(64)

assert (answer[0], answer[-1]) == (0, 63), "it must lead from 0 to 63"
assert all(powers.mask()[dst, src] for src, dst in pairwise(answer)), "one of these steps is not an edge"
assert len(answer) - 1 == analyse.layers_between(powers, 0, 63), "there is a shorter path"
print("right:", " -> ".join(map(str, answer)))

# %% [markdown]
# **4. The receptive field in four lines** (medium, 10 minutes). Write `reached(mask, token, layers)`: the set of tokens that reach
# `token` in `layers` layers, from a boolean mask `[dst, src]` and no function of the library.
#
# <details><summary>Hint</summary>
#
# Keep a boolean vector with a mark for each token that is reached so far, and start with `token` alone. A token is reached one layer
# earlier if a row of the mask that is marked has an edge to it: `mask[marked].any(0)`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of mask, token and layers that returns a set of integers

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

for graph in (window, leak, patterns.log_sparse(12), patterns.butterfly_factor(16, 2)):
    for layers in range(4):
        expected = set(analyse.receptive_field(graph, 10, layers).tolist())
        assert answer(graph.mask(), 10, layers) == expected, (
            f"{graph.name}, {layers} layers: expected {expected}"
        )
print("right: reach is a product of masks")

# %% [markdown]
# ## Sources
#
# * R. Child et al., [Generating Long Sequences with Sparse Transformers](https://arxiv.org/abs/1904.10509), 2019: strides.
# * S. Li et al., [Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on Time Series
#   Forecasting](https://arxiv.org/abs/1907.00235), 2019: powers of two.
# * C. Yun et al., [O(n) Connections are Expressive Enough](https://arxiv.org/abs/2006.04862), 2020: which sparse graphs lose
#   nothing. `examples.expressive.yun_conditions` checks their conditions.

# %% [markdown]
# ---
# before: [10. The zoo: attention masks as graphs](10_the_zoo.ipynb) | [the book](README.md) | next: [12. Sparse against dense, trained](12_sparse_against_dense.ipynb)
