# %% [markdown]
# # Solutions of [notebook 22](../22_reach_is_not_influence.ipynb)

# %% [markdown]
# **1. Reach.** Each layer leads 15 tokens further. 999 / 15 is 66.6, so it takes 67 layers.

# %%
answer = 67

# %% [markdown]
# **2. Influence.** One walk hops twice and carries 1/4 of 1/4. One walk never hops and carries 3/4 of 3/4.

# %%
answer = (1 / 16, 9 / 16)

# %% [markdown]
# **3. More influence for one token.** Token 100 becomes a sender for every later receiver. In each layer it contributes 1/17 of the tenth that a
# receiver takes from its in-edges.

# %%
answer = patterns.window(n, 16) | ga.TokenGraph.from_rule(
    lambda b, h, dst, src: (src == 100) & (dst > 100), n
)

# %% [markdown]
# **4. Sum over all walks.** The matrix of one layer, to the power of the number of layers.


# %%
def sum_over_walks(graph, layers, residual):
    mask = graph.mask().double()
    uniform = mask / mask.sum(1, keepdim=True)
    one_layer = residual * torch.eye(len(mask), dtype=torch.float64) + (1 - residual) * uniform
    return torch.linalg.matrix_power(one_layer, layers)


answer = sum_over_walks
