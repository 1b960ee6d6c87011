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
# Some heads of a language model have a job that can be said in one sentence. The best known: *find the place where my own token
# stood before, and listen to what came after it*. Such an **induction head** lets a model continue what it has read once. Its
# job is a set of edges, so we can write it down as a graph, look for the heads whose listening lies on that graph, and then
# take exactly these edges away and see what the model has lost.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb).
#
# **Afterwards you can** write a head's job as a graph, find the heads that do it, and break them.
#
# before: [Attention, one case of message passing; an MLP, another](14_one_limiting_case.ipynb) | [the book](README.md) | next: [Relaying through a middle token](17_relay_through_a_middle_token.ipynb)

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from torch.nn import functional

import gnn_attention as ga

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
from gnn_attention import draw, patterns  # noqa: E402
from gnn_attention.interpret import circuits, trace  # noqa: E402

torch.set_num_threads(1)
torch.set_grad_enabled(False)  # nothing is trained here
BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"

# %% [markdown]
# ## 1. A program of two rounds
#
# First by hand: two rounds of message passing that go on with a text as it went on before. A state has two halves. The first
# says which word the token is. The second is a memory, empty at first.
#
# * **Round 1**, over the edges from each token to the next: send your word, and write what you hear into your memory. Now every
#   token knows its predecessor.
# * **Round 2**, over all edges from earlier tokens: look for a token whose *memory* holds your own *word*, and hear its word.
#
# Each round is one attention layer with matrices of zeros and ones. (The 100 makes the softmax decide sharply.)

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
heard, (_, weights) = ga.MessagePassingAttention(match)(
    state, patterns.strict_causal(n), return_attention_weights=True
)

# %% tags=["S4.20"]
src, dst = patterns.strict_causal(n).edge_index
strong = [(int(s), int(d)) for s, d, w in zip(src, dst, weights[:, 0], strict=True) if d >= 5 and w > 0.5]
figure, axes = plt.subplots(2, 1, figsize=(9, 4.6), layout="constrained")
draw.arcs(one_before, axes[0], WORDS, title="round 1: every token hears the one before")
draw.arcs(
    patterns.strict_causal(n),
    axes[1],
    WORDS,
    weights[:, 0],
    lit=strong,
    title="round 2: whose memory holds my own word?",
)
plt.show()

answers = [kinds[int(row.argmax())] for row in heard @ word_half.T]
print("after", WORDS[5], WORDS[6], "the program expects:", answers[5], "and then", answers[6])
assert answers[5:] == ["do", "not"]

# %% [markdown]
# Neither round could do it alone, and no single head can: whether a token is worth hearing depends on *another* token, the one
# before it, and that has to be told first. Tokens that find no match (the first five) hear everybody before them alike.
#
# ## 2. A job is a graph
#
# What each of these heads should listen to can be read off the text. That is a graph, the **template** of the job. Here are
# three, for a text of six tokens that is said twice:
#
# * *previous token*: from the token just before;
# * *duplicate token*: from earlier tokens that are the same as mine;
# * *induction*: from the tokens right after those.

# %%
said_twice = torch.tensor([3, 1, 4, 0, 5, 2] * 2)
figure, axes = plt.subplots(1, 3, figsize=(11.5, 4), layout="constrained")
for ax, (name, template) in zip(axes, circuits.TEMPLATES.items(), strict=True):
    draw.mask(
        template(said_twice),
        ax,
        labels=[str(token) for token in said_twice.tolist()],
        title=name.replace("_", " "),
    )
plt.show()

src, dst = circuits.TEMPLATES["induction"](said_twice).edge_index
assert (dst - src).unique().tolist() == [5]  # said twice: always five back
assert torch.equal(said_twice[src - 1], said_twice[dst])

# %% [markdown]
# Now the trained model. We give it 48 random tokens, no two alike, said twice, so that meaning cannot help, and ask each head:
# what share of its listening lies on the edges of the template?

# %%
model, vocabulary = ga.model.load_trained()
length, samples = 48, 16
generator = torch.Generator().manual_seed(0)
once = torch.stack(
    [torch.randperm(model.config.vocabulary_size, generator=generator)[:length] for _ in range(samples)]
)
tokens = torch.cat([once, once], dim=1)

scores = {name: circuits.detect(model, tokens, name) for name in circuits.TEMPLATES}

