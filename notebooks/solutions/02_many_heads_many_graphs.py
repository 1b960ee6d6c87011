# %% [markdown]
# # Solutions of [notebook 02](../02_many_heads_many_graphs.ipynb)

# %% [markdown]
# **1. One edge.**

# %%
answer = (NOT, OUTPUT)

# %% [markdown]
# **2. Two hops.**

# %%
near = ga.patterns.window(5, 2)
answer = set(torch.nonzero((near**2).mask()[LAST])[:, 0].tolist())

# %% [markdown]
# **3. Give the induction head its edges back.**

# %%
back = ga.TokenGraph.from_rule(lambda b, h, dst, src: dst - src == length - 1, 2 * length, name="back")
answer = window | back
