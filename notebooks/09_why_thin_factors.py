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
# # Why thin factors?
#
# Patterns and messages are the shorter description of a head ([notebook 05](05_three_forms.ipynb)), but no large model computes
# with them. It stores two thin matrices for each square one. Is that only to save memory? What would one gain, and lose, with
# other factors, or with none?
#
# There are four questions, from the simplest to the deepest. What does each form cost? Can a model write text with patterns and
# messages all the same? Which other designs have as many parameters? And why should a model *learn* factors at all?
#
# You need [notebook 05](05_three_forms.ipynb), and section 2 of [notebook 08](08_low_rank_and_subspaces.ipynb).
#
# **Afterwards you can** say what each form of a head costs, and why models learn thin factors.
#
# before: [08. Low rank, and subspaces](08_low_rank_and_subspaces.ipynb) | [the book](README.md) | next: [10. The zoo: attention masks as graphs](10_the_zoo.ipynb)

# %%
import copy
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import SVG
from pictures import BLUE, GREY, RED, use_house_style
from torch.nn import functional

import gnn_attention as ga
from gnn_attention import cost

use_house_style()
torch.set_num_threads(1)

# %% [markdown]
# The material is that of notebook 05: the first layer of the model that ships with the package, and a sentence.

# %%
model, vocabulary = ga.model.load_trained()
model = model.double().requires_grad_(False)
tokens = torch.tensor(vocabulary.encode("Llamas do not output words"))
pieces = [piece.replace(" ", "␣") for piece in vocabulary.pieces(tokens)]
x = model.blocks[0].attention_norm(model.embedding(tokens))
heads, position = model.layers[0].heads, model.layers[0].score_mod
n, width, head_dim, num_heads = len(pieces), heads.width, heads.head_dim, heads.num_heads
graph = ga.patterns.causal(n)
expected = ga.MessagePassingAttention(heads, position)(x, graph)
FORMS = ("standard", "factored", "merged")

# %% [markdown]
# ## 1. What each form costs
#
# Take the sizes of Llama 3 8B, as the source text does: states of 4,096 numbers and heads of 128. **One message** takes
# $4096 \cdot 128 + 128 \cdot 4096$ multiplications through the two thin matrices, and $4096 \cdot 4096$ through the merged one.
# `gnn_attention.cost` counts them without running anything.

# %%
thin, square = (
    cost.of_form(form, 4096, num_heads=1, head_dim=128).macs.send for form in ("factored", "merged")
)
print(f"two thin matrices: {thin:,}   one square matrix: {square:,}   ratio: {square // thin}")
assert (thin, square) == (1_048_576, 16_777_216) == (2 * 4096 * 128, 4096 * 4096)

# %% [markdown]
# Next, a whole layer with 32 heads, which share 8 sets of keys and values, for texts of different lengths. The forms differ twice:
# merged projections are wider, and in the space of the states a comparison takes 4,096 multiplications instead of 128, on every
# edge.

# %%
LENGTHS = [2**exponent for exponent in range(0, 17, 2)]
figure, ax = plt.subplots(figsize=(7.5, 3.6))
costs = {
    form: [cost.of_form(form, 4096, 32, head_dim=128, num_kv_heads=8, tokens=count) for count in LENGTHS]
    for form in FORMS
}
for (form, form_costs), (colour, style), shift in zip(
    costs.items(), ((BLUE, "o-"), (GREY, "s-"), (RED, "^-")), (1, 0.65, 1.6), strict=True
):
    totals = [each.macs.total for each in form_costs]
    ax.loglog(LENGTHS, totals, style, color=colour, base=2)
    ax.text(LENGTHS[-1] * 1.4, totals[-1] * shift, form, color=colour, va="center")
ax.set_yscale("log", base=10)
ax.set_xticks(LENGTHS, [f"{count:,}" for count in LENGTHS], fontsize=9)
ax.set(xlabel="tokens", ylabel="multiplications", xlim=(0.7, 2**18.5))
ax.minorticks_off()
plt.show()
for standard, factored, merged in zip(*costs.values(), strict=True):
    assert standard.macs.total < factored.macs.total < merged.macs.total

# %% [markdown]
# The standard form is always the cheapest and the merged form the most expensive. And what about memory, when a text is written token by
# token? The standard form keeps a key and a value of 128 numbers for each of the 8 shared sets. A pattern and a message have 4,096
# numbers each, for every one of the 32 heads. Heads cannot share them, because each head has its own $W_Q$ and $W_O$ in them. (The output
# below also lists caches that keep the state instead, which section 2 explains; the 1 beside the state is for biases.)

