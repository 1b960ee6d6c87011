# %% [markdown]
# # Solutions of [notebook 14](../14_one_limiting_case.ipynb)

# %% [markdown]
# **1. The plain mean.**

# %%
# a token that looks for nothing attends to all its senders equally
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

# %% [markdown]
# **4. Without the quotient.**


# %%
class SumsOnly(MessagePassing):
    def forward(self, q, k, v, edge_index):
        return self.propagate(edge_index, q=q, k=k, v=v)

    def message(self, q_i, k_j, v_j):
        return ((q_i * k_j).sum(-1, keepdim=True) / q_i.shape[-1] ** 0.5).exp() * v_j


# e^(a + 1) = e e^a: the sum has no scale of its own, and grows with the in-degree as well
answer = (SumsOnly, torch.e)
