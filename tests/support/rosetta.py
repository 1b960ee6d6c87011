"""Thirteen texts and libraries, what each calls the twenty parts of attention, and how it is made from ours.

A row of a text: notion | their word | their axes | the conversion, an expression in our tensors. i is a receiver,
j a sender, h a head, e an edge, m the model's width, d the head's. ``tests/test_rosetta.py`` computes each text's
own formulas in :mod:`support.rosetta_formulas` and evaluates every conversion; docs/rosetta.md is written from here.
"""

# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple

NOTIONS = {
    "x": "state of a token, `[i, m]`",
    "edges": "edges, `[2, e]`, senders first",
    "mask": "mask, `[i, j]`, True = edge",
    "W_Q": "`[h, m, d]`",
    "W_K": "`[h, m, d]`",
    "W_V": "`[h, m, d]`",
    "W_O": "`[h, d, m]`",
    "q": "query, `[h, i, d]`",
    "k": "key, `[h, j, d]`",
    "v": "value, `[h, j, d]`",
    "overlap": "q . k, `[h, i, j]`",
    "logits": "scaled, `[h, i, j]`",
    "weights": "after the softmax, `[h, i, j]`",
    "z": "weighted sum of values, `[h, i, d]`",
    "W_P": "pattern matrix, `[h, m, m]`",
    "pattern": "x W_P, `[h, i, m]`",
    "W_M": "message matrix, `[h, m, m]`",
    "message": "x W_M, `[h, j, m]`",
    "carried": "weight times message, `[e, h, m]`",
    "update": "what the state gains, `[i, m]`",
}
OVER_EDGES = "[:, dst, src].T"


class Text(NamedTuple):
    """A text or library: what it writes, where, its scale, its slips, and its rows."""

    title: str
    source: str
    scale: str
    slips: str
    rows: str


