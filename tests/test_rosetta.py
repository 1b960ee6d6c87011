"""Every conversion on the page of terms turns our tensors into those of a text's own formulas.

The formulas of each text use its order of axes and the same matrices, without the library.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.inputs import randn
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch_geometric.nn import TransformerConv

import gnn_attention as ga

T, M, D, H = 6, 8, 4, 2
Parts = dict[str, Tensor]
X = randn(T, M, seed=0)
WQ, WK, WV = (randn(H, M, D, seed=seed) for seed in (1, 2, 3))
WO = randn(H, D, M, seed=4)
# Every receiver has an in-edge, one edge comes from a later token, and the mask is not symmetric.
MASK = torch.ones(T, T, dtype=torch.bool).tril()
MASK[4, 1], MASK[2, 5] = False, True
DST, SRC = MASK.nonzero().T
ENDS = torch.eye(D, dtype=torch.float64)[:2].expand(1, H, 2, D)


def masked_softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the senders of MASK on the last axis."""
    return scores.masked_fill(~MASK, -math.inf).softmax(-1)


def vaswani() -> Parts:
    """head_i = softmax(Q W_i^Q (K W_i^K)^T / sqrt(d_k)) V W_i^V; Concat(heads) W^O."""
    q, k, v = (torch.stack([X @ W[i] for i in range(H)]) for W in (WQ, WK, WV))
    products = torch.stack([q[i] @ k[i].T for i in range(H)])
    weights, W_O = masked_softmax(products / math.sqrt(D)), torch.cat([WO[0], WO[1]])
    head = torch.stack([weights[i] @ v[i] for i in range(H)])
    parts = {"x": X, "W_Q": WQ, "W_K": WK, "W_V": WV, "W_O": W_O, "q": q, "k": k, "v": v, "z": head}
    parts |= {"overlap": products, "logits": products / math.sqrt(D), "weights": weights}
    return parts | {"update": torch.cat([head[0], head[1]], dim=1) @ W_O}


def gilmer() -> Parts:
    """m_v = sum over w in N(v) of M(h_v, h_w), with attention as M."""
    messages, sums = [], torch.zeros(T, M, dtype=torch.float64)
    edges = [(v, w) for v in range(T) for w in range(T) if MASK[v, w]]
    for v, w in edges:
        message = torch.zeros(M, dtype=torch.float64)
        for i in range(H):
            mass = [math.exp((X[v] @ WQ[i]) @ (X[u] @ WK[i]) / math.sqrt(D)) for u in range(T) if MASK[v, u]]
            numerator = math.exp((X[v] @ WQ[i]) @ (X[w] @ WK[i]) / math.sqrt(D))
            message += numerator / sum(mass) * (X[w] @ WV[i] @ WO[i])
        messages.append(message)
        sums[v] += message
    return {"x": X, "edges": torch.tensor(edges).T, "carried": torch.stack(messages), "update": sums}


def elhage() -> Parts:
    """r_i = sum_j A_ij W_V x_j, h(x)_i = W_O r_i; the scale, which the text omits, is added."""
    Q, K, V, O = WQ.mT, WK.mT, WV.mT, WO.mT  # noqa: E741
    QK, OV = Q.mT @ K, O @ V
    products = torch.stack([torch.stack([X[i] @ QK[h] @ X.T for i in range(T)]) for h in range(H)])
    A, v = masked_softmax(products / math.sqrt(D)), torch.stack([(V[h] @ X.T).T for h in range(H)])
    r = A @ v
    parts = {"x": X, "W_Q": Q, "W_K": K, "W_V": V, "W_O": O, "v": v, "overlap": products}
    parts |= {"weights": A, "z": r, "W_P": QK, "W_M": OV}
    parts["message"] = torch.stack([(OV[h] @ X.T).T for h in range(H)])
    return parts | {"update": sum((O[h] @ r[h].T).T for h in range(H))}


