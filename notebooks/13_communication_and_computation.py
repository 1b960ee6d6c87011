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
# # Communication and computation
#
# A transformer does two things in turn. In one phase the tokens exchange messages along the edges of a graph. In the other phase
# each token transforms its own state, without any other token. Andrej Karpathy, who teaches it this way, calls the two phases
# *communication* and *computation*.
#
# How strict is this division? We measure it: attention is the *only* part through which anything passes from one token to another.
# Then we do an exercise of Karpathy's, attention as a graph of objects that send messages to each other, and study a small mistake
# in the published version.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** show with a Jacobian that attention alone moves information.
#
# before: [12. Sparse against dense, trained](12_sparse_against_dense.ipynb) | [the book](README.md) | next: [14. Attention, one case of message passing; an MLP, another](14_one_limiting_case.ipynb)

# %%
import math

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, RED, draw_table, use_house_style
from torch.autograd.functional import jacobian

import gnn_attention as ga
from gnn_attention import draw, patterns

use_house_style()
torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## 1. Who depends on whom, step by step
#
# Take a function that maps the states of $T$ tokens to $T$ new ones. Its derivative, the **Jacobian**, is a large matrix of
# $T \times T$ blocks:
#
# $$J_{\mathit{dst}, \mathit{src}} = \frac{\partial\, y_\mathit{dst}}{\partial\, x_\mathit{src}}$$
#
# A block says how the result at `dst` changes when the state of `src` changes. If nothing passes from `src` to `dst`, the whole block
# is exactly zero. We compute these blocks for each part of one layer, a small one with random parameters, and for the unembedding
# after it. The graph of the layer has eight tokens:

# %%
T, WIDTH = 8, 16
graph = patterns.window(T, 3) | patterns.sinks(T, 1)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 2))
draw.mask(graph, left, title="the mask: window and sink")
draw.arcs(graph, right, title="the same graph as arcs")
plt.show()

# %%
small = ga.model.LanguageModel(
    ga.model.Config(64, width=WIDTH, num_layers=1, num_heads=2, head_dim=8, mlp_width=32)
).double()
block = small.blocks[0]
x = torch.randn(1, T, WIDTH, dtype=torch.float64)


def who_depends_on_whom(step):
    """Return the norm of every block of the derivative, ``[dst, src]``."""
    return jacobian(step, x)[0, :, :, 0].norm(dim=(1, 3))


# %%
STEPS = {
    "norm": block.attention_norm,
    "communication": lambda x: block.communicate(x, graph),
    "computation": block.compute,
    "unembedding": lambda x: small.unembedding(small.norm(x)),
}
strengths = {name: who_depends_on_whom(step) for name, step in STEPS.items()}

figure, axes = plt.subplots(1, 4, figsize=(12, 3.3), sharey=True)
for ax, (name, strength) in zip(axes, strengths.items(), strict=True):
    colours = plt.get_cmap("Blues").with_extremes(bad="#E4E4E4")
    ax.imshow(
        strength.where(strength > 0, math.nan), cmap=colours, vmin=-0.4 * strength.max(), vmax=strength.max()
    )
    ax.set(title=name, xlabel="src (sender)", xticks=range(T), yticks=range(T))
    ax.tick_params(length=0)
axes[0].set_ylabel("dst (receiver)")
plt.show()

# %% [markdown]
# A cell is darker where the block is larger, and grey where it is exactly zero. Three of the four pictures are diagonal: these parts
# treat each token by itself. The fourth, communication, is the mask of the graph, edge for edge: the window of three tokens, and the
# first token, to which every token attends.

# %%
alone = torch.eye(T, dtype=torch.bool)
for name, strength in strengths.items():
    assert torch.equal(strength > 0, graph.mask() if name == "communication" else alone)
    print(f"{name:>13}: {int((strength > 0).sum()):>2} of {T * T} blocks are not zero")

# %% [markdown]
# ## 2. The same in the trained model
#
# `ga.audit` measures along which pairs of tokens information flows in a module, by the derivative and two further tests, and compares
# the pairs with a graph. For each part that is not attention, the claim is the graph of self loops: no token depends on another one.
# (The audit runs the module on two random inputs. It can find a leak, and finds none here. It cannot prove that there is none for
# any input; [notebook 19](19_audit_a_leak.ipynb) builds a leak that it misses.)

