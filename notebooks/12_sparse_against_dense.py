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
# # Sparse against dense, trained
#
# A sparse graph saves edges. What does it cost in accuracy? Two things limit a model, and they are often confused. **Reach** limits
# what a model *can* know: nothing arrives from a token from which no path leads. **Training** limits what the model *learns* of it.
# The first limit is a fact about the graph, known before any training. The second has to be measured, more than once, because it
# varies from run to run.
#
# Here we train the same small model on seven graphs, on a task that needs long reach, and compare its accuracy with the best that
# its graph permits. (`python -m examples.training compare` does this with the shipped model's architecture on real text.)
#
# You need [notebook 11](11_how_many_layers.ipynb).
#
# **Afterwards you can** tell what a graph forbids from what training did not find.
#
# before: [11. How many layers until the last token reaches the first?](11_how_many_layers.ipynb) | [the book](README.md) | next: [13. Communication and computation](13_communication_and_computation.ipynb)

# %%
import sys

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, RED, use_house_style
from torch.nn import functional

from gnn_attention import analyse, draw, patterns
from gnn_attention.convert.expressions import parse

sys.path.append("..")  # the folder of the examples is beside the notebooks; it is not part of the package
from examples.training.tasks import Reader

use_house_style()
torch.set_num_threads(1)  # more threads sum in another order, and the numbers below then differ a little
PURPLE, GREEN = "#CC79A7", "#009E73"

# %% [markdown]
# ## 1. A needle in a row
#
# Every token of a row holds one of four symbols. One token, the **needle**, also has a mark. Every token from the needle on must
# output the needle's symbol. The needle may stand anywhere, so the last token of 64 must receive it over a distance of 0 to 63.
# A model that knows nothing is right in one of four rows: this is the chance level.

# %%
N, SYMBOLS, LAYERS = 64, 4, 3


def rows(samples, generator):
    """States ``[samples, N, 5]`` (symbol, mark), where each needle stands, and what it holds."""
    symbols = torch.randint(SYMBOLS, (samples, N), generator=generator)
    place = torch.randint(N, (samples, 1), generator=generator)
    x = torch.cat([functional.one_hot(symbols, SYMBOLS), functional.one_hot(place, N).mT], dim=-1).float()
    return x, place, symbols.gather(1, place)


x, place, answers = rows(1, torch.Generator().manual_seed(0))
text = [
    "abcd"[symbol] + ("!" if mark else "")
    for symbol, mark in zip(x[0, :, :4].argmax(-1), x[0, :, 4], strict=True)
]
print(" ".join(text), " -> ", "abcd"[answers.item()])

# %% [markdown]
# The task is easy for a token with an edge from the needle: *attend to the token with a mark, and copy its symbol*. Other
# tokens can receive it by a [relay](../docs/glossary.md#relay): a token that copies the mark together with the symbol can be attended to in the next layer.
#
# ## 2. What the graphs permit
#
# Begin with eight tokens and three layers of `window(8, 2)`, in which a token attends to itself and the one before it. In the
# picture on the right, the needle is token 2, and the red edges carry its symbol as far as three layers allow.

# %%
small = patterns.window(8, 2)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(1, 2))
draw.mask(small, left)
draw.arcs(small, right, lit=[(2, 3), (3, 4), (4, 5)], title="three layers, three hops: 2 → 3 → 4 → 5")
plt.show()
assert analyse.receptive_field(small, 5, LAYERS).tolist() == [2, 3, 4, 5]
assert 2 not in analyse.receptive_field(small, 6, LAYERS)

# %% [markdown]
# The symbol of token 2 can reach token 5 and no later one. The tokens 6 and 7 can only guess, whatever the parameters are.
#
# In general the last token depends on the tokens in its receptive field and on no others. The best that any training can reach
# at the last token is to be right whenever the needle is in the field, and in one of four cases otherwise:
#
# $$\text{best accuracy} = f + \tfrac14 (1 - f), \qquad f = \text{share of the row in the receptive field}$$

