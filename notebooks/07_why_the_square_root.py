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
# Every formula of attention divides by $\sqrt d$, where $d$ is the width of a query and a key. Textbooks say "for stability"
# and go on. It is worth an experiment or two: what does a dot product do when its vectors get wider, what does the softmax do
# with the result, and what is left to learn from?
#
# You need the first four sections of [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** explain the scale by variances, and use it as a temperature.
#
# before: [Matrix multiplication is message passing](06_matrix_multiplication_is_message_passing.ipynb) | [the book](README.md) | next: [Low rank, and subspaces](08_low_rank_and_subspaces.ipynb)

# %%
import math
import warnings

import matplotlib.pyplot as plt
import torch

import gnn_attention as ga

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
BLUE, ORANGE, RED, GREEN, GREY = (
    "#0072B2",
    "#E69F00",
    "#D55E00",
    "#009E73",
    "#999999",
)  # told apart by colour-blind eyes too
plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.constrained_layout.use": True})
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
# of independent numbers add up. So the sum has variance $d$: it strays from 0 by about $\sqrt d$. Divided by $\sqrt d$ it has
# variance 1 again, whatever the width. Measured on 200,000 pairs for each width:


# %% tags=["S2.9"]
def dot_products(d, pairs=200_000):
    """Dot products of random pairs, drawn in portions."""
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
# ## 2. Large numbers make the softmax choose one
#
# The softmax takes exponentials. A difference of 1 between two logits is a factor of 2.7 between their weights, a difference of
# 16 a factor of nine million. With logits as far apart as that, one sender gets everything.
#
# Let 64 receivers hear 64 random senders each, in 8 heads. We ask two things of a typical receiver: how large is its largest
# weight, and how many senders does it effectively hear? (The second is $e^{\text{entropy}}$: 64 if all weights are equal, 1 if
# one sender has all.)

# %%
N = 64
graph = ga.patterns.full(N)


def listening(d, scale):
    """The weights of every receiver over the senders: [8 heads, 64 receivers, 64 senders]."""
    q, k, v = torch.randn(3, 1, 8, N, d, generator=torch.Generator().manual_seed(1)).unbind(0)
    _, info = ga.attend(q, k, v, graph, scale=scale, return_info=True)
    return info.weights()[0].unflatten(1, (N, N))


WIDTHS = [4, 16, 64, 256, 1024]
without = [listening(d, 1.0) for d in WIDTHS]
with_root = [listening(d, d**-0.5) for d in WIDTHS]

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
    xlabel="d", ylabel="largest weight", ylim=(0, 1.05), title="without a scale one sender takes it all"
)
axes[1].set(
    xlabel="d", ylabel="senders effectively heard", ylim=(0, N), title="how many of the 64 senders count"
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
# Learning follows derivatives: *if this logit changed a little, would the output get better?* A softmax that has decided gives
# the answer "nothing would change": it is **saturated**. Its derivative $w_j (\delta_{jk} - w_k)$ is 0 when every weight is 0
# or 1.
#
# So we measure what comes back through the softmax. The output of every receiver is judged along a random direction, and we ask
# for the size of the derivative: at the logits of a typical receiver, and at its query, where learning goes on to $W_Q$.


# %% tags=["S2.4"]
def gradients(d, scale):
    """The typical length of the derivative of the output with respect to a receiver's logits, and to its query."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 8, N, d, generator=generator, dtype=torch.float64).unbind(0)
    v, direction = torch.randn(2, 1, 8, N, 16, generator=generator, dtype=torch.float64).unbind(0)
    added = torch.zeros(
        1, 8, N * N, dtype=torch.float64
    )  # to every logit: its derivative is that of the logits
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
# Left: at the logits, the gradient is the same for heads of every width if one divides by the root; without a scale it dies out
# as heads get wider.
#
# Right: the query has one more factor in its derivative, the scale itself. So there is a hill. On its left slope the logits
# hardly matter, and the receiver hears everyone evenly whatever its query; on the right it has decided, and nothing small
# changes its mind. In units of $1/\sqrt d$ the four curves are **one curve**. That is the point: dividing by $\sqrt d$ puts
# heads of every width at the same place (the dotted line), on the safe side, with room to grow while learning.
#
# The stars show where heads without a scale would stand. This is less dramatic than textbooks have it: with $d = 16$ such a
# head would even learn faster at first. But every doubling of the width pushes it on, over the top and down the cliff.

# %%
for d, hill in hills.items():
    with_it, without_it = hill[UNITS.index(1.0)], hill[UNITS.index(d**0.5)]
    print(f"d = {d:>4}: at the query {with_it:.2f} with the root, {without_it:.4f} without a scale")
for heights in zip(*hills.values(), strict=True):
    assert max(heights) < 1e-2 or max(heights) < 1.5 * min(
        heights
    )  # one curve, except at the foot of the cliff
assert hills[16][UNITS.index(4.0)] > hills[16][UNITS.index(1.0)]
assert hills[1024][UNITS.index(32.0)] < hills[1024][UNITS.index(1.0)] / 10

# %% [markdown]
# ## 4. The scale is a temperature
#
# Write $\beta$ for the scale. In physics $\beta$ would be an inverse temperature. At $\beta = 0$, infinitely hot, every outcome
# is equally likely: the receiver hears all its senders **evenly**. As $\beta$ grows it cools down, and at $\beta \to \infty$ it
# is frozen in the best one: **one-hot**. The scale $1/\sqrt d$ is a room temperature. Evenly does not mean over all tokens,
# though. It means over the in-edges:

# %% tags=["S4.7"]
causal = ga.patterns.causal(6)
q, k, v = torch.randn(3, 1, 1, 6, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64).unbind(
    0
)


def shares(beta, graph, receiver):
    """The weights of a receiver's in-edges."""
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
        title=f"whom token 4 hears over {graph_there.name}",
        ylim=(0, 1.03),
    )
