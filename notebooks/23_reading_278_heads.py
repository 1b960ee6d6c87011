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
# What does each head of a language model do? For all 270 heads of SmolLM2-135M and the 8 of the model that ships with this
# library, one command writes a sentence, *looks for ..., says ...*, and then tries to prove it wrong:
#
# `python -m examples.heads --model smollm2 --model trained --json tests/records/2026-11-24-heads.json`
#
# Half of the text is **read**: the job comes from the attention, the tokens looked for from pattern x mean state, what is said
# from message x unembedding. The other half is the **test**: the edges that the sentence names are cut in that head alone and
# the softmax renormalises; as a control, as many random other edges of the same receivers. p is that of a sign-flip test over 16
# passages, corrected by Holm over all claims. A sentence *holds* if the predictions move more than under the control and the
# logits of the words said fall more, both at 5 %.
#
# **Afterwards you can** read what a head looks for and says, and test the sentence by cutting its edges.
#
# before: [Reach is not influence](22_reach_is_not_influence.ipynb) | [the book](README.md) | next: [The graph that a model draws for itself](24_the_graph_that_a_model_draws.ipynb)

# %%
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

warnings.filterwarnings("ignore", message="IProgress not found")
import gnn_attention as ga  # noqa: E402

sys.path.append("..")  # the examples are beside the notebooks, no part of the package
from examples.heads import passages, readings  # noqa: E402

rows = json.loads(Path("../tests/records/2026-11-24-heads.json").read_text())["rows"]
smollm2 = [row for row in rows if row["model"] == "smollm2"]
jobs = [job for job, _ in Counter(row["job"] for row in smollm2).most_common()]
print(f"{'of 270 heads of SmolLM2':24} heads  edges matter  words fall  holds")
for job in jobs:
    mine = [row for row in smollm2 if row["job"] == job]
    confirmed = [sum(row[claim]["p_holm"] <= 0.05 for row in mine) for claim in ("looks", "said")]
    print(f"{job:24} {len(mine):5} {confirmed[0]:13} {confirmed[1]:11} {sum(row['holds'] for row in mine):6}")

# %% [markdown]
# ## 1. A map of the jobs
#
# A square for each head, its job by colour; a dot where the sentence holds.

# %%
table = np.full((9, 30), np.nan)
for row in smollm2:
    table[row["head"], row["layer"]] = jobs.index(row["job"])
colours = plt.get_cmap("tab10", len(jobs))
figure, ax = plt.subplots(figsize=(11, 3.9), layout="constrained")
image = ax.imshow(table, cmap=colours, vmin=-0.5, vmax=len(jobs) - 0.5)
confirmed_heads = [(row["layer"], row["head"]) for row in smollm2 if row["holds"]]
ax.scatter(*zip(*confirmed_heads, strict=True), color="white", edgecolor="black", s=22, linewidth=0.6)
ax.set(xlabel="layer", ylabel="head", xticks=range(0, 30, 2), yticks=range(9))
bar = figure.colorbar(image, ax=ax, ticks=range(len(jobs)))
bar.ax.set_yticklabels(jobs)
plt.show()

# %% [markdown]
# ## 2. Do the edges matter?
#
# How far the predictions move (KL divergence, nats a token) when the edges of the sentence are cut, against random ones. Above
# the line, the sentence names edges that matter more than others: where a head's attention is, is what can be read most safely.
# That is still not what it *says*.

# %%
figure, ax = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
for number, job in enumerate(jobs):
    pairs = [(row["looks"]["control"], row["looks"]["claimed"]) for row in smollm2 if row["job"] == job]
    ax.scatter(*zip(*pairs, strict=True), s=16, color=colours(number), label=job)
ends = np.array([1e-7, 1.0])
ax.plot(ends, ends, color="black", linestyle=":", linewidth=1)
ax.set(xscale="log", yscale="log", xlabel="as many random edges cut", ylabel="the edges of the sentence cut")
ax.legend(frameon=False, fontsize=8)
plt.show()
above = sum(row["looks"]["claimed"] > row["looks"]["control"] for row in smollm2)
print(f"{above} of {len(smollm2)} are above the line")
assert above > len(smollm2) / 2

# %% [markdown]
# ## 3. Sentences that hold, and sentences that do not
#
# The two with the largest effect on the predictions for each job, first of those that hold, then of those that do not.
# Most wrong halves are the second: heads of early layers speak to later heads, not to the unembedding.

# %%
for title, holds in (("hold", True), ("do not", False)):
    print(f"--- {title}")
    for job in jobs:
        mine = [row for row in smollm2 if row["job"] == job and row["holds"] == holds]
        for row in sorted(mine, key=lambda row: -row["looks"]["claimed"])[:2]:
            print(f"{row['layer']:2}.{row['head']} {job}: looks for {row['looks_for']}, says {row['says']}")

# %% [markdown]
# ## 4. Again, on another text
#
# The eight heads of the small model, read and tested on the source of [notebook 16](16_induction_heads.ipynb), which is about
# some of them. `python -m examples.heads 18.6 --model smollm2 --text FILE` does the same for one head of SmolLM2 and a text of yours.

# %%
model, vocabulary = ga.model.load_trained()
text = Path("16_induction_heads.py").read_text().partition("# %%\n")[2].partition("# ## 5. Exercises")[0]
tokens = passages(vocabulary.encode(text))
for reading in readings(model, tokens, lambda token: vocabulary.decode([token])):
    looks = f"moved {reading.looks.claimed:.2f} against {reading.looks.control:.2f}"
    print(
        f"{reading.layer}.{reading.head} {reading.job}: {looks}, {'holds' if reading.holds else 'not shown'}"
    )

# %% [markdown]
# ## 5. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/23_reading_278_heads.py).
#
# **1. What is left without sinks?** A sink's sentence is the easiest to show. Of the heads of SmolLM2 that are no sinks, what share
# of the sentences holds?

# %% tags=["exercise"]
answer = None  # your turn: a number between 0 and 1

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

other_rows = [row["holds"] for row in smollm2 if row["job"] != "sink"]
assert abs(answer - sum(other_rows) / len(other_rows)) < 1e-9, "count rows whose job is not 'sink'"
print(f"right: {answer:.1%}")

# %% [markdown]
# **2. Why correct?** Suppose that no sentence about any of the 278 heads were true. How many of the tests of their edges would be
# expected to come out below 5 %, if p were not corrected?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert abs(answer - 0.05 * len(rows)) < 1e-9, "each test has a chance of 5 % of its own"
print("right:", answer)

# %% [markdown]
# **3. Which head copies?** In the small model one head's job is induction, and its sentence holds. Which one?

# %% tags=["exercise"]
answer = None  # your turn: (layer, head)

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

induction = [
    (row["layer"], row["head"])
    for row in rows
    if row["model"] == "trained" and row["job"] == "induction" and row["holds"]
]
assert tuple(answer) in induction, "look at the rows of the model 'trained'"
print("right:", answer)

# %% [markdown]
# ---
# before: [Reach is not influence](22_reach_is_not_influence.ipynb) | [the book](README.md) | next: [The graph that a model draws for itself](24_the_graph_that_a_model_draws.ipynb)