figure, axes = plt.subplots(1, 3, figsize=(11.5, 2.4), layout="constrained", sharey=True)
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
assert (previous[0], induction[0]) == (0, 1)  # first the memory, then the match
assert sorted(scores["previous_token"][0].topk(2).indices.tolist()) == [2, 3]
assert sorted(scores["induction"][1].topk(2).indices.tolist()) == [0, 3]
assert scores["duplicate_token"].max() < 0.1
assert scores["induction"][1].topk(3).values[-1] < 0.01 < 0.4 < scores["induction"][1].topk(2).values[-1]

# %% [markdown]
# The jobs are there, and shared: heads 2 and 3 of layer 0 listen to the token before, heads 0 and 3 of layer 1 are induction
# heads, and the other two heads of layer 1 are not: they give a quarter of their listening to the token before. No head of this
# model looks for duplicates as such.
#
# Is the second head fed by the first, as in the program by hand? What a head writes into a state, and what another reads from
# it, are matrices, $W_M$ and $W_P$. How much of the one arrives in the other is measured by
#
# $$\frac{\lVert W_P^{\text{later}} \, (W_M^{\text{earlier}})^\top \rVert}
#        {\lVert W_P^{\text{later}} \rVert \; \lVert W_M^{\text{earlier}} \rVert}$$
#
# on the senders' side (it is called *K composition*). We compute it for all pairs of a head of layer 0 and one of layer 1.

# %%
composition = circuits.compositions(model, "k", relative=True)[1, :, 0]  # [head of layer 1, head of layer 0]

figure, ax = plt.subplots(figsize=(4.8, 3.1), layout="constrained")
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
# In units of what two unrelated heads have (1), the two induction heads read both previous-token heads, 2 and 3, with 1.4 to
# 2.1, while the other heads of layer 1 stay at 1.3 or below. The table is not as clean as the program by hand: head 0 of layer
# 0 is read too, though it does not listen to the token before. What a measure of matrices suggests, an intervention has to
# confirm.
#
# ## 3. Break it
#
# Finding a head that looks right is not yet a proof that it does the work. The proof is an intervention: **cut** the edges of the
# template in the layer of the induction heads, and nothing else. A cut edge is not there, and the receiver's other in-edges
# share its weight. How well does the model then predict the second copy?
#
# Any cut could do harm. So we also cut, for comparison, as many *other* edges drawn at random: for every receiver that loses
# one, one from another earlier token. Five draws show how much that varies.


# %%
def predictions(*interventions):
    """At each position the surprise (minus log probability of what came) and the share of right predictions."""
    with trace.intervene(model, *interventions):
        chances = model(tokens)[:, :-1].log_softmax(-1)
    came = tokens[:, 1:]
    surprise = -chances.gather(-1, came[..., None])[..., 0]
    return surprise.mean(0), (chances.argmax(-1) == came).float().mean(0)


def second_copy(curves):
    """Surprise and share of right predictions where all could be known: the second copy after its first token."""
    return tuple(curve[length:].mean().item() for curve in curves)


def random_edges(edges, seed):
    """For each receiver of these edges one edge from another earlier token, at random."""
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
)  # no token twice in a copy: the same places in every text

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
print(f"{'first copy':>30}: surprise {first_copy:5.2f}")
for name, values in results.items():
    (surprise, right), low, high = values.mean(0).tolist(), values[:, 1].min(), values[:, 1].max()
    spread = f" (from {low:.1%} to {high:.1%})" if len(values) > 1 else ""
    print(f"{name:>30}: surprise {surprise:5.2f}, {right:5.1%} right{spread}")

# %%
COLOUR = {"nothing is cut": BLUE, "induction edges, layer 1": RED, "previous-token edges, layer 0": ORANGE}
figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 3.8), layout="constrained", width_ratios=[1.4, 1])
for (name, colour), style in zip(COLOUR.items(), ("-", "-", "--"), strict=True):
    left.plot(range(1, total), conditions[name][0][0], style, color=colour, label=name)
left.axvline(length - 0.5, color=GREY, linestyle=":")
left.text(length + 0.5, 0.3, "second copy", color="#555555")
left.set(xlabel="position of the predicted token", ylabel="surprise", ylim=(0, None))
left.legend(frameon=False, loc="lower left", fontsize=9)
for row, (name, values) in enumerate(results.items()):
    right.barh(row, values[:, 1].mean(), color=COLOUR.get(name, "#CCCCCC"))
    right.plot(values[:, 1], [row] * len(values), "k|", markersize=12)
