# %% [markdown]
# # Solutions of [notebook 20](../20_sinks_are_one_edge.ipynb)

# %% [markdown]
# **1. How many receivers lose the edge?**

# %%
answer = n - 128

# %% [markdown]
# **2. Where does the weight go?**

# %%
answer = 5.0

# %% [markdown]
# **3. A sink for each document.**

# %%
answer = patterns.documents([100, 50]) & (patterns.window(150, 8) | patterns.global_tokens(150, [0, 100]))

# %% [markdown]
# **4. A softmax whose weights may sum to less than one.** The 1 in the denominator is one more sender, with logit 0 and message 0.


# %%
def off_by_one(logits):
    zero = torch.zeros_like(logits[..., :1])
    return torch.cat([logits, zero], -1).softmax(-1)[..., :-1]


answer = off_by_one
