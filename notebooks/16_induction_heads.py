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
# # Induction heads: found by a graph, broken by its edges
#
# Some heads of a language model have a job that fits in one sentence. The best known is: *find an earlier copy of the current token,
# and attend to the token that came after it*. Such an **induction head** lets a model repeat what it has read once. Does a
# trained model have such heads, and does it need them? The job is a set of edges, so we write it down as a graph, look for the heads
# whose weights lie on that graph, and then cut exactly these edges and measure what the model loses.
#
# One result in advance, because it looks small: on random tokens the model predicts about 16 % of the repeated part correctly. Chance
# is 0.1 %, since there are 1,024 tokens, and without the 48 edges of the job almost nothing is left.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** write a head's job as a graph, find the heads that do it, and break them.
#
# before: [15. What a GNN person asks](15_what_a_gnn_person_asks.ipynb) | [the book](README.md) | next: [17. Relaying through a middle token](17_relay_through_a_middle_token.ipynb)

# %%
import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, ORANGE, RED, use_house_style
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import draw, patterns
from gnn_attention.interpret import circuits, trace

use_house_style()
torch.set_num_threads(1)
_ = torch.set_grad_enabled(False)  # nothing is trained here

# %% [markdown]
# ## 1. A program of two rounds
#
# We first write an induction head by hand. Two rounds of message passing continue a text in the way in which it continued before. The
# state of a token has two halves: the first encodes the word, and the second is a memory, which is empty at first.
#
# * **Round 1**, along the edges from each token to the next: each token sends its word, and the receiver writes it into its memory.
#   Now every token knows its predecessor.
# * **Round 2**, along all edges from earlier tokens: each token attends to a token whose *memory* holds its own *word*, and receives
#   the word of that token.
#
# Each round is one attention layer with matrices of zeros and ones. (The factor 100 makes the softmax choose one sender.)

# %% tags=["S4.20"]
WORDS = ["Llamas", "do", "not", "speak", ".", "Llamas", "do"]
kinds = sorted(set(WORDS))
text = torch.tensor([kinds.index(word) for word in WORDS])
n, size = len(text), len(kinds)

word_half, memory_half = torch.eye(2 * size).view(
    2, size, 2 * size
)  # each [size, 2 size]: from a word into its half of a state
shift = ga.StandardHeads.from_arrays(
    word_half.T[None], word_half.T[None], word_half.T[None], memory_half[None]
)
match = ga.StandardHeads.from_arrays(
    100 * word_half.T[None], memory_half.T[None], word_half.T[None], word_half[None]
)

one_before = patterns.window(n, 2) - patterns.self_loops(n)
state = functional.one_hot(text, size).float() @ word_half
state = state + ga.MessagePassingAttention(shift)(state, one_before)
received, (_, weights) = ga.MessagePassingAttention(match)(
    state, patterns.strict_causal(n), return_attention_weights=True
)

# %% tags=["S4.20"]
src, dst = patterns.strict_causal(n).edge_index
strong = [(int(s), int(d)) for s, d, w in zip(src, dst, weights[:, 0], strict=True) if d >= 5 and w > 0.5]
figure, axes = plt.subplots(2, 2, figsize=(12, 5.4), width_ratios=(1, 2.4))
draw.mask(one_before, axes[0, 0], WORDS, title="round 1: the mask")
draw.arcs(one_before, axes[0, 1], WORDS, title="round 1: every token attends to the one before it")
draw.mask(patterns.strict_causal(n), axes[1, 0], WORDS, title="round 2: the mask")
draw.arcs(
    patterns.strict_causal(n),
    axes[1, 1],
    WORDS,
    weights[:, 0],
    lit=strong,
    title="round 2: the widths are weights, and red edges are those of the induction head",
)
plt.show()

answers = [kinds[int(row.argmax())] for row in received @ word_half.T]
print(
    f"after {WORDS[5]!r} the program predicts {answers[5]!r}, and after {WORDS[6]!r} it predicts {answers[6]!r}"
)
assert answers[5:] == ["do", "not"]

