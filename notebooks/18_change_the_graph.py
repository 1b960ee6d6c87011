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
# # Change the graph of a trained model and watch it answer
#
# A trained model predicts the next token from all tokens before it. Its parameters do not contain the causal graph: attention takes the
# graph as an argument. So we can run a trained model along another graph, or remove a single edge, and look at the prediction again.
# **How much of an answer depends on a single edge, and how can we find that edge?**
#
# This is an intervention on connections. *Activation patching* is an intervention on what the connections carry: it replaces a message by the
# message of another run (`ga.trace.patch`).
#
# **Before you start**: you need [notebook 01](01_attention_is_message_passing.ipynb): a mask is a graph. Install with
# `pip install -e ".[notebooks,model]"`; nothing is downloaded, because the model is part of the package.
#
# **Afterwards you can** find the edge on which an answer hangs.
#
# before: [17. Relaying through a middle token](17_relay_through_a_middle_token.ipynb) | [the book](README.md) | next: [19. Audit a model that leaks](19_audit_a_leak.ipynb)

# %%
import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, ORANGE, RED, draw_table, use_house_style

import gnn_attention as ga

use_house_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## 1. The same parameters, other graphs
#
# The text is a Python loop, and then the beginning of the same loop. It has 16 tokens. Along the causal graph every token attends to all
# tokens up to itself, which makes 136 edges: the blue and red cells of the mask, and the arcs beside it. One edge is red. It starts at token 3,
# the ` name` that followed the first ` in`, and ends at token 15, the second ` in`, from which the model has to predict the next token.

# %%
model, vocabulary = ga.model.load_trained()
text = "for name in names:\n    print(name)\nfor name in"
tokens = torch.tensor([vocabulary.encode(text)])
pieces = vocabulary.pieces(text)
n = len(pieces)
print(n, "tokens:", pieces)

labels = [f"{number} {piece.strip() or '␣'}".replace("\\n", "⏎") for number, piece in enumerate(pieces)]
causal, the_edge = ga.patterns.causal(n), (3, 15)
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), width_ratios=(1, 1.9))
ga.draw.mask(causal, left, labels, title="causal(16)")
left.add_patch(plt.Rectangle((the_edge[0] - 0.5, the_edge[1] - 0.5), 1, 1, color=RED))
ga.draw.arcs(
    causal,
    right,
    labels,
    lit=[the_edge],
    title="the same graph as arcs",
)
plt.show()

# %% [markdown]
# Find the red cell in the last row of the mask, and the red arc that ends at the last token. Both are the same edge. Section 3 shows
# how much of the answer depends on it.
#
# First we change the whole graph. What comes after `for name in`? We ask for the three most probable next tokens, along four graphs.


# %%
def answers(graph, most=3):
    """The most probable next tokens, with their probabilities."""
    probabilities = model(tokens, graph)[0, -1].softmax(-1)
    top = probabilities.topk(most)
    words = [vocabulary.decode([token]) for token in top.indices.tolist()]
    return [(word, round(value, 2)) for word, value in zip(words, top.values.tolist(), strict=True)]


graphs = {
    "causal": causal,
    "window(4)": ga.patterns.window(n, 4),
    "window(4) | sinks(1)": ga.patterns.window(n, 4) | ga.patterns.sinks(n, 1),
    "alone": ga.patterns.self_loops(n),
}
for name, graph in graphs.items():
    print(f"{name:22} {graph.num_edges:4} edges  {answers(graph)}")

# %% [markdown]
# Along the causal graph the answer is ` name`, the token that came next the first time. A window of 4 does not reach back so far, and the
# model predicts from the last few tokens only. With the edges from the first token added, it does no better. A token that attends only
# to itself gives the usual continuation of one word.
#
# ## 2. How far does it need to look?
#
# Now we widen the window step by step and follow the probability of ` name`. The model has two layers, so information can travel two
# edges: after two layers of `window(w)`, the last token is reached by the $2 (w - 1)$ tokens before it.


# %%
def probability_of(word, *graphs):
    """The probability of a next token, with a graph for each layer."""
    state = model.embedding(tokens)
    for block, graph in zip(model.blocks, graphs, strict=True):
        state = block(state, graph)
    return model.unembedding(model.norm(state))[0, -1].softmax(-1)[word].item()