# %% tags=["S4.3"]
model, vocabulary = ga.model.load_trained()
n, width = 9, model.config.width
self_loops, causal = patterns.self_loops(n), patterns.causal(n)
for number, block in enumerate(model.blocks):
    for name, part, declared_claim in (
        ("norm", block.attention_norm, self_loops),
        ("attention", block.attention, causal),
        ("norm", block.mlp_norm, self_loops),
        ("MLP", block.mlp, self_loops),
    ):
        verdict = ga.audit(part, declared_claim, (n, width), layers=1)
        assert verdict.exact
        print(f"layer {number}, {name:>9}: exactly along {declared_claim.name}")
for name, part in (("norm", model.norm), ("unembedding", model.unembedding)):
    assert ga.audit(part, self_loops, (n, width), layers=1).exact
    print(f"         {name:>11}: exactly along {self_loops.name}")

# %% [markdown]
# This has a consequence. If all edges are removed, every token predicts what it would predict as the only token of a text. The MLPs
# still compute, and that alone improves the prediction. Below, the model reads the same text under four conditions. The loss is
# minus the logarithm of the probability that the model gave to the next token; at chance level, with 1,024 equally
# probable tokens, it is 6.93.

# %%
TEXT = '''
def closest(points, target):
    """Return the point that is closest to the target."""
    best = None
    for point in points:
        distance = abs(point - target)
        if best is None or distance < abs(best - target):
            best = point
    return best
'''
tokens = torch.tensor([vocabulary.encode(TEXT)])
length = tokens.shape[1]
no_edges = patterns.causal(length) - patterns.causal(length)


@torch.no_grad()
def mean_loss(graph, with_mlp=True):
    """Return the mean loss along a graph; without MLPs, their output is replaced by zero."""
    hooks = (
        []
        if with_mlp
        else [b.mlp.register_forward_hook(lambda *call: torch.zeros_like(call[-1])) for b in model.blocks]
    )
    chances = model(tokens, graph)[0, :-1].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return -chances.gather(-1, tokens[0, 1:, None]).mean().item()


# %%
result = {
    "both": mean_loss(patterns.causal(length)),
    "only computation": mean_loss(no_edges),
    "only communication": mean_loss(patterns.causal(length), with_mlp=False),
    "neither": mean_loss(no_edges, with_mlp=False),
}
for name, value in result.items():
    print(f"{name:>18}: {value:.2f}")
assert min(result, key=result.get) == "both"
assert result["neither"] > result["only computation"]

with torch.no_grad():
    together = model(tokens, no_edges)[0, 20]
    single = model(tokens[:, 20:21], patterns.causal(1) - patterns.causal(1))[0, 0]
assert torch.allclose(
    together, single, atol=1e-4
)  # token 20 in the text without edges predicts the same as token 20 alone

# %% [markdown]
# The model needs both phases: communication without computation is worse than the two together, and so is the reverse.
#
# `ga.trace.record` returns the phases of a run. Each phase adds an **update** to the state of every token. How large is each update,
# compared with the state to which it is added?

# %%
sentence = torch.tensor([vocabulary.encode("Llamas do not output words")])
pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces(sentence[0])]
with torch.no_grad():
    run = ga.trace.record(model, sentence)
sizes = torch.stack([(phase.update.norm(dim=-1) / phase.before.norm(dim=-1))[0] for phase in run.phases])
names = [f"layer {phase.layer}: {phase.name}" for phase in run.phases]

figure, ax = plt.subplots(figsize=(9.5, 2.9))
ax.imshow(sizes, cmap="Blues", vmin=0, vmax=float(sizes.max()) * 1.2, aspect="auto")
for (row, column), value in zip(
    [(r, c) for r in range(len(names)) for c in range(len(pieces))], sizes.flatten(), strict=True
):
    ax.text(
        column,
        row,
        f"{value:.1f}",
        ha="center",
        va="center",
        color="white" if value > 0.7 * sizes.max() else "black",
    )
ax.set_xticks(range(len(pieces)), pieces)
ax.set_yticks(range(len(names)), names)
ax.tick_params(length=0)
ax.set_title("length of the update, divided by the length of the state before it", fontsize=11)
plt.show()

assert [phase.name for phase in run.phases] == ["communication", "computation"] * 2
assert len(run.states) == len(run.phases) + 1
for phase, after in zip(run.phases, run.states[1:], strict=True):
    assert torch.allclose(phase.before + phase.update, after, atol=1e-5)