axes[0].set_ylabel("weight")
axes[0].legend(frameon=False, fontsize=8)
axes[0].text(16**-0.5, 0.75, "one over the root of d ", color="#555555", fontsize=8, ha="right")
plt.show()
print("to the left even, to the right one-hot, for five senders and for three")

# %% [markdown]
# ## 5. Which d? That of the head
#
# A head can also be written with one **pattern matrix** $W_P = W_Q W_K^\top$ ([notebook 05](05_three_forms.ipynb)). A pattern
# $x W_P$ is as wide as the model, and is compared with states of that width. Should the scale now be one over the root of the
# *model's* width? No. It is the same number, $x_i W_Q W_K^\top x_j^\top = q_i \cdot k_j$, a sum over the $d$ channels of the
# head. What the root must undo is the number of channels that were summed, and the rank of $W_P$ still is $d$.

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
        f"scale {scale:.4f}: logits of variance {(logits * scale).var():.2f}, furthest from the standard form by {error:.6f}"
    )
assert torch.allclose(updates[64**-0.5], expected, atol=1e-4)
assert not torch.allclose(updates[512**-0.5], expected, atol=1e-1)
assert merged.scale == heads.scale == 64**-0.5

# %% [markdown]
# ## 6. After training
#
# All of this is about the *first* step of training, when queries and keys are random. From then on the matrices may grow, and
# with them the logits: a head is free to become as sharp as it likes. Here are the heads of the trained model that ships with
# the package: how far its logits stray, for a receiver's senders, and the largest weight of a typical receiver with 32 or more
# senders.

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
            f"layer {layer}, head {head}: logits stray by {spread[head]:5.2f}, largest weight {peak[head]:.2f}"
        )
assert max(deviations) > 2 * min(deviations)

# %% [markdown]
# Some heads have stayed mild and others have grown sharp. The root made it possible to start; where a head ends up is its own
# affair. What strays here is the whole logit, with the model's learned number for each distance in it, and not the dot product
# alone. (There is one more view: if queries and keys *agree* after training, their dot product grows like $d$ and not like
# $\sqrt d$. Yang et al. therefore divide by $d$ when they scale one model up to another.)
#
# ## 7. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/07_why_the_square_root.py).
#
# **1. Louder channels.** The numbers of $q$ and $k$ now have variance 4 each, and $d = 64$. By which scale must $q \cdot k$ be
# multiplied to have variance 1?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

loud = 2 * torch.randn(2, 200_000, 64, generator=torch.Generator().manual_seed(0))
variance = (answer * loud.prod(0).sum(-1)).var().item()
assert math.isclose(variance, 1.0, rel_tol=0.02), f"then the variance is {variance:.3g}"
print(f"right: variance {variance:.3f}")

# %% [markdown]
# **2. Set the temperature.** A receiver's overlaps with its three senders are 2, 1 and 0. With which $\beta$ does the best of
# them get 90 % of the weight, give or take half a percent?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

softmax_weights = (answer * torch.tensor([2.0, 1.0, 0.0])).softmax(0)
assert abs(softmax_weights[0] - 0.9) < 0.005, f"then it gets {softmax_weights[0]:.3f}"
print("right:", ", ".join(f"{weight:.3f}" for weight in softmax_weights.tolist()))

# %% [markdown]
# **3. Out of its reach.** Build a graph of 6 tokens with at least 6 edges over which the scale makes no difference at all.

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph of 6 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_edges >= 6, "too few edges"
assert torch.allclose(ga.attend(q, k, v, answer, scale=0.0), ga.attend(q, k, v, answer, scale=50.0)), (
    "it does"
)
print("right: the same at any temperature")

# %% [markdown]
# ## Sources
#
# * A. Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017, section 3.2.1 and its footnote 4.
# * The note on query, key and value projections, whose footnote section 1 measures.
# * *Attention: All you need to know*, far.in.net, 2025: the inverse temperature.
# * G. Yang et al., [Tensor Programs V](https://arxiv.org/abs/2203.03466), 2022: dividing by $d$.

# %% [markdown]
# ---
# before: [Matrix multiplication is message passing](06_matrix_multiplication_is_message_passing.ipynb) | [the book](README.md) | next: [Low rank, and subspaces](08_low_rank_and_subspaces.ipynb)
