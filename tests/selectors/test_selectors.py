"""Selections, losses and gradients equal those of dense scores in float64, and take less memory."""

from __future__ import annotations

import pytest
import torch
from support.refusals import assert_refusals
from torch._dynamo.testing import CompileCounter

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.patterns import _choice
from gnn_attention.rotary import Rotary
from gnn_attention.selectors import Indexer, PooledBlocks, TopK, indexer, recall
from tests.support.bounds import assert_exact

T, WIDTH = 40, 12
GRAPHS = {
    "causal": patterns.causal(T),
    "documents": patterns.documents([15, 25]),
    # Receiver 0 is isolated.
    "strict": patterns.strict_causal(T),
    "full": patterns.full(T),
}


def randn(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def qkv(heads=4, kv_heads=2, grad=False):
    return [randn(2, h, T, 8, seed=seed, grad=grad) for seed, h in enumerate((heads, kv_heads, kv_heads))]


def dense_logits(q, k, mask):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)


def is_largest(scores, count):
    """Return the mask of the largest finite scores, by sorting."""
    order = scores.argsort(-1, descending=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True) & (scores > -torch.inf)


@pytest.fixture(params=[2**24, 500], ids=["one chunk", "chunks"])
def _chunk_size(request, monkeypatch):
    monkeypatch.setattr(_choice, "SCORES_PER_CHUNK", request.param)


@pytest.mark.usefixtures("_chunk_size")
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("per", ["head", "group", "all"])
def test_top_k_takes_the_largest(name, per):
    q, k, _ = qkv()
    logits = dense_logits(q, k, GRAPHS[name].mask())
    weights = logits.softmax(-1).nan_to_num(0.0)
    sums = {
        "group": weights.view(2, 2, 2, T, T).sum(2).repeat_interleave(2, 1),
        "all": weights.sum(1, True),
    }
    scores = logits if per == "head" else sums[per].masked_fill(~GRAPHS[name].mask(), -torch.inf)
    assert torch.equal(TopK(5, per).select(q, k, GRAPHS[name]).mask(), is_largest(scores, 5))
    if per == "head":
        mod = lambda score, b, h, dst, src: score - 0.3 * (h + 1) * (dst - src)  # noqa: E731
        scores = mod(logits, 0, torch.arange(4).view(4, 1, 1), torch.arange(T).view(T, 1), torch.arange(T))
        assert torch.equal(TopK(5, score_mod=mod).select(q, k, GRAPHS[name]).mask(), is_largest(scores, 5))