# %%
TEXTS = [
    "window(64, 4)",
    "window(64, 8)",
    "window(64, 8) | sinks(64, 2)",
    "window(64, 22)",
    "log_sparse(64)",
    "sparse_strided(64, 8)",
    "causal(64)",
]
graphs = {text: parse(text) for text in TEXTS}
field = {text: analyse.receptive_field(graph, N - 1, LAYERS) for text, graph in graphs.items()}
best = {text: len(f) / N + (1 - len(f) / N) / SYMBOLS for text, f in field.items()}
edges = {text: graph.num_edges / N for text, graph in graphs.items()}
for text in TEXTS:
    print(
        f"{text:>28}: {edges[text]:5.1f} edges per token, {len(field[text]):>2} of 64 in the field, at best {best[text]:.0%} right"
    )

# %%
figure, axes = plt.subplots(2, 4, figsize=(11.5, 6.2))
axes.flat[-1].axis("off")
for ax, (text, graph) in zip(axes.flat, graphs.items(), strict=False):
    draw.mask(graph, ax, title=text.replace("(64, ", "(").replace("(64)", ""))
    ax.set(xlabel="", ylabel="", xticks=[], yticks=[])
plt.show()

# %% [markdown]
# Two of these masks deserve a second look. The sinks are two tokens to which every token attends, and they look like a shortcut.
# In a causal graph, however, they attend only to themselves, so they have nothing to relay. The strides, with 11 edges per
# token, reach all tokens in two layers.
#
# ## 3. What the models learn
#
# We train one model for each graph and seed: width 24, two heads, three layers, and the same batches for all. The loss is the mean
# over all tokens from the needle on.

# %%
SEEDS, STEPS, BATCH = 3, 90, 16


