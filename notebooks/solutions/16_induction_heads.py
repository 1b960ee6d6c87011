# %% [markdown]
# # Solutions of [notebook 16](../16_induction_heads.ipynb)

# %% [markdown]
# **1. Write a template.**

# %%
answer = [(0, 2), (0, 3), (2, 3)]

# %% [markdown]
# **2. The other layer.**

# %%
answer = "less"

# %% [markdown]
# **3. Cut or mute?**

# %%
answer = tuple(second_copy(predictions(operation(job, layers=1)))[0] for operation in (trace.cut, trace.mute))