def s0() -> Parts:
    """scores_i = softmax(P_i X^T / sqrt(d_k)), sum of scores_i M_i."""
    WP, WM = WQ @ WK.mT, WV @ WO
    P, messages = X @ WP, X @ WM
    scores = masked_softmax(P @ X.T / math.sqrt(D))
    parts = {"x": X, "W_Q": WQ, "W_K": WK, "W_V": WV, "W_O": WO, "overlap": P @ X.T, "weights": scores}
    parts |= {"z": scores @ (X @ WV), "W_P": WP, "pattern": P, "W_M": WM, "message": messages}
    return parts | {"update": (scores @ messages).sum(0)}


def s1() -> Parts:
    """alpha = softmax(P x_q' / sqrt(d_k)) for each x_q, with the patterns that can be cached."""
    WP, WM = WQ @ WK.mT, WV @ WO
    P, messages = torch.stack([X @ WK[h] @ WQ[h].T for h in range(H)]), X @ WM
    fits = torch.stack([torch.stack([P[h] @ x_q for x_q in X], dim=1) for h in range(H)])
    alpha = masked_softmax(fits.mT / math.sqrt(D))
    parts = {"x": X, "W_P": WP, "pattern": P, "overlap": fits, "weights": alpha, "W_M": WM}
    return parts | {"message": messages, "update": sum(alpha[h] @ messages[h] for h in range(H))}


def s2() -> Parts:
    """q = W_Q x; score_ij = q_i . k_j / sqrt(d_head); attention_out = W_O weighted_value."""
    Q, K, V, O = WQ.mT, WK.mT, WV.mT, WO.mT  # noqa: E741
    q, k, v = (torch.stack([torch.stack([W[h] @ x for x in X]) for h in range(H)]) for W in (Q, K, V))
    score = torch.stack(
        [torch.tensor([[q[h, i] @ k[h, j] for j in range(T)] for i in range(T)]) for h in range(H)]
    )
    attention = masked_softmax(score.double() / math.sqrt(D))
    z = torch.stack([torch.stack([attention[h, i] @ v[h] for i in range(T)]) for h in range(H)])
    out = torch.stack([sum(O[h] @ z[h, i] for h in range(H)) for i in range(T)])
    parts = {"x": X, "W_Q": Q, "W_K": K, "W_V": V, "W_O": O, "q": q, "k": k, "v": v, "update": out}
    return parts | {"logits": score / math.sqrt(D), "weights": attention, "z": z}


def s3() -> Parts:
    """O = Softmax(Q K^T / sqrt(d)) V, with Q, K, V = I W^Q, I W^K, I W^V."""
    q, k, v = X @ WQ[0], X @ WK[0], X @ WV[0]
    S = (q @ k.T) / math.sqrt(D)
    parts = {"x": X, "W_Q": WQ[0], "W_K": WK[0], "W_V": WV[0], "q": q, "k": k, "v": v}
    return parts | {"logits": S, "weights": masked_softmax(S), "z": masked_softmax(S) @ v}


def s4() -> Parts:
    """Y = W_O^T W_V X sigma(X^T W_K^T W_Q X), with tokens as columns."""
    Q, K, V, O, C = WQ[0].T, WK[0].T, WV[0].T, WO[0], X.T  # noqa: E741
    A, adjacency = C.T @ K.T @ Q @ C, MASK.T.double()
    mass = adjacency * torch.exp(A / math.sqrt(D))
    sigma = mass / mass.sum(0)
    parts = {"x": C, "mask": adjacency, "W_Q": Q, "W_K": K, "W_V": V, "W_O": O, "q": Q @ C, "k": K @ C}
    parts |= {"v": V @ C, "overlap": A, "weights": sigma, "z": V @ C @ sigma, "W_P": K.T @ Q, "W_M": O.T @ V}
    return parts | {"message": O.T @ V @ C, "update": O.T @ V @ C @ sigma}


