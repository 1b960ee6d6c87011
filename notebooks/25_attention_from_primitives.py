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
# # Attention from primitives
#
# Many papers propose a new kind of attention. Most of them change one part: how two tokens are compared, how the resulting numbers become
# weights, or what is added up. This chapter builds attention from three functions of a graph, one for each of these parts, and then
# replaces one part at a time. **What does each replacement change, and what does it cost?**
#
# **Before you start**: you need [notebook 01](01_attention_is_message_passing.ipynb), and *logit*, *weight* and *value* from
# [notebook 05](05_three_forms.ipynb). Install with `pip install -e ".[notebooks]"`; nothing is downloaded. An `assert` checks every claim.
#
# **Afterwards you can** build a published kind of attention from three functions of a graph, and say what it costs.
#
# before: [24. The graph that a model draws for itself](24_the_graph_that_a_model_draws.ipynb) | [the book](README.md)

# %%
import math
import warnings

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, RED, draw_table
from torch.nn import functional

warnings.filterwarnings("ignore", message="IProgress not found")
import gnn_attention as ga  # noqa: E402
from gnn_attention import edge_ops, patterns  # noqa: E402

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that "equal" can mean equal to twelve digits
torch.set_printoptions(precision=2, sci_mode=False)
plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.constrained_layout.use": True})

# %% [markdown]
# We use eight tokens. The state of a token is a point of the plane, so we can draw it. Queries, keys and values are the
# states themselves, so no matrices are needed. The graph is causal: each token attends to itself and to all tokens before it. The
# tensors have the library's layout `[batch, heads, tokens, channels]`, here with one sample and one head.

# %%
NAMES = list("ABCDEFGH")
points = [[0.5, 0.2], [1.0, 0.8], [-0.4, 1.0], [2.2, 1.8], [-1.2, -0.3], [0.3, -1.1], [1.4, 0.3], [0.9, 0.6]]
x = torch.tensor(points)[None, None]
graph = patterns.causal(8)
src, dst = graph.edge_index
first = [f"{NAMES[j]}->{NAMES[i]}" for j, i in graph.edge_index[:, :6].T.tolist()]
print(graph.num_edges, "edges:", *first, "...")

# %% [markdown]
# ## 1. Three functions of a graph
#
# $$s_e = q_{\mathit{dst}} \cdot k_{\mathit{src}}, \qquad w_e = \frac{e^{s_e}}{\sum_{f \to \mathit{dst}} e^{s_f}}, \qquad
# y_{\mathit{dst}} = \sum_{e \to \mathit{dst}} w_e v_{\mathit{src}}$$
#
# `gather_products` takes rows of tokens and returns one number for each edge. `softmax` takes numbers of edges and returns numbers of
# edges. `aggregate` takes numbers of edges and rows of tokens, and returns rows of tokens. The graph is an argument of all three.


# %%
def attention(q, k, v, graph):
    logits = edge_ops.gather_products(q, k, graph) / math.sqrt(q.shape[-1])
    weights = edge_ops.softmax(logits, graph)
    return edge_ops.aggregate(weights, v, graph)


def as_table(values, graph):
    """Numbers of edges [1, 1, E] as a table [dst, src]."""
    table = torch.zeros(graph.num_dst, graph.num_src)
    table[graph.edge_index[1], graph.edge_index[0]] = values[0, 0]
    return table


assert torch.allclose(attention(x, x, x, graph), ga.attend(x, x, x, graph), rtol=0, atol=1e-12)

logits = edge_ops.gather_products(x, x, graph) / math.sqrt(2)
weights = edge_ops.softmax(logits, graph)
print("the logits are", list(logits.shape), "for", graph.num_edges, "edges, where a matrix has", 8 * 8)

figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2))
draw_table(
    left, as_table(logits, graph), NAMES, NAMES, "logits: gather_products, scaled", 6.0, 1, graph.mask()
)
draw_table(right, as_table(weights, graph), NAMES, NAMES, "weights: softmax", 1.0, 2, graph.mask())
for ax in (left, right):
    ax.set(xlabel="src (sender)", ylabel="dst (receiver)")
plt.show()

# %% [markdown]
# The left table holds the output of the first function and the right table that of the second. In the right one, every row sums to one.
#
# The three functions see different things. The first sees the two ends of one edge. The second sees the numbers of all in-edges of a
# receiver, and no token. The third is linear in the values. Any function that fits one of these descriptions can replace the one
# above, and the other two stay as they are.
#
# The derivatives are functions of the same kind, so a model with replaced parts can be trained. The gradient of `gather_products` with
# respect to q is an `aggregate`. The gradient of `aggregate` with respect to w is a `gather_products`:

