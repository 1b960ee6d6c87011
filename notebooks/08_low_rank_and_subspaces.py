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
# The pattern matrix and the message matrix of a head are large squares, but they are products of two thin matrices. So a head cannot read
# most directions of a state, and it cannot write into most of them. "Each attention head reads and writes to a subspace", says the
# literature, and then: "if you can wrap your head around it". **Where does a head read and write, and can we change a model's
# answer by editing a state there?**
#
# We first look at subspaces in three dimensions. Then we find them in a trained model, edit a state inside one, and see the prediction
# change.
#
# The cloud and the line come from part 2 of Chris McCormick's *Patterns and Messages* ("the text"
# below). You need [notebook 05](05_three_forms.ipynb), at least its sections 1 and 2.
#
# **Afterwards you can** find where a head reads and writes, and edit a state there.
#
# before: [07. Why the square root?](07_why_the_square_root.ipynb) | [the book](README.md) | next: [09. Why thin factors?](09_why_thin_factors.ipynb)

# %%
import math

import matplotlib.pyplot as plt
import torch
from pictures import BLUE, GREY, ORANGE, RED, draw_cloud, use_house_style, write_words
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import draw
from gnn_attention.interpret import circuits

use_house_style()
torch.set_num_threads(1)

model, vocabulary = ga.model.load_trained()
model = model.double().requires_grad_(False)
width, head_dim, num_heads = model.config.width, model.config.head_dim, model.config.num_heads

# %% [markdown]
# ## 1. A line through a cloud
#
# Here are forty words as points in space. We have placed them ourselves: along one direction they go from bad to good, and in the other
# directions they are random. In a real model the positions are learned, in more dimensions than one can draw. A reader has judged
# half of the words, from -1 to 1. The direction along which the judgement grows fastest is a line through the cloud: the
# **sentiment line**.

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
    f"angle between the line from the judgements and the hidden one: {math.degrees(math.acos(line @ hidden_line)):.1f} degrees"
)
assert line @ hidden_line > 0.97

# %% [markdown]
# The line is a **subspace** of one dimension. Three operations use it. **Project down**: compute the position of a word on the line, which
# is one number. **Edit** this number. **Project up**: move the word along the line by the difference. The part of the word that is
# perpendicular to the line does not change.

# %%
sentiment = circuits.Subspace(line[:, None])  # its basis: the one direction, as a column
word = int(sentiment.reject(cloud[:15]).norm(dim=1).argmax())  # the bad word that is farthest from the line
coordinate = sentiment.coordinates(cloud[word])
edited = sentiment.edit(cloud[word], line, 1.5)

assert torch.allclose(coordinate, cloud[word] @ line)
assert torch.allclose(sentiment.coordinates(edited), torch.tensor(1.5, dtype=torch.float64))
assert torch.allclose(sentiment.reject(edited), sentiment.reject(cloud[word]))  # the perpendicular part
print(f"sentiment {coordinate.item():.2f} -> {sentiment.coordinates(edited).item():.2f}")
print(
    "moved by",
    [round(step, 2) for step in (edited - cloud[word]).tolist()],
    "which is along",
    [round(part, 2) for part in line.tolist()],
)

# %% [markdown]
# Together with a second line it spans a **plane**, a subspace of two dimensions. The projection onto the plane keeps two numbers of a word
# and drops one.

# %%
second = torch.tensor([-0.5, 1.0, 0.0], dtype=torch.float64)
across = functional.normalize(sentiment.reject(second), dim=0)  # in the plane, at right angles to the line
plane = circuits.Subspace.spanned_by(torch.stack([line, second]))
shadow = plane.project(cloud)
assert torch.allclose(plane.projector() @ plane.projector(), plane.projector())
assert torch.linalg.matrix_rank(plane.projector()) == plane.dim == 2
assert torch.allclose(plane.project(shadow), shadow)  # a second projection changes nothing

