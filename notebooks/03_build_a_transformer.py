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
# # Build a transformer from message passing
#
# Chapters 01 and 02 took a trained model apart. Here we start from an empty file and build one. **How much code is a transformer if
# its attention is message passing, and can we watch it learn something that nobody wrote into it?** We begin with a model that is
# almost nothing, read its loss, and improve it one step at a time, with the mistakes that everyone makes on the way. At the end the
# file has fewer than 60 lines, a model trains in less than a minute, and an edge appears in its attention.
#
# You need [notebook 01](01_attention_is_message_passing.ipynb), and you should have seen a training loop in PyTorch before.
#
# **Afterwards you can** write, train and read a transformer whose attention is a `MessagePassing` layer of your own.
#
# before: [02. Many heads, many graphs](02_many_heads_many_graphs.ipynb) | [the book](README.md) | next: [04. Four perspectives on one run](04_four_perspectives.ipynb)

# %%
import sys

import matplotlib.pyplot as plt
from pictures import BLUE, GREY, RED, draw_table, use_house_style

import gnn_attention as ga
from gnn_attention import draw

sys.path.append("..")  # the folder of the examples is beside the notebooks; it is not part of the package

# %%
# transformer.py
import math

import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

# %%
from examples.training import corpus

use_house_style()

# %% [markdown]
# ## 1. A text, and the loss of knowing nothing
#
# The text is source code of Python's standard library, which every reader has. The vocabulary of the model that ships with the
# package cuts it into tokens, of which there are 1,024. Files whose names begin with *a* to *d* are for training, and other files
# are for the test.
#
# Every cell below that begins with `# transformer.py` is a part of the file that we write. All other cells only look at it.

# %%
torch.set_num_threads(1)  # more threads sum in another order, and the numbers below then differ a little
_, vocabulary = ga.model.load_trained()


def read(files, letters):
    names = [name for name in sorted(files) if name[0] in letters and len(files[name]) < 40_000]
    return torch.tensor(vocabulary.encode("\n".join(files[name] for name in names)))


training_text, test_text = read(corpus().training, "abcd"), read(corpus().held_out, "efghijkl")
print(f"{len(training_text):,} tokens for training, {len(test_text):,} for the test, for example:")
print(vocabulary.pieces(test_text[1000:1012]))

# %% [markdown]
# A model outputs a logit for each token of the vocabulary, and the **loss** is minus the logarithm of the probability that it gives
# to the token that follows. A model that knows nothing gives every token the same probability, 1/1024. Its loss is
# $\log 1024 = 6.93$, the **chance level**. Every model below has the same interface, so that one loop trains all of them: it gets
# a list of token numbers and the edges of a graph, and returns logits.
#
# A batch is one graph. It has 32 texts of 32 tokens, which are 1,024 nodes, and no edges between different texts. This is how PyG
# batches graphs, and it needs no batch dimension. The edges of each text are those of a causal mask.


# %%
# transformer.py
def causal_edges(num_texts, length):
    src, dst = torch.ones(length, length).triu().nonzero().T  # pairs with src <= dst
    offset = length * torch.arange(num_texts)[:, None]
    return torch.stack([(src + offset).flatten(), (dst + offset).flatten()])


# %%
small = ga.convert.from_edge_index(causal_edges(2, 4), 8)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 2))
draw.mask(small, left, title="a batch of two texts of four tokens: the mask")
draw.arcs(small, right, title="the same batch as a graph")
plt.show()

# %% [markdown]
# Look at the two triangles of the mask: they are the two texts, and nothing connects them.
#
# Half of the texts of each batch are ordinary. The other half are *periodic*: 4 to 16 tokens of the corpus, repeated until 32 tokens
# are full. Real texts repeat names and phrases too, but over longer distances than 32 tokens. The periodic texts give our small model
# a reason to use what it has just read.

# %%
NUM_TEXTS, LENGTH = 32, 32
EDGES = causal_edges(NUM_TEXTS, LENGTH)


