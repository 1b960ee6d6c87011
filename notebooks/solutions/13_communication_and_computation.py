# %% [markdown]
# # Solutions of [notebook 13](../13_communication_and_computation.ipynb)

# %% [markdown]
# **1. Fewer edges.**

# %%
answer = 10 * 0.9**20

# %% [markdown]
# **2. Sequential updates.**

# %%
# One sequential round reaches as far as five rounds in which all nodes update together.
answer = patterns.causal(6)

# %% [markdown]
# **3. Encoder and decoder.**

# %%
answer = ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (src < 4) | (src <= dst), 7, name="encoder and decoder"
)