SELECTORS = {
    "top k": TopK(6),
    "top k of all heads": TopK(6, "all"),
    "means": PooledBlocks(block=6, top=2),
    "extremes": PooledBlocks(block=6, top=2, pool="extremes"),
    "indexer": Indexer(WIDTH, 6).double(),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_a_decoding_step_chooses_as_the_full_pass(name):
    q, k, _ = qkv() if name != "indexer" else (randn(2, T, WIDTH),) * 3
    all_rows = SELECTORS[name].select(q, k)
    step = SELECTORS[name].select(q[..., 30:33, :], k, patterns.causal(T).rows(30, 33))
    assert step == all_rows.rows(30, 33)
    with pytest.raises(ValueError, match=r"graph is needed to align q of 3 tokens with k of 40; .*rows"):
        SELECTORS[name].select(q[..., 30:33, :], k)


@pytest.mark.parametrize("name", SELECTORS)
def test_without_tokens_there_are_no_edges(name):
    states = randn(2, 0, WIDTH) if name == "indexer" else randn(2, 4, 0, 8)
    assert SELECTORS[name].select(states, states).num_edges == 0


@pytest.mark.usefixtures("_chunk_size")
@pytest.mark.parametrize("pool", ["mean", "extremes"])
def test_pooled_blocks_are_chosen_by_their_formula(pool):
    q, k, _ = qkv()
    keys = k.repeat_interleave(2, 1)
    scores = torch.empty(2, 4, T, 7, dtype=torch.float64)
    for block, part in enumerate(keys.split(6, 2)):
        ends = torch.stack([q * part.amax(2, True), q * part.amin(2, True)])
        bound = ends.amax(0).sum(-1)
        scores[..., block] = (q @ part.mT).mean(-1) if pool == "mean" else bound
    own_block, block = torch.arange(T).view(-1, 1) // 6, torch.arange(7)
    scores = scores.masked_fill(block == own_block, torch.inf).masked_fill(block > own_block, -torch.inf)
    expected = is_largest(scores, 3).repeat_interleave(6, -1)[..., :T] & GRAPHS["causal"].mask()
    graph = PooledBlocks(6, 3, pool).select(q, k)
    assert torch.equal(graph.mask(), expected)
    if pool == "mean":
        assert torch.equal(graph.mask(), patterns.moba(q, keys, 6, 3).mask())


def make_indexer(k=6, rotary=Rotary()):  # noqa: B008
    torch.manual_seed(3)
    return Indexer(WIDTH, k, num_heads=3, head_dim=4, rotary=rotary).double()


def compute_scores(module, x, mask):
    """Compute ``I`` by a loop over heads, ``[batch, dst, src]``; -inf at non-edges."""
    keys = torch.nn.functional.layer_norm(x @ module.keys.weight.T, (4,), eps=1e-5)
    keys = keys * module.key_norm.weight + module.key_norm.bias
    queries, total = (x @ module.queries.weight.T).unflatten(-1, (3, 4)), 0.0
    for head in range(3):
        rotated_parts = [Rotary().turn(part, torch.arange(T)) for part in (queries[:, :, head], keys)]
        weight = (x @ module.weights.weight[head] / 12**0.5).unsqueeze(-1)
        total = total + weight * (rotated_parts[0] @ rotated_parts[1].mT).clamp(min=0)
    return total.masked_fill(~mask, -torch.inf)


@pytest.mark.usefixtures("_chunk_size")
@pytest.mark.parametrize("name", GRAPHS)
def test_the_indexer_chooses_by_its_formula(name):
    module, x, mask = make_indexer(), randn(2, T, WIDTH), GRAPHS[name].mask()
    scores = compute_scores(module, x, mask)
    graph = module.select(x, x, GRAPHS[name])
    # If several scores are exactly 0, any of these senders may be chosen.
    smallest = scores.masked_fill(~graph.mask()[:, 0], torch.inf).amin(-1)
    largest = scores.masked_fill(graph.mask()[:, 0], -torch.inf).amax(-1)
    assert bool((smallest >= largest - 1e-12).all())
    assert torch.equal(graph.in_degree()[:, 0], mask.sum(-1).clamp(max=6).expand(2, -1))


@pytest.mark.parametrize("samples", [1, 2])
def test_an_indexer_chooses_the_same_in_bfloat16(samples):
    """The inputs are small integers, whose products are exact in bfloat16."""
    rng, mask = torch.Generator().manual_seed(0), GRAPHS["causal"].mask()
    shapes = (samples, 3, T, 4), (samples, 3, T), (samples, T, 4)
    queries, weights, keys = (torch.randint(-3, 4, shape, generator=rng).float() for shape in shapes)
    module = Indexer(WIDTH, 6, num_heads=3, head_dim=4, dtype=torch.bfloat16)
    selection = module.choose((queries, weights), keys, GRAPHS["causal"]).mask().view(samples, T, T)
    scores = (weights.unsqueeze(-1) * (queries @ keys.unsqueeze(1).mT).clamp(min=0)).sum(1)
    expected = scores.masked_fill(~mask, -torch.inf).topk(6).values
    assert torch.equal(scores.masked_fill(~selection, -torch.inf).topk(6).values, expected)


def compute_loss(module, x, q, k, mask):
    weights = dense_logits(q, k, mask).softmax(-1).nan_to_num(0.0)
    p = weights.mean(1)
    log_prob = compute_scores(module, x, mask).log_softmax(-1)
    rows = torch.where(p > 0, p * (p.clamp(min=1e-300).log() - log_prob), 0.0).sum(-1)
    return rows.sum() / mask.any(-1).expand(len(x), -1).sum()


def sample_graph(x):
    """Return a graph that varies by sample, in which receiver 5 is isolated."""
    index = make_indexer(k=2).select(x, x).mask()[:, 0].float().topk(2).indices
    index[:, 5] = -1
    index[:, 0, 1] = index[:, 1, 1] = -1
    return ga.TokenGraph.from_indices(index.unsqueeze(1), T)


@pytest.mark.usefixtures("_chunk_size")
@pytest.mark.parametrize("name", [*GRAPHS, "listed", "by sample"])
def test_the_loss_is_the_divergence(name):
    module, x, (q, k, v) = make_indexer(), randn(2, T, WIDTH, grad=True), qkv(grad=True)
    graph = sample_graph(x) if name == "by sample" else GRAPHS.get(name) or patterns.window(T, 2)
    _, info = ga.attend(q, k, v, graph, return_info=True)
    loss = module.loss(x, x, info)
    gradients = torch.autograd.grad(loss, [*module.parameters(), x, q, k], allow_unused=True)
    mask = graph.mask() if name != "by sample" else graph.mask()[:, 0]
    expected = compute_loss(module, x.detach(), q.detach(), k.detach(), mask)
    assert_exact(loss, expected)
    assert_exact(gradients[:-3], torch.autograd.grad(expected, list(module.parameters())))
    assert gradients[-3:] == (None, None, None)
    if name == "causal":
        halves = [module.loss(x, x, info, rows=rows) for rows in ((0, T // 2), (T // 2, T))]
        assert_exact(sum(halves) / 2, expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_nothing_of_tokens_times_tokens_is_saved(monkeypatch, sparse):
    """Less than two tables of a sample are saved in all; products of all heads and samples would be six."""
    n = 256
    monkeypatch.setattr(_choice, "SCORES_PER_CHUNK", n * 64)
    monkeypatch.setattr(indexer, "EDGES_PER_CHUNK", 512)
    module, x, q = make_indexer(), randn(2, n, WIDTH), randn(2, 4, n, 8)
    graph, tensors = patterns.window(n, 16) if sparse else patterns.causal(n), {}
    _, info = ga.attend(q, q, q, graph, return_info=True)

    def pack(x):
        tensors[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = module.loss(x, x, info)
    # Each tensor that is saved for the backward pass counts once.
    assert n < sum(x.numel() for x in tensors.values()) < 2 * n * n
    assert float(torch.autograd.grad(loss, module.keys.weight)[0].abs().max()) > 0


def test_straight_through_changes_the_gradient_alone():
    module, x, (q, k, v) = make_indexer(), randn(1, T, WIDTH), (y[:1] for y in qkv())
    graph = module.select(x, x)
    score = module.edge_scores(x, x, graph)
    src, dst = graph.edge_index
    assert_exact(score[0, 0], compute_scores(module, x, GRAPHS["causal"].mask())[0, dst, src])
    out = ga.attend(q, k, v, graph, bias=score - score.detach())
    assert_exact(out, ga.attend(q, k, v, graph))
    assert float(torch.autograd.grad(out.square().sum(), module.queries.weight)[0].abs().max()) > 0


def test_recall_is_the_share_of_the_weights():
    q, k, v = qkv()
    _, info = ga.attend(q, k, v, GRAPHS["strict"], return_info=True)
    selection = TopK(4).select(q, k, GRAPHS["strict"])
    weights = dense_logits(q, k, GRAPHS["strict"].mask()).softmax(-1)
    shares = recall(info, selection)
    assert_exact(shares[:, :, 1:], (weights * selection.mask()).sum(-1)[:, :, 1:])
    assert bool(shares[:, :, 0].isnan().all())
    with pytest.raises(ValueError, match=r"chosen must be a subgraph of .*strict.*, but .*full.* is not"):
        recall(info, GRAPHS["full"])


def test_wrong_arguments_are_named():
    module, x, (q, k, v) = make_indexer(), randn(2, T, WIDTH), qkv()
    selection = TopK(3).select(q, k)
    _, info = ga.attend(q, k, v, selection, return_info=True)
    _, dense = ga.attend(q, k, v, patterns.causal(T), return_info=True)
    states, blocks = r"q must be states \[batch, tokens, 12\] in torch.float64", PooledBlocks(8, 2)
    short_graph, per = patterns.causal(5), "per must be one of 'head', 'group', 'all', got 'heads'"
    assert_refusals(
        [
            (lambda: module.loss(x, x, info), ValueError, "info must come from one graph for all heads, got"),
            (lambda: module.loss(x, x, dense.lse), TypeError, "info must be a AttentionInfo, got a Tensor"),
            (lambda: module.loss(x[:1], x[:1], dense), ValueError, f"{states}, of the same samples, got a"),
            (lambda: module.select(q, x), ValueError, f"{states}, .* got a Tensor of"),
            (lambda: Indexer(8, 2, rotary="yes"), TypeError, "rotary must be a Rotary, got 'yes'"),
            (lambda: TopK(3).select(q, k, short_graph), ValueError, "q with 40 receivers and k with 40"),
            (lambda: TopK(3, per="heads"), ValueError, per),
            (lambda: blocks.select(q[:1], k), ValueError, "q and k must agree in B and D"),
            (lambda: blocks.select(q[0], k[0]), ValueError, r"q must be \[B, Hq, dst, D\], got shape"),
            (lambda: blocks.select(q.int(), k), TypeError, "q must be a float tensor .* got torch.int32"),
        ]
    )


@pytest.mark.parametrize("name", ["indexer", "blocks"])
def test_a_compiled_program_chooses_in_each_call(name):
    """The program compiles once, as a full graph, if the candidates come from outside."""
    torch._dynamo.reset()
    counter, causal = CompileCounter(), patterns.causal(T)
    module = make_indexer() if name == "indexer" else PooledBlocks(8, 2)

    def select_and_attend(q, k, v, x):
        selection = module.select(*(x, x) if name == "indexer" else (q, k), causal)
        return ga.attend(q, k, v, selection)

    program = torch.compile(select_and_attend, fullgraph=True, backend=counter)
    for seed in range(2):
        inputs = *(x.flip(2) if seed else x for x in qkv()), randn(2, T, WIDTH, seed=seed)
        assert_exact(program(*inputs), select_and_attend(*inputs))
    assert counter.frame_count == 1
