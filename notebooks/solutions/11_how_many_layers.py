# %% [markdown]
# # Solutions of [notebook 11](../11_how_many_layers.ipynb)

# %% [markdown]
# **1. A long text.**

# %%
answer = 24 * 128 + 1

# %% [markdown]
# **2. A sink that relays.**

# %%
answer = patterns.global_tokens(64, [0], causal=False)

# %% [markdown]
# **3. A path through powers of two.**

# %%
powers = patterns.log_sparse(64)
answer = analyse.witness(powers, 0, 63)

# %% [markdown]
# **4. The receptive field in four lines.**


# %%
def reached(mask, token, layers):
    marked = torch.arange(len(mask)) == token
    for _ in range(layers):
        marked = mask[marked].any(0)
    return set(marked.nonzero().flatten().tolist())


answer = reached