def sample_texts(text, generator, share_periodic=0.5):
    """Return the tokens of a batch, and for each of them the token that follows."""
    start = torch.randint(len(text) - LENGTH, (NUM_TEXTS, 1), generator=generator)
    period = torch.randint(4, LENGTH // 2 + 1, (NUM_TEXTS, 1), generator=generator)
    period[int(share_periodic * NUM_TEXTS) :] = LENGTH + 1  # longer than the text: not periodic
    tokens = text[start + torch.arange(LENGTH + 1) % period]
    return tokens[:, :-1].flatten(), tokens[:, 1:].flatten()


# %%
# transformer.py
def train(model, batches, edge_index, lr=5e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98))
    for tokens, following in batches:
        loss = functional.cross_entropy(model(tokens, edge_index), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


# %%
LOSSES = {}


def fit(name, model, steps, edge_index=EDGES):
    """Train a model, and record its loss on ordinary texts of the test."""
    generator = torch.Generator().manual_seed(0)
    curve = list(train(model, (sample_texts(training_text, generator) for _ in range(steps)), edge_index))
    LOSSES[name] = loss_on_test(model, edge_index)
    print(f"{name}: loss {sum(curve[-20:]) / 20:.2f} in training, {LOSSES[name]:.2f} on the test")


@torch.no_grad()
def loss_on_test(model, edge_index=EDGES):
    generator = torch.Generator().manual_seed(1)
    batches = [sample_texts(test_text, generator, share_periodic=0) for _ in range(8)]
    return sum(functional.cross_entropy(model(x, edge_index), y).item() for x, y in batches) / len(batches)


@torch.no_grad()
def write(model, prompt, count=24):
    """Continue a text, token by token."""
    tokens = torch.tensor(vocabulary.encode(prompt))
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        context = tokens[-LENGTH:]
        logits = model(context, causal_edges(1, len(context)))[-1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)])
    return vocabulary.decode(tokens.tolist())


# %% [markdown]
# ## 2. Version 0: no edges
#
# The first model looks at one token and predicts the next. Each token has a row of 64 numbers, its **embedding**, and a logit is the
# product of this row with the row of another token. Nothing travels between tokens: the edges are ignored.


# %%
class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1024, 64)
        self.unembedding = nn.Linear(64, 1024)

    def forward(self, tokens, edge_index):
        return self.unembedding(self.embedding(tokens))


torch.manual_seed(0)
fit("version 0, no edges", Bigram(), 200)

# %% [markdown]
# The loss is far below 6.93: after `import` or `self` it is easy to say what may follow. But a model that sees one token cannot do
# better than a table of pairs.
#
# ## 3. Version 1: the mean of the past
#
# The simplest message passing sends the state of each token along its edges, and takes the mean. PyG does the rest: `propagate` gathers
# the state `x_j` of the sender of each edge, and scatters the messages to the receivers.


# %%
class MeanOfPast(MessagePassing):
    def __init__(self):
        super().__init__(aggr="mean")
        self.embedding = nn.Embedding(1024, 64)
        self.unembedding = nn.Linear(64, 1024)

    def forward(self, tokens, edge_index):
        x = self.embedding(tokens)
        return self.unembedding(x + self.propagate(edge_index, x=x))

    def message(self, x_j):
        return x_j


torch.manual_seed(0)
fit("version 1, the mean", MeanOfPast(), 200)

# %% [markdown]
# This is only a little better than version 0. A mean of up to 32 tokens is a blur: the token before counts as much as one long ago.
#
# **Mistake 1: reversed edges.** In PyG, row 0 of `edge_index` holds the senders. The rows are easy to confuse, so we make the mistake
# on purpose, and reverse the causal edges.

# %%
torch.manual_seed(0)
fit("mistake 1, reversed edges", MeanOfPast(), 200, EDGES.flip(0))


