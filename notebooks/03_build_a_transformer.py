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
# Chapter 02 ended with a model that was trained already. Here we start from an empty file and build one. **How much code is a transformer if
# its attention is message passing, and can we watch it learn something that nobody wrote into it?** We begin with a model that is
# almost nothing, read its loss, and improve it one step at a time, with mistakes that are easy to make. At the end the
# file has fewer than 60 lines, a model trains in less than a minute, and an edge appears in its attention. All cells together run for
# about two minutes on one core.
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
# $\log(1024) = 6.93$, the **chance level**. Every model below has the same interface, so that one loop trains all of them: it gets
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
# are full. We want to watch a model learn a guess: if the current token has occurred before, what followed then follows now. The last
# line below counts how often this guess is right. In ordinary texts of 32 tokens it is right too rarely for a small model to learn it in
# a minute, as a control in section 6 shows. Large models read longer texts, in which more is repeated.

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


def share_repeated(share_periodic):
    """Return the share of tokens after which the same token follows as after an earlier copy."""
    batch = sample_texts(test_text, torch.Generator().manual_seed(1), share_periodic)
    is_copy, agrees = (x.view(-1, LENGTH, 1) == x.view(-1, 1, LENGTH) for x in batch)
    return (is_copy & agrees).tril(-1).any(-1).double().mean().item()


ordinary, periodic = share_repeated(0), share_repeated(1)
print(
    f"the guess is right for {ordinary:.0%} of the tokens of ordinary texts, {periodic:.0%} of periodic texts"
)
assert ordinary < 0.2 < 0.5 < periodic


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


def sample_batches(count, seed=0, share_periodic=0.5):
    generator = torch.Generator().manual_seed(seed)
    return (sample_texts(training_text, generator, share_periodic) for _ in range(count))


@torch.no_grad()
def measure_loss(model, share_periodic, edge_index=EDGES):
    """Return the loss on 256 texts of the test."""
    generator = torch.Generator().manual_seed(1)
    batches = [sample_texts(test_text, generator, share_periodic) for _ in range(8)]
    return sum(functional.cross_entropy(model(x, edge_index), y).item() for x, y in batches) / len(batches)


def record(name, model, edge_index=EDGES):
    LOSSES[name] = ordinary, periodic = [measure_loss(model, share, edge_index) for share in (0, 1)]
    print(f"{name}: loss {ordinary:.2f} on ordinary texts, {periodic:.2f} on periodic texts")


def fit(name, model, steps=200, edge_index=EDGES):
    """Train a model, and record its losses on texts that it has not seen."""
    for _ in train(model, sample_batches(steps), edge_index):
        pass
    record(name, model, edge_index)


PROMPT = "def read(self, name):\n"


@torch.no_grad()
def write(model, count=24):
    """Continue the prompt, token by token."""
    tokens = torch.tensor(vocabulary.encode(PROMPT))
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        context = tokens[-LENGTH:]
        logits = model(context, causal_edges(1, len(context)))[-1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)])
    return vocabulary.decode(tokens.tolist())


# %% [markdown]
# ## 2. Version 0: no edges
#
# The first model looks at one token and predicts the next. Each token has a row of 64 numbers, its **[embedding](../docs/glossary.md#embedding)**, and a logit is the
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
fit("version 0, no edges", Bigram())
print(f"as uncertain as a uniform choice among {math.exp(LOSSES['version 0, no edges'][0]):.0f} tokens")

# %% [markdown]
# Read a loss $\ell$ aloud like this: the model is as uncertain as a uniform choice among $e^\ell$ tokens. A model that knows nothing
# chooses among 1,024, and version 0 among far fewer: after `import` or `self` it is easy to say what may follow. But a model that sees
# one token cannot do better than a table of pairs, and it gains nothing from periodic texts.
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
fit("version 1, the mean", MeanOfPast())

# %% [markdown]
# This is only a little better than version 0. A mean of up to 32 tokens is a blur: the token before counts as much as one long ago.
#
# **Mistake 1: reversed edges.** In PyG, row 0 of `edge_index` holds the senders. The rows are easy to confuse, so we make the mistake
# on purpose.

