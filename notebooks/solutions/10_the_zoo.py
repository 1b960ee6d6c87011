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
