# %% [markdown]
# # Solutions of [notebook 17](../17_relay_through_a_middle_token.ipynb)

# %% [markdown]
# **1. Keep a secret.**

# %%
answer = [(DO, LAST), (DO, NOT), (OUTPUT, LAST)]

# %% [markdown]
# **2. Without a computer.**

# %%
answer = (1 / 8, 1 / 2)

# %% [markdown]
# **3. Enough relays.**

# %%
answer = 4
