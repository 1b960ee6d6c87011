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
# A transformer does two things in turn. In one phase the tokens **talk**: each hears others along the edges of a graph. In the
# other phase each token **thinks** about what it has heard, alone. Andrej Karpathy, who teaches it this way, calls the two
# *communication* and *computation*.
#
# How strict is this division? Completely: attention is the *only* place where anything passes from one token to another. That
# can be measured. Then we do an exercise of Karpathy's, attention as a graph of objects that talk to each other, and look at a
# small mistake in the published version from which much can be learned.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** show with a Jacobian that attention alone moves information.
#
# before: [Sparse against dense, trained](12_sparse_against_dense.ipynb) | [the book](README.md) | next: [Attention, one case of message passing; an MLP, another](14_one_limiting_case.ipynb)

# %%
import math
import warnings

import matplotlib.pyplot as plt
import torch
from torch.autograd.functional import jacobian

import gnn_attention as ga
from gnn_attention import draw, patterns

torch.manual_seed(0)
torch.set_num_threads(1)
warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"

# %% [markdown]
# ## 1. Who depends on whom, step by step
#
# Take a function that maps the states of $T$ tokens to $T$ new ones. Its derivative is a large matrix, and the matrix falls
# into $T \times T$ blocks:
#
# $$J_{\mathit{dst}, \mathit{src}} = \frac{\partial\, y_\mathit{dst}}{\partial\, x_\mathit{src}}$$
#
# The block says how the result at `dst` changes when the state of `src` does. If nothing passes from `src` to `dst`, the whole
# block is exactly zero. Here are the parts of one layer (a small one, with parameters just drawn) and of the read-out after it,
# one after the other. A cell is darker where the block is larger; grey means: exactly zero.

# %%
T, WIDTH = 8, 16
small = ga.model.LanguageModel(
    ga.model.Config(64, width=WIDTH, num_layers=1, num_heads=2, head_dim=8, mlp_width=32)
).double()
block = small.blocks[0]
graph = patterns.window(T, 3) | patterns.sinks(T, 1)
x = torch.randn(1, T, WIDTH, dtype=torch.float64)


def who_depends_on_whom(step):
    """The length of every block of the derivative, ``[dst, src]``."""
    return jacobian(step, x)[0, :, :, 0].norm(dim=(1, 3))


# %%
STEPS = {
    "norm": block.attention_norm,
    "communication": lambda x: block.communicate(x, graph),
    "computation": block.compute,
    "unembedding": lambda x: small.unembedding(small.norm(x)),
}
strengths = {name: who_depends_on_whom(step) for name, step in STEPS.items()}

figure, axes = plt.subplots(1, 4, figsize=(12, 3.3), layout="constrained", sharey=True)
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
# Three of the four are diagonal: whatever they do, they do to each token by itself. The other one, communication, is the mask
# of the graph, edge for edge. (The window of three, and the first token, which everybody hears.)

# %%
alone = torch.eye(T, dtype=torch.bool)
for name, strength in strengths.items():
    assert torch.equal(strength > 0, graph.mask() if name == "communication" else alone)
    print(f"{name:>13}: {int((strength > 0).sum()):>2} of {T * T} blocks are not zero")

# %% [markdown]
# ## 2. The same in the trained model
#
# `ga.audit` finds out along which pairs information really flows in a module, with the derivative and two further witnesses,
# and compares it with a graph. For everything in a layer that is not attention the graph is *nobody hears anybody else*. (It looks
# at two random inputs: it may find a leak, and finds none here. It cannot prove that there is none at any input; [notebook
# 19](19_audit_a_leak.ipynb) builds a leak that it misses.)

# %% tags=["S4.3"]
model, vocabulary = ga.model.load_trained()
n, width = 9, model.config.width
nobody_else, causal = patterns.self_loops(n), patterns.causal(n)
for number, block in enumerate(model.blocks):
    for name, part, declared_claim in (
        ("norm", block.attention_norm, nobody_else),
        ("attention", block.attention, causal),
        ("norm", block.mlp_norm, nobody_else),
        ("MLP", block.mlp, nobody_else),
    ):
        verdict = ga.audit(part, declared_claim, (n, width), layers=1)
        assert verdict.exact
        print(f"layer {number}, {name:>9}: exactly along {declared_claim.name}")
