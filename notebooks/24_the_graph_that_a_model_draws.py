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
# # The graph that a model draws for itself
#
# Every graph so far was drawn by us. DeepSeek's sparse attention (2025) lets the model draw it, anew for each text: a small *indexer*
# gives every pair of tokens a number, each token attends to the `k` senders with the largest ones, and the indexer learns from what
# attention itself looks at. Here one learns for a layer of the small model that ships with the package; the model is not changed.
#
# **Afterwards you can** let a model choose its own graph, train the chooser, and measure what it misses.
#
# before: [Reading 278 heads](23_reading_278_heads.ipynb) | [the book](README.md) | next: [Attention from primitives](25_attention_from_primitives.ipynb)

# %%
import inspect
import textwrap
import warnings

import matplotlib.pyplot as plt
import torch

warnings.filterwarnings("ignore", message="IProgress not found")
import gnn_attention as ga  # noqa: E402
from gnn_attention import analyse, draw, patterns  # noqa: E402
from gnn_attention.selectors import Indexer, TopK, recall  # noqa: E402

torch.manual_seed(0)
model, vocabulary = ga.model.load_trained()
model.requires_grad_(False)
n, k = 192, 16
causal = patterns.causal(n)


# %%
def states(text):
    """What the second attention layer sees of the first n tokens of a text."""
    tokens = torch.tensor(vocabulary.encode(text)[:n])[None]
    return model.blocks[1].attention_norm(model.states(tokens)[2])


def attention(x, graph):
    """The layer's attention along a graph: its result, and info for the indexer."""
    layer = model.layers[1]
    q, (keys, values) = layer.heads.receive(x), layer.heads.send(x)
    return ga.attend(q, keys, values, graph, layer.heads.scale, layer.score_mod, return_info=True)


learn = [states(inspect.getsource(module)) for module in (textwrap, inspect, torch.optim.lr_scheduler)]
judge = states(inspect.getsource(torch.nn.init))

# %% [markdown]
# ## 1. It learns by watching
#
# `Indexer.loss` is the divergence of its softmax over a token's in-edges from the weights that attention gives them (the mean over
# heads), here along the causal graph: the *dense warm-up*. We write down what it would choose on the way.

# %%
watched = [attention(x, causal)[1] for x in learn]
dense, truth = attention(judge, causal)


def choices(steps, seed=0):
    """What an indexer would choose for the text that judges, after so many steps of training each."""
    torch.manual_seed(seed)
    indexer = Indexer(width=judge.shape[-1], k=k, num_heads=4, head_dim=16)
    optimizer, graphs_of_steps = torch.optim.Adam(indexer.parameters(), lr=0.01), []
    for step in range(max(steps) + 1):
        if step in steps:
            graphs_of_steps.append(indexer.select(judge, judge))
        x, info = learn[step % 3], watched[step % 3]
        loss = indexer.loss(x, x, info)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return graphs_of_steps


steps = (0, 5, 20, 80)
graphs = choices(steps)
shares = [recall(truth, graph).mean().item() for graph in graphs]

# %%
best = TopK(k, per="all", scale=model.layers[1].heads.scale, score_mod=model.layers[1].score_mod)
oracle = best.select(truth.call.q, truth.call.k)
most = recall(truth, oracle).mean().item()
window = recall(truth, patterns.window(n, k)).mean().item()
for step, share in zip(steps, shares, strict=True):
    print(f"after {step:2} steps the choice of {k} senders holds {share:.2f} of the attention")
print(f"the best choice holds {most:.2f}, a window of {k} {window:.2f}")
assert shares[0] < shares[-1] < most

# %% [markdown]
# `TopK(per="all")` is the oracle: no graph of so many senders for all heads together holds more. It is the number to compare with,
# not 1: four heads look at different things, and share one graph. And this layer looks nearby: a plain window of as many tokens, which
# nobody had to train, holds as much as what 80 steps have taught. Then was it worth it? Section 3 asks.
#
# ## 2. The choice over time

# %%
draw.over_time(
    graphs, titles=[f"after {step} steps" for step in steps], title=f"{k} senders of each receiver"
)

# %%
print(analyse.choice(graphs[0], causal))
print(analyse.choice(graphs[-1], causal))
print(analyse.choice(oracle, causal))