TEXTS = {
    "vaswani": Text(
        "Vaswani et al., Attention Is All You Need",
        "[arXiv 1706.03762](https://arxiv.org/abs/1706.03762), section 3.2",
        "1/sqrt(d_k), in the formula",
        "None. Masked logits are said to be set to minus infinity, so a receiver without in-edges would get 0/0.",
        """
        x | X | i m | x
        W_Q | W_i^Q | m d, one for each head | W_Q
        W_K | W_i^K | m d | W_K
        W_V | W_i^V | m d | W_V
        W_O | W^O | (h d) m | W_O.flatten(0, 1)
        q | query, Q W_i^Q | i d | q
        k | key | j d | k
        v | value | j d | v
        overlap | Q K^T | i j | overlap
        logits | compatibility | i j | logits
        weights | weights on the values | i j | weights
        z | head_i | i d | z
        update | MultiHead(Q, K, V) | i m | update""",
    ),
    "gilmer": Text(
        "Gilmer et al., Neural Message Passing for Quantum Chemistry",
        "[arXiv 1704.01212](https://arxiv.org/abs/1704.01212), section 2",
        "none: M_t is any function of both ends and the edge",
        "None. An edge is written receiver first, e_vw for what v receives from w: the other order than edge lists.",
        """
        x | h_v^t, hidden state | v m | x
        edges | (v, w), w in N(v) | receiver first | edges.flip(0)
        carried | M_t(h_v, h_w, e_vw), message | e m, heads summed | carried.sum(1)
        update | m_v^(t+1), the sum of messages | v m | update""",
    ),
    "elhage": Text(
        "Elhage et al., A Mathematical Framework for Transformer Circuits",
        "[transformer-circuits.pub, 2021](https://transformer-circuits.pub/2021/framework/index.html)",
        "none in A = softmax(x^T W_Q^T W_K x)",
        "The formula of the attention pattern leaves the scale out. *Pattern* is the table after the softmax.",
        """
        x | residual stream | i m | x
        W_Q | W_Q | d m | W_Q.mT
        W_K | W_K | d m | W_K.mT
        W_V | W_V | d m | W_V.mT
        W_O | W_O | m d | W_O.mT
        v | value vector v_i = W_V x_i | j d | v
        overlap | x^T W_QK x | i j | overlap
        weights | attention pattern A | i j, destination first | weights
        z | result vector r_i | i d | z
        W_P | W_QK = W_Q^T W_K | m m | W_P
        W_M | W_OV = W_O W_V | m m, transposed | W_M.mT
        message | W_OV x_j | j m | message
        update | sum over heads of h(x) | i m | update""",
    ),
    "s0": Text(
        "McCormick, Refactoring the Attention Equations (S0)",
        "the post of 2025; claims [S0](sources.md)",
        "1/sqrt(d_k), kept when matrices are merged",
        "*values* are the projected values first and the re-projected ones in its section 2; *logits* are without the scale, which "
        "the next line has.",
        """
        x | X | i m | x
        W_Q | W_i^Q | m d | W_Q
        W_K | W_i^K | m d | W_K
        W_V | W_i^V | m d | W_V
        W_O | W_i^O, rows of W^O | d m | W_O
        overlap | logits_i = P_i X^T | i j | overlap
        weights | scores_i | i j | weights
        z | head_i | i d | z
        W_P | W_i^P | m m | W_P
        pattern | patterns_i = P_i | i m | pattern
        W_M | W_i^M | m m | W_M
        message | messages_i = M_i (in its section 2: values_i) | j m | message
        update | MultiHead(X) | i m | update""",
    ),
    "s1": Text(
        "McCormick, Patterns and Messages, part 2 (S1)",
        "the post of 18 February 2025; claims [S1](sources.md)",
        "1/sqrt(d_k)",
        "p = x W^P is the receiver's; the cached P of alpha = softmax(P x_q') must be the sender's, X (W^P)^T. \"Two steps\" are "
        "three. A softmax bounds the size of the output, it does not fix it. With the rotations of its example (Llama 3) a pattern cannot be cached.",
        """
        x | word vector | i m | x
        W_P | W^P, W^QK | m m | W_P
        pattern | cached P_i: the senders' | j m | x @ W_P.mT
        overlap | P_i x_q' | j i: a column for x_q | overlap.mT
        weights | alpha_i, attention scores | i j: a row for x_q | weights
        W_M | W^M, W^VO | m m | W_M
        message | messages M_i | j m | message
        update | sum_i alpha_i M_i | i m | update""",
    ),
    "s2": Text(
        "A note on query, key and value projections (S2)",
        "claims [S2](sources.md)",
        "1/sqrt(d_head), in the score",
        "None. *Score* is before the softmax, where S0 and S1 mean the number after it.",
        """
        x | activation x_i | i m | x
        W_Q | W_Q^(h) | d m: columns | W_Q.mT
        W_K | W_K^(h) | d m | W_K.mT
        W_V | W_V^(h) | d m | W_V.mT
        W_O | W_O^(h) | m d | W_O.mT
        q | query q_i | i d | q
        k | key k_j | j d | k
        v | value v_j | j d | v
        logits | score_ij | i j | logits
        weights | attention_ij | i j | weights
        z | weighted_value_i | i d | z
        update | sum over h of attention_out^(h) | i m | update""",
    ),
    "s3": Text(
        "Multi-headed attention as matrix multiplication (S3)",
        "claims [S3](sources.md); one head, without W^O",
        "1/sqrt(d)",
        'The sum over j != i contradicts O = A V, which has j = i. "Row i of I W^Q is W^Q v_i" mixes rows and columns: it is '
        "(W^Q)^T v_i.",
        """
        x | input vectors, I | i m | x
        W_Q | W^Q | m d | W_Q[0]
        W_K | W^K | m d | W_K[0]
        W_V | W^V | m d | W_V[0]
        q | Q | i d | q[0]
        k | K | j d | k[0]
        v | V | j d | v[0]
        logits | similarity S | i j | logits[0]
        weights | attention weights A, w_j | i j | weights[0]
        z | outputs O | i d | z[0]""",
    ),
    "s4": Text(
        "Attention: All you need to know (S4)",
        "far.in.net, 29 March 2025; claims [S4](sources.md); one head",
        "beta, usually 1/sqrt(h), inside sigma: scores are without it",
        "X^T W_K W_Q X lacks a transpose twice; V is said to be in R^h where h' is meant; vectors are said to form rows of matrices whose "
        "columns they are; one sum runs to i instead of T, which is the same for causal masks only. Its *message* is our value.",
        """
        x | x_i, columns of X | m i | x.T
        mask | M, adjacency matrix | j i | mask.T.double()
        W_Q | W_Q | d m | W_Q[0].T
        W_K | W_K | d m | W_K[0].T
        W_V | W_V | d m | W_V[0].T
        W_O | W_O | d m, used as W_O^T | W_O[0]
        q | query; receiving channel | d i | q[0].T
        k | key; sending channel | d j | k[0].T
        v | value; outgoing message | d j | v[0].T
        overlap | relevance score a_ji; channel overlap; A | j i | overlap[0].T
        weights | attention matrix; listening distribution | j i: columns sum to 1 | weights[0].T
        z | mixture result; mixed incoming message | d i | z[0].T
        W_P | attention transform W_A = W_K^T W_Q | m m, transposed | W_P[0].T
        W_M | information transform W_I = W_O^T W_V | m m, transposed | W_M[0].T
        message | update u_i, matrix U | m j | message[0].T
        update | y_i; state update | m i, of one head | (weights[0] @ message[0]).T""",
    ),
    "pyg": Text(
        "torch_geometric, `TransformerConv`",
        "the library itself is run; `root_weight=False`, without biases; ends before W_O",
        "1/sqrt(out_channels)",
        'None. `message()` returns the *weighted value*; "message" has four meanings (see the [notebook](../notebooks/03_four_perspectives.ipynb)).',
        """
        x | x | i m | x
        edges | edge_index | senders first | edges
        mask | adj_t (adj is its transpose) | i j | mask
        W_Q | lin_query.weight | (h d) m | W_Q.transpose(1, 2).flatten(0, 1)
        W_K | lin_key.weight | (h d) m | W_K.transpose(1, 2).flatten(0, 1)
        W_V | lin_value.weight | (h d) m | W_V.transpose(1, 2).flatten(0, 1)
        q | query | i h d | q.transpose(0, 1)
        k | key | j h d | k.transpose(0, 1)
        v | value | j h d | v.transpose(0, 1)
        weights | alpha | e h | weights[:, dst, src].T
        carried | message(): alpha value_j | e h d | (weights[:, dst, src, None] * v[:, src]).transpose(0, 1)
        z | out | i (h d) | z.transpose(0, 1).flatten(1)""",
    ),
    "dgl": Text(
        "DGL, `DotGatConv`",
        "[dmlc/dgl](https://github.com/dmlc/dgl), `python/dgl/nn/pytorch/conv/dotgatconv.py` at 02fc4e3; one head; its formulas are "
        "written out, DGL is not run",
        "none at that commit, though the docstring names Vaswani et al.",
        "*Attention score* is the number after the softmax. One matrix `fc` serves as query, key and value of both ends.",
        """
        x | feat | i m | x
        edges | graph.edges(): (u, v) | senders first | edges
        q | dstdata['ft'] | i d | x @ W_Q[0]
        k | srcdata['ft'] | j d | x @ W_Q[0]
        v | srcdata['ft'], the same | j d | x @ W_Q[0]
        overlap | edata['a'], u_dot_v | e | ((x @ W_Q[0])[dst] * (x @ W_Q[0])[src]).sum(1)""",
    ),
    "lens": Text(
        "TransformerLens",
        "its names of weights and hooks; its formulas are written out, the library is not run",
        "1/sqrt(d_head) (`attn_scale`), in hook_attn_scores",
        "None. *pattern* is the table of weights after the softmax, scores are before it.",
        """
        x | hook_resid_pre | b i m | x[None]
        W_Q | W_Q | h m d | W_Q
        W_K | W_K | h m d | W_K
        W_V | W_V | h m d | W_V
        W_O | W_O | h d m | W_O
        q | hook_q | b i h d | q.transpose(0, 1)[None]
        k | hook_k | b j h d | k.transpose(0, 1)[None]
        v | hook_v | b j h d | v.transpose(0, 1)[None]
        logits | hook_attn_scores | b h i j | logits[None]
        weights | hook_pattern | b h i j | weights[None]
        z | hook_z | b i h d | z.transpose(0, 1)[None]
        W_P | QK | m m, factored | W_P
        W_M | OV | m m, factored | W_M
        update | hook_attn_out | b i m | update[None]""",
    ),
    "flex": Text(
        "torch FlexAttention",
        "the function itself is run",
        "1/sqrt(d); `score_mod` is given the scaled score",
        "None. mask_mod(b, h, q_idx, kv_idx) is True for an edge, receiver first.",
        """
        mask | mask_mod | q_idx kv_idx | mask
        q | query | b h i d | q[None]
        k | key | b h j d | k[None]
        v | value | b h j d | v[None]
        logits | score, as score_mod sees it | b h i j | logits[None]
        z | output | b h i d | z[None]""",
    ),
    "mha": Text(
        "torch `nn.MultiheadAttention`",
        "the module itself is run, without biases",
        "1/sqrt(head_dim)",
        "A bool `attn_mask` is True where attention is *forbidden*; in scaled_dot_product_attention True allows it.",
        """
        x | query = key = value | b i m | x[None]
        mask | attn_mask, reversed | i j, True = no edge | ~mask
        W_Q | in_proj_weight, first third | (h d) m | W_Q.transpose(1, 2).flatten(0, 1)
        W_K | in_proj_weight, second third | (h d) m | W_K.transpose(1, 2).flatten(0, 1)
        W_V | in_proj_weight, last third | (h d) m | W_V.transpose(1, 2).flatten(0, 1)
        W_O | out_proj.weight | m (h d) | W_O.flatten(0, 1).T
        weights | attn_output_weights, average_attn_weights=False | b h i j | weights[None]
        update | attn_output | b i m | update[None]""",
    ),
}


