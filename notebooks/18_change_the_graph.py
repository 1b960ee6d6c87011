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
# A trained model has learned what to say *along the graph it was trained on*. Its parameters do not hold that graph: attention
# takes it as an argument. So we may ask a trained model to listen along another one, edge by edge if we like, and see which
# edges an answer hangs on. It is an intervention on connections. (*Activation patching* is one on what they carry: a message from
# another run in place of this one's, `ga.trace.patch`.)
#
# You need [notebook 01](01_attention_is_message_passing.ipynb); the model is the one that ships with the package.
#
# **Afterwards you can** find the edge on which an answer hangs.
#
# before: [Relaying through a middle token](17_relay_through_a_middle_token.ipynb) | [the book](README.md) | next: [Audit a model that leaks](19_audit_a_leak.ipynb)

# %%
import warnings

import matplotlib.pyplot as plt
import torch

import gnn_attention as ga

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for

model, vocabulary = ga.model.load_trained()
text = "for name in names:\n    print(name)\nfor name in"
tokens = torch.tensor([vocabulary.encode(text)])
pieces = vocabulary.pieces(text)
n = len(pieces)
print(n, "tokens:", pieces)

# %% [markdown]
# ## 1. The same parameters, other graphs
#
# The model was trained causally: every token hears all tokens up to itself. What comes after `for name in`, which the text has
# said once before? We ask for the three likeliest next tokens, along four graphs.


# %%
def answers(graph, most=3):
    """The likeliest next tokens, with their probabilities."""
    with torch.no_grad():
        chances = model(tokens, graph)[0, -1].softmax(-1)
    top = chances.topk(most)
    words = [vocabulary.decode([token]) for token in top.indices.tolist()]
    return [(word, round(chance, 2)) for word, chance in zip(words, top.values.tolist(), strict=True)]


graphs = {
    "causal": ga.patterns.causal(n),
    "window(4)": ga.patterns.window(n, 4),
    "window(4) | sinks(1)": ga.patterns.window(n, 4) | ga.patterns.sinks(n, 1),
    "alone": ga.patterns.self_loops(n),
}
for name, graph in graphs.items():
    print(f"{name:22} {graph.num_edges:4} edges  {answers(graph)}")

# %% [markdown]
# Along the causal graph the answer is the token that came next the first time. Cut to a window the model cannot look back so
# far, and it guesses from the last words alone. A token that hears itself alone knows only how its own word usually goes on.
#
# ## 2. How far does it need to look?
#
# We widen the window step by step and follow the probability of the causal answer. Two layers look back twice: after two
# layers of `window(w)` the last token can have heard of $2 (w - 1)$ tokens before it.


# %%
def chance_of(word, *graphs):
    """The probability of a next token, with a graph for each layer."""
    with torch.no_grad():
        state = model.embedding(tokens)
        for block, graph in zip(model.blocks, graphs, strict=True):
            state = block(state, graph)
        return model.unembedding(model.norm(state))[0, -1].softmax(-1)[word].item()


# %%
with torch.no_grad():
    next_token = model(tokens, graphs["causal"])[0, -1].argmax()
windows = [ga.patterns.window(n, w) for w in range(1, n + 1)]
chance = [chance_of(next_token, window, window) for window in windows]
# layer 1 stays narrow: what arrives from afar was handed on by somebody in between
relayed = [chance_of(next_token, window, ga.patterns.window(n, 4)) for window in windows]
source = pieces.index(" in") + 1  # the word behind the first " in"
one_hop, two_hops = n - source, (n - source - 1 + 1) // 2 + 1
figure, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
ax.plot(range(1, n + 1), chance, marker="o", color="#0072B2", label="both layers window(n, w)")
ax.plot(
    range(1, n + 1), relayed, marker="s", color="#E69F00", label="layer 0 window(n, w), layer 1 window(n, 4)"
)
ax.axvline(one_hop, color="#999999", linestyle="--")
ax.text(one_hop - 0.15, 0.02, "the word is heard in one hop", fontsize=9, color="#555555", ha="right")
ax.axvline(two_hops, color="#999999", linestyle=":")
ax.text(two_hops - 0.15, 0.55, "in two hops", fontsize=9, color="#555555", ha="right")
ax.set(xlabel="w", ylabel=f"probability of {vocabulary.decode([int(next_token)])!r}", ylim=(0, None))
ax.legend(frameon=False, fontsize=9, loc="upper left")
plt.show()
for w in (4, 6, 7, 8, one_hop - 1, one_hop):
    print(f"w = {w:2}: {chance[w - 1]:.2f} in both layers, {relayed[w - 1]:.2f} in layer 0 alone")

# %% tags=["B5"]
assert chance[one_hop - 1] > 2 * chance[one_hop - 2]  # the jump, where one hop is enough
between = chance[two_hops - 1 : one_hop - 1]
assert max(between) > 1.5 * min(between)  # two hops are not nothing, and not the same for every width
assert relayed[n - 1] > 1.5 * relayed[3]