# %%
for form, form_costs in costs.items():
    numbers = {what: size // form_costs[0].itemsize for what, size in form_costs[0].cache_per_token.items()}
    print(f"{form:>8}:", ", ".join(f"{count:,} numbers as {what}" for what, count in numbers.items()))
cached_numbers = [form_costs[0].cache_per_token for form_costs in costs.values()]
assert cached_numbers[1]["pattern, message"] == 128 * cached_numbers[0]["key, value"]

# %% [markdown]
# So nobody runs a large model on patterns and messages. They are a tool for thinking.
#
# ## 2. A cache of patterns and messages, step by step
#
# Yet it is possible, in three steps. **Step 1**: the state of the new token is projected to its pattern and its message, and both are added
# to the cache *first*. So the token will attend to itself as well: every node has a self loop. (The text multiplies by $W_P$. A pattern that
# is kept is a sender's, so the matrix must be the transpose: [notebook 05](05_three_forms.ipynb), section 4.)

# %% tags=["S1.14"] mystnb={"image": {"alt": "The new state times two square matrices is a pattern and a message, which are appended to the cached ones."}}
SVG("../docs/illustrations/cache-a-message.svg")

# %% [markdown]
# **Step 2**: the state of the new token is multiplied with all cached patterns, and a softmax makes weights. **Step 3**: the cached messages
# are summed with these weights. The sum over all heads is added to the state.

# %% tags=["S1.18"] mystnb={"image": {"alt": "The new state times each cached pattern gives a weight; weighted messages are summed, over all heads, and added to the state."}}
SVG("../docs/illustrations/score-and-aggregate.svg")

# %% [markdown]
# As code, on the small model:

# %% tags=["S1.28"]
receivers, senders = ga.FactoredHeads.of(heads), ga.FactoredHeads.of(heads, side="sender")
cache = ga.cache.PatternMessageCache(senders, graph)
rows = []
for t, piece in enumerate(pieces):
    new = x[None, t : t + 1]
    cache.append(new)  # step 1
    kept_patterns, kept_messages = cache.senders()
    rows.append(cache.attend(new, score_mod=position)[0])  # steps 2 and 3
    alpha = (
        kept_patterns[0] @ x[t] * heads.scale
        + position.table[:, position.table.shape[1] // 2 + t - torch.arange(t + 1)]
    )
    by_hand = (alpha.softmax(-1).unsqueeze(1) @ kept_messages[0]).sum(0)
    assert torch.allclose(rows[-1], by_hand, rtol=0, atol=1e-12)
    shapes = f"patterns {list(kept_patterns[0].shape)}, messages {list(kept_messages[0].shape)}"
    itself = alpha.softmax(-1)[:, t].mean()
    print(f"{piece!r:>8}: {shapes}, mean weight of the self loop {itself:.2f}")

assert torch.allclose(torch.cat(rows), expected, rtol=0, atol=1e-12)  # the full pass, at every position
print("every row equals that of the full pass")

# %% [markdown]
# The graph says what must be kept. With a window, a sender can be dropped once no later token attends to it, so the cache does not grow with
# the text. And since all messages of a token are made from its state, a cache can keep the state alone and make the message *after*
# mixing: $\sum_j w_j (x_j W_M) = (\sum_j w_j x_j) W_M$.

# %%
near = ga.patterns.window(n, 4) | ga.patterns.sinks(n, 1)
short = ga.cache.PatternMessageCache(senders, near)
lean = ga.cache.PatternMessageCache(receivers, near, keep="states")
full_output = ga.MessagePassingAttention(heads, position)(x, near)
for t in range(n):
    for each in (short, lean):
        assert torch.allclose(
            each.update(x[None, t : t + 1], score_mod=position)[0, 0], full_output[t], rtol=0, atol=1e-12
        )
print("kept at the end:", [pieces[p] for p in short.positions.tolist()])
print(
    f"patterns and messages {list(short.senders()[0][0].shape)} twice, or states {list(lean.senders()[0][0].shape)}"
)

# %% [markdown]
# ## 3. Other decompositions, as many parameters
#
# The two thin factors are one design among several, as the source text says. Others are in wide use. In **grouped** heads several heads share
# one $W_K$ and one $W_V$ (GQA; with one pair for all heads it is MQA). With a **latent**, the keys and values of all heads are made from one
# short vector (the idea of MLA). A third design keeps all heads separate and makes each **thinner**.
#
# We cut our trained model down by each of the three designs, to the *same number of parameters*, without training it again, and measure
# its loss on a text: minus the logarithm of the probability of each token, on average. Thinner heads keep the largest
# singular values of each pattern and message matrix, the latent those of all keys and values side by side, and grouped heads the
# mean of their group.

# %% tags=["S1.26"]
PYTHON = '''
class Stack:
    """A last in, first out list of items."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        for item in reversed(self.items):
            yield item
'''
text = torch.tensor([vocabulary.encode(PYTHON)])


# %% tags=["S1.26"]
def loss_of(changed):
    """The mean loss of a model at the tokens of the text."""
    log_probabilities = changed(text)[0, :-1].log_softmax(-1)
    return -log_probabilities.gather(-1, text[0, 1:, None]).mean().item()


def cut_down(change):
    """The model with other heads in every layer."""
    changed = copy.deepcopy(model)
    for attention in changed.layers:
        attention.heads = change(attention.heads).requires_grad_(False)
    return changed


def thinner(heads, rank):
    """The best pattern and message matrices of a smaller rank; the scale is 1 / sqrt(rank) now, which is undone."""
    (u, s, vh), (a, t, bh) = heads.pattern_matrix().svd(), heads.message_matrix().svd()
    root, size = s[:, None, :rank].sqrt() * (rank / heads.head_dim) ** 0.25, t[:, None, :rank].sqrt()
    W_Q, W_K = u[..., :rank] * root, vh.mT[..., :rank] * root
    return ga.StandardHeads.from_arrays(W_Q, W_K, a[..., :rank] * size, (bh.mT[..., :rank] * size).mT)


def grouped(heads, groups):
    """Neighbouring heads share the mean of their keys and of their values."""
    W_K, W_V = (W.unflatten(0, (groups, -1)).mean(1) for W in (heads.W_K, heads.W_V))
    return ga.StandardHeads.from_arrays(heads.W_Q, W_K, W_V, heads.W_O)


# %% tags=["S1.26"]
def through_a_latent(heads, numbers):
    """Keys and values of all heads from one short vector for each token."""
    together = torch.cat([*heads.W_K, *heads.W_V], dim=1)
    down = torch.linalg.svd(together).U[:, :numbers]
    W_K, W_V = (down @ (down.T @ W) for W in (heads.W_K, heads.W_V))
    return ga.StandardHeads.from_arrays(heads.W_Q, W_K, W_V, heads.W_O)


def parameters(design, size):
    """How many numbers a layer has."""
    each = width * head_dim
    if design is thinner:
        return 4 * num_heads * width * size
    if design is grouped:
        return 2 * num_heads * each + 2 * size * each
    return 2 * num_heads * each + size * (width + 2 * num_heads * head_dim)


full = loss_of(model)
unused = loss_of(
    cut_down(lambda heads: ga.StandardHeads.from_arrays(heads.W_Q, heads.W_K, heads.W_V, 0 * heads.W_O))
)
assert math.isclose(
    loss_of(cut_down(lambda heads: thinner(heads, 32))), full
)  # nothing is cut: nothing changes
assert math.isclose(loss_of(cut_down(lambda heads: through_a_latent(heads, 128))), full)

# %% tags=["S1.26"]
BUDGETS = {
    "three quarters": {thinner: 24, grouped: 2, through_a_latent: 42},
    "five eighths": {thinner: 20, grouped: 1, through_a_latent: 21},
}
results = {}
print(f"all 65,536 parameters of a layer: loss {full:.2f}; no attention at all: {unused:.2f}")
for budget, designs in BUDGETS.items():
    for design, size in designs.items():
        results[budget, design] = loss_of(
            cut_down(lambda heads, design=design, size=size: design(heads, size))
        )
        name = design.__name__.replace("_", " ")
        print(
            f"{budget}: {name} ({size}), {parameters(design, size):,} parameters: loss {results[budget, design]:.2f}"
        )
    counts = [parameters(design, size) for design, size in designs.items()]
    assert max(counts) < 1.01 * min(counts)

assert all(
    results[budget, thinner] < min(results[budget, grouped], results[budget, through_a_latent])
    for budget in BUDGETS
)
assert results["five eighths", thinner] < full + 0.2

# %% [markdown]
# For a model that was trained with separate heads, thinner heads are by far the best choice: without a quarter of its parameters
# the loss is almost the same, since the last singular values were small. Sharing hurts, because these four heads look for different
# things. That is no verdict on grouped heads or latents. Models that use them are *trained* with them, and what they save is
# something else: the cache. While a text is written, thinner heads keep $2 \cdot 4 \cdot 24 = 192$ numbers for each token, two
# groups keep $2 \cdot 2 \cdot 32 = 128$, and the latent keeps 42.
#
# ## 4. Why learn the factors?
#
# If only the products matter, why not learn $W_P$ and $W_M$ themselves? A layer of Llama 3 8B would have 1.07 billion parameters
# instead of 42 million. But is it only the size? Let two students learn from the same teacher, a random layer with narrow
# heads. One learns the thin factors, the other the merged squares. They **start from the same function** and train on the same
# examples; then both are tested on new ones. We do this with 16, 32 and 64 examples, with three different teachers each.

# %%
with torch.device("meta"):
    llama = (ga.StandardHeads(4096, 32, num_kv_heads=8), ga.MergedHeads(4096, 32, head_dim=128))
sizes = [sum(parameter.numel() for parameter in heads.parameters()) for heads in llama]
print("a layer of Llama 3 8B:", " in thin factors, ".join(f"{size:,}" for size in sizes), "merged")
assert sizes == [41_943_040, 1_073_741_824]

# %% tags=["S4.15"]
mask = ga.patterns.causal(12).mask()


def answer_of(heads, states):
    """The updates by these heads, in the two lines of patterns and messages."""
    if isinstance(heads, ga.StandardHeads):
        W_P, W_M = heads.W_Q @ heads.W_K.mT, heads.W_V @ heads.W_O
    else:
        W_P, W_M = heads.W_P, heads.W_M
    x = states[:, None]  # [examples, head, token, width]
    weights = (x @ W_P @ x.mT * heads.scale).masked_fill(~mask, -math.inf).softmax(-1)
    return (weights @ (x @ W_M)).sum(1)


def learn_from(teacher, student, train_states, test_states, steps=400):
    """The errors on training and on new examples after learning; 1: as bad as an update of zero."""
    goals = [answer_of(teacher, states) for states in (train_states, test_states)]
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.mse_loss(answer_of(student, train_states), goals[0]).backward()
        optimizer.step()
    with torch.no_grad():
        answers = [answer_of(student, states) for states in (train_states, test_states)]
    return [
        ((answer - goal).square().mean() / goal.square().mean()).item()
        for answer, goal in zip(answers, goals, strict=True)
    ]


# %% tags=["S4.15"]
EXAMPLES, errors = (16, 32, 64), {}
for seed in range(3):
    torch.manual_seed(seed)
    teacher = ga.StandardHeads(16, 2, head_dim=2).double().requires_grad_(False)
    teacher.W_Q *= 4  # so that its weights are far from even
    training_states, test_states = torch.randn(64, 12, 16).double(), torch.randn(256, 12, 16).double()
    start = ga.StandardHeads(16, 2, head_dim=2).double()
    assert torch.allclose(
        answer_of(start, test_states), answer_of(ga.MergedHeads.of(start), test_states)
    )  # one function, written in two ways
    for count in EXAMPLES:
        for name, student in (
            ("thin factors", copy.deepcopy(start)),
            ("merged squares", ga.MergedHeads.of(start)),
        ):
            errors.setdefault((name, count), []).append(
                learn_from(teacher, student, training_states[:count], test_states)
            )

# %% tags=["S4.15"]
figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True)
for ax, which, title in ((axes[0], 0, "training examples"), (axes[1], 1, "new examples")):
    for name, colour, look, shift in (("thin factors", BLUE, "o", 0.96), ("merged squares", RED, "s", 1.04)):
        error_table = torch.tensor([errors[name, count] for count in EXAMPLES])[:, :, which].clamp(min=1e-5)
        ax.loglog(EXAMPLES, error_table.median(1).values, color=colour, linewidth=1, base=2)
        for column in range(3):
            label = name if column == 0 else None
            ax.loglog(
                [count * shift for count in EXAMPLES],
                error_table[:, column],
                look,
                color=colour,
                label=label,
                base=2,
            )
    ax.set_yscale("log", base=10)
    ax.axhline(1.0, color=GREY, linestyle=":")
    ax.set(xlabel="number of training examples", title=f"error on {title}", ylim=(6e-6, 5))
    ax.set_xticks(EXAMPLES, EXAMPLES)
    ax.minorticks_off()
axes[0].set_ylabel("squared error, as a share")
axes[0].legend(frameon=False, loc="lower left")
axes[0].text(16, 1.3, "as bad as an update of zero", color="#555555", fontsize=9)
plt.show()

# %% tags=["S4.15"]
median = {key: torch.tensor(values).median(0).values.tolist() for key, values in errors.items()}
for (name, count), (train_error, new) in median.items():
    print(f"{count} examples, {name:>14}: median error {train_error:.2f} on these, {new:.2f} on new ones")

assert median["thin factors", 32][1] < 0.05 < 0.5 < median["merged squares", 32][1]
assert sum(new > 1 for _, new in errors["merged squares", 32]) == 2
assert max(median["merged squares", count][0] for count in EXAMPLES) < 0.1
assert max(median[name, 64][1] for name in ("thin factors", "merged squares")) < 0.05

# %% [markdown]
# (Each mark is one teacher, and the lines join the medians. Errors below 0.00001 are drawn there.)
#
# With 16 examples, and with 32 in two cases of three, the square student fits its training examples, and on new ones it is worse
# than an update of zero: it has memorised. It can express so many functions that 32 examples do not tell them apart.
# The thin student can express few, and with 32 examples it has found the right one. With 64 both find it. So the bottleneck
# is not only cheap. It is a good guess about what is worth learning, wherever the truth has low rank too, as this teacher has.
#
# ## 5. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/09_why_thin_factors.py).
#
# **1. When would merging be free?** (easy, 5 minutes) At a width of 4,096, for which head size does the message cost as many multiplications
# through the two thin matrices as through the merged one?
#
# <details><summary>Hint</summary>
#
# Two thin matrices have the sizes `4096 x d` and `d x 4096`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert 2 * 4096 * answer == 4096 * 4096, (
    f"two thin matrices would cost {2 * 4096 * answer:,}, the square one {4096 * 4096:,}"
)
print("right: a head of", answer, "numbers")

