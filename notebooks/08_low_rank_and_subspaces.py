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
# # Low rank, and subspaces
#
# A head's pattern matrix and message matrix are large squares, but they are products of two thin matrices. So most directions
# of a state mean nothing to a head: it cannot read them, and it cannot write into them. "Each attention head reads and writes
# to a subspace", says the literature, and then: "if you can wrap your head around it".
#
# This notebook makes subspaces something to look at, in three dimensions first. Then it finds them in a trained model, edits a
# state inside one and watches the model change its mind.
#
# The cloud and the line come from part 2 of Chris McCormick's *Patterns and Messages* ("the text"
# below). You need [notebook 05](05_three_forms.ipynb), at least its sections 1 and 2.
#
# **Afterwards you can** find where a head reads and writes, and edit a state there.
#
# before: [Why the square root?](07_why_the_square_root.ipynb) | [the book](README.md) | next: [Why thin factors?](09_why_thin_factors.ipynb)

# %%
import math
import warnings

import matplotlib.pyplot as plt
import torch
from pictures import draw_cloud
from torch.nn import functional

import gnn_attention as ga

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm, on import, about progress bars nobody asked for
from gnn_attention.interpret import circuits  # noqa: E402

torch.set_num_threads(1)
BLUE, ORANGE, RED, GREEN, GREY = (
    "#0072B2",
    "#E69F00",
    "#D55E00",
    "#009E73",
    "#999999",
)  # told apart by colour-blind eyes too
plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.constrained_layout.use": True})

model, vocabulary = ga.model.load_trained()
model = model.double().requires_grad_(False)
width, head_dim, num_heads = model.config.width, model.config.head_dim, model.config.num_heads

# %% [markdown]
# ## 1. A line through a cloud
#
# Here are forty words as points in space. (We have placed them ourselves: along one direction they go from bad to good, and
# otherwise they lie about at random. In a real model it is learned, in more dimensions than one can draw.) Some of the words
# have been judged by a reader, from -1 to 1. The direction along which the judgement grows fastest is a line through the cloud:
# the **sentiment line**.

# %%
generator = torch.Generator().manual_seed(3)
hidden_line = functional.normalize(torch.tensor([1.0, 0.7, 0.5], dtype=torch.float64), dim=0)
judgement = torch.linspace(-1, 1, 40, dtype=torch.float64)
cloud = 2 * judgement[:, None] * hidden_line + 0.45 * torch.randn(
    40, 3, generator=generator, dtype=torch.float64
)

judged = torch.arange(0, 40, 2)  # half of them
centred = cloud[judged] - cloud[judged].mean(0)
line = functional.normalize(centred.T @ judgement[judged], dim=0)
print(
    f"angle between the line that was found and the hidden one: {math.degrees(math.acos(line @ hidden_line)):.1f} degrees"
)
assert line @ hidden_line > 0.97

# %% [markdown]
# The line is a **subspace**, of one dimension. Three things can be done with it. **Project down**: read off where a word lies
# on the line, one number. **Edit** that number. **Project up**: move the word by the difference, along the line. What does not
# lie on the line stays as it was.

# %%
sentiment = circuits.Subspace(line[:, None])  # its basis: the one direction, as a column
word = int(
    sentiment.reject(cloud[:15]).norm(dim=1).argmax()
)  # of the bad ones, that which is farthest from the line
coordinate = sentiment.coordinates(cloud[word])
edited = sentiment.edit(cloud[word], line, 1.5)

assert torch.allclose(coordinate, cloud[word] @ line)
assert torch.allclose(sentiment.coordinates(edited), torch.tensor(1.5, dtype=torch.float64))
assert torch.allclose(sentiment.reject(edited), sentiment.reject(cloud[word]))  # the rest
print(f"sentiment {coordinate.item():.2f} -> {sentiment.coordinates(edited).item():.2f}")
print(
    "moved by",
    [round(step, 2) for step in (edited - cloud[word]).tolist()],
    "which is along",
    [round(part, 2) for part in line.tolist()],
)

# %% [markdown]
# A second line, and the two of them span a **plane**: a subspace of two dimensions. To project onto it keeps two numbers of a
# word and loses one. (In the pictures red words are bad and blue ones good.)

