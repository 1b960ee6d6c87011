# %% [markdown]
# # Solutions of [notebook 04](../04_four_perspectives.ipynb)

# %% [markdown]
# **1. The longest update.**

# %%
longest = max(run.phases, key=lambda phase: phase.update[0, -1].norm())
answer = (longest.layer, longest.name)

# %% [markdown]
# **2. Translate.**

# %%
answer = "mixed incoming message"

# %% [markdown]
# **3. If it could hear the future.**

# %%
absent = call.overlap()[0, head].masked_fill(call.graph.mask(), -math.inf)
dst, src = divmod(int(absent.argmax()), n)
answer = (src, dst)
