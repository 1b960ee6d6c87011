# %% [markdown]
# # Solutions of [notebook 01](../01_attention_is_message_passing.ipynb)

# %% [markdown]
# **1. The other direction.**

# %%
answer = ga.patterns.causal(5).T

# %% [markdown]
# **2. Flat and sharp.**

# %%
answer = (0.0, 10.0)

# %% [markdown]
# **3. By hand.**

# %%
# its receiving channel is (1, 1.5), the sending channel of Llamas (1, 0), its own (0, 0)
masses = math.exp(1 / math.sqrt(2)), math.exp(0)
answer = tuple(mass / sum(masses) for mass in masses)

# %% [markdown]
# **4. Large logits.**


# %%
def safe_softmax(logits, dst, n):
    largest = torch.full((n,), -math.inf).scatter_reduce(0, dst, logits, "amax")
    mass = (logits - largest[dst]).exp()
    return mass / torch.zeros(n).index_add(0, dst, mass)[dst]


answer = safe_softmax
