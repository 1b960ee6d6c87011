# %% [markdown]
# # Solutions of [notebook 23](../23_reading_278_heads.ipynb)

# %% [markdown]
# **1. Another text**

# %%
# the comma at 4 was followed by ' b' at 5; the last token, 12, is a comma too
answer = (5, 12)

# %% [markdown]
# **2. Why correct?**

# %%
answer = 0.05 * 278

# %% [markdown]
# **3. Half right**

# %%
answer = sum(row["looks"]["p_holm"] <= 0.05 < row["said"]["p_holm"] for row in others)

# %% [markdown]
# **4. Write the control**

# %%
import random  # noqa: E402


def control_edges(edges, seed):
    generator, drawn = random.Random(seed), []
    for dst in sorted({dst for _, dst in edges}):
        claimed = {src for src, receiver in edges if receiver == dst}
        candidates = [src for src in range(dst + 1) if src not in claimed]
        drawn += [(src, dst) for src in generator.sample(candidates, len(claimed))]
    return drawn


answer = control_edges
