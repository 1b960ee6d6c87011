# %% [markdown]
# # Solutions of [notebook 07](../07_why_the_square_root.ipynb)

# %% [markdown]
# **1. Louder channels.**

# %%
answer = 1 / 32

# %% [markdown]
# **2. Set the temperature.**

# %%
answer = 2.29

# %% [markdown]
# **3. Out of its reach.**

# %%
# whoever hears only one sender gives it everything
answer = ga.patterns.self_loops(6)