def rows(text: Text) -> list[list[str]]:
    """``[notion, word, axes, conversion]`` of each row."""
    return [[part.strip() for part in line.split(" | ")] for line in text.rows.strip().splitlines()]


def cell(part: str) -> str:
    """A cell of a table in Markdown, in which formulas stand as they are."""
    return f"`{part}`" if any(sign in part for sign in "_^*=[(") else part


def page() -> str:
    """docs/rosetta.md."""
    shown = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in NOTIONS.items())
    parts = [
        "<!-- Made by tests/test_rosetta.py from tests/support/rosetta.py: change that, then run it. -->",
        "# Rosetta\n\nOne computation, thirteen ways to write it. Each table says what a text or library calls a part of attention, in which "
        "order it has its axes, and the expression that makes it from ours; `tests/test_rosetta.py` evaluates every one of these "
        "expressions and compares it with that text's own formulas, or with the library itself. `i` is a receiver, `j` a sender, `h` a head, `e` an "
        "edge, `b` a sample, `m` the width of a state, `d` of a head. A part without a row is one for which the text has no word.",
        f"## Ours\n\n| name | what |\n|---|---|\n{shown}\n\n`src, dst = edges`; the scale is 1/sqrt(d), `logits = scale * overlap`, "
        "`update = (weights @ message).sum(0)`.",
    ]
    for text in TEXTS.values():
        table = "\n".join(
            f"| `{name}` | {cell(word)} | {axes} | `{made}` |" for name, word, axes, made in rows(text)
        )
        parts.append(
            f"## {text.title}\n\nSource: {text.source}.\n\nScale: {text.scale}.\n\nSlips: {text.slips}\n\n"
            f"| ours | their word | their axes | from ours |\n|---|---|---|---|\n{table}"
        )
    return "\n\n".join(parts) + "\n"
