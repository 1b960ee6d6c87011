# %% [markdown]
# # Solutions of [notebook 14](../14_one_limiting_case.ipynb)

# %% [markdown]
# **1. The plain mean.**

# %%
# a token that looks for nothing hears everyone alike
answer = torch.zeros(1, 12, 4)

# %% [markdown]
# **2. A message of both ends.**


# %%
def difference(x_dst, x_src):
    return x_src - x_dst


answer = difference

# %% [markdown]
# **3. Static nodes by hand.**

# %%
# one node for what is above zero, one for what is below
answer = (torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [1.0]]))