def trained(graph, seed):
    """Train a model, and return it with its loss at each step."""
    torch.manual_seed(seed)
    model = Reader(SYMBOLS + 1, SYMBOLS, layers=LAYERS, width=24, num_heads=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        x, place, answers = rows(BATCH, generator)
        is_scored = torch.arange(N) >= place
        loss = functional.cross_entropy(model(x, graph)[is_scored], answers.expand(-1, N)[is_scored])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model, losses


# %%
@torch.no_grad()
def right_by_distance(model, graph):
    """Return how often the last token is right, for each distance from the needle."""
    x, place, answers = rows(2048, torch.Generator().manual_seed(1000))
    right = (model(x, graph)[:, -1].argmax(-1) == answers[:, 0]).double()
    distance = N - 1 - place[:, 0]
    count = torch.zeros(N, dtype=torch.float64).index_add(0, distance, torch.ones_like(right))
    return torch.zeros(N, dtype=torch.float64).index_add(0, distance, right) / count


runs = {text: [trained(graph, seed) for seed in range(SEEDS)] for text, graph in graphs.items()}
right = {
    text: torch.stack([right_by_distance(model, graphs[text]) for model, _ in runs[text]]) for text in TEXTS
}

for text in TEXTS:
    each = right[text].mean(1)
    print(
        f"{text:>28}: {each.mean():4.0%} right, from {each.min():.0%} to {each.max():.0%} by seed; at best {best[text]:.0%}"
    )

# %% [markdown]
# How does the accuracy of the last token depend on the distance of the needle? The line is the mean over the seeds, smoothed over
# five distances. The dashed vertical line is the edge of the receptive field, and the dotted line is the chance level.

# %%
figure, axes = plt.subplots(1, 4, figsize=(12.5, 2.9), sharey=True)
for ax, text in zip(
    axes, ["window(64, 4)", "window(64, 8)", "sparse_strided(64, 8)", "causal(64)"], strict=True
):
    curve = right[text].mean(0)
    smooth = functional.avg_pool1d(curve[None], 5, stride=1, padding=2, count_include_pad=False)[0]
    ax.plot(range(N), smooth, color=BLUE)
    ax.axhline(1 / SYMBOLS, color=GREY, linestyle=":")
    if len(field[text]) < N:
        ax.axvline(len(field[text]) - 0.5, color=RED, linestyle="--")
    ax.set(title=text, xlabel="distance of the needle", ylim=(0, 1.05))
axes[0].set_ylabel("last token is right")
plt.show()

inside = {
    text: right[text][:, [N - 1 - token for token in field[text].tolist()]].mean().item() for text in TEXTS
}
outside = {
    text: right[text][:, [d for d in range(N) if N - 1 - d not in field[text].tolist()]].mean().item()
    for text in TEXTS
    if len(field[text]) < N
}
print("inside the field: ", {text.replace("64, ", ""): round(value, 2) for text, value in inside.items()})
print("outside the field:", {text.replace("64, ", ""): round(value, 2) for text, value in outside.items()})
assert all(abs(value - 1 / SYMBOLS) < 0.05 for value in outside.values())  # chance, for every graph

# %% [markdown]
# To the right of the dashed line the accuracy is at the chance level, for every seed and every number of steps: there the graph
# sets the limit. To the left of the line the accuracy is what training has achieved.
#
# ## 4. Accuracy against edges
#
# This is the picture to look at before choosing a graph. A hollow mark is the best that the graph permits, and a filled mark what the
# models learned, with a bar from the worst seed to the best.

# %%
STYLE = {
    "window": ("o", BLUE),
    "log_sparse": ("D", GREEN),
    "sparse_strided": ("s", RED),
    "causal": ("^", "black"),
}
figure, ax = plt.subplots(figsize=(8.2, 4.4))
for text in TEXTS:
    marker, colour = ("v", PURPLE) if "sinks" in text else STYLE[text.split("(")[0]]
    each = right[text].mean(1)
    ax.plot(edges[text], best[text], marker, markersize=10, markerfacecolor="none", markeredgecolor=colour)
    ax.plot([edges[text]] * 2, [each.min(), each.max()], color=colour, linewidth=2)
    ax.plot(edges[text], each.mean(), marker, color=colour)
    name = text.replace("(64, ", "(").replace("(64)", "").replace("64, ", "")
    left = text in (
        "window(64, 8)",
        "sparse_strided(64, 8)",
    )  # of the mark; the others have their name on the right
    place = {"xytext": (-11, -4), "ha": "right"} if left else {"xytext": (11, -4)}
    ax.annotate(name, (edges[text], each.mean()), textcoords="offset points", fontsize=9, **place)
ax.axhline(1 / SYMBOLS, color=GREY, linestyle=":")
ax.set(xscale="log", xlabel="edges per token", ylabel="last token is right", ylim=(0.2, 1.04), xlim=(3, 50))
ax.set_xticks([4, 8, 16, 32], [4, 8, 16, 32])
ax.minorticks_off()
plt.show()

# %% [markdown]
# With a third of the edges the strides are as accurate as the causal graph. The narrow windows lose what is outside their reach, and
# the narrowest loses more: its models have not learned everything inside their field. The sinks (purple) add two edges per token and
# next to no reach. A *small* difference between two graphs must be read together with the bars: with three seeds it is a hint and not
# a proof.

# %%
learned = {text: right[text].mean().item() for text in TEXTS}
assert min(learned["sparse_strided(64, 8)"], learned["causal(64)"], learned["window(64, 22)"]) > 0.97
assert edges["sparse_strided(64, 8)"] < 0.35 * edges["causal(64)"]
assert all(learned[text] < best[text] + 0.02 for text in TEXTS)
assert best["window(64, 8) | sinks(64, 2)"] - best["window(64, 8)"] < 0.03

# %% [markdown]
# ## 5. How fast?
#
# Three of the graphs reach all tokens: the causal one in one hop, the strides in two, the wide window in three. One might expect
# that a model learns a relay later than a direct edge. Each line is one run.

# %%
figure, ax = plt.subplots(figsize=(7.5, 3.4))
reaching = {
    "causal(64)": ("black", "-"),
    "sparse_strided(64, 8)": (RED, "--"),
    "window(64, 22)": (BLUE, "-."),
}
for text, (colour, style) in reaching.items():
    for number, (_, losses) in enumerate(runs[text]):
        smooth = functional.avg_pool1d(
            torch.tensor([losses]), 5, stride=1, padding=2, count_include_pad=False
        )[0]
        ax.plot(smooth, style, color=colour, label=None if number else text)
ax.set(xlabel="step", ylabel="loss", ylim=(0, None))
ax.legend(frameon=False)
plt.show()
for text in reaching:
    steps = [next((step for step, loss in enumerate(losses) if loss < 0.5), None) for _, losses in runs[text]]
    print(f"{text:>22}: loss below 0.5 after {steps} steps, seed by seed")

# %% [markdown]
# This is not the case here: the seeds differ from one another more than the graphs do. (For the same seed, all three graphs begin with
# the same parameters and see the same rows.) On harder tasks relays do take longer to learn; `python -m examples.training reach`
# trains on one.
#
# **The answer.** A sparse graph costs the accuracy on tokens outside its receptive field, for every model and every seed. Inside the
# field, training can fail to find what the graph permits, as in the narrowest window, and it need not: the strides learn as much
# as the causal graph with a third of its edges. So choose a graph by its reach first, and then train.
#
# ## 6. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/12_sparse_against_dense.py).
#
# **1. Before training** (easy, 3 minutes). A model has four layers of `window(64, 8)`. How often can the last token be right at best,
# if the needle stands anywhere in the row?
#
# <details><summary>Hint</summary>
#
# Each layer adds seven tokens to the receptive field. Put the share of the row into the formula of section 2.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number between 0 and 1

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

share = len(analyse.receptive_field(patterns.window(N, 8), N - 1, 4)) / N
assert abs(answer - (share + (1 - share) / SYMBOLS)) < 0.005, (
    "how many tokens are in the receptive field after four hops of seven?"
)
print(f"right: {answer:.1%}")

# %% [markdown]
# **2. A sink that relays** (medium, 5 minutes). Let the two sinks of `window(64, 8) | sinks(64, 2)` attend to all tokens; the graph is
# then no longer causal. Write an expression of builders over 64 tokens with which every token is reached by every other after two
# layers, with fewer than 15 edges per token.
#
# <details><summary>Hint</summary>
#
# [Chapter 10](10_the_zoo.ipynb) has the builders. A global token attends to all tokens, and all tokens attend to it.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a text such as "window(64, 8) | ..."

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

graph = parse(answer)
assert graph.num_dst == N, "64 tokens"
assert graph.num_edges / N < 15, "too many edges"
assert analyse.diameter(graph) is not None, "some token never reaches another"
assert analyse.diameter(graph) <= 2, f"some pair needs {analyse.diameter(graph)} layers"
print(f"right: {graph.num_edges / N:.1f} edges per token")

# %% [markdown]
# **3. A graph of your own** (hard, 15 minutes). Write a causal graph with at most 9 edges per token with which the model of this
# chapter, with one seed, is right in more than 90 % of the rows.
#
# <details><summary>Hint</summary>
#
# Combine near tokens with tokens at regular distances: `patterns.window` and one or two `patterns.dilated`. Three layers must cover 63
# tokens, so distances of 1, 4 and 16 are a good start. Check the receptive field before you train.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph over 64 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_edges / N <= 9, f"{answer.num_edges / N:.1f} edges per token are too many"
assert bool((answer.edge_index[0] <= answer.edge_index[1]).all()), "the graph is not causal"
model, _ = trained(answer, 0)
accuracy = right_by_distance(model, answer).mean().item()
reached = len(analyse.receptive_field(answer, N - 1, LAYERS))
print(f"{answer.num_edges / N:.1f} edges per token, {reached} of 64 in the field, {accuracy:.0%} right")
assert accuracy > 0.9, "not often enough"

# %% [markdown]
# ## Sources
#
# * U. Alon and E. Yahav, [On the Bottleneck of Graph Neural Networks](https://arxiv.org/abs/2006.05205), 2021: tasks that only
#   reach can answer; `python -m examples.training reach` trains on theirs.
# * R. Child et al., [Generating Long Sequences with Sparse Transformers](https://arxiv.org/abs/1904.10509), 2019: strides. S.
#   Li et al., [Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on Time Series
#   Forecasting](https://arxiv.org/abs/1907.00235), 2019: powers of two. G. Xiao et al., [Efficient Streaming Language Models with
#   Attention Sinks](https://arxiv.org/abs/2309.17453), 2024.

# %% [markdown]
# ---
# before: [11. How many layers until the last token reaches the first?](11_how_many_layers.ipynb) | [the book](README.md) | next: [13. Communication and computation](13_communication_and_computation.ipynb)