# %%
REVERSED = EDGES.flip(0)
torch.manual_seed(0)
fit("mistake 1, reversed edges", MeanOfPast(), edge_index=REVERSED)

reversed_toy = ga.convert.from_edge_index(causal_edges(1, 4).flip(0), 4)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), width_ratios=(1, 2))
draw.mask(reversed_toy, left, title="reversed: the mask")
draw.arcs(reversed_toy, right, title="the arrows lead back in time")
plt.show()


# %% [markdown]
# The loss is lower, so this looks like an improvement. But look at the arrows: a token now receives the tokens *after* it, and among them
# the one that it must predict. The mean blurs this answer too, so the loss falls only a little. The loss on the test does not warn
# us, since it is measured along the same edges. When a model writes, these tokens do not exist yet. A check finds this mistake in any
# model: change the last token of a text, and see whether an earlier output changes.
# ([Notebook 19](19_audit_a_leak.ipynb) turns this check into an audit.)


# %%
@torch.no_grad()
def reads_the_future(model, edge_index):
    tokens = test_text[: NUM_TEXTS * LENGTH].clone()
    before = model(tokens, edge_index)[LENGTH - 2]
    tokens[LENGTH - 1] = (tokens[LENGTH - 1] + 1) % 1024
    return not torch.equal(model(tokens, edge_index)[LENGTH - 2], before)


print("causal edges: ", reads_the_future(MeanOfPast(), EDGES))
print("reversed edges:", reads_the_future(MeanOfPast(), REVERSED))
assert not reads_the_future(MeanOfPast(), EDGES)
assert reads_the_future(MeanOfPast(), REVERSED)
assert LOSSES["mistake 1, reversed edges"][0] < LOSSES["version 1, the mean"][0] - 0.1

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
        distance = (edge_index[1] - edge_index[0]).abs().clamp(max=len(self.bias) - 1)
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
# every receiver receives almost nothing. No error is raised. So check that the weights of each receiver sum to 1.

# %%
torch.manual_seed(0)
layer, x = Attention(64, 4, slope=2.0).double(), torch.randn(NUM_TEXTS * LENGTH, 64).double()
with torch.no_grad():
    y = layer(x, EDGES)
sums = torch.zeros_like(x[:, :4]).index_add(0, EDGES[1], layer.weights)
wrong = torch.zeros_like(x[:, :4]).index_add(0, EDGES[1], torch.randn_like(layer.weights).softmax(0))
assert torch.allclose(sums, torch.ones_like(sums))
print(f"weights of a receiver sum to {sums.mean():.3f}; without index to {wrong.mean():.3f}")

# %% [markdown]
# Is this the attention of a transformer? We compare it, in double precision, with `ga.attend`, which the library's tests compare with the
# dense formula, on the same graph.

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
assert torch.allclose(y, expected, rtol=0, atol=1e-12)

# %% [markdown]
# ## 5. Versions 2 and 3: residual stream and MLP
#
# We first put the layer alone between embedding and [unembedding](../docs/glossary.md#unembedding).


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
fit("mistake 3, no residual", AttentionOnly(False))
torch.manual_seed(0)
fit("version 2, attention", AttentionOnly(True))
assert LOSSES["version 2, attention"][0] < LOSSES["mistake 3, no residual"][0] - 0.1
assert LOSSES["version 0, no edges"][0] < LOSSES["mistake 3, no residual"][0]

# %% [markdown]
# **Mistake 3: the forgotten residual.** Without `x +`, a token keeps of its own state only what it sends to itself, mixed with all other
# messages. Its loss is higher than that of version 0, which has no attention at all. With `x +`, each layer *adds* what the token
# receives, and its state remains. This running sum is the **[residual stream](../docs/glossary.md#residual-stream)**.
#
# Attention no longer blurs what it receives, so mistake 1 now shows itself:

# %%
torch.manual_seed(0)
cheat = AttentionOnly(True)
fit("mistake 1 again", cheat, edge_index=REVERSED)
print(write(cheat, count=9))
assert LOSSES["mistake 1 again"][0] < 1

