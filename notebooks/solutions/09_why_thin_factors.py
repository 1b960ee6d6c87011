# %% [markdown]
# # Solutions of [notebook 09](../09_why_thin_factors.ipynb)

# %% [markdown]
# **1. When would merging be free?**

# %%
# half of the width
answer = 2048

# %% [markdown]
# **2. As thin as can be.**

# %%
losses = {size: loss_of(cut_down(lambda heads, size=size: thinner(heads, size))) for size in range(1, 33)}
answer = next(size for size, loss in losses.items() if loss < full + 0.1)

# %% [markdown]
# **3. How long may a text be?**

# %%
answer = 8 * 2**30 // (2 * 2 * 8 * 128 * 32)
