# %% [markdown]
# # Solutions of [notebook 25](../25_attention_from_primitives.ipynb)

# %% [markdown]
# **1. The angle alone.**


# %%
def angle_logits(q, k, graph):
    q, k = (functional.normalize(points, dim=-1) for points in (q, k))
    return 5 * edge_ops.gather_products(q, k, graph)


answer = angle_logits

# %% [markdown]
# **2. No sender at all.**


# %%
def attention_or_nothing(logits, v, graph):
    given = edge_ops.logsumexp(logits, graph).sigmoid()
    return given.unsqueeze(-1) * edge_ops.aggregate(edge_ops.softmax(logits, graph), v, graph)


answer = attention_or_nothing

# %% [markdown]
# **3. How many rounds?**

# %%
answer = math.ceil(99 / 4)

# %% [markdown]
# **4. Forget.**


# %%
def log_of_gates(graph):
    src, dst = graph.edge_index
    return math.log(0.5) * (dst - src)


answer = log_of_gates