# %% [markdown]
# Most of the answer comes back at once, at the width with which the last token hears the word behind the first ` in` in a single hop.
# But look to the left of that jump. At 6 and 7 it is 0.30 and 0.29, twice what it is from 8 to 12. Seven is the first width that reaches
# the word in *two* hops; at 6 it is out of reach, so some of this comes from the nearer `name`s. And wider windows, with more senders to
# compete, do worse again. Is anything handed on at all, then? Keep layer 1 at a window of 4 and widen layer 0 alone: now whatever
# arrives from afar *was* handed on by a token in between, and the chance doubles. So the relay works, poorly: nobody trained
# it. The graph says what *can* be heard of, what the model has learned decides how much of it *is* passed on.
#
# ## 3. One edge
#
# Which edges carry the answer? `ga.trace.record` notes what every edge of every layer and head carried. We look at the last
# token in the second layer: whom does each head listen to?
#
# To cut it with a click: [the page](../docs/explore.html) that `gnn-attention explore` writes begins with this sentence,
# and its tour ends here.

# %%
with torch.no_grad():
    run = ga.trace.record(model, tokens)
last = [(src, n - 1) for src in range(n)]
weights = run.layers[1].weights(last)[0]  # [edges, heads]
for head in range(weights.shape[1]):
    src = int(weights[:, head].argmax())
    print(
        f"layer 1, head {head}: listens most to token {src:2} {pieces[src]!r}, weight {weights[src, head].item():.2f}"
    )

# %% [markdown]
# The last word, ` in`, was there before, and some heads listen most to the token right behind it: these are the induction heads,
# and what they hear they copy. An edge can be taken away in two ways, and they are not the same. **Cut**: it is not there, the
# other edges share its weight. **Mute**: it keeps its weight, but says nothing. We do both to this edge, first in the head that
# listens most to it, then in all heads of the layer.

# %%
src = pieces.index(pieces[-1]) + 1  # behind the first " in"
head = int(weights[src].argmax())
edge = [(src, n - 1)]
print(f"{src} -> {n - 1}: {pieces[src]!r} is heard by {pieces[-1]!r}, most by head {head}")


def changed_by(intervention, **where):
    """The logits after an intervention on the edge."""
    with torch.no_grad():
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

# %% [markdown]
# One edge of 136 carries most of the answer. In all heads muting it hurts more than cutting it: a muted edge keeps its weight, a
# cut one leaves it to the others. Every other token is as it was: an edge into the last token changes the last token alone.

# %%
assert torch.equal(versions["cut in all heads"][:, :-1], versions["as it was"][:, :-1])

# %% [markdown]
# ## 4. Writing along another graph
#
# `generate` takes a graph too. Each new token is a new node with the edges that the graph gives it; what no later token can
# hear is dropped from the cache on the way.

# %%
prompt = torch.tensor(vocabulary.encode("def read(self, size"))
for graph in (ga.patterns.causal(64), ga.patterns.window(64, 6)):
    written = ga.model.generate(model, prompt, count=30, temperature=0, graph=graph)
    print(f"--- {graph.name}\n{vocabulary.decode(written.tolist())}")

# %% [markdown]
# ## 5. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/18_change_the_graph.py).
#
# **1. One token more.** Over `window(4)` the model is no longer sure. Let everyone hear one more token, whatever the distance:
# `ga.patterns.window(n, 4) | ga.patterns.global_tokens(n, [position])`. Which position brings the answer back,
# with a probability of more than one half?

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
# **2. A whole head.** Cut *all* edges of the head that you found, `ga.trace.cut(None, layers=1, heads=head)`, or mute all of
# them. Which hurts more, `"cut"`, `"mute"`, or `"neither"`?

# %% tags=["exercise"]
answer = None  # your turn: a word

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

with torch.no_grad():
    ways = {
        way: ga.trace.record(model, tokens, interventions=way(None, layers=1, heads=head)).output
        for way in (ga.trace.cut, ga.trace.mute)
    }
probabilities = [logits[0, -1].softmax(-1)[next_token].item() for logits in ways.values()]
same = torch.allclose(*ways.values(), atol=1e-5)
assert answer == ("neither" if same else "cut" if probabilities[0] < probabilities[1] else "mute"), (
    f"the probabilities are {probabilities}"
)
print(f"right: {probabilities[0]:.3f} and {probabilities[1]:.3f}")

# %% [markdown]
# **3. A bargain.** Find a graph with at most $4 n$ edges, fewer than half of the causal graph's, over which the model gives
# the same answer with a probability of more than one half.

# %% tags=["exercise"]
answer = None  # your turn: a TokenGraph

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer.num_edges <= 4 * n, f"{answer.num_edges} edges are too many"
(word, chance), *_ = answers(answer)
assert (word, chance > 0.5) == (" name", True), f"it says {word!r} with probability {chance}"
print(f"right: {answer.num_edges} edges in place of {graphs['causal'].num_edges}:", answers(answer))

# %% [markdown]
# ---
# before: [Relaying through a middle token](17_relay_through_a_middle_token.ipynb) | [the book](README.md) | next: [Audit a model that leaks](19_audit_a_leak.ipynb)