next_token = model(tokens, causal)[0, -1].argmax()
windows = [ga.patterns.window(n, w) for w in range(1, n + 1)]
both = [probability_of(next_token, window, window) for window in windows]
# If layer 1 has a window of 4, a distant token reaches the last one only through a token in between.
relayed = [probability_of(next_token, window, ga.patterns.window(n, 4)) for window in windows]
source = pieces.index(" in") + 1  # the token after the first " in"
distance = n - 1 - source
one_hop, two_hops = distance + 1, (distance + 1) // 2 + 1

figure, ax = plt.subplots(figsize=(8, 3.2))
widths = range(1, n + 1)
ax.plot(widths, both, marker="o", color=BLUE, label="both layers window(n, w)")
ax.plot(widths, relayed, marker="s", color=ORANGE, label="layer 0 window(n, w), layer 1 window(n, 4)")
for w, hops, height in ((one_hop, "one hop", 0.02), (two_hops, "two hops", 0.55)):
    ax.axvline(w, color=GREY, linestyle="--" if w == one_hop else ":")
    ax.text(w - 0.15, height, f"token 3 is reached in {hops}", fontsize=9, color="#555555", ha="right")
ax.set(xlabel="w", ylabel=f"probability of {vocabulary.decode([int(next_token)])!r}", ylim=(0, None))
ax.legend(frameon=False, fontsize=9, loc="upper left")
plt.show()
for w in (4, 6, 7, 8, one_hop - 1, one_hop):
    print(f"w = {w:2}: {both[w - 1]:.2f} in both layers, {relayed[w - 1]:.2f} in layer 0 alone")
with ga.trace.intervene(model, ga.trace.cut([(10, n - 1)], layers=1)):
    without = model(tokens, windows[5])[0, -1].softmax(-1)[next_token].item()
print(f"w =  6, without the edge from the 'name' at 10: {without:.2f}")

# %% tags=["B5"]
assert both[one_hop - 1] > 2 * both[one_hop - 2]  # the jump, where one hop is enough
assert min(both[5:7]) > 1.5 * max(both[7 : one_hop - 1])  # 6 and 7 against 8 to 12
assert relayed[n - 1] > 1.5 * relayed[3]
assert without < both[5]

# %% [markdown]
# Look at the blue line. Most of the answer comes back at once, at the width at which token 3 reaches the last token in a single hop
# (dashed). This is the red edge of section 1: all windows up to 12 lack it.
#
# To the left of this jump the line is not monotonic. At the widths 6 and 7 the probability is 0.30 and 0.29, about twice as much as from 8
# to 12. Seven is the first width at which token 3 is reached in *two* hops (dotted). But at 6 it is out of reach, so part of this
# comes from nearer tokens: without the edge from the `name` at token 10 in layer 1, the probability at 6 falls to 0.22. A wider window contains more
# senders, which compete for the same weight.
#
# Does the model pass anything on at all? The orange line is the test. Layer 1 keeps a window of 4 and only layer 0 gets wider, so
# everything that arrives from a distance *was* passed on by a token in between. The probability doubles, from 0.16 to more than 0.30. So
# the relay works, but poorly, because the model was not trained for it. The graph determines which tokens *can* be reached. The
# parameters determine how much of their information *is* passed on.
#
# ## 3. One edge
#
# How would we find the red edge if nobody had drawn it? `ga.trace.record` records what every edge of every layer and head carries. To
# which token does the last token attend most, in each head of the second layer?
#
# You can also cut it with a click: the [page](../docs/explore.html) that `gnn-attention explore` writes begins with this text.

# %%
run = ga.trace.record(model, tokens)
last = [(src, n - 1) for src in range(n)]
weights = run.layers[1].weights(last)[0]  # [edges, heads]
for head in range(weights.shape[1]):
    src = int(weights[:, head].argmax())
    print(
        f"layer 1, head {head}: attends most to token {src:2} {pieces[src]!r}, weight {weights[src, head].item():.2f}"
    )

# %% [markdown]
# The last token, ` in`, occurred before, and heads 0 and 3 attend most to the token that followed it. They are induction heads, and they copy
# the token to which they attend. There are two ways to take an edge away, and they differ:
#
# * **Cut**: the edge is removed before the softmax, so the other in-edges of the receiver share its weight.
# * **Mute**: the edge keeps its weight, but its message is replaced by zero.
#
# We do both to this edge, first in the head that gives it the largest weight, then in all heads of the layer.

