# %% [markdown]
# # Solutions of [notebook 03](../03_build_a_transformer.ipynb)

# %% [markdown]
# **1. The message.**


# %%
def message(q_i, k_j, v_j, index):
    scores = (q_i * k_j).sum(-1) / math.sqrt(q_i.shape[-1])
    return softmax(scores, index)[:, None] * v_j


answer = message

# %% [markdown]
# **2. The aggregation.**


# %%
def aggregate(messages, index, num_nodes):
    return torch.zeros(num_nodes, messages.shape[1]).index_add(0, index, messages)


answer = aggregate

# %% [markdown]
# **3. The mask.**


# %%
def window_edges(num_texts, length, width):
    edges = causal_edges(num_texts, length)
    return edges[:, edges[1] - edges[0] < width]


answer = window_edges

# %% [markdown]
# **4. Too short a window.**

# %%
# Two hops of at most two tokens each reach three tokens back.
answer = 2
