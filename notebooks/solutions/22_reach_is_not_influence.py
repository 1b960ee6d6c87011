# %% [markdown]
# # Solutions of [notebook 22](../22_reach_is_not_influence.ipynb)

# %% [markdown]
# **1. Reach.** Each layer leads 15 tokens further: 999 / 15, rounded up.

# %%
answer = 67

# %% [markdown]
# **2. Influence.** A layer moves 1/4 back and leaves 3/4 in place.

# %%
answer = (1 / 16, 9 / 16)

# %% [markdown]
# **3. Loud and clear.** One more sender for everybody: 1/17 of the tenth that is taken, in each of the layers.

# %%
answer = patterns.window(n, 16) | ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (src == 100) & (dst > 100), n
)