for name, part in (("norm", model.norm), ("unembedding", model.unembedding)):
    assert ga.audit(part, nobody_else, (n, width), layers=1).exact
    print(f"         {name:>11}: exactly along {nobody_else.name}")

# %% [markdown]
# This has a plain consequence. Take all edges away, and the model falls apart into tokens that know nothing of each other:
# every one of them predicts what it would predict as the only token of a text. It still computes, and that is worth something.
# Below, the same text under four conditions. Surprise is minus the logarithm of the probability that the model gave to the
# token that came; even guessing would have 6.93.

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
silence = patterns.causal(length) - patterns.causal(length)  # no edges at all


@torch.no_grad()
def surprise(graph, thinking=True):
    """The mean surprise; without thinking the MLPs say nothing."""
    hooks = (
        []
        if thinking
        else [b.mlp.register_forward_hook(lambda *call: torch.zeros_like(call[-1])) for b in model.blocks]
    )
    chances = model(tokens, graph)[0, :-1].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return -chances.gather(-1, tokens[0, 1:, None]).mean().item()


# %%
result = {
    "both": surprise(patterns.causal(length)),
    "only computation": surprise(silence),
    "only communication": surprise(patterns.causal(length), thinking=False),
    "neither": surprise(silence, thinking=False),
}
for name, value in result.items():
    print(f"{name:>18}: {value:.2f}")
assert min(result, key=result.get) == "both"
assert result["neither"] > result["only computation"]

with torch.no_grad():
    together = model(tokens, silence)[0, 20]
    single = model(tokens[:, 20:21], patterns.causal(1) - patterns.causal(1))[0, 0]
assert torch.allclose(
    together, single, atol=1e-4
)  # token 20 among the others, hearing none of them, and token 20 alone

# %% [markdown]
# `ga.trace.record` marks the phases of a run. Each one adds an **update** to the state of every token, and between them the
# states only rest. How large is each update, compared with the state that it is added to?

# %%
sentence = torch.tensor([vocabulary.encode("Llamas do not output words")])
pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces(sentence[0])]
with torch.no_grad():
    run = ga.trace.record(model, sentence)
sizes = torch.stack([(phase.update.norm(dim=-1) / phase.before.norm(dim=-1))[0] for phase in run.phases])
names = [f"layer {phase.layer}: {phase.name}" for phase in run.phases]

figure, ax = plt.subplots(figsize=(9.5, 2.9), layout="constrained")
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
ax.set_title("length of the update, in lengths of the state before it", fontsize=11)
plt.show()

assert [phase.name for phase in run.phases] == ["communication", "computation"] * 2
assert len(run.states) == len(run.phases) + 1
for phase, after in zip(run.phases, run.states[1:], strict=True):
    assert torch.allclose(phase.before + phase.update, after, atol=1e-5)

# %% [markdown]
# ## 3. Nodes that talk to each other
#
# Now the exercise. Write attention as objects. A **node** holds a state, and it can answer three questions about it: what am I
# looking for, what do I have to offer, and what do I say to those who listen? A directed edge `src -> dst` lets `dst` listen to
# `src`. In one round every node looks at those it may hear, weighs them, and takes over the weighted mean of what they say.


# %%
class Node:
    """A state, and three answers about it."""

    def __init__(self, width, generator):
        self.state = torch.randn(width, generator=generator)
        self.W_Q, self.W_K, self.W_V = torch.randn(3, width, width, generator=generator) / math.sqrt(width)

    def looks_for(self):
        return self.state @ self.W_Q

    def offers(self):
        return self.state @ self.W_K

    def says(self):
        return self.state @ self.W_V


# %%
def hear(node, senders):
    """What a node takes over from those it hears."""
    fit = torch.stack([node.looks_for() @ sender.offers() for sender in senders])
    return fit.softmax(0) @ torch.stack([sender.says() for sender in senders])


def one_round(nodes, edges):
    """The update of every node; 0 for those that hear nobody."""
    updates = torch.zeros(len(nodes), len(nodes[0].state))
    for number, node in enumerate(nodes):
        senders = [nodes[src] for src, dst in edges if dst == number]
        if senders:
            updates[number] = hear(node, senders)
    return updates


generator = torch.Generator().manual_seed(0)
nodes = [Node(20, generator) for _ in range(10)]
edges = torch.randint(10, (40, 2), generator=generator).tolist()  # 40 times: some node hears some node
updates = one_round(nodes, edges)
print("update of node 0 begins with", [round(value, 2) for value in updates[0, :4].tolist()])

