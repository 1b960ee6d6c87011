# %% [markdown]
# # Solutions of [notebook 15](../15_what_a_gnn_person_asks.ipynb)

# %% [markdown]
# **1. Two limits.**

# %%
# tokens 0 and 4 attend only to themselves
answer = patterns.documents([4, 4])

# %% [markdown]
# **2. Count by attention.**


# %%
def count_senders(graph):
    q, v = torch.zeros(1, 1, graph.num_dst, 1), torch.ones(1, 1, graph.num_src, 1)
    # every weight is sigmoid(0) = 1/2, and nothing is divided
    return 2 * attend(q, torch.zeros_like(v), v, graph, normaliser="sigmoid")[0, 0, :, 0]


answer = count_senders

# %% [markdown]
# **3. GAT without its LeakyReLU.**


# %%
def linear_gat(h, a_dst, a_src):
    to_receiver, to_sender, one = h @ a_dst, h @ a_src, torch.ones(len(h))
    return torch.stack([to_receiver, one], 1), torch.stack([one, to_sender], 1)


answer = linear_gat

# %% [markdown]
# **4. Structure for a transformer.**


# %%
def is_near(graph):
    src, dst = patterns.full(6).edge_index
    # within two edges, a node has 3 nodes in a triangle and 5 in the hexagon, itself included
    return patterns.k_hop(graph, 2).mask()[dst, src][:, None]


answer = is_near
