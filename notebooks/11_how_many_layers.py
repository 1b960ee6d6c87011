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
# # How many layers until the last token hears the first?
#
# A sparse graph is cheap because most tokens do not hear each other. They can still *hear of* each other: a token tells the
# next layer what it has heard in this one. One layer is one hop, and a model of $L$ layers lets information travel along
# ways of at most $L$ edges. So a question about a model, *what can this token know?*, becomes a question about a graph:
# *from where is this node reached in $L$ steps?*
#
# You need the first two sections of [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** compute the reach of a mask before training anything.
#
# before: [The zoo: attention masks as graphs](10_the_zoo.ipynb) | [the book](README.md) | next: [Sparse against dense, trained](12_sparse_against_dense.ipynb)

# %%
import math
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

from gnn_attention import analyse, attend, draw, patterns
from gnn_attention.convert.expressions import parse

# %% [markdown]
# ## 1. Hearsay
#
# Over `window(12, 3)` a token hears itself and the two before it. Unrolled, every layer is a row of the same tokens, and the
# edges run from one row to the next. Lit is everything that can have had an influence on the last token at the top: its
# **receptive field**, which grows downwards.
#
# On [the page](../docs/explore.html) that `gnn-attention explore` writes, *Reach* shows the same for any graph and token, layer by layer.

# %%
window = patterns.window(12, 3)
draw.layers(window, 3)

# %% [markdown]
# Each layer adds two tokens, the width of the window minus the token itself. After $L$ layers a window of $w$ has heard of
#
# $$\min(n, \; L (w - 1) + 1)$$
#
# tokens, and the last token has heard of the first after $\lceil (n - 1) / (w - 1) \rceil$ layers.

# %%
for layers in range(1, 5):
    field = analyse.receptive_field(window, 11, layers)
    print(f"after {layers} layers token 11 has heard of {len(field):>2} tokens: {field.tolist()}")
    assert len(field) == min(12, layers * 2 + 1)

for n, w in [(12, 3), (100, 4), (4096, 512)]:
    num_layers = analyse.layers_between(patterns.window(n, w), 0, n - 1)
    assert num_layers == math.ceil((n - 1) / (w - 1))
    print(f"window({n}, {w}): {num_layers} layers from the first token to the last")

# %% [markdown]
# The way itself is a **witness**: the tokens that hand the information on, one for each layer.

# %%
way = analyse.witness(window, 0, 11)
print(" -> ".join(map(str, way)))
draw.arcs(window, lit=list(pairwise(way)), title="a shortest way from the first token to the last")

# %% [markdown]
# ## 2. Does the graph tell the truth about a model?
#
# The receptive field says what *can* have an influence. Let us ask a network. We run $L$ rounds of attention with random
# matrices, each adding what was heard to the state, and take the derivative of the last token's state with respect to every
# input token. Where the graph says "not reached" it must be exactly zero, and elsewhere it must not.


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
for layers, look in zip((1, 2, 3, 4), ("o-", "s--", "^-.", "D:"), strict=True):
    strength = influence(window, layers)
    assert strength.nonzero()[:, 0].tolist() == analyse.receptive_field(window, 11, layers).tolist()
    ax.plot(torch.where(strength > 0, strength, math.nan), look, label=f"{layers} layers")
ax.set(
    xlabel="input token",
    ylabel="influence on token 11",
    yscale="log",
    xticks=range(12),
    title="nothing is drawn where it is 0",
)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Exactly the receptive field, token for token. The curves say something else too: with two layers or more, what comes from the
# far edge of the field, where a single way leads, arrives weakest. Reach is what is possible, not what is easy.
#
# ## 3. Fewer layers, or fewer edges?
#
# A wider window reaches farther and costs more. Other graphs strike a better bargain: here are five over 256 tokens.

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
        f"{text:>31}: {graph.num_edges / n:6.1f} senders each, {depth:>3} layers until everyone has heard of all its past"
    )

# %% [markdown]
# A sink costs one edge for each token and looks like a shortcut. It is none: everyone hears the sink, but with causal edges the
# sink hears nobody but itself, so it has nothing to tell. Strides of $\sqrt n$ reach everything in two layers with at most
# $2 \sqrt n$ senders, powers of two in about $\log_2 n$ layers with $\log_2 n$ senders.

# %%
assert analyse.layers_to_full_reach(parse("window(256, 9) | sinks(256, 1)")) >= analyse.layers_to_full_reach(
    parse("window(255, 9)")
)
assert analyse.layers_to_full_reach(parse("log_sparse(256)")) <= math.log2(n)

figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained", sharey=True)
for ax, text in zip(axes, ["window(256, 9)", "sparse_strided(256, 16)", "log_sparse(256)"], strict=True):
    draw.hops(parse(text), ax=ax)
plt.show()

# %% [markdown]
# The same bargain as a picture: each dot is a graph, to the right it costs more per layer, upwards it needs more layers. A
# model pays the product of the two.

