# %% [markdown]
# # Solutions of [notebook 20](../20_sinks_are_one_edge.ipynb)

# %% [markdown]
# **1. Who has lost it?**

# %%
answer = n - 128

# %% [markdown]
# **2. Where does the weight go?**

# %%
answer = 5.0

# %% [markdown]
# **3. A sink for each document.**

# %%
answer = patterns.documents([100, 50]) & (patterns.window(150, 8) | patterns.global_tokens(150, [0, 100]))