# %% [markdown]
# Is that attention? To compare, we stack what the nodes look for, offer and say into three matrices, and hand them to the
# library together with the graph. It refuses:

# %%
q, k, v = (
    torch.stack([answer(node) for node in nodes]) for answer in (Node.looks_for, Node.offers, Node.says)
)
try:
    ga.convert.from_edge_index(torch.tensor(edges).T, 10)
except ValueError as error:
    print(error)

# %% [markdown]
# The edges were drawn 40 times among 100 pairs, so some were drawn twice. But a mask is a *set*: a pair is allowed or it is
# not. In the loop an edge that is listed twice is heard twice, and its weight counts twice in the softmax. Said properly: a
# logit that counts $m$ times is a logit with $\log m$ added. With that, object by object and matrix by matrix are the same.

# %%
graph = ga.convert.from_edge_index(torch.tensor(edges).T, 10, coalesce=True)
times = torch.zeros(10, 10).index_put(
    (torch.tensor(edges)[:, 1], torch.tensor(edges)[:, 0]), torch.ones(40), accumulate=True
)
twice_heard = ga.score_mods.log_multiplicity(times)  # [dst, src]

by_matrices = ga.attend(q[None, None], k[None, None], v[None, None], graph, scale=1.0, score_mod=twice_heard)[
    0, 0
]
assert torch.allclose(by_matrices, updates, atol=1e-5)
as_a_set = ga.attend(q[None, None], k[None, None], v[None, None], graph, scale=1.0)[0, 0]
assert not torch.allclose(as_a_set, updates, atol=1e-2)
print(
    f"{len(edges)} edges drawn, {graph.num_edges} different ones; the largest change by counting each once:",
    end=" ",
)
print(f"{(as_a_set - updates).abs().max():.2f}")
draw.graph(graph, title="who hears whom: an arrow runs from sender to receiver")

# %% [markdown]
# Three things still separate these nodes from a transformer's. The logits are not divided by $\sqrt d$ ([why they should
# be](07_why_the_square_root.ipynb)). There is one head. And **each node has matrices of its own**, while all tokens of a
# transformer share theirs: that is why a transformer can be trained on a thousand tokens and run on a million. With shared
# matrices the whole exercise is our layer, and the layer's graph is the list of edges.

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
# The version shown in the lecture, as it has been copied into many repositories since, is as short as ours and differs in one
# detail. It collects the updates in a *list*, skips nodes that hear nobody, and at the end goes through nodes and updates side
# by side. In our words:


# %%
def one_round_side_by_side(nodes, edges):
    """As above, but with a list that has no entry for those who hear nobody."""
    senders = [[nodes[src] for src, dst in edges if dst == number] for number in range(len(nodes))]
    updates = [hear(node, heard) for node, heard in zip(nodes, senders, strict=True) if heard]
    result = torch.zeros(len(nodes), len(nodes[0].state))
    for number, update in zip(range(len(nodes)), updates, strict=False):
        result[number] = update
    return result


deaf = next(
    draw_
    for draw_ in (torch.randint(10, (40, 2), generator=generator).tolist() for _ in range(1000))
    if {dst for _, dst in draw_} == set(range(10)) - {3}  # node 3, and only node 3, hears nobody
)
right, wrong = one_round(nodes, deaf), one_round_side_by_side(nodes, deaf)
received = {
    number: next((i for i in range(10) if torch.equal(wrong[number], right[i])), None) for number in range(10)
}
print("node -> whose update it was given:", received)
assert received == {0: 0, 1: 1, 2: 2, 3: 4, 4: 5, 5: 6, 6: 7, 7: 8, 8: 9, 9: 3}

# %% [markdown]
# Node 3 hears nobody and should be left as it is. Instead it gets the update of node 4, node 4 that of node 5, and so on; the
# last node gets nothing. (In the dictionary node 9 stands beside 3 because both are zero.) Below, an arrow runs from the node
# for which an update was computed to the node that got it.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.0), layout="constrained", sharey=True)
for ax, shift, title in ((axes[0], 0, "by number"), (axes[1], 1, "side by side")):
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
    ax.set_yticks([0, 1], ["is given to", "update of"])
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
plt.show()

