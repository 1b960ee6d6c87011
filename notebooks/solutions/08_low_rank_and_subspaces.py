# %% [markdown]
# # Solutions of [notebook 08](../08_low_rank_and_subspaces.ipynb)

# %% [markdown]
# **1. Two heads.**

# %%
combined = lower[0].writes + lower[1].writes
# The dimensions add up, since the two subspaces share no direction.
answer = combined.dim

# %% [markdown]
# **2. A neutral word.**

# %%
answer = cloud[word] - (cloud[word] @ line) * line

# %% [markdown]
# **3. How thin could this head be?**

# %%
values = lower[int(previous.argmax())].pattern.singular_values()
lost = [values[rank:].norm() / values.norm() for rank in range(33)]
answer = next(rank for rank in range(33) if lost[rank] < 0.1)