def pyg() -> Parts:
    """Run TransformerConv with our matrices, and record the results of its ``message``."""
    layer = TransformerConv(M, D, heads=H, root_weight=False, bias=False).double()
    edges, messages = torch.stack([SRC, DST]), list[Tensor]()
    with torch.no_grad():
        for linear, W in ((layer.lin_query, WQ), (layer.lin_key, WK), (layer.lin_value, WV)):
            linear.weight.copy_(torch.cat([W[h].T for h in range(H)]))
        layer.register_message_forward_hook(lambda module, inputs, output: messages.append(output))
        out, (index, alpha) = layer(X, edges, return_attention_weights=True)
        q, k, v = (linear(X).view(-1, H, D) for linear in (layer.lin_query, layer.lin_key, layer.lin_value))
        weights = {f"W_{name}": getattr(layer, f"lin_{word}").weight for name, word in
                   (("Q", "query"), ("K", "key"), ("V", "value"))}  # fmt: skip
    adj_t = torch.sparse_coo_tensor(index.flip(0), torch.ones(len(SRC)), (T, T)).to_dense().bool()
    parts = {"x": X, "edges": index, "mask": adj_t, "q": q, "k": k, "v": v, "weights": alpha, "z": out}
    return parts | weights | {"carried": messages[0]}


def dgl() -> Parts:
    """Compute ``u_dot_v`` of one projection, which senders and receivers share."""
    ft = X @ WQ[0]
    a = torch.stack([ft[u] @ ft[v] for u, v in zip(SRC.tolist(), DST.tolist(), strict=True)])
    return {"x": X, "edges": torch.stack([SRC, DST]), "q": ft, "k": ft, "v": ft, "overlap": a}


def lens() -> Parts:
    """Compute einsums over ``[batch, pos, head, d_head]``, as in the code of TransformerLens."""
    x = X[None]
    q, k, v = (torch.einsum("bpm,hmd->bphd", x, W) for W in (WQ, WK, WV))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    pattern = masked_softmax(scores)
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
    parts = {"x": x, "W_Q": WQ, "W_K": WK, "W_V": WV, "W_O": WO, "q": q, "k": k, "v": v, "z": z}
    parts |= {"logits": scores, "weights": pattern, "update": torch.einsum("bqhd,hdm->bqm", z, WO)}
    return parts | {"W_P": WQ @ WK.mT, "W_M": WV @ WO}


def flex() -> Parts:
    """Run flex_attention, and compute the scores that a score_mod gets from ratios of weights."""
    q, k, v = ((X @ W)[None] for W in (WQ, WK, WV))

    def allowed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        return MASK[q_idx, kv_idx]

    block_mask = create_block_mask(allowed, None, None, T, T, device="cpu")
    scores = torch.full((1, H, T, T), math.nan, dtype=torch.float64)
    out = flex_attention(q, k, v, block_mask=block_mask)
    for i in range(T):
        for j in range(T):
            # Beside a sender of score 0, the ratio of the two weights is the exponential of the score.
            pair = torch.stack([k[:, :, j], torch.zeros_like(k[:, :, j])], dim=2)
            shares = flex_attention(q[:, :, i : i + 1], pair, ENDS)[:, :, 0]
            scores[:, :, i, j] = (shares[..., 0] / shares[..., 1]).log()
    grid = torch.arange(T)
    table = allowed(0, 0, grid[:, None], grid[None])
    return {"mask": table, "q": q, "k": k, "v": v, "logits": scores, "z": out}


def mha() -> Parts:
    """Run nn.MultiheadAttention with our matrices."""
    module = nn.MultiheadAttention(M, H, bias=False, batch_first=True).double()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([torch.cat([W[h].T for h in range(H)]) for W in (WQ, WK, WV)]))
        module.out_proj.weight.copy_(torch.cat([WO[h] for h in range(H)]).T)
        forbidden = ~MASK
        out, weights = module(X[None], X[None], X[None], attn_mask=forbidden, average_attn_weights=False)
        thirds = module.in_proj_weight.chunk(3)
    parts = {"x": X[None], "mask": forbidden, "W_O": module.out_proj.weight}
    parts |= {"weights": weights, "update": out}
    return parts | dict(zip(("W_Q", "W_K", "W_V"), thirds, strict=True))