# %%
q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
incoming = torch.randn(1, 1, graph.num_edges)  # the gradient of some loss with respect to each product
edge_ops.gather_products(q, k, graph).backward(incoming)
assert torch.allclose(q.grad, edge_ops.aggregate(incoming, k, graph), rtol=0, atol=1e-12)
assert torch.allclose(k.grad, edge_ops.scatter(incoming, q, graph), rtol=0, atol=1e-12)
print("dq is a sum over in-edges, dk is a sum over out-edges")

# %% [markdown]
# ## 2. Another logit
#
# The product $q \cdot k$ compares two points, and it grows with the length of both. D is the point farthest from the origin and lies in the
# direction of H, so H attends most to D, although other points are nearer. The distance is another comparison:
#
# $$s_e = - \gamma \, |q - k|^2 = 2 \gamma \, q \cdot k - \gamma \, k \cdot k - \gamma \, q \cdot q$$
#
# The last term is the same for all in-edges of a receiver, so the softmax is the same without it. The rest is again a product of
# rows, with one more channel: $(2q, 1) \cdot (k, -k \cdot k)$. For a new logit, try to rewrite it in this form first, because a product
# of rows has the fastest code.


# %%
def product_logits(q, k, graph):
    return edge_ops.gather_products(q, k, graph) / math.sqrt(q.shape[-1])


def distance_logits(q, k, graph, gamma=2.0):
    q = torch.cat([2 * q, torch.ones_like(q[..., :1])], dim=-1)
    k = torch.cat([k, -k.square().sum(-1, keepdim=True)], dim=-1)
    return gamma * edge_ops.gather_products(q, k, graph)


def favourites(logits, graph):
    """The sender with the largest weight, for each receiver."""
    return as_table(edge_ops.softmax(logits, graph), graph).argmax(1)


by_hand = -2.0 * (x[:, :, dst] - x[:, :, src]).square().sum(-1)
weights = edge_ops.softmax(distance_logits(x, x, graph), graph)
assert torch.allclose(weights, edge_ops.softmax(by_hand, graph), rtol=0, atol=1e-12)

for name, logit in {"product": product_logits, "distance": distance_logits}.items():
    most = favourites(logit(x, x, graph), graph)
    print(f"{name:>9}:", ", ".join(f"{NAMES[i]} to {NAMES[j]}" for i, j in enumerate(most.tolist())))
assert favourites(product_logits(x, x, graph), graph)[7] == NAMES.index("D")
assert torch.equal(favourites(distance_logits(x, x, graph), graph), torch.arange(8))

# %% [markdown]
# Each point is nearest to itself, so each token attends most to itself. The paper on graph attention networks (GAT, 2017) has a third
# comparison. It adds a number of the receiver and a number of the sender, and applies a LeakyReLU to the sum:
#
# $$s_e = \text{LeakyReLU}(a \cdot q_{\mathit{dst}} + b \cdot k_{\mathit{src}})$$
#
# A sum of two numbers is a product of width 2, $(u, 1) \cdot (1, t)$. But this logit cannot do what the distance does. The LeakyReLU
# keeps the order of its inputs, and the number of the receiver is the same for all its in-edges. So the sender with the largest
# $b \cdot k_{\mathit{src}}$ has the largest weight for **every** receiver that attends to it. Brody, Alon and Yahav (2021) noticed this and proposed
# GATv2, which applies the LeakyReLU before the sum over channels:
#
# $$s_e = a \cdot \text{LeakyReLU}(q_{\mathit{dst}} + k_{\mathit{src}})$$


# %%
def gat_logits(q, k, graph, a, b):
    of_dst, of_src = q @ a, k @ b  # one number for each token
    q = torch.stack([of_dst, torch.ones_like(of_dst)], dim=-1)
    k = torch.stack([torch.ones_like(of_src), of_src], dim=-1)
    return functional.leaky_relu(edge_ops.gather_products(q, k, graph), 0.2)


def gatv2_logits(q, k, graph, a):
    src, dst = graph.edge_index
    rows = q[:, :, dst] + k[:, :, src]  # a row for each edge
    return functional.leaky_relu(rows, 0.2) @ a