# %%
WORDS = """vile horrid awful dreadful cruel nasty ugly rotten bad sad poor weak sour dull stale dry odd slow plain usual
mild calm neat fair fine clean nice sound good sweet warm glad kind bright lovely great lucky superb splendid perfect"""
figure = plt.figure(figsize=(13, 5.2))
cells = figure.add_gridspec(1, 2, width_ratios=[1, 2.3])
space = figure.add_subplot(cells[0], projection="3d")
draw_cloud(space, cloud, judgement, "forty words in space, a line and a plane")
space.set(zlim=(-2.3, 2.3))
space.plot(*(line[:, None] * torch.tensor([-2.6, 2.6])), color="black", linewidth=1.5)
corners = torch.stack(
    [a * line + b * across for a, b in ((-2.6, -1.5), (2.6, -1.5), (2.6, 1.5), (-2.6, 1.5))]
)
space.plot_trisurf(*corners.T, triangles=[[0, 1, 2], [0, 2, 3]], color=BLUE, alpha=0.2)
for point, projection in zip(cloud, shadow, strict=True):
    space.plot(*torch.stack([point, projection]).T, color=GREY, linewidth=0.8)

flat = figure.add_subplot(cells[1])
plane_coordinates = torch.stack([shadow @ line, shadow @ across], dim=1)
flat.axhline(0, color="black", linewidth=1.5)
colours = plt.get_cmap("coolwarm_r", 5)
flat.scatter(*plane_coordinates.T, c=judgement, cmap=colours, edgecolor="black", linewidth=0.3, zorder=3)
flat.set(title="the same words, projected onto the plane, and one edit")
flat.set(xlabel="along the line", ylabel="across")
flat.set(xlim=(-2.8, 3.5), ylim=(-1.4, 1.05))
steps = torch.linspace(0, 1, 100, dtype=torch.float64)[:, None]
start, end = plane_coordinates[word], torch.stack([edited @ line, edited @ across])
black_line = torch.tensor([[-3.0, 0.0]]) + steps * torch.tensor([[6.6, 0.0]])
blue_arrow = start + steps * (end - start)
flat.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": BLUE, "linewidth": 2.5})
assert write_words(flat, plane_coordinates, WORDS.split(), avoid=torch.cat([black_line, blue_arrow])) > 36
plt.show()
assert cloud.abs().max() < 2.3  # every dot is inside the box

# %% [markdown]
# Red words are bad and blue words are good. On the left, each grey line connects a word with its projection onto the plane. On the right
# you look straight at this plane, and the black line is the sentiment line. The blue arrow is the edit. It is parallel to the line, so
# the other coordinate keeps its value.
#
# ## 2. A head's matrices are nearly all zero, seen from the right angle
#
# The states of our trained model have 128 numbers, and its heads have channels of 32. A pattern matrix $W_P = W_Q W_K^\top$ is 128 wide and
# high, and has rank 32: it reads 32 lines of the receiver and 32 lines of the sender (the text calls them "hyperlines"), and no more.
# Its **singular values** say how strongly it reads each; after the 32nd they are 0. The dashed curves are those of an untrained head.

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
# Some of the spectra are steep after training: a few directions matter most. The **effective rank** expresses this in one number. It is the
# exponential of the entropy of the squared singular values: 32 if all are equal, and 1 if only one is not zero.


# %%
def effective_rank(matrices):
    """Return the number of singular values that effectively count."""
    shares = matrices.singular_values().square()
    return torch.special.entr(shares / shares.sum(-1, keepdim=True)).sum(-1).exp()


for layer in (0, 1):
    heads = model.layers[layer].heads
    for name, matrices in (("pattern", heads.pattern_matrix()), ("message", heads.message_matrix())):
        print(f"layer {layer}, {name}:", ", ".join(f"{rank:.1f}" for rank in effective_rank(matrices)))
print("untrained pattern:", ", ".join(f"{rank:.1f}" for rank in effective_rank(fresh.pattern_matrix())))
pattern, message = (getattr(model.layers[0].heads, f"{which}_matrix")() for which in ("pattern", "message"))
assert effective_rank(pattern).max() < 6
assert effective_rank(message).min() > 15

# %% [markdown]
# In layer 0, the patterns use three to six of their 32 directions. The *messages* stay broad, since a message must carry the content of any
# token. Two heads of layer 1 have patterns as broad as those of an untrained head.
#
# LoRA uses the same fact: an update of low rank changes a matrix along few directions only. In the same sense, one head can change a
# state in at most 32 of its 128 dimensions.
#
# ## 3. What a head can read, and where it can write
#
# The columns of $W_Q$, $W_K$ and $W_V$ span what a head reads: as a receiver, as a sender, and of a sender's content. The rows
# of $W_O$ span where it writes. All four are subspaces of 32 dimensions. Both halves of the sentence "a head reads and writes a subspace"
# can be tested: a change of a state *outside* of what the head reads does not change its output, and its output lies *inside* of
# where it writes.

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
assert torch.allclose(
    circuit.writes.project(update), update
)  # the update lies inside of where the head writes

