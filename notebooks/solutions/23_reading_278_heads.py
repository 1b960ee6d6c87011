# %% [markdown]
# # Solutions of [notebook 23](../23_reading_278_heads.ipynb)

# %% [markdown]
# **1. What is left without sinks?**

# %%
confirmed = [row["holds"] for row in smollm2 if row["job"] != "sink"]
answer = sum(confirmed) / len(confirmed)

# %% [markdown]
# **2. Why correct?**

# %%
answer = 0.05 * 278

# %% [markdown]
# **3. Which head copies?**

# %%
answer = (1, 0)
