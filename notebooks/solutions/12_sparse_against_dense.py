# %% [markdown]
# # Solutions of [notebook 12](../12_sparse_against_dense.ipynb)

# %% [markdown]
# **1. Before training.**

# %%
answer = 29 / 64 + 35 / 64 / 4

# %% [markdown]
# **2. A sink that relays.**

# %%
answer = "window(64, 8) | global_tokens(64, [0, 1], causal=False)"

# %% [markdown]
# **3. A graph of your own.**

# %%
answer = patterns.window(N, 4) | patterns.dilated(N, 4, 4) | patterns.dilated(N, 4, 16)