# %%
src = pieces.index(pieces[-1]) + 1  # after the first " in"
head = int(weights[src].argmax())
edge = [(src, n - 1)]
assert edge == [the_edge]
print(f"{src} -> {n - 1}: {pieces[-1]!r} attends to {pieces[src]!r}, most in head {head}")


def changed_by(intervention, **where):
    """The logits after an intervention on the edge."""
    return ga.trace.record(model, tokens, interventions=intervention(edge, layers=1, **where)).output


versions = {
    "as it was": run.output,
    f"cut in head {head}": changed_by(ga.trace.cut, heads=head),
    f"mute in head {head}": changed_by(ga.trace.mute, heads=head),
    "cut in all heads": changed_by(ga.trace.cut),
    "mute in all heads": changed_by(ga.trace.mute),
}
for name, logits in versions.items():
    print(
        f"{name:17} probability of {vocabulary.decode([int(next_token)])!r}: {logits[0, -1].softmax(-1)[next_token].item():.3f}"
    )
assert not torch.equal(versions["cut in all heads"], versions["mute in all heads"])
assert torch.equal(versions["cut in all heads"][:, :-1], versions["as it was"][:, :-1])

# %% [markdown]
# Without this edge the probability of ` name` falls from 0.74 to 0.17. In all heads, muting does more harm than cutting: a muted edge
# keeps its weight and wastes it, while a cut edge leaves its weight to the others. The predictions at all other tokens are exactly as before,
# because an edge into the last token changes the last token alone.
#
# A cut that does harm is no proof that *this* edge is special. Perhaps any cut does as much. The model is small enough to find out: we cut
# each of the 136 edges in turn, in all heads of one layer, and record the probability of ` name`. How many dark cells do you expect in
# each layer?

# %%
edges = [tuple(pair) for pair in causal.edge_index.T.tolist()]
left_over = torch.zeros(2, n, n)
for layer in (0, 1):
    for sender, receiver in edges:
        with ga.trace.intervene(model, ga.trace.cut([(sender, receiver)], layers=layer)):
            logits = model(tokens, causal)[0, -1]
        left_over[layer, receiver, sender] = logits.softmax(-1)[next_token]