# %% [markdown]
# The loss is lower, so this looks like an improvement. But a token now receives the tokens *after* it, and among them the one that it
# must predict. The loss on the test does not warn us, since it is measured along the same edges. When the model writes, these tokens do
# not exist yet. A check finds this mistake in any model: change the last token of a text, and see whether an earlier output changes.
# ([Notebook 19](19_audit_a_leak.ipynb) turns this check into an audit.)


# %%
@torch.no_grad()
def reads_the_future(model, edge_index):
    tokens = test_text[: NUM_TEXTS * LENGTH].clone()
    before = model(tokens, edge_index)[LENGTH - 2]
    tokens[LENGTH - 1] = (tokens[LENGTH - 1] + 1) % 1024
    return not torch.equal(model(tokens, edge_index)[LENGTH - 2], before)


print("causal edges: ", reads_the_future(MeanOfPast(), EDGES))
print("reversed edges:", reads_the_future(MeanOfPast(), EDGES.flip(0)))
assert not reads_the_future(MeanOfPast(), EDGES)
assert reads_the_future(MeanOfPast(), EDGES.flip(0))
assert LOSSES["mistake 1, reversed edges"] < LOSSES["version 1, the mean"] - 0.1

# %% [markdown]
# ## 4. The layer as message passing
#
# A mean is a blur because all weights are equal. Attention lets the tokens decide. Each token has a query, a key and a value; the score of
# an edge is the product of the receiver's query with the sender's key, plus a number for the distance of the two tokens, which is
# a feature of the edge; a softmax over the in-edges of each receiver turns scores into weights; and the weighted values are summed:
#
# $$y_i = W_O \sum_{j \to i} w_{ij} \, v_j, \qquad
# w_{ij} = \frac{e^{a_{ij}}}{\sum_{j' \to i} e^{a_{ij'}}}, \qquad a_{ij} = \frac{q_i \cdot k_j}{\sqrt d} + b_{i - j}$$
#
# Here it is as a `MessagePassing` layer with several heads, in 15 lines. PyG fills the arguments of `message` by their names: `q_i` is the
# query of the receiver of each edge, `k_j` and `v_j` belong to its sender, `index` is the number of the receiver, and `bias` has a row
# for each edge already. `softmax` is PyG's: it needs `index` to know which edges share one unit of weight. (A weight depends on *all*
# in-edges of its receiver, so this is not the strict form of message passing; [notebook 01](01_attention_is_message_passing.ipynb),
# section 6, has that one. PyG's softmax subtracts the largest score first, so no exponential overflows.)


# %%
# transformer.py
class Attention(MessagePassing):
    def __init__(self, width, num_heads, slope, reach=16):
        super().__init__(aggr="sum", node_dim=0)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        slopes = slope * 2.0 ** -torch.arange(num_heads)
        self.bias = nn.Parameter(-slopes * torch.arange(reach + 1)[:, None])

    def forward(self, x, edge_index):
        distance = (edge_index[1] - edge_index[0]).clamp(max=len(self.bias) - 1)
        q, k, v = self.qkv(x).view(len(x), 3, self.bias.shape[1], -1).unbind(1)
        return self.out(self.propagate(edge_index, q=q, k=k, v=v, bias=self.bias[distance]).flatten(1))

    def message(self, q_i, k_j, v_j, bias, index):
        scores = (q_i * k_j).sum(-1) / math.sqrt(q_i.shape[-1]) + bias
        self.weights = softmax(scores, index)
        return self.weights[:, :, None] * v_j


# %% [markdown]
# The bias starts as a slope with the distance, steeper in some heads than in others, so near tokens get more weight at the start. Training
# changes these numbers like all others.
#
# **Mistake 2: a softmax over all edges.** Without `index`, as in `scores.softmax(0)`, all edges of the batch share one unit of weight, and
# every receiver gets almost nothing. No error is raised. So check that the weights of each receiver sum to 1.

