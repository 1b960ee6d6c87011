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
# before: [Reading 278 heads](21_reading_278_heads.ipynb) | [the book](README.md)

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
indexer = Indexer(width=judge.shape[-1], k=k, num_heads=4, head_dim=16)
optimizer = torch.optim.Adam(indexer.parameters(), lr=0.01)
watched = [attention(x, causal)[1] for x in learn]
truth = attention(judge, causal)[1]
steps, graphs, shares = (0, 5, 20, 80), [], []
for step in range(81):
    if step in steps:
        graphs.append(indexer.select(judge, judge))
        shares.append(recall(truth, graphs[-1]).mean().item())
    x, info = learn[step % 3], watched[step % 3]
    loss = indexer.loss(x, x, info)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

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
# not 1: four heads look at different things, and share one graph. This layer looks nearby, so a plain window of as many tokens
# holds about as much as what 80 steps have taught. The indexer had to find that out, and may yet leave the window where a text asks for it.
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
# ## 3. Attention along it
#
# The chosen graph is a graph like any other. What changes in the layer's result?

# %%
dense = attention(judge, causal)[0]
random = ga.TokenGraph.from_indices(
    (torch.rand(n, k) * torch.arange(1, n + 1)[:, None]).long(), n, coalesce=True
)
errors = {}
for name, graph in {
    "untrained": graphs[0],
    "random": random,
    "trained": graphs[-1],
    "oracle": oracle,
}.items():
    errors[name] = ((attention(judge, graph)[0] - dense).norm() / dense.norm()).item()
    print(f"{name:9} {graph.num_edges:5} edges  relative error {errors[name]:.2f}")
assert errors["trained"] < errors["untrained"]

figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
ax.bar(list(errors), list(errors.values()), color="#0072B2")
ax.set(ylabel="relative error")
plt.show()

# %% [markdown]
# ## 4. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/22_the_graph_that_a_model_draws.py).
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
# before: [Reading 278 heads](21_reading_278_heads.ipynb) | [the book](README.md)
