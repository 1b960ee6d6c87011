# %% [markdown]
# # Solutions of [notebook 01](../01_attention_is_message_passing.ipynb)

# %% [markdown]
# **1. The other direction.**

# %%
answer = ga.patterns.causal(5).T

# %% [markdown]
# **2. One edge.**

# %%
answer = (NOT, OUTPUT)

# %% [markdown]
# **3. Hearsay.**

# %%
near = ga.patterns.window(5, 2)
answer = set(torch.nonzero((near**2).mask()[LAST])[:, 0].tolist())

# %% [markdown]
# **4. Loud and quiet.**

# %%
answer = (0.0, 10.0)

# %% [markdown]
# **5. Give the induction head its edges back.**

# %%
back = ga.TokenGraph.from_rule(lambda b, h, dst, src: dst - src == length - 1, 2 * length, name="back")
answer = window | back