reads = circuit.reads_as_receiver + circuit.reads_as_sender + circuit.reads_as_value
unread = reads.reject(noise)
assert torch.allclose(layer_alone(x + unread, graph), update)  # the update is the same
assert not torch.allclose(layer_alone(x + noise, graph), update, atol=0.1)
share = (unread.norm() / noise.norm()).item()
print(f"{share:.0%} of the length of a random change is outside of what this head reads")

# %% [markdown]
# ## 4. Heads that meet in a subspace
#
# A head of layer 1 can use what a head of layer 0 writes only if it reads where the other writes. So we compare subspaces. The mean
# squared cosine of the angles between two subspaces is 1 if one lies in the other, and about a quarter for random subspaces of 32 in 128
# dimensions. The left table shows it for what each head of layer 1 reads **as a sender's key** and what each head of layer 0 writes.
# (`circuits.each(block)` includes the norm before the heads.) The right table also takes strengths into account, as *composition*: the
# share of what one head writes that the other reads. Unrelated heads have the value $1 / \sqrt{128} = 0.09$.

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
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
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
# Heads 0 and 3 of layer 1 are induction heads, which attend to the token after an earlier copy of the current one. Heads 2 and 3 of
# layer 0 write into the state of each token which token precedes it. The matrices alone show the connection, without running the model: the two
# induction heads read best where the other two write, and the remaining heads of layer 1 are at the level of unrelated heads. (Head 0 of
# layer 0 is read too, although it is not a previous-token head.) [Notebook 16](16_induction_heads.ipynb) follows this circuit.
#
# ## 5. The same edit, in the trained model
#
# Now we repeat the edit of section 1 in states that a model has learned. Our model reads Python, where ` in` follows
# `for name`, but not `if name`. Is there a line in its states for this difference? We take pairs of texts with the same last token, after
# `for` and after `if`, and read the state of the last token after the attention of the last layer and before its MLP, when
# all communication is done. The line is the difference of the two means.

# %%
NAMES = ["name", "value", "path", "index", "result", "text", "key", "line", "data", "item", "size", "node"]
TEXTS = {"for": [f"    for {name}" for name in NAMES], "if": [f"    if {name}" for name in NAMES]}
learn, test = slice(0, 8), slice(8, 12)
IN = vocabulary.encode(" in")[0]
assert vocabulary.pieces([IN]) == [" in"]


def states_of(text):
    """Return the five states of the tokens of a text."""
    return model.states(torch.tensor([vocabulary.encode(text)]))


def chance_of_in(state, number, graph=None):
    """Continue the model from state 2 (after layer 0) or 3 (before the last MLP), and return the probability of " in"."""
    if number == 2:
        state = state + model.blocks[1].communicate(state, graph or ga.patterns.causal(state.shape[1]))
    last = (state + model.blocks[1].compute(state))[0, -1]
    return model.unembedding(model.norm(last)).softmax(-1)[IN].item()


def line_between(number):
    """Return the direction from "if" to "for", and the positions of both means on it."""
    means = {
        word: torch.stack([states_of(text)[number][0, -1] for text in texts[learn]]).mean(0)
        for word, texts in TEXTS.items()
    }
    direction = functional.normalize(means["for"] - means["if"], dim=0)
    return direction, {word: (mean @ direction).item() for word, mean in means.items()}


# %% [markdown]
# The line comes from eight names. For the four other names we project down, set the one number to its value after the *other* word,
# project up, and let the model continue. As a control, we take a step of the same length along a random line.


# %%
def edited_chances(number, along=None):
    """Return the probability of " in" for the four new names, before and after the edit to the other word."""
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
    "the same step along a random line:",
    ", ".join(f"{chance:.2f}" for chance in random["for, edited to if"]),
    "and",
    end=" ",
)
print(", ".join(f"{chance:.2f}" for chance in random["if, edited to for"]))
assert min(late["for"]) > 0.5 > 0.1 > max(late["for, edited to if"])
assert max(late["if"]) < 0.1 < 0.5 < min(late["if, edited to for"])
assert max(random["if, edited to for"]) < 0.1