everyone = patterns.full(8)
for _ in range(100):
    most = favourites(gat_logits(x, x, everyone, torch.randn(2), torch.randn(2)), everyone)
    assert len(most.unique()) == 1  # all eight receivers prefer one sender

q, k = torch.cat([x, -x], dim=-1), torch.cat([-x, x], dim=-1)
most = favourites(gatv2_logits(q, k, everyone, -torch.ones(4)), everyone)
assert torch.equal(most, torch.arange(8))
print("GAT: one favourite for all, with 100 random a and b;  GATv2: each token prefers", most.tolist())

# %% [markdown]
# Here GATv2 computes a distance: LeakyReLU($z$) + LeakyReLU($-z$) is $0.8 |z|$, so $-1$ times the sum of the four channels is $-0.8$ times the sum
# of the absolute differences. The code shows the cost: the function computes a row of channels for each edge before it multiplies.
# The LeakyReLU stands between the sum of the rows and the product, so GATv2 computes as many rows as the graph has edges. The other
# three logits need one row for each token.
#
# The picture shows the four logits of the receiver H (red) as functions of the position of a sender. Along each grey line the logit is constant.

# %%
grid = torch.stack(
    torch.meshgrid(torch.linspace(-1.7, 2.6, 80), torch.linspace(-1.6, 2.2, 80), indexing="xy"), dim=-1
)
senders = grid.reshape(1, 1, -1, 2)
from_everywhere = patterns.cross(1, senders.shape[2])  # one receiver, 6,400 senders
H = x[:, :, 7:]
mirror = torch.cat([-senders, senders], dim=-1)
a, b = torch.tensor([0.5, 0.5]), torch.tensor([0.3, 1.0])
fields = {
    "product": product_logits(H, senders, from_everywhere),
    "distance": distance_logits(H, senders, from_everywhere),
    "GAT": gat_logits(H, senders, from_everywhere, a, b),
    "GATv2": gatv2_logits(torch.cat([H, -H], dim=-1), mirror, from_everywhere, -torch.ones(4)),
}
figure, axes = plt.subplots(1, 4, figsize=(13, 3.1))
for ax, (name, field) in zip(axes, fields.items(), strict=True):
    ax.contour(
        grid[..., 0],
        grid[..., 1],
        field.view(80, 80),
        levels=12,
        colors=GREY,
        linewidths=0.8,
        linestyles="solid",
    )
    ax.plot(*x[0, 0, :7].T, "o", color=BLUE)
    ax.plot(*x[0, 0, 7], "D", color=RED)
    for letter, point in zip(NAMES, x[0, 0].tolist(), strict=True):
        ax.annotate(letter, point, xytext=(4, -12 if letter == "H" else 4), textcoords="offset points")
    ax.set(xticks=[], yticks=[], aspect="equal", title=name)
plt.show()

# %% [markdown]
# The lines of the product are straight and perpendicular to the direction of H, so a sender far out in this direction always has a
# larger logit. The lines of the distance are circles around H. The lines of GAT are straight, too, but they are perpendicular to
# the parameter $b$, for every receiver. The lines of GATv2 with these parameters are squares around H.
#
# ## 3. Another normaliser
#
# The normaliser turns the logits of the in-edges of a receiver into weights. We take one receiver with four senders, so four edges, and change
# the logit of the last one. How do the other weights change?
#
# * **softmax**: $e^{s_e}$ divided by the sum. All weights are positive and their sum is 1.
# * **sparsemax**: $\max(s_e - t, 0)$ with the $t$ for which the sum is 1. Small logits get the weight 0.
# * **sigmoid**: $1 / (1 + e^{-s_e})$. Each weight depends on its own logit alone.
# * **stick-breaking**: the last sender takes the share $\sigma(s_e)$ of 1, the sender before it takes the share $\sigma(s_f)$ of the rest, and so on.
#
# Stick-breaking needs a running sum over the in-edges of a receiver, from an edge to the last one. This is the primitive `cumsum`. Since
# $\log (1 - \sigma(s)) = -\text{softplus}(s)$, the product of the remaining shares becomes such a sum.


# %%
def stick_breaking(logits, graph):
    return (logits - edge_ops.cumsum(functional.softplus(logits), graph, reverse=True)).exp()


four = patterns.cross(1, 4)
s = torch.tensor([[[0.5, 0.0, 1.0, 0.2]]])
shares = edge_ops.softmax(s, four)
print("shares before:", [round(share, 2) for share in shares.flatten().tolist()])