# %%
torch.manual_seed(0)
layer, x = Attention(64, 4, slope=2.0), torch.randn(len(EDGES[0].unique()), 64)
with torch.no_grad():
    y = layer(x, EDGES)
sums = torch.zeros(len(x), 4).index_add(0, EDGES[1], layer.weights)
wrong = torch.zeros(len(x), 4).index_add(0, EDGES[1], torch.randn_like(layer.weights).softmax(0))
assert torch.allclose(sums, torch.ones(()), atol=1e-5)
print(f"weights of a receiver sum to {sums.mean():.3f}; without index to {wrong.mean():.3f}")

# %% [markdown]
# Is this the attention of a transformer? We compare it with `ga.attend`, which the library's tests compare with the dense formula, on the
# same graph.

# %%
graph = ga.convert.from_edge_index(EDGES, len(x))
src, dst = graph.edge_index
with torch.no_grad():
    q, k, v = (
        layer.qkv(x).view(len(x), 3, 4, -1).permute(1, 2, 0, 3)[:, None]
    )  # [1, heads, nodes, width of a head]
    out = ga.attend(q, k, v, graph, bias=layer.bias[(dst - src).clamp(max=16)].T)
    expected = layer.out(out[0].transpose(0, 1).flatten(1))
print(f"largest difference: {(y - expected).abs().max():.1e}")
assert torch.allclose(y, expected, atol=1e-5)

# %% [markdown]
# ## 5. Versions 2 and 3: residual stream and MLP
#
# We first put the layer alone between embedding and unembedding.


# %%
class AttentionOnly(nn.Module):
    def __init__(self, with_residual):
        super().__init__()
        self.embedding, self.unembedding = nn.Embedding(1024, 64), nn.Linear(64, 1024)
        self.layers = nn.ModuleList(Attention(64, 4, slope) for slope in (2.0, 0.0))
        self.with_residual = with_residual

    def forward(self, tokens, edge_index):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x * self.with_residual + layer(x, edge_index)
        return self.unembedding(x)


torch.manual_seed(0)
fit("mistake 3, no residual", AttentionOnly(False), 200)
torch.manual_seed(0)
fit("version 2, attention", AttentionOnly(True), 200)
assert LOSSES["version 2, attention"] < LOSSES["mistake 3, no residual"] - 0.1

# %% [markdown]
# **Mistake 3: the forgotten residual.** Without `x +`, a token keeps of its own state only what it sends to itself, mixed with all other
# messages. With it, each layer *adds* what the token receives, and its state remains. This running sum is the **residual stream**.
#
# Version 3 is the transformer. Each block has an attention layer, which moves information along the edges, and an **MLP**, which
# transforms each token by itself. A norm keeps the numbers in range, and embedding and unembedding share one matrix.


# %%
# transformer.py
class Block(nn.Module):
    def __init__(self, width, num_heads, slope):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, slope)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, edge_index):
        x = x + self.attention(self.norm_1(x), edge_index)
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self, num_tokens, width=64, num_heads=4, slopes=(2.0, 0.0)):
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, num_heads, slope) for slope in slopes)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, edge_index):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, edge_index)
        return self.norm(x) @ self.embedding.weight.T


# %%
torch.manual_seed(0)
model = Transformer(1024)
PROMPT = "def read(self, name):\n"
print(
    f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters; before training it writes:"
)
print(write(model, PROMPT))

# %% [markdown]
# ## 6. Watch an edge appear
#
# We train for 800 steps, and stop every 50 steps to look at the weights of layer 1 on a text of eight tokens,
# *the first value is the first value is*. Which edge would help? The token *value* at position 6 has read *value is* before, at
# positions 2 and 3. If it attends to token 3, it receives the answer, *is*. An edge from the token after an earlier copy is an
# **induction edge**; of the eight tokens, those from position 4 on have one, three positions back.