# %%
second = torch.tensor([-0.5, 1.0, 0.0], dtype=torch.float64)
plane = circuits.Subspace.spanned_by(torch.stack([line, second]))
shadow = plane.project(cloud)
assert torch.allclose(plane.projector() @ plane.projector(), plane.projector())
assert torch.linalg.matrix_rank(plane.projector()) == plane.dim == 2
assert torch.allclose(plane.project(shadow), shadow)  # to project twice changes nothing more

# %%
figure = plt.figure(figsize=(13, 4.9))
titles = (
    "the cloud, its sentiment line, and one edit",
    "every word projected onto the line",
    "... and onto a plane",
)
for number, title in enumerate(titles, 1):
    ax = figure.add_subplot(1, 3, number, projection="3d")
    draw_cloud(ax, cloud, judgement, title)
    if number < 3:
        ax.plot(*(line[:, None] * torch.tensor([-2.6, 2.6])), color="black", linewidth=1.5)
    if number == 1:
        ax.quiver(*cloud[word], *(edited - cloud[word]), color=BLUE, linewidth=2.5, arrow_length_ratio=0.12)
    landing = sentiment.project(cloud) if number == 2 else shadow if number == 3 else None
    if landing is not None:
        for start, end in zip(cloud, landing, strict=True):
            ax.plot(*torch.stack([start, end]).T, color=GREY, linewidth=0.8)
    if number == 3:
        across = functional.normalize(
            sentiment.reject(second), dim=0
        )  # in the plane, at right angles to the line
        corners = torch.stack(
            [a * line + b * across for a, b in ((-2.4, -1.3), (2.4, -1.3), (2.4, 1.3), (-2.4, 1.3))]
        )
        ax.plot_trisurf(*corners.T, triangles=[[0, 1, 2], [0, 2, 3]], color=BLUE, alpha=0.2)
plt.show()

# %% [markdown]
# ## 2. A head's matrices are nearly all zero, seen from the right angle
#
# The states of our trained model have 128 numbers, its heads have channels of 32. A pattern matrix $W_P = W_Q W_K^\top$ is 128
# wide and high, and has rank 32: it reads 32 lines of the receiver and 32 lines of the sender ("hyperlines", says the text),
# and no more. Its **singular values** say how strongly: after the 32nd they are 0. For comparison, dashed, the same for
# untrained heads.

# %%
torch.manual_seed(0)
fresh = ga.StandardHeads(width, num_heads, head_dim).double().requires_grad_(False)
figure, axes = plt.subplots(1, 2, figsize=(12, 3.4), sharey=True)
for ax, which in zip(axes, ("pattern", "message"), strict=True):
    for layer, colour in ((0, BLUE), (1, ORANGE)):
        matrices = getattr(model.layers[layer].heads, f"{which}_matrix")()
        values = matrices.singular_values()
        assert matrices.rank().tolist() == [head_dim] * num_heads
        assert (
            torch.linalg.matrix_rank(matrices.full()).tolist() == [head_dim] * num_heads
        )  # the full squares agree
        for head, row in enumerate(values / values.norm(dim=-1, keepdim=True)):
            ax.plot(
                range(1, 33), row, color=colour, linewidth=1.3, label=f"layer {layer}" if head == 0 else None
            )
    untrained = getattr(fresh, f"{which}_matrix")().singular_values()[0]
    ax.plot(range(1, 33), untrained / untrained.norm(), color="black", linestyle="--", label="untrained")
    ax.plot([33, 128], [0, 0], color=RED, linewidth=2.5, label="33 to 128: exactly 0")
    ax.set(xlabel="number of the singular value", title=f"{which} matrices of all heads")
axes[0].set(ylabel="singular value (of a matrix of norm 1)", ylim=(-0.02, None))
axes[0].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# Some of the spectra have become steep: a few directions matter most. One number for it is the **effective rank**, the
# exponential of the entropy of the squared singular values: it is 32 if all are equal, and 1 if one has everything.


# %%
def effective_rank(matrices):
    """How many singular values share the size of a matrix."""
    shares = matrices.singular_values().square()
    return torch.special.entr(shares / shares.sum(-1, keepdim=True)).sum(-1).exp()