# %% [markdown]
# Read this loss aloud: it is less than two tokens to choose from, for source code that the model has never seen. No language model is that
# good. A loss that is too low to be true is a reason to look for a [leak](../docs/glossary.md#leak). The text that the model writes is worthless, because the tokens
# that it learned to copy do not exist yet.
#
# Version 3 is the transformer. Each block has an attention layer, which moves information along the edges, and an **MLP**, which
# transforms each token by itself. A [norm](../docs/glossary.md#norm) keeps the numbers in range, and embedding and unembedding share one matrix.


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
print(f"{sum(p.numel() for p in model.parameters()):,} parameters; before training the model writes:")
print(write(model))

# %% [markdown]
# ## 6. Watch an edge appear
#
# We train for 800 steps, and stop every 50 steps to look at the weights of layer 1 on a text of eight tokens,
# *the first value is the first value is*. Which edge would help? Token 6 is *value*, and *value is* stands before it, at positions 2
# and 3. If token 6 attends to token 3, it receives the answer, *is*. An edge from the token after an earlier copy is an
# **induction edge**. The tokens from position 4 on have one each, from three positions back.
#
# One layer cannot find this edge: token 3 holds *is*, and nothing in *is* says that it follows *value*. It must receive this in layer 0, along
# the edge $2 \to 3$ from its previous token. So two things have to be learned, in two layers.

# %%
TOY = torch.tensor(vocabulary.encode(" the first value is the first value is"))
WORDS = [piece.strip() for piece in vocabulary.pieces(TOY)]
TOY_GRAPH = ga.patterns.causal(8)
INDUCTION = [(1, 4), (2, 5), (3, 6), (4, 7)]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(1, 2))
draw.mask(TOY_GRAPH, left, WORDS)
draw.arcs(TOY_GRAPH, right, WORDS, lit=INDUCTION, title="causal(8), with the induction edges in orange")
plt.show()


# %%
@torch.no_grad()
def toy_weights(model):
    """Return the weights of layer 1 on the toy, the mean over its heads, [dst, src]."""
    edges = causal_edges(1, len(TOY))
    model(TOY, edges)
    return torch.zeros(8, 8).index_put((edges[1], edges[0]), model.blocks[1].attention.weights.mean(1))