PAGE = Path(__file__).parents[1] / "docs" / "rosetta.md"
FORMULAS = {
    formula.__name__: formula
    for formula in (pyg, dgl, flex, mha, lens, vaswani, gilmer, elhage, s0, s1, s2, s3, s4)
}
# The page has a table of all terms, one of our names, and one for each text: ours | theirs | axes | code.
OVERVIEW, OURS, *TEXTS = (
    [
        [cell.strip(" `") for cell in line.strip("|").split(" | ")]
        for line in part.splitlines()
        if line.startswith("| `")
    ]
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")
)
NOTIONS = [name for name, _ in OURS]
CELLS = [(text, row[0], row[3]) for text, rows in zip(FORMULAS, TEXTS, strict=True) for row in rows]


@cache
def ours() -> dict[str, Tensor]:
    """Compute the twenty notions with this library."""
    heads = ga.StandardHeads.from_arrays(WQ, WK, WV, WO)
    graph = ga.convert.from_mask(MASK)
    call = ga.trace.record(ga.MessagePassingAttention(heads), X, graph).layers[0]
    factored, edges = ga.FactoredHeads.of(heads), call.edge_index
    parts = {"x": X, "edges": edges, "mask": graph.mask(), "src": edges[0], "dst": edges[1]}
    parts |= {name: getattr(heads, name) for name in ("W_Q", "W_K", "W_V", "W_O")}
    parts |= {"q": call.q[0], "k": call.k[0], "v": call.v[0], "z": call.z[0], "update": call.update[0]}
    parts |= {"overlap": call.overlap()[0], "logits": call.pair_logits()[0]}
    parts |= {"weights": call.dense(call.weights())[0], "carried": call.carried(edges)[0]}
    parts |= {"W_P": heads.pattern_matrix().full(), "W_M": heads.message_matrix().full()}
    parts |= {"pattern": factored.patterns(X[None])[0], "message": factored.messages(X[None])[0]}
    return {name: part.detach() for name, part in parts.items()}


@cache
def theirs(text: str) -> dict[str, Tensor]:
    return FORMULAS[text]()


@pytest.mark.parametrize(("text", "notion", "conversion"), CELLS, ids=lambda part: str(part)[:24])
def test_every_conversion_runs(text: str, notion: str, conversion: str) -> None:
    """The expression of the cell equals the formula of the text, axis by axis."""
    output, expected = eval(conversion, {}, ours()), theirs(text)[notion].detach()
    assert output.shape == expected.shape
    if expected.is_floating_point():
        assert_exact(output, expected)
    else:
        assert torch.equal(output, expected)


def test_every_text_has_its_rows() -> None:
    """Every formula of the thirteen texts has a row for each of its notions, and every row has a formula."""
    assert (len(TEXTS), len(NOTIONS)) == (13, 20)
    for name, rows in zip(FORMULAS, TEXTS, strict=True):
        notions = [row[0] for row in rows]
        assert len(notions) == len(set(notions))
        assert set(notions) == set(theirs(name)) <= set(NOTIONS)
    words = [{row[0]: row[1] for row in rows} for rows in TEXTS]
    assert [row[1:] for row in OVERVIEW] == [[text.get(notion, "-") for text in words] for notion in NOTIONS]
    assert {notion for _, notion, _ in CELLS} == set(NOTIONS)


def test_a_symmetric_world_would_hide_a_turned_table() -> None:
    """Each tensor with two axes of tokens differs from its transpose, so that no test passes by accident."""
    assert not torch.equal(MASK, MASK.T)
    for name in ("overlap", "weights", "W_P", "W_M"):
        assert (ours()[name] - ours()[name].mT).abs().max() > 0.1