for layer in (0, 1):
    heads = model.layers[layer].heads
    for name, matrices in (("pattern", heads.pattern_matrix()), ("message", heads.message_matrix())):
        print(f"layer {layer}, {name}:", ", ".join(f"{rank:.1f}" for rank in effective_rank(matrices)))
print("untrained pattern:", ", ".join(f"{rank:.1f}" for rank in effective_rank(fresh.pattern_matrix())))
looked_for, said = (getattr(model.layers[0].heads, f"{which}_matrix")() for which in ("pattern", "message"))
assert effective_rank(looked_for).max() < 6
assert effective_rank(said).min() > 15

# %% [markdown]
# In layer 0 three to six directions do most of the looking, out of 32. What is *said* stays broad: a message has to carry the
# content of a token, of whatever kind it is. Two heads of layer 1 look as broadly as an untrained head.
#
# ## 3. What a head can read, and where it can write
#
# The columns of $W_Q$, $W_K$ and $W_V$ span what a head reads: as a receiver, as a sender, and of a sender's content. The rows
# of $W_O$ span where it writes. All four are subspaces of 32 dimensions. Both halves of the sentence "a head reads and writes a
# subspace" can be tested: change a state *outside* of what is read, and the head does not notice. And whatever it writes lies
# *inside*.

# %%
layer, head = 1, 0
circuit = circuits.of(model.layers[layer], head)
print("reads as receiver, as sender, as value; writes:")
print(
    [
        part.dim
        for part in (
            circuit.reads_as_receiver,
            circuit.reads_as_sender,
            circuit.reads_as_value,
            circuit.writes,
        )
    ]
)

# %%
layer_heads = model.layers[layer].heads
alone = ga.StandardHeads.from_arrays(
    *(W[head : head + 1] for W in (layer_heads.W_Q, layer_heads.W_K, layer_heads.W_V, layer_heads.W_O))
)
layer_alone = ga.MessagePassingAttention(alone).requires_grad_(False)
graph = ga.patterns.causal(20)
generator = torch.Generator().manual_seed(1)
x, noise = torch.randn(2, 20, width, generator=generator, dtype=torch.float64).unbind(0)

update = layer_alone(x, graph)
assert torch.allclose(circuit.writes.project(update), update)  # nothing outside of where it writes

reads = circuit.reads_as_receiver + circuit.reads_as_sender + circuit.reads_as_value
unread = reads.reject(noise)
assert torch.allclose(layer_alone(x + unread, graph), update)  # it does not notice
assert not torch.allclose(layer_alone(x + noise, graph), update, atol=0.1)
share = (unread.norm() / noise.norm()).item()
print(f"a random change has {share:.0%} of its length where this head cannot see it")

# %% [markdown]
# ## 4. Heads that meet in a subspace
#
# A head of layer 1 can hear of what a head of layer 0 has written only if it reads where the other writes. So we compare
# subspaces: the mean squared cosine of the angles between them is 1 if one lies in the other and, for random subspaces of 32 in
# 128 dimensions, about a quarter. Here is how well every head of layer 1 can read, **as a sender's key**, what each head of
# layer 0 writes. (`circuits.each(block)` reads the heads with the norm before them folded in.) On the right the same with
# strengths, as *composition*: how much of what the one writes does the other read, where chance is $1 / \sqrt{128} = 0.09$.

# %%
lower, upper = (circuits.each(block) for block in model.blocks)
previous = ga.model.previous_token_scores(model)[0]
induction = ga.model.induction_scores(model)[1]

room = torch.tensor(
    [[float(late.reads_as_sender.overlap(early.writes)) for early in lower] for late in upper]
)
strength = torch.tensor(
    [[float(circuits.composition(early, late, "k")) for early in lower] for late in upper]
)
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
for ax, table, title in (
    (axes[0], room, "overlap of the subspaces"),
    (axes[1], strength, "composition: with strengths"),
):
    ax.imshow(table, cmap="Blues", vmin=0, vmax=1.6 * table.max())
    for row in range(num_heads):
        for column in range(num_heads):
            ax.text(column, row, f"{table[row, column]:.2f}", ha="center", va="center")
    ax.set_xticks(range(num_heads), [f"0.{h}\n({score:.2f})" for h, score in enumerate(previous)])
    ax.set_yticks(range(num_heads), [f"1.{h} ({score:.2f})" for h, score in enumerate(induction)])
    ax.tick_params(length=0)
    ax.set(title=title, xlabel="writes (previous-token score)", ylabel="reads as a key (induction score)")
