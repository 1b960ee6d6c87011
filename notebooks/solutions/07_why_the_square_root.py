# %% [markdown]
# # Solutions of [notebook 07](../07_why_the_square_root.ipynb)

# %% [markdown]
# **1. Larger numbers.**

# %%
answer = 1 / 32

# %% [markdown]
# **2. Set the temperature.**

# %%
answer = 2.29

# %% [markdown]
# **3. No choice.**

# %%
# A receiver with a single in-edge gives it all the weight.
answer = ga.patterns.self_loops(6)

# %% [markdown]
# **4. The gradient of a softmax.**


# %%
def jacobian(weights):
    return weights.diag() - torch.outer(weights, weights)


answer = jacobian