# %% [markdown]
# The first computation changes the states most: its update is about three times as long as the state. No phase is negligible.
#
# ## 3. Nodes as objects
#
# Now Karpathy's exercise: write attention as objects. A **node** holds a state and computes three vectors from it: a query (what it
# looks for), a key (what it offers) and a value (the message that it sends). A directed edge `src -> dst` lets `dst` attend to `src`.
# In one round every node compares its query with the keys of its senders, and receives the weighted mean of their values.


# %%
class Node:
    """A state, and the three vectors that are computed from it."""

    def __init__(self, width, generator):
        self.state = torch.randn(width, generator=generator)
        self.W_Q, self.W_K, self.W_V = torch.randn(3, width, width, generator=generator) / math.sqrt(width)

    def query(self):
        return self.state @ self.W_Q

    def key(self):
        return self.state @ self.W_K

    def value(self):
        return self.state @ self.W_V


# %%
def receive(node, senders):
    """Return the weighted mean of the values of a node's senders."""
    scores = torch.stack([node.query() @ sender.key() for sender in senders])
    return scores.softmax(0) @ torch.stack([sender.value() for sender in senders])


def one_round(nodes, edges):
    """Return the update of every node; it is 0 for a node without in-edges."""
    updates = torch.zeros(len(nodes), len(nodes[0].state))
    for number, node in enumerate(nodes):
        senders = [nodes[src] for src, dst in edges if dst == number]
        if senders:
            updates[number] = receive(node, senders)
    return updates


generator = torch.Generator().manual_seed(0)
nodes = [Node(20, generator) for _ in range(10)]
edges = torch.randint(10, (40, 2), generator=generator).tolist()  # 40 random pairs (src, dst)
updates = one_round(nodes, edges)
print("update of node 0 begins with", [round(value, 2) for value in updates[0, :4].tolist()])

# %% [markdown]
# Is that attention? To compare, we stack the queries, keys and values of the nodes into three matrices, and pass the edges to the
# library. It raises an error:

# %%
q, k, v = (torch.stack([vector(node) for node in nodes]) for vector in (Node.query, Node.key, Node.value))
try:
    ga.convert.from_edge_index(torch.tensor(edges).T, 10)
except ValueError as error:
    print(error)

# %% [markdown]
# 40 edges were drawn among 100 pairs, so some were drawn twice. A mask is a *set*: a pair is in it or not. In the loop, an edge that is
# listed twice counts twice in the softmax. An edge that counts $m$ times is an edge whose logit is larger by $\log m$. With this
# addition the matrices give the same result as the objects.

# %%
graph = ga.convert.from_edge_index(torch.tensor(edges).T, 10, coalesce=True)
times = torch.zeros(10, 10).index_put(
    (torch.tensor(edges)[:, 1], torch.tensor(edges)[:, 0]), torch.ones(40), accumulate=True
)
repeated = ga.score_mods.log_multiplicity(times)  # [dst, src]

by_matrices = ga.attend(q[None, None], k[None, None], v[None, None], graph, scale=1.0, score_mod=repeated)[
    0, 0
]
assert torch.allclose(by_matrices, updates, atol=1e-5)
as_a_set = ga.attend(q[None, None], k[None, None], v[None, None], graph, scale=1.0)[0, 0]
assert not torch.allclose(as_a_set, updates, atol=1e-2)
print(
    f"{len(edges)} edges drawn, {graph.num_edges} of them different; counting each once changes the updates by up to",
    end=" ",
)
print(f"{(as_a_set - updates).abs().max():.2f}")

figure, ax = plt.subplots(figsize=(4.6, 4.4))
draw_table(
    ax, times, range(10), range(10), limit=3.0, digits=0, mask=graph.mask(), title="copies of each edge"
)
ax.set(xlabel="src (sender)", ylabel="dst (receiver)")
plt.show()

# %% [markdown]
# Three differences from a transformer remain. The logits are not divided by $\sqrt d$ ([why they should
# be](07_why_the_square_root.ipynb)). There is one head. And **each node has matrices of its own**, while all tokens of a
# transformer share theirs, which is why a transformer can be trained on a thousand tokens and run on a million. With shared
# matrices the whole exercise is our layer, and the list of edges is the graph of the layer.

# %%
W_Q, W_K, W_V = nodes[0].W_Q, nodes[0].W_K, nodes[0].W_V
heads = ga.StandardHeads.from_arrays(W_Q[None], W_K[None], W_V[None], torch.eye(20)[None])
for node in nodes:
    node.W_Q, node.W_K, node.W_V = W_Q / 20**0.25, W_K / 20**0.25, W_V  # 1/sqrt(d), half on either side
