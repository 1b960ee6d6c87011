# %% [markdown]
# # Solutions of [notebook 11](../11_how_many_layers.ipynb)

# %% [markdown]
# **1. A long text.**

# %%
answer = 24 * 128 + 1

# %% [markdown]
# **2. The sink that talks.**

# %%
answer = patterns.global_tokens(64, [0], causal=False)

# %% [markdown]
# **3. A way through powers of two.**

# %%
powers = patterns.log_sparse(64)
answer = analyse.witness(powers, 0, 63)