rest, by_hand = 1.0, []
for share in reversed(s.flatten().sigmoid().tolist()):
    by_hand.insert(0, share * rest)
    rest = rest * (1 - share)
assert torch.allclose(stick_breaking(s, four).flatten(), torch.tensor(by_hand), rtol=0, atol=1e-12)
print(f"stick-breaking: {[round(share, 2) for share in by_hand]}, and {rest:.2f} goes to no sender")

# %%
last = torch.linspace(-3, 5, 161)
s = s.repeat(161, 1, 1)  # 161 samples, which differ in the last logit
s[:, 0, 3] = last
normalised = {how: edge_ops.normalise(s, four, how)[:, 0] for how in ("softmax", "sparsemax", "sigmoid")}
normalised["stick-breaking"] = stick_breaking(s, four)[:, 0]

figure, axes = plt.subplots(1, 4, figsize=(13, 2.9), sharey=True)
for ax, (name, lines) in zip(axes, normalised.items(), strict=True):
    for sender, style in enumerate((":", "--", "-.", "-")):
        color = RED if sender == 3 else BLUE
        ax.plot(last, lines[:, sender], style, color=color, label=f"sender {sender}")
    ax.plot(last, lines.sum(1), color=GREY, linewidth=0.8, label="sum")
    ax.set(title=name, xlabel="logit of sender 3", ylim=(-0.05, 2.9))
axes[0].legend(frameon=False, fontsize=8)
axes[0].set(ylabel="weight")
plt.show()

others = {name: lines[:, :3] for name, lines in normalised.items()}
assert (others["softmax"].diff(dim=0) < 0).all()  # the other weights always fall
assert (others["sparsemax"][-1] == 0).all()  # and here they fall to zero
assert (others["sigmoid"] == others["sigmoid"][0]).all()  # the other weights do not change
assert (normalised["stick-breaking"].sum(1) < 1).all()
s[:, 0, 0] += 1.0  # now the first logit: in stick-breaking the weights of later senders do not change
assert torch.allclose(
    stick_breaking(s, four)[:, 0, 1:], normalised["stick-breaking"][:, 1:], rtol=0, atol=1e-12
)

# %% [markdown]
# The weight of sender 3 is the solid red line, and it rises in all four plots. With softmax and sparsemax the senders compete: one can gain only
# what the others lose, and the grey sum stays at 1. With sigmoid they do not compete. The blue lines are flat, and the sum can be small or
# large, so a receiver can even give almost no weight to any sender. Stick-breaking lies in between. Its sum is less than 1, and a sender
# takes weight only from the senders **before** it, so the order of the tokens matters although there are no positions. The function
# `normalise` also accepts a function of your own.
#
# ## 4. Other messages
#
# The third part adds up values. The first replacement makes the message depend on the edge. Give each edge features $a_e$, and let
# its message be $v_{\mathit{src}} + a_e W$. This needs no row for each edge, because the sum can be split:
#
# $$\sum_{e} w_e (v_{\mathit{src}} + a_e W) = \sum_{e} w_e v_{\mathit{src}} + \Big( \sum_{e} w_e a_e \Big) W$$
#
# What is this good for? Let each token compute how far back the last equal token is. The tokens are letters now, a key is the one-hot
# row of its letter, and the feature of an edge is one number, the distance from sender to receiver. No value of a sender can contain this number,
# because the sender has a different distance to each of its receivers.

# %%
letters = list("abcabdca")
codes = torch.tensor([ord(letter) - ord("a") for letter in letters])
one_hot = functional.one_hot(codes, 4).double()[None, None]
before = patterns.strict_causal(8)
distance = (before.edge_index[1] - before.edge_index[0]).double()[:, None]  # [E, 1]

back = ga.attend(
    one_hot,
    one_hot,
    torch.zeros(1, 1, 8, 1),  # the values are zero: only the edges contribute
    before,
    scale=60.0,
    bias=-6.0 * distance[:, 0],  # prefer the latest
    edge_attr=distance,
    edge_value=torch.ones(1, 1, 1),  # [heads, features, channels]
)
expected = {3: 3, 4: 3, 6: 4, 7: 4}  # the second a, the second b, the second c, the third a
for token, letter in enumerate(letters):
    seen = letter in letters[:token]
    print(f"{letter} at {token}:", f"{back[0, 0, token, 0]:.2f} tokens back" if seen else "not seen before")
    assert not seen or abs(back[0, 0, token, 0] - expected[token]) < 1e-6

