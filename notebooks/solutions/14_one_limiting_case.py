# %% [markdown]
# # Solutions of [notebook 14](../14_one_limiting_case.ipynb)

# %% [markdown]
# **1. The plain mean.**

# %%
# With queries of zero all logits of a receiver are 0, so it attends to all its senders uniformly.
answer = torch.zeros(1, 12, 4)

# %% [markdown]
# **2. A message that depends on both ends.**


# %%
def difference(x_dst, x_src):
    return x_src - x_dst


answer = difference

# %% [markdown]
# **3. Static nodes by hand.**

# %%
# One node fires above zero, the other below.
answer = (torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [1.0]]))

# %% [markdown]
# **4. Without the quotient.**


# %%
class SumsOnly(MessagePassing):
    def forward(self, q, k, v, edge_index):
        return self.propagate(edge_index, q=q, k=k, v=v)

    def message(self, q_i, k_j, v_j):
        return ((q_i * k_j).sum(-1, keepdim=True) / q_i.shape[-1] ** 0.5).exp() * v_j


# e^(a + 1) = e * e^a. Only the quotient removes the factor, and the growth of the sum with the in-degree.
answer = (SumsOnly, torch.e)
