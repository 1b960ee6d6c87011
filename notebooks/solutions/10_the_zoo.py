# %% [markdown]
# # Solutions of [notebook 10](../10_the_zoo.ipynb)

# %% [markdown]
# **1. A triangle with a gap.**

# %%
answer = patterns.causal(12) - (patterns.window(12, 2) - patterns.self_loops(12))

# %% [markdown]
# **2. A chat.**

# %%
answer = patterns.shared_prefix(4, [3, 5])

# %% [markdown]
# **3. A tenth of the price.**

# %%
budget = patterns.causal(4096).num_edges / 10
answer = max(w for w in range(1, 4096) if 4096 * w - w * (w - 1) // 2 <= budget)

# %% [markdown]
# **4. From a paper's sentence to a mask.**


# %%
def near_and_first(lengths):
    n, firsts = sum(lengths), [sum(lengths[:number]) for number in range(len(lengths))]
    near = patterns.window(n, 4) | patterns.global_tokens(n, firsts)
    return near & patterns.documents(lengths)


answer = near_and_first