# %% [markdown]
# **2. As thin as can be** (medium, 5 minutes). What is the smallest head size with which the model of section 3, cut down to `thinner` heads, has a loss
# of less than 0.1 above that of the whole model?
#
# <details><summary>Hint</summary>
#
# The loss for one head size is `loss_of(cut_down(lambda heads: thinner(heads, 24)))`. Try smaller ones.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

at, below = (
    loss_of(cut_down(lambda heads, size=size: thinner(heads, size))) for size in (answer, answer - 1)
)
assert at < full + 0.1, f"with heads of {answer} numbers it is {at - full:.2f} more"
assert below >= full + 0.1, "it can be thinner"
print(
    f"right: {answer} of {head_dim} numbers for each head, {parameters(thinner, answer):,} parameters in a layer"
)

# %% [markdown]
# **3. How long may a text be?** (easy, 5 minutes) A layer of the size of Llama 3 8B keeps, in the standard form, a key and a value of 128 numbers
# for each of 8 shared sets, and there are 32 layers. How many tokens fit into 8 GiB, at two bytes for a number?
#
# <details><summary>Hint</summary>
#
# Section 1 prints how many numbers one layer keeps for each token. 8 GiB are `8 * 2**30` bytes.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

one = costs["standard"][0]
numbers = one.cache_per_token["key, value"] // one.itemsize
assert answer == 8 * 2**30 // (2 * numbers * 32), f"a token has {numbers:,} numbers in a layer"
print(f"right: {answer:,} tokens; with patterns and messages it would be {answer // 128:,}")

# %% [markdown]
# ## Sources
#
# * C. McCormick, *Patterns and Messages*, part 2, 2025: the costs, the cache in steps, the question of decompositions.
# * Llama Team, [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), 2024: the sizes.
# * C. Eckart and G. Young, *The approximation of one matrix by another of lower rank*, 1936: the largest singular values are
#   the best.
# * N. Shazeer, [One Write-Head is All You Need](https://arxiv.org/abs/1911.02150), 2019 (MQA); J. Ainslie et al.,
#   [GQA](https://arxiv.org/abs/2305.13245), 2023, who take the mean of a group and then train on; DeepSeek-AI,
#   [DeepSeek-V2](https://arxiv.org/abs/2405.04434), 2024 (MLA).
# * *Attention: All you need to know*, far.in.net, 2025: why learn the factors?

# %% [markdown]
# ---
# before: [08. Low rank, and subspaces](08_low_rank_and_subspaces.ipynb) | [the book](README.md) | next: [10. The zoo: attention masks as graphs](10_the_zoo.ipynb)