# %% [markdown]
# The choice starts anywhere, and 80 steps later half of its edges span at most 10 tokens. No sender is chosen by half of all receivers
# (the last line of each): here are no hubs, such as sinks would be.
#
# ## 3. Attention along it
#
# The chosen graph is a graph like any other. What changes in the layer's result? The fair comparison is the window, and one training run
# is no evidence, so here are three.

# %%
random = ga.TokenGraph.from_indices(
    (torch.rand(n, k) * torch.arange(1, n + 1)[:, None]).long(), n, coalesce=True
)
trained = {seed: choices((80, 240), seed) for seed in (1, 2)}


# %%
def error(graph):
    """How far the layer's result along a graph is from the one along all causal edges."""
    return ((attention(judge, graph)[0] - dense).norm() / dense.norm()).item()


trained[0] = choices((80, 240))
near = patterns.window(n, k)
compared = {"untrained": graphs[0], "random": random, f"window({k})": near}
compared |= {f"trained, seed {seed}": trained[seed][0] for seed in range(3)} | {"oracle": oracle}
errors = {name: error(graph) for name, graph in compared.items()}
for name, graph in compared.items():
    recall_share = recall(truth, graph).mean().item()
    print(f"{name:16} {graph.num_edges:5} edges  holds {recall_share:.2f}  relative error {errors[name]:.2f}")
longer = [error(trained[seed][1]) for seed in range(3)]
print("after 240 steps the errors are", ", ".join(f"{value:.2f}" for value in longer))
outside = [1 - (trained[seed][0] & near).num_edges / near.num_edges for seed in range(3)]
print("outside of the window are", ", ".join(f"{share:.0%}" for share in outside), "of the edges")

figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
colors = ["#D55E00" if name == f"window({k})" else "#0072B2" for name in errors]
ax.bar(list(errors), list(errors.values()), color=colors)
ax.tick_params(axis="x", labelsize=8)
ax.set(ylabel="relative error")
plt.show()
at_80 = [errors[f"trained, seed {seed}"] for seed in range(3)]
assert max(at_80) < errors[f"window({k})"] < errors["untrained"]
assert all(late > early for late, early in zip(longer, at_80, strict=True))

# %% [markdown]
# By the attention that it holds, the trained choice is no better than the window. By the error of the result it is, a little, with each
# of the three seeds, and a third of its edges or more lie outside of the window. But train on, and the gain shrinks; with one seed it is
# gone. (Perhaps because the indexer learns from three texts and is judged on a fourth.) So this is a small success: a layer that looks
# nearby leaves little to choose. [The benchmarks](../docs/benchmarks.md) have the choice for a whole model.
#
# ## 4. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/24_the_graph_that_a_model_draws.py).
#
# **1. How many edges?** Each receiver takes `k` of the tokens up to itself. How many edges does the choice have for `n` tokens?

# %% tags=["exercise"]
answer = None  # your turn: a formula in n and k

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer == graphs[-1].num_edges, "the first k - 1 receivers have fewer senders"
print("right:", answer)

# %% [markdown]
# **2. Always there.** Write the graph of the trained choice, the last 4 tokens and the first one.

# %% tags=["exercise"]
answer = None  # your turn: a graph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

mask = graphs[-1].mask().clone()
mask[:, 0] = True
for receiver in range(n):
    mask[receiver, max(0, receiver - 3) : receiver + 1] = True
assert torch.equal(answer.mask(), mask), "three graphs, joined by |"
print(f"right: it holds {recall(truth, answer).mean():.2f}")

# %% [markdown]
# **3. The recall of two heads.** Two heads attend to disjoint sets of 16 senders each, all weights 1/16. They share a graph of 16
# senders. What share of their attention can it hold at most, in the mean over both heads?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

q = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 2, 1, 2) * 100
keys = torch.eye(2).repeat_interleave(16, 0).expand(1, 2, 32, 2)
_, info = ga.attend(q, keys, keys, patterns.full(32).rows(31, 32), return_info=True)
shared = TopK(16, per="all").select(q, keys, info.call.graph)
assert abs(recall(info, shared).mean() - answer) < 1e-6, "each sender of the graph serves one head"
print("right:", answer)

# %% [markdown]
# Source: DeepSeek-AI, [DeepSeek-V3.2](https://arxiv.org/abs/2512.02556), 2025.

# %% [markdown]
# ---
# before: [Reading 278 heads](23_reading_278_heads.ipynb) | [the book](README.md) | next: [Attention from primitives](25_attention_from_primitives.ipynb)