right.set_yticks(range(len(results)), list(results))
right.invert_yaxis()
right.set(xlabel="share of the second copy that is predicted right")
plt.show()

# %% [markdown]
# The tokens are random, so the text is unlike anything the model has learned, and in the first copy it is far more surprised
# than even guessing would be (6.93). In the second copy it predicts about one token in six right, of 1024 possible ones.
# Without the 48 edges of the job, nothing is left of that; without as many others, all of it is.
#
# Without the previous-token edges of the *first* layer the second copy is lost too, though the second layer has all its edges:
# nobody has told it what stood before.

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
# We cut the same edges in one head of layer 1 at a time, and then in all but one. The first says which head cannot be spared,
# the second which head can do the job alone.

# %%
heads = range(model.config.num_heads)
without = [second_copy(predictions(trace.cut(job, layers=1, heads=head)))[1] for head in heads]
only = [
    second_copy(predictions(trace.cut(job, layers=1, heads=[h for h in heads if h != head])))[1]
    for head in heads
]

figure, ax = plt.subplots(figsize=(6.6, 3.2), layout="constrained")
ax.bar([head - 0.2 for head in heads], without, width=0.38, color=BLUE, label="cut in this head alone")
ax.bar([head + 0.2 for head in heads], only, width=0.38, color=ORANGE, label="cut in all heads but this")
ax.axhline(intact, color="black", linestyle=":", linewidth=1)
ax.text(4.35, intact, "nothing cut", ha="right", va="bottom", fontsize=9)
ax.set(
    xticks=list(heads),
    xlabel="head of layer 1",
    ylabel="share predicted right",
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
# Heads 1 and 2 make no difference, as their shares in section 2 said. Heads 0 and 3 need each other: either alone gets less
# than a tenth of what both get together, presumably because two messages into the same token's state add up, and only the sum
# is enough to win against all other tokens of the vocabulary.

# %% [markdown]
# ## 5. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/16_induction_heads.py).
#
# **1. Write a template.** For the text `7 2 7 7 5` give the edges of the *duplicate token* template: every token hears all
# earlier tokens that are the same as it is.

# %% tags=["exercise"]
answer = None  # your turn: a list of (src, dst)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

answer_graph = ga.convert.from_edge_index(torch.tensor(answer).T, 5)
assert answer_graph == circuits.TEMPLATES["duplicate_token"](torch.tensor([7, 2, 7, 7, 5])), "not these"
print("right:", answer)

# %% [markdown]
# **2. The other layer.** Cut the previous-token edges in layer 1 instead of layer 0. Does the model lose `"more"` or `"less"`
# of the second copy than it did when they were cut in layer 0? Answer before you try it.

# %% tags=["exercise"]
answer = None  # your turn: "more" or "less"

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

elsewhere = second_copy(predictions(trace.cut(line, layers=1)))[1]
there = results["previous-token edges, layer 0"][0, 1]
assert answer == ("more" if elsewhere < there else "less"), (
    "see section 1: in which round is the token before needed?"
)
print(f"right: {elsewhere:.1%} are still right, and {there:.1%} without the edges in layer 0")

# %% [markdown]
# **3. Cut or mute?** A cut edge leaves its weight to the others, a muted one keeps it and says nothing (`trace.mute`). Do each
# of the two to the induction edges of layer 1, in all heads. How large is the surprise in the second copy? Give both numbers to
# two digits after the point.

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
print(f"right: cut {expected[0]:.2f}, muted {expected[1]:.2f}")

# %% [markdown]
# ## Sources
#
# * N. Elhage et al., *A Mathematical Framework for Transformer Circuits*, 2021: induction heads in two-layer models, K
#   composition.
# * C. Olsson et al., [In-context Learning and Induction Heads](https://arxiv.org/abs/2209.11895), 2022: repeated random tokens.
# * TransformerLens, head detector: heads found by the table of weights they should have.

# %% [markdown]
# ---
# before: [Attention, one case of message passing; an MLP, another](14_one_limiting_case.ipynb) | [the book](README.md) | next: [Relaying through a middle token](17_relay_through_a_middle_token.ipynb)
