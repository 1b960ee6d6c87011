# %% [markdown]
# # Solutions of [notebook 04](../04_four_perspectives.ipynb)

# %% [markdown]
# **1. The longest update.**

# %%
longest = max(run.phases, key=lambda phase: phase.update[0, -1].norm())
answer = (longest.layer, longest.name)

# %% [markdown]
# **2. Translate.**

# %%
answer = "mixed incoming message"

# %% [markdown]
# **3. Attending to the future.**

# %%
absent = call.overlap()[0, head].masked_fill(call.graph.mask(), -math.inf)
dst, src = divmod(int(absent.argmax()), n)
answer = (src, dst)

# %% [markdown]
# **4. Routing, written.**


# %%
def route(src, dst):
    moved = torch.zeros(heads.width, dtype=torch.float64)
    for h in range(heads.num_heads):
        moved += shares[h, dst, src] * (x[src] @ heads.W_V[h]) @ heads.W_O[h]
    return moved


answer = route
