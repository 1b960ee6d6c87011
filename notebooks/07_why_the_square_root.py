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
# # Why the square root?
#
# $$w_{ij} = \text{softmax}_j \Big( \frac{q_i \cdot k_j}{\sqrt d} \Big)$$
#
# Every formula of attention divides by $\sqrt d$, where $d$ is the width of a query and a key. Textbooks say "for stability" and go
# on. **What goes wrong without the root, and why is it the root and not $d$?** Three experiments answer it: how large dot
# products of wide vectors are, what the softmax does with large numbers, and what then remains of the gradient.
#
# You need the first four sections of [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** explain the scale by variances, and use it as a temperature.
#
# before: [06. Matrix multiplication is message passing](06_matrix_multiplication_is_message_passing.ipynb) | [the book](README.md) | next: [08. Low rank, and subspaces](08_low_rank_and_subspaces.ipynb)

# %%
import math

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, ORANGE, RED, use_house_style

import gnn_attention as ga
from gnn_attention import draw

use_house_style()
GREEN = "#009E73"
LOOKS = {16: (BLUE, "o-"), 64: (ORANGE, "s-"), 256: (RED, "^-")}

# %% [markdown]
# ## 1. Wide vectors have large dot products
#
# Take two random vectors of $d$ numbers, each drawn from the bell curve with mean 0 and variance 1. Their dot product is a sum
# of $d$ products:
#
# $$q \cdot k = \sum_{c=1}^{d} q_c k_c$$
#
# Each product has mean 0 and variance 1, because $\mathbb E[q_c^2 k_c^2] = \mathbb E[q_c^2] \, \mathbb E[k_c^2] = 1$. Variances
# of independent numbers add up, so the sum has variance $d$, and its typical size is $\sqrt d$. Divided by $\sqrt d$ it has variance
# 1 again, for every width. We measure this on 200,000 pairs for each width:


# %% tags=["S2.9"]
def dot_products(d, pairs=200_000):
    """Return the dot products of random pairs, which are drawn in portions."""
    generator = torch.Generator().manual_seed(0)
    portions = [torch.randn(2, pairs // 10, d, generator=generator).prod(0).sum(-1) for _ in range(10)]
    return torch.cat(portions)


products = {d: dot_products(d) for d in LOOKS}
for d, numbers in products.items():
    print(
        f"d = {d:>3}: variance {numbers.var():6.2f}, divided by the root {(numbers / math.sqrt(d)).var():.3f}"
    )
    assert math.isclose(numbers.var(), d, rel_tol=0.02)
    assert math.isclose((numbers / math.sqrt(d)).var(), 1.0, rel_tol=0.02)

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3), sharey=False)
for d, numbers in products.items():
    axes[0].hist(
        numbers,
        120,
        range=(-60, 60),
        density=True,
        histtype="step",
        color=LOOKS[d][0],
        linewidth=1.8,
        label=f"d = {d}",
    )
    axes[1].hist(
        numbers / math.sqrt(d),
        120,
        range=(-5, 5),
        density=True,
        histtype="step",
        color=LOOKS[d][0],
        linewidth=1.8,
    )
axes[0].set(title="q · k", yticks=[])
axes[1].set(title="q · k, divided by the root of d", yticks=[])
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# The left curves get wider with $d$; on the right, all three are the same curve.
#
# ## 2. Large numbers make the softmax choose one
#
# The softmax takes exponentials. A difference of 1 between two logits is a factor of 2.7 between their weights, and a difference of 16
# is a factor of nine million: one sender gets all the weight.
#
# Let 64 receivers attend to 64 random senders each, in 8 heads. We measure two numbers for a typical receiver: its largest weight, and
# the number of senders that effectively count. (This is $e^{\text{entropy}}$: 64 if all weights are equal, and 1 if one sender has
# all of it.)

# %%
N = 64
graph = ga.patterns.full(N)


def random_weights(d, scale):
    """Return the weights of random heads: [8 heads, 64 receivers, 64 senders]."""
    q, k, v = torch.randn(3, 1, 8, N, d, generator=torch.Generator().manual_seed(1)).unbind(0)
    _, info = ga.attend(q, k, v, graph, scale=scale, return_info=True)
    return info.weights()[0].unflatten(1, (N, N))