plt.show()

readers, writers = [0, 3], [2, 3]
assert induction[readers].min() > 0.4 > 10 * induction[[1, 2]].max()
assert previous[writers].min() > 0.4 > 10 * previous[[0, 1]].max()
assert room[readers][:, writers].min() > 0.4
assert (room[[1, 2]] - 0.25).abs().max() < 0.02

# %% [markdown]
# Heads 0 and 3 of layer 1 are induction heads: they find the earlier place where the same token stood. Heads 2 and 3 of layer 0
# write into each token what stood before it. And it shows in the matrices alone, without running anything: the two read best
# where the other two write, and the remaining heads of layer 1 are at chance. (Head 0 of layer 0 joins in; it looks further
# back.) [Notebook 16](16_induction_heads.ipynb) follows this circuit.
#
# ## 5. The same edit, in the trained model
#
# Now the edit of section 1 where nobody has placed the words. Our model reads Python, where ` in` follows `for name`, but not
# `if name`. Is there a line in its states for that? We take pairs of texts with the same last token, after `for` and after
# `if`, and look at the state of that last token when all communication is over: after the attention of the last layer, before
# its MLP. The line is the difference of the two means.

# %%
NAMES = ["name", "value", "path", "index", "result", "text", "key", "line", "data", "item", "size", "node"]
TEXTS = {"for": [f"    for {name}" for name in NAMES], "if": [f"    if {name}" for name in NAMES]}
learn, test = slice(0, 8), slice(8, 12)
IN = vocabulary.encode(" in")[0]
assert vocabulary.pieces([IN]) == [" in"]


def states_of(text):
    """The five states of the tokens of a text."""
    return model.states(torch.tensor([vocabulary.encode(text)]))


def chance_of_in(state, number, graph=None):
    """Goes on with the model from state 2 (after layer 0) or 3 (before the last MLP): the chance that " in" is next."""
    if number == 2:
        state = state + model.blocks[1].communicate(state, graph or ga.patterns.causal(state.shape[1]))
    last = (state + model.blocks[1].compute(state))[0, -1]
    return model.unembedding(model.norm(last)).softmax(-1)[IN].item()


def line_between(number):
    """The direction from "if" to "for", and where the means of both lie on it."""
    means = {
        word: torch.stack([states_of(text)[number][0, -1] for text in texts[learn]]).mean(0)
        for word, texts in TEXTS.items()
    }
    direction = functional.normalize(means["for"] - means["if"], dim=0)
    return direction, {word: (mean @ direction).item() for word, mean in means.items()}


# %% [markdown]
# The line was found with eight names. On the four others we project down, set the one number to where it is after the *other*
# word, project up, and let the model go on. As a check, a step of the same length along a random line.


# %%
def edited_chances(number, along=None):
    """The probability of " in" for the four new names: as they are, and edited to the other word."""
    direction, levels = line_between(number)
    subspace, probabilities = circuits.Subspace(direction[:, None]), {}
    for word, other in (("for", "if"), ("if", "for")):
        before, after = [], []
        for text in TEXTS[word][test]:
            state = states_of(text)[number].clone()
            before.append(chance_of_in(state, number))
            changed = subspace.edit(state[0, -1], direction, levels[other])
            step = levels[other] - state[0, -1] @ direction
            assert torch.allclose(
                subspace.reject(changed), subspace.reject(state[0, -1])
            )  # the other 127 directions
            state[0, -1] = changed if along is None else state[0, -1] + step * along
            after.append(chance_of_in(state, number))
        probabilities[word], probabilities[f"{word}, edited to {other}"] = before, after
    return probabilities


# %%
generator = torch.Generator().manual_seed(2)
by_chance = functional.normalize(torch.randn(width, generator=generator, dtype=torch.float64), dim=0)
late, random, early = edited_chances(3), edited_chances(3, by_chance), edited_chances(2)
for name, chances in late.items():
    print(f"{name:>18}: P(' in') =", ", ".join(f"{chance:.2f}" for chance in chances))