# %% [markdown]
# Neither round can do this alone, and no single head can. Whether a sender matters depends on a *third* token, the one before the
# sender, and one layer must first move that token's word to the sender. Tokens without a match (the first five) attend uniformly to
# all tokens before them.
#
# ## 2. A job is a graph
#
# The text determines to which tokens each of these heads should attend. These edges are a graph, the **template** of the job. Here are
# three templates, for a text of six tokens that is repeated once:
#
# * *previous token*: a token attends to the token before it;
# * *duplicate token*: a token attends to its earlier copies;
# * *induction*: a token attends to the tokens right after its earlier copies.

# %%
repeated = torch.tensor([3, 1, 4, 0, 5, 2] * 2)
figure, axes = plt.subplots(1, 3, figsize=(11.5, 4))
for ax, (name, template) in zip(axes, circuits.TEMPLATES.items(), strict=True):
    draw.mask(
        template(repeated),
        ax,
        labels=[str(token) for token in repeated.tolist()],
        title=name.replace("_", " "),
    )
plt.show()

src, dst = circuits.TEMPLATES["induction"](repeated).edge_index
assert (dst - src).unique().tolist() == [5]  # six tokens are repeated, so each edge spans five positions
assert torch.equal(repeated[src - 1], repeated[dst])

# %% [markdown]
# Now the trained model. It reads 48 random tokens, all different, and then the same 48 again, so that meaning cannot help. For each
# head we compute the share of its attention weights that lies on the edges of each template.

# %%
model, vocabulary = ga.model.load_trained()
length, samples = 48, 16
generator = torch.Generator().manual_seed(0)
once = torch.stack(
    [torch.randperm(model.config.vocabulary_size, generator=generator)[:length] for _ in range(samples)]
)
tokens = torch.cat([once, once], dim=1)

scores = {name: circuits.detect(model, tokens, name) for name in circuits.TEMPLATES}

figure, axes = plt.subplots(1, 3, figsize=(11.5, 2.4), sharey=True)
for ax, (name, score) in zip(axes, scores.items(), strict=True):
    ax.imshow(score, cmap="Blues", vmin=0, vmax=1)
    for (layer, head), value in [
        ((r, c), score[r, c].item()) for r in range(score.shape[0]) for c in range(score.shape[1])
    ]:
        ax.text(
            head, layer, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black"
        )
    ax.set(
        title=name.replace("_", " "),
        xlabel="head",
        xticks=range(score.shape[1]),
        yticks=range(score.shape[0]),
    )
    ax.tick_params(length=0)
axes[0].set_ylabel("layer")
plt.show()


# %%
def strongest(score):
    layer, head = divmod(int(score.argmax()), score.shape[1])
    return layer, head


previous, induction = strongest(scores["previous_token"]), strongest(scores["induction"])
print(
    f"previous token: layer {previous[0]}, head {previous[1]}; induction: layer {induction[0]}, head {induction[1]}"
)
assert (previous[0], induction[0]) == (0, 1)  # the memory is written before it is matched
assert sorted(scores["previous_token"][0].topk(2).indices.tolist()) == [2, 3]
assert sorted(scores["induction"][1].topk(2).indices.tolist()) == [0, 3]
assert scores["duplicate_token"].max() < 0.1
assert scores["induction"][1].topk(3).values[-1] < 0.01 < 0.4 < scores["induction"][1].topk(2).values[-1]

# %% [markdown]
# The two jobs exist, and each is shared by two heads: heads 2 and 3 of layer 0 attend to the token before, and heads 0 and 3 of layer 1
# are induction heads. The other two heads of layer 1 give a quarter of their weight to the token before. No head of this model attends
# to duplicates as such.
#
# Does the second layer read what the first one wrote, as in the program by hand? A head writes into a state by its matrix $W_M$, and
# a later head reads from it by its matrix $W_P$. How much of the one arrives in the other is measured by
#
# $$\frac{\lVert W_P^{\text{later}} \, (W_M^{\text{earlier}})^\top \rVert}
#        {\lVert W_P^{\text{later}} \rVert \; \lVert W_M^{\text{earlier}} \rVert}$$
#
# on the side of the senders; this is called *K composition*. We compute it for all pairs of a head of layer 0 and one of layer 1.

