# %% [markdown]
# # Solutions of [notebook 06](../06_matrix_multiplication_is_message_passing.ipynb)

# %% [markdown]
# **1. Count the paths.**

# %%
# the choices of two stops, with repetition, among five
answer = 15

# %% [markdown]
# **2. Do nothing.**

# %%
# the identity matrix, as a graph
answer = ga.patterns.self_loops(6)

# %% [markdown]
# **3. Load a layer of another library.**

# %%
answer = (C_Q.T, C_K.T, C_V.T)

# %% [markdown]
# **4. A product without a product.**


# %%
def product(edge_index, weights, B):
    src, dst = edge_index
    return torch.zeros_like(B).index_add(0, dst, weights[:, None] * B[src])


answer = product