# %% [markdown]
# With one number of 128 changed, the model predicts after `if` what it predicts after `for`, and vice versa. (The step along the random line
# has an effect too: after `for` the probability falls, but it stays above that after `if`. It does not turn `if` into `for`.)
#
# Now the same edit one step earlier, *before* the attention of the last layer. The line exists there too, but the edit has almost no
# effect:

# %%
for name, chances in early.items():
    print(f"{name:>18}: P(' in') =", ", ".join(f"{chance:.2f}" for chance in chances))
assert min(early["for, edited to if"]) > 0.4
assert max(early["if, edited to for"]) < 0.1

# %% [markdown]
# Why? We have changed the state of this token, but not the messages that it still receives from its neighbours. To see where the answer
# comes from, we leave the states as they are and change the graph: in layer 1, the last token attends only to itself. On four tokens, the
# graph of the last layer then is:

# %%
cut = ga.patterns.causal(4) - ga.convert.from_edge_index(torch.tensor([[0, 1, 2], [3, 3, 3]]), 4)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(1, 2))
draw.mask(cut, left, title="no messages to token 3")
draw.arcs(cut, right, title="the same graph as arcs")
plt.show()

# %%
alone = []
for text in TEXTS["for"][test]:
    state = states_of(text)[2]
    last = state.shape[1] - 1
    to_the_last = ga.convert.from_edge_index(torch.tensor([list(range(last)), [last] * last]), last + 1)
    alone.append(chance_of_in(state, 2, ga.patterns.causal(last + 1) - to_the_last))
print("for, attending only to itself in layer 1: P(' in') =", ", ".join(f"{chance:.2f}" for chance in alone))
assert max(alone) < 0.1 < 0.5 < min(early["for"])

# %% [markdown]
# So the state of the token after layer 0 does not decide the answer, edited or not. The messages of the last layer do. In a network of messages,
# several states can hold the same information, and what can be *read* from a state need not be *used* there.
#
# **The answer.** A head reads and writes subspaces of 32 of the 128 dimensions, which its matrices define. An edit of one number in the
# right subspace changes the prediction, if it happens where the model uses this number, and has no effect where it does not.
#
# ## 6. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/08_low_rank_and_subspaces.py).
#
# **1. Two heads** (easy, 3 minutes, code). Into how many dimensions can heads 0 and 1 of layer 0 write *together*?
#
# <details><summary>Hint</summary>
#
# Two subspaces can be added: `circuits.of(...).writes + ...`, and a subspace has a `dim`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer == torch.linalg.matrix_rank(model.layers[0].heads.W_O[:2].flatten(0, 1)), (
    "another number of dimensions"
)
print("right:", answer)

# %% [markdown]
# **2. A neutral word** (medium, 5 minutes, code). In the cloud of section 1, move the word that was edited there, `cloud[word]`, so that its sentiment is
# 0 and nothing else about it changes. Compute the three numbers without `edit`.
#
# <details><summary>Hint</summary>
#
# Subtract the part of the word that lies along `line`, which has length 1.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a tensor of three numbers

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
answer = torch.as_tensor(answer, dtype=torch.float64)

assert abs(answer @ line) < 1e-3, f"its sentiment is {answer @ line:.2f}"
assert torch.allclose(answer, sentiment.reject(cloud[word]), atol=1e-3), "the perpendicular part has changed"
print("right:", [round(number, 3) for number in answer.tolist()])

# %% [markdown]
# **3. How thin could this head be?** (medium, 10 minutes). What is the smallest rank with which one can write the pattern matrix of the strongest
# previous-token head of layer 0 with an error of less than 10 % of its Frobenius norm?
#
# <details><summary>Hint</summary>
#
# The best approximation of rank $r$ keeps the $r$ largest singular values. Its error is the norm of the others.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"
values = lower[int(previous.argmax())].pattern.singular_values()
lost = [values[rank:].norm() / values.norm() for rank in range(33)]

assert lost[answer] < 0.1, f"with rank {answer} the error is at least {lost[answer]:.0%}"
assert lost[answer - 1] >= 0.1, "a smaller rank is enough"
print(f"right: rank {answer} of 32 has an error of {lost[answer]:.1%}")

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
# before: [07. Why the square root?](07_why_the_square_root.ipynb) | [the book](README.md) | next: [09. Why thin factors?](09_why_thin_factors.ipynb)
