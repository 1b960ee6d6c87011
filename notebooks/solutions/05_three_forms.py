# %% [markdown]
# # Solutions of [notebook 05](../05_three_forms.ipynb)

# %% [markdown]
# **1. The factors are not unique.**

# %%
answer = torch.linalg.inv(R).T

# %% [markdown]
# **2. One message alone.**

# %%
answer = x[3] @ heads.W_V[0] @ heads.W_O[0]

# %% [markdown]
# **3. A head that sends nothing.**

# %%
loud = torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None, None]
answer = (heads.W_Q, heads.W_K, heads.W_V, heads.W_O * loud)