# %%
TOY = torch.tensor(vocabulary.encode(" the first value is the first value is"))
WORDS = [piece.strip() for piece in vocabulary.pieces(TOY)]
TOY_GRAPH = ga.patterns.causal(8)
INDUCTION = [(1, 4), (2, 5), (3, 6), (4, 7)]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(1, 2))
draw.mask(TOY_GRAPH, left, WORDS)
draw.arcs(TOY_GRAPH, right, WORDS, lit=INDUCTION, title="causal(8); the induction edges are red")
plt.show()


# %%
@torch.no_grad()
def toy_weights(model):
    """Return the weights of layer 1 on the toy, the mean over its heads, [dst, src]."""
    edges = causal_edges(1, len(TOY))
    model(TOY, edges)
    return torch.zeros(8, 8).index_put((edges[1], edges[0]), model.blocks[1].attention.weights.mean(1))


@torch.no_grad()
def measure_induction(model):
    """Return the mean weight of the induction edge in each head of layer 1, and the loss on the second copy of random tokens."""
    once = torch.randint(1024, (NUM_TEXTS, LENGTH // 2), generator=torch.Generator().manual_seed(2))
    tokens, (src, dst) = torch.cat([once, once], 1), EDGES
    logits = model(tokens.flatten(), EDGES).view(NUM_TEXTS, LENGTH, -1)
    loss = functional.cross_entropy(logits[:, LENGTH // 2 : -1].flatten(0, 1), once[:, 1:].flatten())
    is_induction = (dst % LENGTH >= LENGTH // 2) & (dst - src == LENGTH // 2 - 1)
    return model.blocks[1].attention.weights[is_induction].mean(0), loss.item()


STEPS = 800
generator = torch.Generator().manual_seed(0)
batches = (sample_texts(training_text, generator) for _ in range(STEPS))
steps, snapshots, measures = range(0, STEPS + 1, 50), [toy_weights(model)], [measure_induction(model)]
for step, _ in enumerate(train(model, batches, EDGES), 1):
    if step % 50 == 0:
        snapshots.append(toy_weights(model))
        measures.append(measure_induction(model))
LOSSES["version 3, transformer"] = loss_on_test(model)

# %%
figure, axes = plt.subplots(6, 6, figsize=(15, 11.5), width_ratios=(1, 2) * 3)
src, dst = TOY_GRAPH.edge_index
for (left, right), step, table in zip(axes.reshape(-1, 2), steps, snapshots, strict=False):
    draw_table(left, table, range(8), range(8), f"step {step}", mask=TOY_GRAPH.mask(), digits=None)
    draw.arcs(TOY_GRAPH, right, range(8), weights=table[dst, src], lit=INDUCTION)
    right.set_title("", loc="left")
for ax in axes.flat[2 * len(steps) :]:
    ax.set_axis_off()
plt.show()

# %% [markdown]
# Each pair of pictures is the same set of weights, as a mask on the left and as arcs on the right; darker cells and wider arcs are
# larger weights. At step 0 all weights of a receiver are equal. At first the model attends to particular tokens, which helps in
# ordinary text. From about step 300 a line of four dark cells appears below the diagonal, and the four red arcs grow. No part of the
# code mentions copies or positions three back: the model has found the edges because they lower the loss.
#
# One toy could be an accident. So we measure the same weight on 16 random tokens that are repeated once, where nothing but the first copy
# helps, together with the loss on the second copy.

# %%
weights, losses = torch.stack([weights for weights, _ in measures]), [loss for _, loss in measures]
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.6))
left.plot(steps, losses, "o-", color=BLUE)
left.axhline(math.log(1024), color=GREY, linestyle=":")
left.set(
    xlabel="step", ylabel="loss", title="loss on the second copy of random tokens (dotted: chance level)"
)
for head, values in enumerate(weights.T):
    right.plot(
        steps, values, color=RED, linestyle=("-", "--", "-.", ":")[head], label=f"head {head} of layer 1"
    )
right.set(
    xlabel="step", ylabel="weight", ylim=(0, 1), title="mean weight of the induction edge, random tokens"
)
right.legend(frameon=False)
plt.show()

best = int(weights[-1].argmax())
print(f"head {best}: weight {weights[0][best]:.2f} before training, {weights[-1][best]:.2f} after")
assert weights[0].max() < 0.06
assert weights[-1].max() > 0.3
assert min(snapshots[-1][dst, src] for src, dst in INDUCTION) > 0.3
for name, loss in LOSSES.items():
    print(f"{name:>26}: loss on the test {loss:.2f}")
assert LOSSES["version 3, transformer"] == min(LOSSES.values()) or "mistake" in min(LOSSES, key=LOSSES.get)

# %% [markdown]
# For 250 steps the weight does not move, and the loss rises above the chance level, because the model learns ordinary text and random
# tokens are not like it. Then the weight rises to more than a half within some 200 steps, and the loss falls below the chance level. Olsson et al. (2022) describe this sudden phase in large models. The list compares all versions on
# ordinary text that the models have not seen.
#
# ## 7. What the edge does, and what the model writes
#
# Does the model *use* the edge? In a model made of message passing, cutting an edge means leaving a column out of `edge_index`. Layer 1
# then cannot send along it. Here is the probability of *is* after the second *value*, with all edges, without the induction edge
# $3 \to 6$, and without another edge into token 6.


# %%
@torch.no_grad()
def probability(edges, following=3):
    """Return the probability of token 3, ``is``, after token 6."""
    return model(TOY[:7], edges)[6].softmax(0)[TOY[following]].item()


edges = causal_edges(1, 7)
results = {"all edges": probability(edges)}
for src in (3, 4):
    is_kept = ~((edges[0] == src) & (edges[1] == 6))
    results[f"without {src} -> 6"] = probability(edges[:, is_kept])
for name, value in results.items():
    print(f"{name:>16}: {value:.0%}")
assert results["without 3 -> 6"] < 0.5 * results["all edges"]
assert results["without 4 -> 6"] > 0.5 * results["all edges"]

# %% [markdown]
# And the text that it writes now, after the same beginning as before:

# %%
print(write(model, PROMPT))

# %% [markdown]
# It looks like Python and means nothing, which is what less than a minute of training buys. The model that ships with this package has the
# same parts. It is twice as wide, and it was trained for longer.
#
# ## 8. The whole file
#
# These are the cells marked `# transformer.py`, put together. To see that nothing is missing, we run the text in an empty namespace, load
# the trained parameters into its `Transformer`, and compare.

# %%
parts = [
    cell.removeprefix("# transformer.py\n").strip() for cell in In if cell.startswith("# transformer.py\n")
]
file = "\n\n\n".join(parts) + "\n"
lines = [line for line in file.splitlines() if line]
print(file)
print(f"# {len(lines)} lines that are not blank")

namespace = {}
exec(file, namespace)
copy = namespace["Transformer"](1024)
copy.load_state_dict(model.state_dict())
assert torch.equal(copy(TOY, causal_edges(1, 8)), model(TOY, causal_edges(1, 8)))
assert len(lines) == 54

# %% [markdown]
# **The answer.** A transformer whose attention is message passing is a file of 54 lines, imports and training loop included, and 15 of
# them are the attention. And we have watched it learn. All edges of a receiver had the same weight at the start, and training
# found those that lead from the token after an earlier copy. [Notebook 16](16_induction_heads.ipynb) takes such edges apart in the model that ships.
#
# ## 9. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/03_build_a_transformer.py).
#
# **1. The message** (medium, 10 minutes, code). Write `message` of a layer with one head and no bias, as a function of the arguments that
# PyG passes: `message(q_i, k_j, v_j, index)`, of shapes `[edges, width]` and `[edges]`.
#
# <details><summary>Hint</summary>
#
# One score for each edge is a sum over the last dimension. Divide it by the root of the width, apply `softmax(scores, index)`, and multiply
# each row of `v_j` by the weight of its edge: `weights[:, None]`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of q_i, k_j, v_j and index

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

q, k, v = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
src, dst = causal_edges(1, 8)
messages = answer(q[dst], k[src], v[src], dst)
assert messages.shape == (36, 16), (
    f"expected a message of 16 numbers for each of 36 edges, got {tuple(messages.shape)}"
)
received = torch.zeros(8, 16).index_add(0, dst, messages)
expected = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
assert torch.allclose(received[0], expected[0], atol=1e-5), "token 0 has one in-edge, whose weight is 1"
assert torch.allclose(received, expected, atol=1e-5), (
    "is each score divided by a root, and does the softmax know `index`?"
)
print("right: equal to scaled dot-product attention")

# %% [markdown]
# **2. The aggregation** (easy, 5 minutes, code). PyG sums the messages for you. Write that sum: `aggregate(messages, index, num_nodes)`
# returns a row for each receiver.
#
# <details><summary>Hint</summary>
#
# Start from `torch.zeros(num_nodes, width)`, and use `index_add`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of messages [edges, width], index [edges] and the number of nodes

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

total = answer(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 5.0]]), torch.tensor([2, 2, 0]), 4)
assert total.shape == (4, 2), f"expected a row for each of 4 nodes, got {tuple(total.shape)}"
assert not total[[1, 3]].any(), "a node without in-edges has a row of zeros"
assert total.tolist() == [[0, 5], [0, 0], [3, 0], [0, 0]], "each message goes to the row of its receiver"
print("right")