# %% [markdown]
# The second replacement adds up more than once. With the same weights, the result of one round is the value of the next:
#
# $$z \leftarrow (1 - \alpha) \sum_{e \to \mathit{dst}} w_e z_{\mathit{src}} + \alpha v$$
#
# This is the personalised PageRank of Klicpera et al. (2018), with attention weights. Each round reaches one edge further. It costs one
# `aggregate`, because the weights stay the same. The graph is a window of three tokens. The picture shows how much of the value of A each
# token has after each round.

# %%
near = patterns.window(8, 3)
weights = edge_ops.softmax(product_logits(x, x, near), near)
ALPHA = 0.2
only_a = torch.zeros(1, 1, 8, 1)
only_a[0, 0, 0] = 1.0
z, history = only_a, [only_a.flatten()]
for _ in range(40):
    z = (1 - ALPHA) * edge_ops.aggregate(weights, z, near) + ALPHA * only_a
    history.append(z.flatten())

limit = ALPHA * torch.linalg.inv(torch.eye(8) - (1 - ALPHA) * as_table(weights, near))[:, 0]
assert (history[-1] - limit).abs().max() < 1e-3
shown = torch.stack([*history[:6], limit])
rows = [*(f"round {number}" for number in range(6)), "limit"]
figure, ax = plt.subplots(figsize=(7, 3.4))
draw_table(ax, shown, rows, NAMES, "how much of the value of A a token has", mask=shown > 0)
plt.show()
assert [int((row > 0).sum()) for row in shown[:5]] == [1, 3, 5, 7, 8]

# %% [markdown]
# Read the table from top to bottom. After $r$ rounds the value has crossed $r$ edges, each of which spans at most two tokens, so the coloured
# part of a row grows by two tokens a round. [Notebook 11](11_how_many_layers.ipynb) counts such steps. The rounds converge, because
# the weights of a receiver sum to one, so each round multiplies the largest difference by at most $1 - \alpha$. The limit is the solution of
# a linear system. The code computes it from a matrix of all pairs, to check the rounds, which need no such matrix.
#
# ## 5. What each part sees, and what it costs
#
# | kind of attention | logit | normaliser | what is added up | path |
# |---|---|---|---|---|
# | softmax attention | product | softmax | values | `attend`, the fastest code |
# | distance (RBF) | product of wider rows | softmax | values | `attend` |
# | GAT | function of a product of width 2 | softmax | values | `edge_ops` |
# | GATv2, additive | function of a **row for each edge** | softmax | values | rows of chunks of edges |
# | sparsemax, sigmoid | product | another | values | `attend(normaliser=...)` |
# | stick-breaking | product | running sums | values | `edge_ops` |
# | edge features | product + product with the edge | softmax | values + features | `attend(edge_attr=...)` |
# | PageRank | product | softmax | results of the last round | `edge_ops` |
#
# **The answer** to the question at the top is in this table. Another logit changes which sender has the largest weight. Another normaliser changes
# whether senders compete. Another message brings in features of edges or tokens further away. The column on the right gives the cost. If tokens enter a
# logit only through products of rows, a layer needs a few numbers for each edge. If a nonlinearity stands between the rows and the product,
# it needs a row for each edge. The [guide](../docs/guide/primitives.md) has seventeen kinds of attention, with their papers and measured costs.
#
# ## 6. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/25_attention_from_primitives.py).
#
# **1. The angle alone** (5 minutes, easy, code). Write a logit that depends on the angle between the two points and not on their lengths:
# $5 \cos(q_{\mathit{dst}}, k_{\mathit{src}})$, as a function of q, k and a graph.
#
# <details><summary>Hint</summary>
#
# The cosine is the product of two rows of length 1.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of (q, k, graph) that returns logits

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

cosines = functional.cosine_similarity(x[:, :, dst], x[:, :, src], dim=-1)
assert torch.allclose(answer(x, x, graph), 5 * cosines), "not 5 times the cosine"
assert torch.allclose(answer(x, 3 * x, graph), 5 * cosines), "the length of a key still counts"
print("right: the lengths can be divided away at the tokens, before any edge is visited")