# %%
CHOICES = {
    "window": ([f"window(256, {w})" for w in (3, 5, 9, 17, 33, 65, 129)], "o"),
    "strides": ([f"sparse_strided(256, {stride})" for stride in (4, 8, 16, 32, 64)], "s"),
    "powers of two": (["log_sparse(256)"], "D"),
    "causal": (["causal(256)"], "^"),
}
figure, ax = plt.subplots(figsize=(7, 4.4), layout="constrained")
for (label, (texts, marker)), colour in zip(
    CHOICES.items(), ["#0072B2", "#D55E00", "#009E73", "#222222"], strict=True
):
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
ax.set(xscale="log", yscale="log", xlabel="edges per token and layer", ylabel="layers until all is heard of")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 4. Layers that differ
#
# The layers of a model need not share a graph. A **butterfly** needs two senders for each token and layer: in layer $k$ a token
# hears itself and the token whose number differs in one binary digit, the $k$-th. After $\log_2 n$ layers everyone has heard
# of everyone, which no graph with two senders can do faster.

# %%
factors = [patterns.butterfly_factor(16, level) for level in range(4)]
assert all(factor.in_degree().unique().tolist() == [2] for factor in factors)
assert analyse.layers_to_full_reach(factors) == 4
draw.layers(factors, 4, token=5, title="a butterfly: four layers, each with a graph of its own")

# %% [markdown]
# Exactly one way leads from any token to any other. The order of the layers does not matter here, but it can. Below, one graph
# lets a token hear its own chunk of four, the other the last token of every earlier chunk: its summary, so to speak.

# %%
assert analyse.path_counts(factors, 4).unique().tolist() == [1]

chunk, summaries = patterns.chunked(16, 4), patterns.summary_tokens(16, 4, 1)
for names, order in (
    ("chunk, then summaries", [chunk, summaries]),
    ("summaries, then chunk", [summaries, chunk]),
):
    field = analyse.receptive_field(order, 13, 2)
    print(f"{names}: token 13 has heard of {len(field):>2} tokens: {field.tolist()}")
assert len(analyse.receptive_field([chunk, summaries], 13, 2)) == 14  # all its past

# %% [markdown]
# First the chunk: the last token of each chunk collects, and then tells everyone. The other way round the last tokens speak
# before they have heard anything. In a model whose layers alternate both happen in turn; the wrong start costs one layer.
#
# ## 5. Never
#
# Some tokens never hear of each other, however deep the model. In a packed row that is the purpose: documents must not mix.
# And a forgotten edge shows up the same way. `never_hears` gives the pairs, as a graph.

# %%
packed = patterns.documents([5, 4, 3]) & patterns.window(12, 3)
never = analyse.never_hears(packed)
assert analyse.layers_to_full_reach(packed) is None
assert never == patterns.causal(12) - patterns.documents(
    [5, 4, 3]
)  # exactly the pairs of different documents

figure, axes = plt.subplots(1, 2, figsize=(9, 4.7), layout="constrained")
draw.mask(packed, axes[0])
draw.mask(never, axes[1], title="never hears of, in any number of layers")
plt.show()

# %% [markdown]
# One edge across the border is enough, and everything behind it leaks through. The witness shows where.

# %%
leak = packed | patterns.global_tokens(12, [4])
way = analyse.witness(leak, 0, 10)
print("token 10, of the last document, has heard of token 0, of the first, along", " -> ".join(map(str, way)))
draw.layers(leak, len(way) - 1, token=10)

# %% [markdown]
# ## 6. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/11_how_many_layers.py).
#
# **1. A long text.** A model has 24 layers, all with the same window: a token hears the last 129 tokens, itself included. How
# long may a text be, at most, so that the last token has heard of the first?

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
# **2. The sink that talks.** In section 3 the sink did not help because it hears nobody else. Build a graph over 64 tokens, not
# necessarily causal, in which nobody but token 0 hears more than 10 tokens, and everyone has heard of everyone after two layers.

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 64 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_dst == 64, "64 tokens"
assert answer.in_degree()[1:].max() <= 10, "somebody hears too many"
assert analyse.diameter(answer) is not None, "somebody never hears of somebody"
assert analyse.diameter(answer) <= 2, f"it takes {analyse.diameter(answer)} layers"
print("right:", answer.num_edges, "edges")

# %% [markdown]
# **3. A way through powers of two.** Over `log_sparse(64)` a token hears itself and the tokens 1, 2, 4, 8, ... before it. Give a
# shortest way from token 0 to token 63: the list of tokens that it goes through, both ends included.

# %% tags=["exercise"]
answer = None  # your turn: a list of tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
powers = patterns.log_sparse(64)

assert (answer[0], answer[-1]) == (0, 63), "it must lead from 0 to 63"
assert all(powers.mask()[dst, src] for src, dst in pairwise(answer)), "one of these steps is no edge"
assert len(answer) - 1 == analyse.layers_between(powers, 0, 63), "there is a shorter way"
print("right:", " -> ".join(map(str, answer)))

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
# before: [The zoo: attention masks as graphs](10_the_zoo.ipynb) | [the book](README.md) | next: [Sparse against dense, trained](12_sparse_against_dense.ipynb)
