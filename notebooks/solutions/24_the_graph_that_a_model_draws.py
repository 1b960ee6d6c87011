# %% [markdown]
# # Solutions of [notebook 24](../24_the_graph_that_a_model_draws.ipynb)

# %% [markdown]
# **1. How many edges?**

# %%
answer = n * k - k * (k - 1) // 2

# %% [markdown]
# **2. Always there.**

# %%
answer = graphs[-1] | patterns.window(n, 4) | patterns.sinks(n, 1)

# %% [markdown]
# **3. The recall of two heads.**

# %%
answer = 0.5

# %% [markdown]
# **4. Write the loss.**


# %%
def divergence(scores, weights, mask):
    log_q = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)
    return (torch.xlogy(weights, weights) - weights * log_q).sum(-1).mean()


answer = divergence

# %% [markdown]
# **5. Words instead of distances.**


# %%
def varied(number, tokens):
    # odd passages stay as they are; the others repeat after four numbers of tokens, none of which is 64
    return tokens if number % 2 else repeat(tokens, (50, 70, 90, 110)[number // 2 % 4])


answer = varied