@torch.no_grad()
def measure_heads(model):
    """On 16 random tokens and a copy of them: weights of layers 0 and 1 that the text names, and the loss on the copy."""
    once = torch.randint(1024, (NUM_TEXTS, LENGTH // 2), generator=torch.Generator().manual_seed(2))
    tokens, (src, dst) = torch.cat([once, once], 1), EDGES
    logits = model(tokens.flatten(), EDGES).view(NUM_TEXTS, LENGTH, -1)
    loss = functional.cross_entropy(logits[:, LENGTH // 2 : -1].flatten(0, 1), once[:, 1:].flatten())
    is_induction = (dst % LENGTH >= LENGTH // 2) & (dst - src == LENGTH // 2 - 1)
    previous, induction = (
        block.attention.weights[is_edge].mean(0)  # a number for each head
        for block, is_edge in zip(model.blocks, (dst - src == 1, is_induction), strict=True)
    )
    return previous, induction, loss


STEPS = 800
torch.manual_seed(0)
model = Transformer(1024)  # the same parameters as before, also if this cell runs twice
steps, snapshots, measures = range(0, STEPS + 1, 50), [toy_weights(model)], [measure_heads(model)]
for step, _ in enumerate(train(model, sample_batches(STEPS), EDGES), 1):
    if step % 50 == 0:
        snapshots.append(toy_weights(model))
        measures.append(measure_heads(model))
    if step in (200, STEPS):
        record(f"version 3, transformer, {step} steps", model)

# %%
figure, axes = plt.subplots(6, 6, figsize=(15, 11.5), width_ratios=(1, 2) * 3)
src, dst = TOY_GRAPH.edge_index
for (left, right), step, table in zip(axes.reshape(-1, 2), steps, snapshots, strict=False):
    draw_table(left, table, range(8), range(8), f"step {step}", mask=TOY_GRAPH.mask(), digits=None)
    left.set_xticks(range(8), range(8), rotation=0, ha="center")
    draw.arcs(TOY_GRAPH, right, range(8), weights=table[dst, src], lit=INDUCTION)
    right.set_title("", loc="left")
for ax in axes.flat[2 * len(steps) :]:
    ax.set_axis_off()
plt.show()

# %% [markdown]
# Each pair shows the same weights, the mean over the four heads, as a mask and as arcs; darker cells and wider arcs are larger weights. At step 0 all weights of a receiver are nearly equal. At step 50 most receivers attend to the
# same two tokens: look at the columns 0 and 3. Between steps 300 and 450 a line of four dark cells appears below the diagonal, and the four
# orange arcs grow. No part of the code mentions copies or three positions back: the model has found the edges because they lower the loss.
#
# One toy could be an accident. So we measure the same weight on 16 random tokens that are repeated once, where nothing but the first copy
# helps, together with the loss on the second copy.

# %%
previous, weights, losses = (torch.stack(values) for values in zip(*measures, strict=True))
figure, (left, right) = plt.subplots(1, 2, figsize=(13.5, 3.6))
left.plot(steps, losses, "o-", color=BLUE)
left.axhline(math.log(1024), color=GREY, linestyle=":")
left.set(xlabel="step", ylabel="loss", title="loss on the copy (dotted: chance level)")
for head, (values, style) in enumerate(zip(weights.T, ("-", "--", "-.", ":"), strict=True)):
    right.plot(steps, values, style, color=RED, label=f"layer 1, head {head}: induction")
relay = int(previous[-1].argmax())
right.plot(steps, previous[:, relay], color=BLUE, label=f"layer 0, head {relay}: previous token")
right.set(xlabel="step", ylabel="weight", ylim=(0, 1), title="mean weight of the edge, random tokens")
right.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

best = int(weights[-1].argmax())
print(f"induction edge, head {best} of layer 1: from {weights[0][best]:.2f} to {weights[-1][best]:.2f}")
print(f"previous token, head {relay} of layer 0: from {previous[0][relay]:.2f} to {previous[-1][relay]:.2f}")
assert weights[0].max() < 0.06
assert weights[-1].max() > 0.3
assert min(snapshots[-1][dst, src] for src, dst in INDUCTION) > 0.3
assert previous[-1][relay] > 0.5
assert losses.max() > math.log(1024) > losses[-1]

# %% [markdown]
# For the first 250 steps the weight stays small, and the loss rises above the chance level, because the model learns what text is like,
# and random tokens are not like it. Then, within some 200 steps, one head of layer 0 turns to the previous token (blue), the heads of layer 1
# turn to the induction edge (orange), and the loss falls below the chance level. Olsson et al. (2022) describe such
# a sudden change in large models.
#
# ### Was it luck, and what did it need?
#
# We gave the model two aids, periodic texts and the slope of the bias. So we train four more models for 400 steps: two with other seeds,
# which means other initial parameters and other batches, one without periodic texts, and one without the slope.


# %%
def train_again(seed=0, share_periodic=0.5, slopes=(2.0, 0.0), steps=400):
    """Return a new model, trained like the one above but for the arguments."""
    torch.manual_seed(seed)
    other = Transformer(1024, slopes=slopes)
    for _ in train(other, sample_batches(steps, seed, share_periodic), EDGES):
        pass
    return other


others = {f"seed {seed}": train_again(seed) for seed in (1, 2)}

# %%
others["without periodic texts"] = train_again(share_periodic=0.0)
others["without the slope"] = train_again(slopes=(0.0, 0.0))
record("control without periodic texts, 400 steps", others["without periodic texts"])

AFTER_400 = {"seed 0, the model above": weights[steps.index(400)].max().item()}
AFTER_400 |= {name: measure_heads(other)[1].max().item() for name, other in others.items()}
figure, ax = plt.subplots(figsize=(7.5, 2.4))
bars = ax.barh(list(AFTER_400), list(AFTER_400.values()), color=[RED] * 3 + [GREY] * 2)
ax.bar_label(bars, fmt="%.2f", padding=3)
ax.invert_yaxis()
ax.set(xlabel="weight", xlim=(0, 1), title="induction edge after 400 steps, strongest head, random tokens")
plt.show()

*seeds, without_periods, without_slope = AFTER_400.values()
assert min(seeds) > 2 * max(without_periods, without_slope)

# %% [markdown]
# The edge appears with each of the three seeds, and in neither control. Without periodic texts there is too little to gain from it. The
# slope gives the previous token some weight from the start: the blue curve above does not begin at zero. So nobody wrote the induction
# edge into the model, but its texts and its start make the edge easy to find.
#
# ## 7. What the edge does, and what the model writes
#
# Does the model *use* the edge? In a model made of message passing, cutting an edge means leaving a column out of `edge_index`. Then
# no layer sends along it. Here is the probability of *is* after the second *value*, with all edges, without the induction edge
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
print(write(model))

# %% [markdown]
# It looks like Python and means nothing, which is what less than a minute of training buys. The model that ships with this package has the
# same parts. It is twice as wide, and it was trained for longer.
#
# Last, all models in one table. In a second row, version 0 is trained for as long as the transformer.

# %%
torch.manual_seed(0)
fit(f"version 0, {STEPS} steps", Bigram(), STEPS)
print(f"\n{'loss on texts that are':>42}  ordinary  periodic")
for name, (ordinary, periodic) in LOSSES.items():
    print(f"{name:>42}  {ordinary:8.2f}  {periodic:8.2f}")

versions = [sum(losses) for name, losses in LOSSES.items() if name.startswith("version")]
assert versions[:4] == sorted(versions[:4], reverse=True)
transformer, bigram = LOSSES[f"version 3, transformer, {STEPS} steps"], LOSSES[f"version 0, {STEPS} steps"]
assert abs(transformer[0] - bigram[0]) < 0.2
assert transformer[1] < bigram[1] - 1
control = LOSSES["control without periodic texts, 400 steps"]
assert control[0] < transformer[0] - 0.1
assert control[1] > transformer[1] + 1

# %% [markdown]
# At 200 steps each version is better than the one before, on both kinds of text. At 800 steps the comparison is more instructive: on
# ordinary texts our transformer is about as good as a table of pairs. On periodic texts it is better by far, and what it does there is
# induction. The two kinds of text compete for a small model: after half of the steps, the control that saw ordinary texts alone has the lowest loss on them of all models without a leak, and a high one on periodic texts.
#
# ## 8. The whole file
#
# These are the cells marked `# transformer.py`, put together. To see that nothing is missing, we run the text in an empty namespace, load
# the trained parameters into its `Transformer`, and compare. (`In` is IPython's list of the cells that have run.)

# %%
parts = {}
for cell in In:
    if cell.startswith("# transformer.py\n"):
        part = cell.removeprefix("# transformer.py\n").strip()
        parts[part.partition("\n")[0]] = part  # a cell that has run twice counts once
file = "\n\n\n".join(parts.values()) + "\n"
lines = [line for line in file.splitlines() if line]
print(file)
print(f"# {len(lines)} lines that are not blank")

namespace = {}
exec(file, namespace)
copy = namespace["Transformer"](1024)
copy.load_state_dict(model.state_dict())
assert torch.equal(copy(TOY, causal_edges(1, 8)), model(TOY, causal_edges(1, 8)))
assert len(lines) == 54
assert len([line for line in parts["class Attention(MessagePassing):"].splitlines() if line]) == 15

# %% [markdown]
# **The answer.** A transformer whose attention is message passing is a file of 54 lines, imports and training loop included, and 15 of
# them are the attention. And we have watched it learn: at the start the in-edges of a receiver had nearly equal weights, and training found
# those that lead from the token after an earlier copy, given texts in which these edges help. [Notebook 16](16_induction_heads.ipynb) takes
# such edges apart in the model that ships.
#
# ## 9. Exercises
#
# Replace `None` with your answer, then run the cell below it. It is red until your answer is right. All answers at once:
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
assert total[2].tolist() == [3, 0], (
    f"node 2 receives two messages, whose sum is [3, 0], not {total[2].tolist()}"
)
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
assert window == ga.patterns.window(6, 3), f"your graph for one text is not window(6, 3):\n{window}"
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

assert answer == ga.analyse.layers_between(ga.patterns.window(8, 3), 3, 6), (
    "each layer is one hop, of at most two tokens"
)
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