WIDTHS = [4, 16, 64, 256, 1024]
without = [random_weights(d, 1.0) for d in WIDTHS]
with_root = [random_weights(d, d**-0.5) for d in WIDTHS]

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.2))
for weights, colour, look, name in (
    (without, RED, "s-", "no scale"),
    (with_root, BLUE, "o-", "with the root"),
):
    axes[0].semilogx(WIDTHS, [w.amax(-1).median() for w in weights], look, color=colour, label=name, base=2)
    axes[1].semilogx(
        WIDTHS, [torch.special.entr(w).sum(-1).exp().median() for w in weights], look, color=colour, base=2
    )
axes[0].set(
    xlabel="d",
    ylabel="largest weight",
    ylim=(0, 1.05),
    title="without a scale, one sender gets all the weight",
)
axes[1].set(
    xlabel="d", ylabel="effective number of senders", ylim=(0, N), title="how many of the 64 senders count"
)
axes[0].legend(frameon=False)
plt.show()

largest = {d: weights.amax(-1).median().item() for d, weights in zip(WIDTHS, without, strict=True)}
print(
    "largest weight without a scale:", ", ".join(f"{weight:.3f} (d = {d})" for d, weight in largest.items())
)
assert largest[1024] > 0.99
spread = [weights.amax(-1).median() for weights in with_root]
assert max(spread) < 0.25

# %% [markdown]
# ## 3. And from a choice nothing is learned
#
# Training follows derivatives: if this logit changed a little, would the output get better? When one weight is nearly 1 and all others are
# nearly 0, a small change of a logit changes nothing: the softmax is **saturated**. Its derivative $w_j (\delta_{jk} - w_k)$ is 0 when
# every weight is 0 or 1.
#
# So we measure the gradient that passes back through the softmax. The loss is the product of each receiver's output with a random
# direction, and we compute the length of its gradient at the logits of a typical receiver, and at its query, from which it goes on to
# $W_Q$.


