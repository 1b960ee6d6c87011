# %% [markdown]
# # Solutions of [notebook 18](../18_change_the_graph.ipynb)

# %% [markdown]
# **1. One token more.**

# %%
answer = src

# %% [markdown]
# **2. A whole head.**

# %%
# No in-edge is left to take the weight, so the head adds nothing in both cases.
answer = "neither"

# %% [markdown]
# **3. A cheap graph.**

# %%
answer = ga.patterns.window(n, 3) | ga.patterns.global_tokens(n, [src])