# %%
composition = circuits.compositions(model, "k", relative=True)[1, :, 0]  # [head of layer 1, head of layer 0]

figure, ax = plt.subplots(figsize=(4.8, 3.1))
ax.imshow(composition, cmap="PuOr", vmin=0, vmax=2)
for (later, earlier), value in [((r, c), composition[r, c].item()) for r in range(4) for c in range(4)]:
    ax.text(
        earlier, later, f"{value:.2f}", ha="center", va="center", color="white" if value > 1.7 else "black"
    )
ax.set(
    xlabel="written by this head of layer 0",
    ylabel="read by this head of layer 1",
    title="K composition; 1 = unrelated",
)
ax.set_xticks(range(4))
ax.set_yticks(range(4))
ax.tick_params(length=0)
plt.show()

inductors, others_ = composition[[0, 3]], composition[[1, 2]]
assert (inductors[:, 2:] > 1.4).all()
assert (others_ < 1.3).all()
assert composition.argmax() == 4 * 3 + 3

# %% [markdown]
# The value 1 is what two unrelated heads have. The two induction heads (rows 0 and 3) read both previous-token heads (columns 2 and 3)
# with 1.4 to 2.1, while the other heads of layer 1 stay at 1.3 or below. The table is not as clean as the program by hand: head 0 of
# layer 0 is read too, though it does not attend to the token before. A measure of matrices suggests a circuit; an intervention must
# confirm it.
#
# ## 3. Cut its edges
#
# A head whose weights look right need not do the work. The test is an intervention: **cut** the edges of the template in the layer of
# the induction heads, and nothing else. A cut edge is removed before the softmax, so the other in-edges of the receiver share its
# weight. How well does the model then predict the second copy?
#
# Any cut could do harm. As a control we therefore cut as many *other* edges at random: for every receiver that loses an edge, one from
# another earlier token. Five draws show how much this varies.


# %%
def predictions(*interventions):
    """Return the loss at each position, and the share of the texts in which the prediction is right."""
    with trace.intervene(model, *interventions):
        log_probabilities = model(tokens)[:, :-1].log_softmax(-1)
    following = tokens[:, 1:]
    loss = -log_probabilities.gather(-1, following[..., None])[..., 0]
    return loss.mean(0), (log_probabilities.argmax(-1) == following).float().mean(0)


def second_copy(curves):
    """Return the mean loss and share of right predictions in the second copy, after its first token."""
    return tuple(curve[length:].mean().item() for curve in curves)


def random_edges(edges, seed):
    """Return, for each receiver of the edges, one random edge from another earlier token."""
    generator = torch.Generator().manual_seed(seed)
    edge_pairs = {tuple(edge) for edge in edges.edge_index.T.tolist()}
    random_pairs = []
    for src, dst in sorted(edge_pairs):
        free = [other for other in range(dst) if (other, dst) not in edge_pairs] or [src]
        random_pairs.append((free[int(torch.randint(len(free), (1,), generator=generator))], dst))
    return ga.convert.from_edge_index(torch.tensor(random_pairs).T, edges.num_dst, coalesce=True)


# %%
total = 2 * length
job, line = (circuits.TEMPLATES[name](tokens[0]) for name in ("induction", "previous_token"))
assert job == circuits.TEMPLATES["induction"](
    tokens[5]
)  # the tokens of a copy are all different, so every text has the same template