states = torch.stack([node.state for node in nodes])
each_once = graph.edge_index.T.tolist()
assert torch.allclose(
    ga.MessagePassingAttention(heads)(states, graph), one_round(nodes, each_once), atol=1e-5
)
print("the layer and the objects agree")

# %% [markdown]
# ## 4. An instructive mistake
#
# The version shown in the lecture, which has been copied into many repositories since, is as short as ours and differs in one detail.
# It collects the updates in a *list*, skips nodes without in-edges, and at the end iterates over nodes and updates in parallel. Written
# with our names:


# %%
def one_round_by_position(nodes, edges):
    """Return the updates of the published version: its list has no entry for a node without in-edges."""
    senders = [[nodes[src] for src, dst in edges if dst == number] for number in range(len(nodes))]
    updates = [receive(node, some) for node, some in zip(nodes, senders, strict=True) if some]
    result = torch.zeros(len(nodes), len(nodes[0].state))
    for number, update in zip(range(len(nodes)), updates, strict=False):
        result[number] = update
    return result


isolating = next(
    sample
    for sample in (torch.randint(10, (40, 2), generator=generator).tolist() for _ in range(1000))
    if {dst for _, dst in sample} == set(range(10)) - {3}  # node 3, and only node 3, has no in-edges
)
right, wrong = one_round(nodes, isolating), one_round_by_position(nodes, isolating)
received = {
    number: next((i for i in range(10) if torch.equal(wrong[number], right[i])), None) for number in range(10)
}
print("node: the node whose update it received:", received)
assert received == {0: 0, 1: 1, 2: 2, 3: 4, 4: 5, 5: 6, 6: 7, 7: 8, 8: 9, 9: 3}

# %% [markdown]
# Node 3 has no in-edges, so its state should not change. Instead it receives the update of node 4, node 4 that of node 5, and so on;
# the last node receives nothing. (The dictionary maps node 9 to 3 because both updates are zero.) Below, an arrow leads from the
# node for which an update was computed to the node that received it.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.0), sharey=True)
for ax, shift, title in (
    (axes[0], 0, "updates by number of the node"),
    (axes[1], 1, "updates by position in the list"),
):
    for number in set(range(10)) - {3}:
        to = number - shift if number > 3 else number
        colour = BLUE if to == number else RED
        ax.annotate(
            "", (to, 0.08), (number, 0.92), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.8}
        )
    for number in range(10):
        for level in (0, 1):
            hollow = number == 3 and level == 1
            ax.plot(
                number,
                level,
                "o",
                markersize=15,
                color="white" if hollow else "#DDDDDD",
                markeredgecolor=GREY,
            )
            ax.text(number, level, str(number), ha="center", va="center", fontsize=10)
    ax.set(title=title, xlim=(-0.7, 9.7), ylim=(-0.25, 1.25), xticks=[])
    ax.set_yticks([0, 1], ["is added to", "update of"])
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
plt.show()

# %% [markdown]
# How often does it matter? A node is isolated if none of the 40 edges ends at it. By inclusion and exclusion, at least one of the 10
# nodes is isolated with probability
#
# $$\sum_{k=1}^{9} (-1)^{k+1} \binom{10}{k} \Big(1 - \frac{k}{10}\Big)^{40}$$
#
# and the bug is harmless only if all nodes without in-edges come last. About one run in seven to eight is wrong, and nothing shows it:
# no error is raised, and all shapes are right.

# %%
has_isolated = sum((-1) ** (k + 1) * math.comb(10, k) * (1 - k / 10) ** 40 for k in range(1, 10))

draws = torch.randint(10, (20000, 40, 2), generator=generator)
has_sender = torch.zeros(20000, 10, dtype=torch.bool).scatter(1, draws[..., 1], True)
has_later = has_sender.flip(1).cumsum(1).flip(1) > 0
shifted = (~has_sender & has_later).any(1)  # an isolated node comes before one with in-edges
different = torch.tensor([len({tuple(edge) for edge in one.tolist()}) for one in draws[:2000]])

print(
    f"a node is isolated:    {has_isolated:.1%} by the formula, {(~has_sender).any(1).double().mean():.1%} of 20,000 draws"
)
print(f"an update is misplaced: {shifted.double().mean():.1%}")
twice = (different < 40).double().mean()
print(f"an edge is repeated:    {twice:.2%} of 2,000 draws, {40 - different.double().mean():.0f} on average")
assert abs((~has_sender).any(1).double().mean() - has_isolated) < 0.01
assert 1 / 8.5 < shifted.double().mean() < 1 / 7