# %% tags=["S2.4"]
def gradients(d, scale):
    """Return the typical length of the gradient at the logits of a receiver, and at its query."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 8, N, d, generator=generator, dtype=torch.float64).unbind(0)
    v, direction = torch.randn(2, 1, 8, N, 16, generator=generator, dtype=torch.float64).unbind(0)
    added = torch.zeros(
        1, 8, N * N, dtype=torch.float64
    )  # This is added to every logit, so its gradient is that of the logits.
    for leaf in (q, added):
        leaf.requires_grad_()
    (ga.attend(q, k, v, graph, scale=scale, bias=added) * direction).sum().backward()
    return added.grad.unflatten(2, (N, N)).norm(dim=-1).median().item(), q.grad.norm(dim=-1).median().item()


at_logits = {
    name: [gradients(d, d**power)[0] for d in WIDTHS]
    for name, power in (("no scale", 0), ("with the root", -0.5))
}
UNITS = [2.0**exponent for exponent in range(-6, 7)]
hills = {d: [gradients(d, unit * d**-0.5)[1] for unit in UNITS] for d in (*LOOKS, 1024)}

# %%
figure, axes = plt.subplots(1, 2, figsize=(12, 3.6), width_ratios=[1, 1.3])
for (name, curve), (colour, look) in zip(at_logits.items(), ((RED, "s-"), (BLUE, "o-")), strict=True):
    axes[0].loglog(WIDTHS, curve, look, color=colour, label=name, base=2)
axes[0].set(xlabel="d", title="the gradient at the logits")
for (d, hill), (colour, look) in zip(hills.items(), (*LOOKS.values(), (GREEN, "v-")), strict=True):
    axes[1].loglog(UNITS, hill, look, color=colour, markersize=4, linewidth=1, label=f"d = {d}", base=2)
    place = UNITS.index(d**0.5)
    axes[1].plot(UNITS[place], hill[place], "*", color=colour, markersize=15, markeredgecolor="black")
axes[1].axvline(1.0, color=GREY, linestyle=":")
axes[1].set(
    xlabel="scale, in units of one over the root of d",
    title="the gradient at the query (stars: no scale)",
    ylim=(1e-4, 10),
)
for ax in axes:
    ax.set_yscale("log", base=10)
    ax.legend(frameon=False, fontsize=9, loc="lower left")
plt.show()

for d, *gradient_sizes in zip(WIDTHS, *at_logits.values(), strict=True):
    print(
        f"d = {d:>4}: at the logits {gradient_sizes[1]:.3f} with the root, {gradient_sizes[0]:.5f} without a scale"
    )
assert max(at_logits["with the root"]) < 1.3 * min(at_logits["with the root"])  # whatever the width
assert at_logits["no scale"][-1] < at_logits["with the root"][-1] / 300

# %% [markdown]
# Left: with the root, the gradient at the logits is the same for heads of every width. Without a scale it vanishes as heads get wider.
#
# Right: the gradient at the query has one more factor, the scale itself, so the curve is a hill. On its left slope the logits are so
# small that the receiver attends to all senders equally, whatever its query is. On its right slope the softmax is saturated. In units
# of $1/\sqrt d$ the four curves are **one curve**. This is the reason for the root: dividing by $\sqrt d$ puts heads of every width at
# the same point of the hill (the dotted line), on the safe side, where the logits can grow during training.
#
# The stars mark heads without a scale. The effect is less dramatic than textbooks say: with $d = 16$ such a head would even learn faster
# at first. But every doubling of the width moves the star to the right, over the top of the hill and down the other side.

# %%
for d, hill in hills.items():
    with_it, without_it = hill[UNITS.index(1.0)], hill[UNITS.index(d**0.5)]
    print(f"d = {d:>4}: at the query {with_it:.2f} with the root, {without_it:.4f} without a scale")
for heights in zip(*hills.values(), strict=True):
    assert max(heights) < 1e-2 or max(heights) < 1.5 * min(
        heights
    )  # one curve, except where the gradient is nearly zero
assert hills[16][UNITS.index(4.0)] > hills[16][UNITS.index(1.0)]
assert hills[1024][UNITS.index(32.0)] < hills[1024][UNITS.index(1.0)] / 10

# %% [markdown]
# ## 4. The scale is a temperature
#
# Write $\beta$ for the scale. In physics, $\beta$ is an inverse temperature. At $\beta = 0$, which is infinitely hot, all weights are equal:
# the receiver attends to all its senders **uniformly**. As $\beta$ grows, the softmax cools down, and for $\beta \to \infty$ all weight
# goes to the best sender: the weights are **one-hot**. Uniformly does not mean over all tokens, but over the in-edges. So we compare
# two graphs of six tokens:

# %%
figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), width_ratios=(1, 2))
for row, six in zip(axes, (ga.patterns.causal(6), ga.patterns.window(6, 3)), strict=True):
    draw.mask(six, row[0])
    draw.arcs(six, row[1], lit=[(src, dst) for src, dst in six.edge_index.T.tolist() if dst == 4])
plt.show()

# %% [markdown]
# Token 4 has five in-edges (orange) in the causal graph and three in the window.

# %% tags=["S4.7"]
causal = ga.patterns.causal(6)
q, k, v = torch.randn(3, 1, 1, 6, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64).unbind(
    0
)


def shares(beta, graph, receiver):
    """Return the weights of the in-edges of a receiver."""
    _, info = ga.attend(q, k, v, graph, scale=beta, return_info=True)
    return info.weights()[0, 0, graph.edge_index[1] == receiver]


logits = (q[0, 0, 4] @ k[0, 0].T)[:5]
assert torch.allclose(shares(0.0, causal, 4), torch.full((5,), 0.2, dtype=torch.float64))
one_hot = (torch.arange(5) == logits.argmax()).double()
assert torch.allclose(shares(1000.0, causal, 4), one_hot)
window = ga.patterns.window(6, 3)
assert torch.allclose(shares(0.0, window, 4), torch.full((3,), 1 / 3, dtype=torch.float64))

# %%
betas = torch.logspace(-2.5, 1.0, 60, dtype=torch.float64)
figure, axes = plt.subplots(1, 2, figsize=(11, 3.2), sharey=True)
for ax, graph_there in zip(axes, (causal, window), strict=True):
    senders = graph_there.edge_index[0][graph_there.edge_index[1] == 4].tolist()
    curves_there = torch.stack([shares(beta.item(), graph_there, 4) for beta in betas])
    for column, sender in enumerate(senders):
        colour, dashes = [(BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (RED, "-"), ("black", ":")][sender]
        ax.semilogx(betas, curves_there[:, column], dashes, color=colour, label=f"token {sender}")
    ax.axvline(16**-0.5, color=GREY, linestyle=":")
    ax.set(
        xlabel="scale (inverse temperature)",
        title=f"weights of token 4 along {graph_there.name}",
        ylim=(0, 1.03),
    )
axes[0].set_ylabel("weight")
axes[0].legend(frameon=False, fontsize=8)
axes[0].text(16**-0.5, 0.75, "one over the root of d ", color="#555555", fontsize=8, ha="right")
plt.show()

# %% [markdown]
# On the left of each picture all weights are equal, 1/5 and 1/3; on the right one sender has all the weight.
#
# ## 5. Which d? That of the head
#
# A head can also be written with one **pattern matrix** $W_P = W_Q W_K^\top$ ([notebook 05](05_three_forms.ipynb)). A pattern
# $x W_P$ is as wide as the model, and is compared with states of that width. Should the scale now be one over the root of the
# *model's* width? No. It is the same number, $x_i W_Q W_K^\top x_j^\top = q_i \cdot k_j$, a sum over the $d$ channels of the
# head. The root makes up for the number of channels in this sum, and the rank of $W_P$ is still $d$.

# %%
heads = ga.StandardHeads(width=512, num_heads=8, head_dim=64)  # the sizes of the first transformer
x = torch.randn(1, 64, 512, generator=torch.Generator().manual_seed(3))
with torch.no_grad():
    torch.manual_seed(4)
    heads.reset_parameters()
    merged = ga.MergedHeads.of(heads)
    expected = heads.collect(ga.attend(heads.receive(x), *heads.send(x), graph, scale=heads.scale))
    updates = {
        scale: merged.collect(ga.attend(merged.receive(x), *merged.send(x), graph, scale=scale))
        for scale in (64**-0.5, 512**-0.5)
    }
    logits = merged.receive(x) @ merged.send(x)[0].mT
for scale, update in updates.items():
    error = (update - expected).abs().max()
    print(
        f"scale {scale:.4f}: logits of variance {(logits * scale).var():.2f}, largest difference from the standard form {error:.6f}"
    )
assert torch.allclose(updates[64**-0.5], expected, atol=1e-4)
assert not torch.allclose(updates[512**-0.5], expected, atol=1e-1)
assert merged.scale == heads.scale == 64**-0.5

# %% [markdown]
# ## 6. After training
#
# All of this concerns the *first* step of training, when queries and keys are random. During training the matrices may grow, and the
# logits with them, so a head can become as sharp as the task requires. For each head of the trained model that ships with the package,
# we print the standard deviation of the logits of a receiver, and the largest weight of a typical receiver with 32 or more senders.

# %%
model, vocabulary = ga.model.load_trained()
tokens = torch.randint(len(vocabulary), (4, 128), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    run = ga.trace.record(model, tokens)
deviations = []
for layer, call in enumerate(run.layers):
    table, weights = call.dense(call.logits(), math.nan), call.dense(call.weights())
    late = table[:, :, 32:]
    spread = (late - late.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt().mean((0, 2))
    peak = weights[:, :, 32:].amax(-1).flatten(2).median(-1).values.mean(0)
    deviations += spread.tolist()
    for head in range(len(spread)):
        print(
            f"layer {layer}, head {head}: deviation of logits {spread[head]:5.2f}, largest weight {peak[head]:.2f}"
        )
assert max(deviations) > 2 * min(deviations)

# %% [markdown]
# Some heads attend broadly and others sharply. The root makes a good start possible, and training decides the rest. (The deviation is that of
# the whole logit, which includes a number that the model has learned for each distance.)
#
# **The answer.** Without the root, the logits of wide heads are so far apart that the softmax saturates, and its gradient vanishes. The
# variance of a sum of $d$ independent products is $d$, so its size is $\sqrt d$, and the root makes all widths equal at the start. After
# training, queries and keys may agree, and then their dot product grows like $d$; Yang et al. therefore divide by $d$ when
# they transfer settings from a small model to a large one.
#
# ## 7. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/07_why_the_square_root.py).
#
# **1. Larger numbers** (easy, 3 minutes). The numbers of $q$ and $k$ now have variance 4 each, and $d = 64$. By which scale must $q \cdot k$ be
# multiplied to have variance 1?
#
# <details><summary>Hint</summary>
#
# The variance of each product is the product of the two variances.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

larger = 2 * torch.randn(2, 200_000, 64, generator=torch.Generator().manual_seed(0))
variance = (answer * larger.prod(0).sum(-1)).var().item()
assert math.isclose(variance, 1.0, rel_tol=0.02), f"then the variance is {variance:.3g}"
print(f"right: variance {variance:.3f}")

# %% [markdown]
# **2. Set the temperature** (easy, 5 minutes). The overlaps of a receiver with its three senders are 2, 1 and 0. For which $\beta$ does
# the best of them get between 89.5 and 90.5 % of the weight?
#
# <details><summary>Hint</summary>
#
# Try some numbers, or solve $1 / (1 + e^{-\beta} + e^{-2 \beta}) = 0.9$ for $e^{-\beta}$.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

softmax_weights = (answer * torch.tensor([2.0, 1.0, 0.0])).softmax(0)
assert abs(softmax_weights[0] - 0.9) < 0.005, f"then it gets {softmax_weights[0]:.3f}"
print("right:", ", ".join(f"{weight:.3f}" for weight in softmax_weights.tolist()))

# %% [markdown]
# **3. No choice** (medium, 3 minutes). Build a graph of 6 tokens with at least 6 edges along which the scale makes no difference.
#
# <details><summary>Hint</summary>
#
# What are the weights of a receiver with a single in-edge?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 6 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_edges >= 6, "too few edges"
assert torch.allclose(ga.attend(q, k, v, answer, scale=0.0), ga.attend(q, k, v, answer, scale=50.0)), (
    "the scale makes a difference"
)
print("right: the same at any temperature")

# %% [markdown]
# **4. The gradient of a softmax** (medium, 10 minutes, code). Write the Jacobian of the softmax as a function of the weights, `[n]` to
# `[n, n]`: entry $jk$ is the derivative of $w_j$ with respect to logit $k$.
#
# <details><summary>Hint</summary>
#
# Section 3 has the formula. $\delta_{jk}$ is the identity matrix, and `torch.outer` has all products of two weights.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of the weights

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

some_logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
expected = torch.autograd.functional.jacobian(lambda a: a.softmax(0), some_logits)
assert torch.allclose(answer(some_logits.softmax(0)), expected), "this is not the derivative"
saturated = answer((40 * some_logits).softmax(0))
print(
    f"right: its largest entry is {expected.abs().max():.2f}, and {saturated.abs().max():.0e} at a scale of 40"
)

# %% [markdown]
# ## Sources
#
# * A. Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017, section 3.2.1 and its footnote 4.
# * The note on query, key and value projections, whose footnote section 1 measures.
# * *Attention: All you need to know*, far.in.net, 2025: the inverse temperature.
# * G. Yang et al., [Tensor Programs V](https://arxiv.org/abs/2203.03466), 2022: dividing by $d$.

# %% [markdown]
# ---
# before: [06. Matrix multiplication is message passing](06_matrix_multiplication_is_message_passing.ipynb) | [the book](README.md) | next: [08. Low rank, and subspaces](08_low_rank_and_subspaces.ipynb)
