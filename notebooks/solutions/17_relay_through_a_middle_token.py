# %% [markdown]
# # Solutions of [notebook 17](../17_relay_through_a_middle_token.ipynb)

# %% [markdown]
# **1. Keep a secret.**

# %%
answer = [(DO, LAST), (DO, NOT), (OUTPUT, LAST)]

# %% [markdown]
# **2. Rollout and flow by hand.**

# %%
answer = (1 / 8, 1 / 2)

# %% [markdown]
# **3. Enough relays.**

# %%
answer = 4

# %% [markdown]
# **4. The terms of another token.**

# %%
with torch.no_grad():
    round_1 = torch.einsum("hj,jd,hde->je", w1[:, OUTPUT], x, M1)
    round_2 = torch.einsum("hj,jd,hde->je", w2[:, OUTPUT], x, M2)
    relayed = torch.einsum("gq,hqj,jd,hde,gef->qjf", w2[:, OUTPUT], w1, x, M1, M2)
answer = (round_1, round_2, relayed)