# %% [markdown]
# **3. The mask** (medium, 10 minutes, code). Write `window_edges(num_texts, length, width)`: the edges of a batch in which each token attends
# to itself and the `width - 1` tokens before it.
#
# <details><summary>Hint</summary>
#
# Take the edges of `causal_edges`, and keep those whose distance is less than `width`.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a function of num_texts, length and width that returns an edge_index

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

window = ga.convert.from_edge_index(answer(1, 6, 3), 6)
assert window == ga.patterns.window(6, 3), f"one text of six tokens:\n{window}"
pair = ga.convert.from_edge_index(answer(2, 6, 3), 12)
assert pair == ga.patterns.window(12, 3) & ga.patterns.documents([6, 6]), "two texts must not share an edge"
print("right:\n", window, sep="")

# %% [markdown]
# **4. Too short a window** (easy, 5 minutes). The second copy of *value*, token 6, finds *is* three tokens back, at token 3. Along
# `window(8, 3)` there is no edge between the two. How many layers does a model along this window need until token 3 can reach token 6?
#
# <details><summary>Hint</summary>
#
# A window of 3 reaches two tokens back. [Notebook 11](11_how_many_layers.ipynb) has the formula.
#
# </details>

# %% tags=["exercise"]
answer = None  # your turn: a number of layers

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

assert answer == ga.analyse.layers_between(ga.patterns.window(8, 3), 3, 6), "each layer is one hop"
print("right: token 4 or 5 relays it; the induction head of this chapter needs the edge itself")

# %% [markdown]
# ## Sources
#
# * A. Karpathy, *Let's build GPT: from scratch, in code, spelled out*, 2023: a model that grows from a bigram, and its mistakes.
# * O. Press et al., [Train Short, Test Long](https://arxiv.org/abs/2108.12409), 2022: a bias that falls with the distance.
# * C. Olsson et al., [In-context Learning and Induction Heads](https://arxiv.org/abs/2209.11895), 2022: the phase in which induction
#   heads appear.
# * M. Fey and J. E. Lenssen, [Fast Graph Representation Learning with PyTorch Geometric](https://arxiv.org/abs/1903.02428), 2019.

# %% [markdown]
# ---
# before: [02. Many heads, many graphs](02_many_heads_many_graphs.ipynb) | [the book](README.md) | next: [04. Four perspectives on one run](04_four_perspectives.ipynb)
