# %% [markdown]
# # Solutions of [notebook 21](../21_the_graph_a_model_needs.ipynb)

# %% [markdown]
# **1. How many pairs?**

# %%
answer = 30 * 9 * 1024 * 1025 // 2

# %% [markdown]
# **2. Within one per cent.**

# %%
answer = min(point["share"] for point in record["points"] if point["loss"] <= 1.01 * causal)

# %% [markdown]
# **3. Cut or mute.**

# %%
answer = 0.2 * (2.3 - 6) / 0.8