# %% [markdown]
# **2. No sender at all** (10 minutes, medium, code). The weights of a softmax always sum to one. Add 1 to its denominator,
# $w_e = e^{s_e} / (1 + \sum e^{s})$, and they need not: if all logits are very small, so are all weights. Write this attention as a function
# of logits, values and a graph.
#
# <details><summary>Hint</summary>
#
# `edge_ops.logsumexp` returns $\text{lse} = \log \sum e^s$ for each receiver, and $\sum e^s / (1 + \sum e^s)$ is a function of lse alone.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of (logits, v, graph) that returns rows of tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

expected = ga.attend(x, x, x, graph, sink_logits=torch.zeros(1))  # a sink with the logit 0
assert torch.allclose(answer(product_logits(x, x, graph), x, graph), expected), (
    "the denominator is not 1 + sum"
)
silent = answer(torch.full((1, 1, graph.num_edges), -900.0), x, graph)
assert torch.allclose(silent, torch.zeros_like(silent)), "with very small logits there should be nothing"
print("right: it is softmax attention, times the sigmoid of lse")

# %% [markdown]
# **3. How many rounds?** (3 minutes, easy). Along a window of 5 tokens, including the receiver itself, how many rounds does the value of the
# first of 100 tokens need to reach the last one?
#
# <details><summary>Hint</summary>
#
# How many tokens does the longest edge span? How far is it from the first token to the last?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

wide = patterns.window(100, 5)
ones = torch.ones(1, 1, wide.num_edges)
z, rounds = torch.zeros(1, 1, 100, 1), 0
z[0, 0, 0] = 1.0
while z[0, 0, -1] == 0:
    z, rounds = edge_ops.aggregate(ones, z, wide), rounds + 1
assert answer == rounds, "one round crosses one edge: how many tokens does an edge span at most?"
print("right:", rounds)

# %% [markdown]
# **4. Forget** (5 minutes, medium, code). In the forgetting transformer (Lin et al. 2025), each token has a gate $f$ between 0 and 1. It
# multiplies $e^{s_e}$ by the gates of all tokens after the sender, up to the receiver. Let every gate be 1/2. What must be added to the
# logit of an edge? Write a function of `graph` that returns a number for each edge, `[E]`.
#
# <details><summary>Hint</summary>
#
# The gates are multiplied in $e^{s_e}$, so their logarithms are added to $s_e$. How many of them are there for an edge?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of graph that returns [E]

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

_, info = ga.attend(x, x, x, graph, scale=0.0, bias=answer(graph), return_info=True)
table = info.weight_matrix()[0, 0]
halves = torch.tensor([[0.5 ** (i - j) if j <= i else 0.0 for j in range(8)] for i in range(8)])
assert torch.allclose(table, halves / halves.sum(1, keepdim=True)), (
    "each token further back has half the weight"
)
print("right: the last token has the weights", [round(w, 3) for w in table[7].tolist()])

# %% [markdown]
# ## Sources
#
# * P. Veličković et al., [Graph Attention Networks](https://arxiv.org/abs/1710.10903), 2017. S. Brody, U. Alon and E. Yahav, [How Attentive are Graph
#   Attention Networks?](https://arxiv.org/abs/2105.14491), 2021: one ranking for all receivers, and GATv2.
# * H. Kim, G. Papamakarios and A. Mnih, [The Lipschitz Constant of Self-Attention](https://arxiv.org/abs/2006.04710), 2020: logits from distances.
# * A. Martins and R. Astudillo, [From Softmax to Sparsemax](https://arxiv.org/abs/1602.02068), 2016. J. Ramapuram et al., [Theory, Analysis, and
#   Best Practices for Sigmoid Self-Attention](https://arxiv.org/abs/2409.04431), 2024. S. Tan et al., [Stick-breaking
#   Attention](https://arxiv.org/abs/2410.17980), 2024.
# * P. Shaw, J. Uszkoreit and A. Vaswani, [Self-Attention with Relative Position Representations](https://arxiv.org/abs/1803.02155), 2018: features of
#   edges in keys and values.
# * J. Klicpera, A. Bojchevski and S. Günnemann, [Predict then Propagate](https://arxiv.org/abs/1810.05997), 2018, and G. Wang et al., [Multi-hop
#   Attention Graph Neural Network](https://arxiv.org/abs/2009.14332), 2020: several rounds with one weighting.
# * Z. Lin et al., [Forgetting Transformer](https://arxiv.org/abs/2503.02130), 2025.

# %% [markdown]
# ---
# before: [24. The graph that a model draws for itself](24_the_graph_that_a_model_draws.ipynb) | [the book](README.md)