print(
    " and moved along a random line:",
    ", ".join(f"{chance:.2f}" for chance in random["for, edited to if"]),
    "and",
    end=" ",
)
print(", ".join(f"{chance:.2f}" for chance in random["if, edited to for"]))
assert min(late["for"]) > 0.5 > 0.1 > max(late["for, edited to if"])
assert max(late["if"]) < 0.1 < 0.5 < min(late["if, edited to for"])
assert max(random["if, edited to for"]) < 0.1

# %% [markdown]
# One number of 128 was changed, and the model takes an `if` for a `for`, and the other way round. (A step as long along the
# random line disturbs: after `for` the chance falls too, but stays above what it is after `if`. And it does not turn `if` into
# `for`.)
#
# Now the same edit one step earlier, *before* the last layer has listened. The line is there too, but the edit does next to
# nothing:

# %%
for name, chances in early.items():
    print(f"{name:>18}: P(' in') =", ", ".join(f"{chance:.2f}" for chance in chances))
assert min(early["for, edited to if"]) > 0.4
assert max(early["if, edited to for"]) < 0.1

# %% [markdown]
# Why? We changed what this token knows, not what its neighbours are going to tell it. To see where the answer comes from, leave
# the states as they are and change the graph: in layer 1 the last token shall hear nobody but itself.

# %%
alone = []
for text in TEXTS["for"][test]:
    state = states_of(text)[2]
    last = state.shape[1] - 1
    to_the_last = ga.convert.from_edge_index(torch.tensor([list(range(last)), [last] * last]), last + 1)
    alone.append(chance_of_in(state, 2, ga.patterns.causal(last + 1) - to_the_last))
print("for, hearing only itself in layer 1: P(' in') =", ", ".join(f"{chance:.2f}" for chance in alone))
assert max(alone) < 0.1 < 0.5 < min(early["for"])

# %% [markdown]
# So its own state after layer 0, edited or not, does not decide: the others tell it, in the last round. In a network of
# messages one state need not be the only place where something is known, and what can be *read* from a state need not be *used*
# there.
#
# ## 6. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/08_low_rank_and_subspaces.py).
#
# **1. Two heads.** Into how many dimensions can heads 0 and 1 of layer 0 write *together*? (Two subspaces can be added:
# `circuits.of(...).writes + ...`.)

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer == torch.linalg.matrix_rank(model.layers[0].heads.W_O[:2].flatten(0, 1)), "not that many"
print("right:", answer)

# %% [markdown]
# **2. A neutral word.** In the cloud of section 1, move the word that was edited there, `cloud[word]`, so that its sentiment is
# 0 and nothing else about it changes. Give the three numbers, without `edit`.

# %% tags=["exercise"]
answer = None  # your turn: a tensor of three numbers

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
answer = torch.as_tensor(answer, dtype=torch.float64)

assert abs(answer @ line) < 1e-3, f"its sentiment is {answer @ line:.2f}"
assert torch.allclose(answer, sentiment.reject(cloud[word]), atol=1e-3), "something else about it has changed"
print("right:", [round(number, 3) for number in answer.tolist()])

# %% [markdown]
# **3. How thin could this head be?** What is the smallest rank with which one can write the pattern matrix of the strongest
# previous-token head of layer 0 so that what is lost is less than 10 % of its size (its Frobenius norm)?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
values = lower[int(previous.argmax())].pattern.singular_values()
lost = [values[rank:].norm() / values.norm() for rank in range(33)]

assert lost[answer] < 0.1, f"with rank {answer} at least {lost[answer]:.0%} is lost"
assert lost[answer - 1] >= 0.1, "it can be thinner"
print(f"right: rank {answer} of 32 loses {lost[answer]:.1%}")

# %% [markdown]
# ## Sources
#
# * C. McCormick, *Patterns and Messages*, part 2, 2025: the cloud, the hyperlines.
# * N. Elhage et al., [A Mathematical Framework for Transformer
#   Circuits](https://transformer-circuits.pub/2021/framework/index.html), 2021: what heads read and write, and composition.
# * C. Eckart and G. Young, *The approximation of one matrix by another of lower rank*, 1936: the largest singular values are
#   the best.

# %% [markdown]
# ---
# before: [Why the square root?](07_why_the_square_root.ipynb) | [the book](README.md) | next: [Why thin factors?](09_why_thin_factors.ipynb)