conditions = {
    "nothing is cut": [predictions()],
    "induction edges, layer 1": [predictions(trace.cut(job, layers=1))],
    "as many others, layer 1": [
        predictions(trace.cut(random_edges(job, seed), layers=1)) for seed in range(5)
    ],
    "previous-token edges, layer 0": [predictions(trace.cut(line, layers=0))],
    "as many others, layer 0": [
        predictions(trace.cut(random_edges(line, seed), layers=0)) for seed in range(5)
    ],
}
results = {
    name: torch.tensor([second_copy(curves) for curves in runs]) for name, runs in conditions.items()
}  # [draw, 2]
first_copy = conditions["nothing is cut"][0][0][: length - 1].mean().item()
print(f"{'first copy':>30}: loss {first_copy:5.2f}")
for name, values in results.items():
    (loss, right), low, high = values.mean(0).tolist(), values[:, 1].min(), values[:, 1].max()
    spread = f" (from {low:.1%} to {high:.1%})" if len(values) > 1 else ""
    print(f"{name:>30}: loss {loss:5.2f}, {right:5.1%} right{spread}")

# %%
COLOUR = {"nothing is cut": BLUE, "induction edges, layer 1": RED, "previous-token edges, layer 0": ORANGE}
figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 3.8), width_ratios=[1.4, 1])
for (name, colour), style in zip(COLOUR.items(), ("-", "-", "--"), strict=True):
    left.plot(range(1, total), conditions[name][0][0], style, color=colour, label=name)
left.axvline(length - 0.5, color=GREY, linestyle=":")
left.text(length + 0.5, 0.3, "second copy", color="#555555")
left.set(xlabel="position of the predicted token", ylabel="loss", ylim=(0, None))
left.legend(frameon=False, loc="lower left", fontsize=9)
for row, (name, values) in enumerate(results.items()):
    right.barh(row, values[:, 1].mean(), color=COLOUR.get(name, "#CCCCCC"))
    right.plot(values[:, 1], [row] * len(values), "k|", markersize=12)
right.set_yticks(range(len(results)), list(results))
right.invert_yaxis()
right.set(xlabel="share of right predictions in the second copy")
plt.show()

# %% [markdown]
# The tokens are random, unlike any text of the training data, so in the first copy the loss is far above that of chance (6.93, the
# logarithm of 1,024). In the second copy the model predicts about one token in six correctly, out of 1,024. The bars show that nothing
# is left of this without the 48 edges of the job, and that nearly all of it is left without as many other edges (the marks are the
# five draws).
#
# Without the previous-token edges of the *first* layer the second copy is lost too, although the second layer has all its edges: its
# senders no longer carry the word of their predecessor.

# %%
intact = results["nothing is cut"][0, 1]
assert 0.1 < intact < 0.2
assert job.num_edges == length - 1 + 1
for name in ("induction edges, layer 1", "previous-token edges, layer 0"):
    assert results[name][0, 1] < 0.005
for name in ("as many others, layer 1", "as many others, layer 0"):
    assert (results[name][:, 1] > 0.8 * intact).all()

# %% [markdown]
# ## 4. One head or several?
#
# We cut the same edges in one head of layer 1 at a time, and then in all heads but one. The first experiment shows which heads are
# necessary, and the second whether one head is sufficient.

# %%
heads = range(model.config.num_heads)
without = [second_copy(predictions(trace.cut(job, layers=1, heads=head)))[1] for head in heads]
only = [
    second_copy(predictions(trace.cut(job, layers=1, heads=[h for h in heads if h != head])))[1]
    for head in heads
]

figure, ax = plt.subplots(figsize=(6.6, 3.2))
ax.bar([head - 0.2 for head in heads], without, width=0.38, color=BLUE, label="cut in this head alone")
ax.bar([head + 0.2 for head in heads], only, width=0.38, color=ORANGE, label="cut in all heads but this")
ax.axhline(intact, color="black", linestyle=":", linewidth=1)
ax.text(4.35, intact, "nothing is cut", ha="right", va="bottom", fontsize=9)
ax.set(
    xticks=list(heads),
    xlabel="head of layer 1",
    ylabel="share of right predictions",
    xlim=(-0.6, 4.4),
    ylim=(0, 0.2),
)
ax.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=2)
plt.show()
for head in heads:
    score = scores["induction"][1, head]
    print(
        f"head {head}: template score {score:.2f}; right without it {without[head]:5.1%}, with it alone {only[head]:5.1%}"
    )