# %% [markdown]
# The mistake loses track of the receivers. In a graph library it cannot happen: PyG's `aggregate` adds every message to the row of its
# receiver, `index_add(0, dst, message)`, so a receiver without edges has a row of zeros. In the matrix form it cannot happen either,
# but there the softmax of a row without edges is 0 / 0. This library returns exactly 0 for it, in every backend.

# %%
graph = ga.convert.from_edge_index(torch.tensor(isolating).T, 10, coalesce=True)
update = ga.MessagePassingAttention(heads)(states, graph)
plain = torch.where(graph.mask(), states @ W_Q @ W_K.T @ states.T, -math.inf).softmax(-1)
assert not update[3].any()
assert plain[3].isnan().all()
print(
    "update of node 3:",
    update[3].abs().max().item(),
    "   softmax of its row of the matrix:",
    plain[3, 0].item(),
)

# %% [markdown]
# **The answer.** The division is complete. Each part of the model other than attention has a diagonal Jacobian, and the Jacobian of
# attention is the mask. So every question about what a token can know is a question about the graph.
#
# ## 5. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/13_communication_and_computation.py).
#
# **1. Fewer edges** (easy, 5 minutes). With 20 random edges among 10 nodes instead of 40, how many nodes are isolated on average?
#
# <details><summary>Hint</summary>
#
# The expected number is the sum over the nodes of the probability that no edge ends at this node.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

draws = torch.randint(10, (20000, 20), generator=generator)
average = 10 - torch.zeros(20000, 10).scatter(1, draws, 1.0).sum(1).mean().item()
assert abs(answer - average) < 0.03, (
    "an edge ends at another node with probability 9/10, and there are 20 edges"
)
print(f"right: {answer:.2f}; in 20,000 draws {average:.2f}")

# %% [markdown]
# **2. Sequential updates** (hard, 10 minutes). In a round, every update is computed from the old states. Suppose instead that each node, in
# the order 0, 1, 2, ..., adds its update to its state *immediately*, so that the next nodes receive the new state. In
# `window(6, 2)` a node attends to itself and the one before it. Which initial states can influence which states after **one** such
# round? Write the graph.
#
# <details><summary>Hint</summary>
#
# Node 1 receives the new state of node 0, and node 2 receives the new state of node 1, which depends on node 0 already.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph over 6 nodes

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"


def one_after_the_other(states):
    line = patterns.window(6, 2)
    states = list(states.unbind(0))
    for number in range(6):
        states[number] = states[number] + ga.MessagePassingAttention(heads)(torch.stack(states), line)[number]
    return torch.stack(states)


derivative = jacobian(one_after_the_other, states[:6]).norm(dim=(1, 3))
assert torch.equal(derivative > 0, answer.mask()), (
    f"not quite: {int((derivative > 0).sum())} pairs depend on each other"
)
print("right")

# %% [markdown]
# **3. Encoder and decoder** (medium, 10 minutes). Karpathy describes the first transformer as a graph. The four tokens of the encoder
# attend to each other. The three tokens of the decoder come after them, and each attends to all tokens of the encoder, to itself and to
# the tokens of the decoder before it. Write the code that builds this graph.
#
# <details><summary>Hint</summary>
#
# Start from a rule for `ga.TokenGraph.from_rule`, or from `patterns.full` and `patterns.causal`, or look for a builder whose name
# begins with `prefix`, and read what it does.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph over 7 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.in_degree().tolist() == [4, 4, 4, 4, 5, 6, 7], "a token has too many or too few senders"
assert not answer.mask()[:4, 4:].any(), "a token of the encoder attends to the decoder"
draw.side_by_side(answer, labels=["e0", "e1", "e2", "e3", "d0", "d1", "d2"])

# %% [markdown]
# ## Sources
#
# * A. Karpathy, lecture in Stanford CS25 V2, *Introduction to Transformers*, 2023: communication and computation, nodes with a
#   key, a query and a value. The code above is written from the idea, not copied.
# * *Attention: All you need to know*, far.in.net, 2025 (S4 in the docstrings of this library): attention is the only step that
#   moves information between positions (S4.3); communication and computation alternate (S4.19).
# * J. Gilmer et al., [Neural Message Passing for Quantum Chemistry](https://arxiv.org/abs/1704.01212), 2017.

# %% [markdown]
# ---
# before: [12. Sparse against dense, trained](12_sparse_against_dense.ipynb) | [the book](README.md) | next: [14. Attention, one case of message passing; an MLP, another](14_one_limiting_case.ipynb)