whole = run.output[0, -1].softmax(-1)[next_token].item()
figure, axes = plt.subplots(2, 2, figsize=(13, 9.4), width_ratios=(1, 1.9))
for layer, (left, right) in zip((1, 0), axes, strict=True):
    fall = whole - left_over[layer]
    draw_table(
        left,
        fall,
        labels,
        labels,
        f"layer {layer}: fall of the probability",
        limit=whole,
        digits=None,
        mask=causal.mask(),
    )
    left.set(xlabel="src (sender)", ylabel="dst (receiver)")
    needed = [pair for pair in edges if left_over[layer, pair[1], pair[0]] < 0.6]
    for sender, receiver in needed:
        left.add_patch(
            plt.Rectangle((sender - 0.5, receiver - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=2)
        )
    ga.draw.arcs(
        causal,
        right,
        labels,
        lit=needed,
        title=f"layer {layer}: without a red edge it falls below 0.6",
    )
    ordered = sorted(edges, key=lambda pair: left_over[layer, pair[1], pair[0]])
    for sender, receiver in ordered[:6]:
        print(f"layer {layer}, without {sender:2} -> {receiver:2}: {left_over[layer, receiver, sender]:.2f}")
    assert len(needed) == (5 if layer == 0 else 1)
    assert {receiver for _, receiver in needed} == ({3, 15} if layer == 0 else {15})
plt.show()
assert (
    min(left_over[1, receiver, sender] for sender, receiver in edges if (sender, receiver) != the_edge) > 0.69
)

# %% [markdown]
# The upper row is layer 1. **One edge of 136 carries the answer**: without it the probability is 0.17, and without any of the 135 others it
# stays at about 0.70 or more. The orange cells are edges without which ` name` becomes *more* probable; one is the edge of the last token to itself.
#
# The lower row is layer 0, where the answer depends on five edges. Look where they end. All of them end at token 3 or at token 15, the
# two ends of the red edge of layer 1. One of them is what an induction head needs ([notebook 16](16_induction_heads.ipynb)): through `2 -> 3`,
# token 3 receives the information that an ` in` stands before it, and in layer 1 the last ` in` looks for exactly that. The other four bring
# `for` and ` name`, which stand before both ` in`s, to the two ends. This suggests that the two places match in more than one token. So "the edge that
# carries the answer" is an edge of layer 1. The edges of layer 0 decide that it gets the weight.
#
# ## 4. Writing along another graph
#
# `generate` takes a graph, too. Each new token is a new node with the edges that the graph gives it. Keys and values that no later token can
# attend to are dropped from the cache. The model continues the same beginning along the causal graph and along a window:

# %%
prompt = torch.tensor(vocabulary.encode("def read(self, size"))
for graph in (ga.patterns.causal(64), ga.patterns.window(64, 6)):
    written = ga.model.generate(model, prompt, count=30, temperature=0, graph=graph)
    print(f"--- {graph.name}\n{vocabulary.decode(written.tolist())}")

# %% [markdown]
# Along the causal graph the model writes a docstring, closes it, and goes on with a read buffer, which fits a function called `read`. Along
# a window of 6 tokens it opens a docstring and begins with code inside of it. One example shows only that the text changes.
# [Notebook 20](20_sinks_are_one_edge.ipynb) measures how much worse the predictions of a language model become.
#
# **The answer** to the question at the top: in this text nearly all of it. One edge of layer 1 takes the probability of ` name` from 0.74 to 0.17,
# and no other edge of that layer takes it below 0.69. A weight suggests the edge, a cut confirms it, and the cuts of all other edges are
# the control.
#
# ## 5. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/18_change_the_graph.py).
#
# **1. One token more** (3 minutes, easy). Along `window(4)` the model is no longer sure. Let every token attend to one more token, at any
# distance: `ga.patterns.window(n, 4) | ga.patterns.global_tokens(n, [position])`. Which position brings the answer back, with a probability
# of more than one half?
#
# <details><summary>Hint</summary>
#
# Which sender does the window lack, according to section 3?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a position

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

widened = ga.patterns.window(n, 4) | ga.patterns.global_tokens(n, [answer])
(word, chance), *_ = answers(widened)
assert (word, chance > 0.5) == (" name", True), (
    f"with token {answer} it says {word!r} with probability {chance}"
)
print(f"right: token {answer}, {pieces[answer]!r}:", answers(widened))

# %% [markdown]
# **2. A whole head** (5 minutes, medium). Cut *all* edges of the head that you found, `ga.trace.cut(None, layers=1, heads=head)`, or mute all of
# them. Which does more harm, `"cut"`, `"mute"`, or `"neither"`?
#
# <details><summary>Hint</summary>
#
# A cut edge leaves its weight to the other in-edges of the receiver. Which in-edges are left?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a word

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

with torch.no_grad():
    outputs = [
        ga.trace.record(model, tokens, interventions=intervention(None, layers=1, heads=head)).output
        for intervention in (ga.trace.cut, ga.trace.mute)
    ]
probabilities = [logits[0, -1].softmax(-1)[next_token].item() for logits in outputs]
same = torch.allclose(*outputs, atol=1e-5)
assert answer == ("neither" if same else "cut" if probabilities[0] < probabilities[1] else "mute"), (
    f"the probabilities are {probabilities}"
)
print(f"right: {probabilities[0]:.3f} and {probabilities[1]:.3f}")

# %% [markdown]
# **3. A cheap graph** (10 minutes, medium, code). Build a graph with at most $4 n$ edges, fewer than half of those of the causal graph, along
# which the model gives the same answer with a probability of more than one half.
#
# <details><summary>Hint</summary>
#
# A narrow window and one global token cost few edges. Section 3 says which tokens the two layers need.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_edges <= 4 * n, f"{answer.num_edges} edges are too many"
(word, chance), *_ = answers(answer)
assert (word, chance > 0.5) == (" name", True), f"it says {word!r} with probability {chance}"
print(f"right: {answer.num_edges} edges in place of {causal.num_edges}:", answers(answer))

# %% [markdown]
# ---
# before: [17. Relaying through a middle token](17_relay_through_a_middle_token.ipynb) | [the book](README.md) | next: [19. Audit a model that leaks](19_audit_a_leak.ipynb)
