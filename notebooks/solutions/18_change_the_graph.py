# %% [markdown]
# # Solutions of [notebook 18](../18_change_the_graph.ipynb)

# %% [markdown]
# **1. One token more.**

# %%
answer = src

# %% [markdown]
# **2. A whole head.**

# %%
# where nothing is left to share the weight, a cut head is as silent as a muted one
answer = "neither"

# %% [markdown]
# **3. A bargain.**

# %%
answer = ga.patterns.window(n, 3) | ga.patterns.global_tokens(n, [src])
