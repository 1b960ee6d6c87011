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

# %% [markdown]
# **4. Attribution in three lines.** The change of the output is a vector for each edge; its dot product with the gradient is a number.


# %%
def estimate_cuts(w, v, g):
    o = w @ v
    return w * ((o - v) @ g) / (1 - w)


answer = estimate_cuts