assert without[1] == without[2] == intact
assert max(without[0], without[3], *only) < 0.1 * intact

# %% [markdown]
# Heads 1 and 2 make no difference, as their scores in section 2 suggest. Heads 0 and 3 are both necessary, and neither is sufficient:
# either alone achieves less than a tenth of what both achieve together. Presumably their two messages add up in the state of the
# receiver, and only the sum exceeds the scores of all other tokens of the vocabulary.
#
# **The answer.** The trained model has induction heads, and it needs them: the 48 edges of their template, and the edges of the layer
# below that write the predecessor into each state, carry its whole ability to repeat random tokens.

# %% [markdown]
# ## 5. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/16_induction_heads.py).
#
# **1. Write a template** (easy, 5 minutes). For the text `7 2 7 7 5`, write the edges of the *duplicate token* template: every token
# attends to all earlier copies of itself.
#
# <details><summary>Hint</summary>
#
# Write pairs (src, dst) of positions, with src before dst, wherever both positions hold the same number.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a list of (src, dst)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

answer_graph = ga.convert.from_edge_index(torch.tensor(answer).T, 5)
assert answer_graph == circuits.TEMPLATES["duplicate_token"](torch.tensor([7, 2, 7, 7, 5])), (
    "these are not the edges between equal tokens"
)
print("right:", answer)

# %% [markdown]
# **2. The other layer** (medium, 5 minutes). Cut the previous-token edges in layer 1 instead of layer 0. Does the model lose `"more"` or
# `"less"` of the second copy than with the cut in layer 0? Answer before you try it.
#
# <details><summary>Hint</summary>
#
# Which round of section 1 uses these edges, and in which layer of the model does it run?
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: "more" or "less"

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

elsewhere = second_copy(predictions(trace.cut(line, layers=1)))[1]
there = results["previous-token edges, layer 0"][0, 1]
assert answer == ("more" if elsewhere < there else "less"), (
    "see section 1: which round uses the edges from the token before?"
)
print(f"right: {elsewhere:.1%} are still right, and {there:.1%} without the edges in layer 0")

# %% [markdown]
# **3. Cut or mute?** (medium, 10 minutes, code) The weight of a cut edge goes to the other edges; a muted edge keeps its weight, but its
# message is zero (`trace.mute`). Write the code that does each of the two to the induction edges of layer 1, in all heads, and
# computes the loss in the second copy.
#
# <details><summary>Hint</summary>
#
# `second_copy(predictions(trace.cut(job, layers=1)))` returns the loss and the share of right predictions.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: two numbers (cut, mute)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

expected = [
    second_copy(predictions(intervention(job, layers=1)))[0] for intervention in (trace.cut, trace.mute)
]
assert all(abs(a - b) < 0.01 for a, b in zip(answer, expected, strict=True)), (
    "second_copy(predictions(trace.mute(job, layers=1)))"
)
print(f"right: the loss is {expected[0]:.2f} with cut edges and {expected[1]:.2f} with muted ones")

# %% [markdown]
# ## Sources
#
# * N. Elhage et al., *A Mathematical Framework for Transformer Circuits*, 2021: induction heads in two-layer models, K
#   composition.
# * C. Olsson et al., [In-context Learning and Induction Heads](https://arxiv.org/abs/2209.11895), 2022: repeated random tokens.
# * TransformerLens, head detector: heads are detected by the similarity of their weights to a given pattern.

# %% [markdown]
# ---
# before: [15. What a GNN person asks](15_what_a_gnn_person_asks.ipynb) | [the book](README.md) | next: [17. Relaying through a middle token](17_relay_through_a_middle_token.ipynb)