# %% [markdown]
# How often does it matter? A node hears nobody if none of 40 edges ends at it. With inclusion and exclusion, some node of 10
# does with probability
#
# $$\sum_{k=1}^{9} (-1)^{k+1} \binom{10}{k} \Big(1 - \frac{k}{10}\Big)^{40}$$
#
# and the bug is harmless only if all nodes without in-edges come last. So about one run in seven to eight is wrong, and
# looks as good as the others: nothing is raised, all shapes fit.

# %%
some_deaf = sum((-1) ** (k + 1) * math.comb(10, k) * (1 - k / 10) ** 40 for k in range(1, 10))

draws = torch.randint(10, (20000, 40, 2), generator=generator)
hears = torch.zeros(20000, 10, dtype=torch.bool).scatter(1, draws[..., 1], True)
shifted = (~hears & (hears.flip(1).cumsum(1).flip(1) > 0)).any(
    1
)  # somebody deaf, and somebody behind who is not
different = torch.tensor([len({tuple(edge) for edge in one.tolist()}) for one in draws[:2000]])

print(
    f"some node hears nobody: {some_deaf:.1%} by the formula, {(~hears).any(1).double().mean():.1%} of 20,000 draws"
)
print(f"an update goes astray:  {shifted.double().mean():.1%}")
twice = (different < 40).double().mean()
print(f"an edge drawn twice:    {twice:.2%} of 2,000 draws, {40 - different.double().mean():.0f} on average")
assert abs((~hears).any(1).double().mean() - some_deaf) < 0.01
assert 1 / 8.5 < shifted.double().mean() < 1 / 7

# %% [markdown]
# The mistake is one of *bookkeeping about receivers*, and in a graph library it cannot be made: PyG's `aggregate` adds every
# message to the row of its receiver, `index_add(0, dst, message)`, and a receiver without edges has a row of zeros. The number
# of the receiver travels with the message. In the matrix form it cannot be made either, but another waits there: the softmax of
# a row without edges is 0 / 0. This library gives exactly 0, in every backend.

# %%
graph = ga.convert.from_edge_index(torch.tensor(deaf).T, 10, coalesce=True)
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
# ## 5. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/13_communication_and_computation.py).
#
# **1. Fewer edges.** With 20 edges among 10 nodes instead of 40, how many nodes hear nobody, on average?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

draws = torch.randint(10, (20000, 20), generator=generator)
deaf_on_average = 10 - torch.zeros(20000, 10).scatter(1, draws, 1.0).sum(1).mean().item()
assert abs(answer - deaf_on_average) < 0.03, (
    "each node is missed by an edge with probability 9/10, and there are 20 edges"
)
print(f"right: {answer:.2f}; in 20,000 draws {deaf_on_average:.2f}")

# %% [markdown]
# **2. One after the other.** In a round all nodes speak at once: every update is computed from the old states. Suppose that
# each node, in the order 0, 1, 2, ..., adds its update to its state *at once*, so that the next ones hear the new state. Over
# `window(6, 2)`, where a node hears itself and the one before it: whose first states can influence whose state after **one**
# such round? Give the graph.

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
# **3. Encoder and decoder.** Karpathy describes the first transformer as a graph: the four tokens of the encoder all hear each
# other; each of the three tokens of the decoder, which come after them, hears all of the encoder, and of the decoder itself and
# those before it. Build it from `patterns.full`, `patterns.causal`, `ga.algebra.tokens.extend` or a rule, or find the builder.

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph over 7 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.in_degree().tolist() == [4, 4, 4, 4, 5, 6, 7], "somebody hears too many or too few"
assert not answer.mask()[:4, 4:].any(), "a token of the first text hears the second"
draw.side_by_side(answer, labels=["e0", "e1", "e2", "e3", "d0", "d1", "d2"])

# %% [markdown]
# ## Sources
#
# * A. Karpathy, lecture in Stanford CS25 V2, *Introduction to Transformers*, 2023: communication and computation, nodes with a
#   key, a query and a value. The code above is written anew from the idea.
# * *Attention: All you need to know*, far.in.net, 2025 (S4 in the docstrings of this library): attention is the only step that
#   moves information between positions (S4.3), the alternation of phases (S4.19).
# * J. Gilmer et al., [Neural Message Passing for Quantum Chemistry](https://arxiv.org/abs/1704.01212), 2017.

# %% [markdown]
# ---
# before: [Sparse against dense, trained](12_sparse_against_dense.ipynb) | [the book](README.md) | next: [Attention, one case of message passing; an MLP, another](14_one_limiting_case.ipynb)
