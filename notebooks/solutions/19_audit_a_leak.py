# %% [markdown]
# # Solutions of [notebook 19](../19_audit_a_leak.ipynb)

# %% [markdown]
# **1. A norm over all tokens.**

# %%
# Every pair of a token and a later one leaks.
answer = T * (T - 1) // 2

# %% [markdown]
# **2. A transposed mask.**

# %%
# Both windows contain the self loops, so these do not leak.
answer = ga.patterns.window(T, 3).T - ga.patterns.self_loops(T)

# %% [markdown]
# **3. Two layers as one.**

# %%
# Two hops along window(T, 3) reach four tokens back.
answer = 5

# %% [markdown]
# **4. A leak of your own.**


# %%
class Leak(nn.Module):
    def forward(self, x):
        return torch.cat([x[:, :1] + x[:, -1:], x[:, 1:]], dim=1)


answer = Leak()
