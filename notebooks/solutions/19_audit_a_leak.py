# %% [markdown]
# # Solutions of [notebook 19](../19_audit_a_leak.ipynb)

# %% [markdown]
# **1. A norm over everything.**

# %%
# every pair of a token and one after it
answer = T * (T - 1) // 2

# %% [markdown]
# **2. The wrong way round.**

# %%
# both windows have the self loops
answer = ga.patterns.window(T, 3).T - ga.patterns.self_loops(T)

# %% [markdown]
# **3. Two rounds in one.**

# %%
# two hops of window(T, 3) reach as far
answer = 5
