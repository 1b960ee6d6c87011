# %% [markdown]
# # Solutions of [notebook 24](../24_the_graph_that_a_model_draws.ipynb)

# %% [markdown]
# **1. How many edges?**

# %%
answer = n * k - k * (k - 1) // 2

# %% [markdown]
# **2. Always there.**

# %%
answer = graphs[-1] | patterns.window(n, 4) | patterns.sinks(n, 1)

# %% [markdown]
# **3. The recall of two heads.**

# %%
answer = 0.5
