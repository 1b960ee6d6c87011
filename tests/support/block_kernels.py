"""Problems for the kernels that go block by block, the dense formula in float64 beside them, and how far
apart the two are.
"""

import pytest
import torch
from support.bounds import assert_exact, assert_rule, attention_truth

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS, dropout
from gnn_attention.backends.gpu.formats import Problem
from gnn_attention.backends.gpu.row_windows import windows_of
from gnn_attention.backends.gpu.tiles import tiles_of


def listed(num_dst, num_src, density, seed=0):
    """A list of edges in no order, with some receivers that hear nobody and one that hears everybody."""
    mask = torch.rand(num_dst, num_src, generator=torch.Generator().manual_seed(seed)) < density
    mask[num_dst // 3], mask[num_dst // 2] = False, True
    dst, src = mask.nonzero(as_tuple=True)
    order = torch.randperm(len(dst), generator=torch.Generator().manual_seed(seed))
    return ga.convert.from_edge_index(torch.stack([src[order], dst[order]]), num_dst, num_src)


SMALL = listed(40, 30, 0.2)
GRAPHS = {
    "irregular": listed(70, 45, 0.15),
    "wide": listed(20, 150, 0.1),
    "tall": listed(150, 20, 0.1),
    "window": patterns.window(140, 30),
    "full": patterns.full(128),
    "one edge": ga.convert.from_edge_index(torch.tensor([[9], [69]]), 70, 10),
    "no edges": ga.convert.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 20, 30),
}
FEATURES = {
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "slopes": {"slopes": torch.tensor([0.5, 0.25]), "dst_offset": 7, "src_offset": 3},
    "softcap": {"softcap": 1.5},
    "before": {"before": (1, 2)},
    "bias": {"bias": (2, 1), "batch": 2},
    "dropout": {
        "dropout": 0.3,
        "seed": torch.tensor(5),
        "dst_offset": 2,
        "src_offset": 9,
        "first_sample": 1,
        "first_head": 3,
    },
    "everything": {"slopes": torch.tensor([0.1, 0.2]), "before": (1, 1), "bias": (1, 2), "softcap": 3.0}
    | {"dropout": 0.2, "seed": torch.tensor(11)},
    "wide values": {"dim": 7, "value_dim": 33},
    "narrow values": {"dim": 40, "value_dim": 1},
}


HIDDEN = [("v", torch.nan), ("k", torch.nan), ("q", torch.nan), ("v", torch.inf), ("v", -torch.inf)]


def with_slow(cases, quick):
    """Those that are not quick run with the slow ones."""
    return [pytest.param(*_tuple(case), marks=() if case in quick else pytest.mark.slow) for case in cases]


def _tuple(case):
    return case if isinstance(case, tuple) else (case,)


def form_of(kind, graph, with_numbers=False, device="cpu"):
    """``windows 32`` or ``tiles 64``: a form of a graph."""
    name, size = kind.split()
    make = {"windows": windows_of, "tiles": tiles_of}[name]
    return make(graph, torch.device(device), int(size), with_numbers)


def problem_of(
    graph,
    dtype=torch.float64,
    device="cpu",
    batch=1,
    heads=2,
    kv_heads=1,
    dim=24,
    value_dim=20,
    draw=0,
    **more,
):
    """Random numbers of these sizes; ``before`` and ``bias`` may be the shape of what is wanted."""
    rng = torch.Generator().manual_seed(draw)
    sizes = (
        (batch, heads, graph.num_dst, dim),
        (batch, kv_heads, graph.num_src, dim),
        (batch, kv_heads, graph.num_src, value_dim),
    )
    q, k, v = (torch.randn(size, generator=rng, dtype=torch.float64).to(dtype).to(device) for size in sizes)
    for name in ("before", "bias"):
        if name in more:
            values = (
                torch.randn(*more[name], graph.num_edges, generator=rng, dtype=torch.float64)
                .to(dtype)
                .to(device)
            )
            more[name] = values.expand(batch, heads, -1)
    more = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    return Problem(q, k, v, **{"scale": dim**-0.5, **more})


def dense(problem, graph):
    """``(out, lse, [q, k, v, before, bias])`` of the formula, in float64, on leaves that take gradients."""
    leaves = [
        None if x is None else x.double().cpu().requires_grad_()
        for x in (*problem[:3], problem.before, problem.bias)
    ]
    q, k, v, before, bias = leaves
    src, dst = graph.edge_index[:, (graph.edge_index[1] * graph.num_src + graph.edge_index[0]).argsort()]
    i, j = (
        torch.arange(n) + offset
        for n, offset in ((graph.num_dst, problem.dst_offset), (graph.num_src, problem.src_offset))
    )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * problem.scale
    if problem.slopes is not None:
        logits = logits - problem.slopes.double().cpu().view(-1, 1, 1) * (i[:, None] - j).abs()
    if before is not None:
        logits = logits + torch.zeros_like(logits).index_put((*_every(q), dst, src), before)
    if problem.softcap:
        logits = problem.softcap * (logits / problem.softcap).tanh()
    if bias is not None:
        logits = logits + torch.zeros_like(logits).index_put((*_every(q), dst, src), bias)
    hidden = torch.ones(graph.num_dst, graph.num_src, dtype=torch.bool).index_put(
        (dst, src), torch.tensor(False)
    )
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return _kept(weights, problem, i, j) @ v, lse, leaves


def _every(q):
    return torch.arange(q.shape[0])[:, None, None], torch.arange(q.shape[1])[:, None]


def _kept(weights, problem, i, j):
    if not problem.dropout:
        return weights
    first = problem.first_sample, problem.first_head
    return dropout.dropped(weights, problem.seed.cpu(), problem.dropout, i[:, None], j, *first)


def backward_of(module, problem, form, out, lse, grad_out, grad_lse=None):
    """The five gradients, from what a caller would hand over."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1) - (0 if grad_lse is None else grad_lse)
    return module.backward(problem, form, grad_out, delta.to(wide), lse)


def check_exact(module, problem, form, graph):
    """Out, lse, and the gradients of a random loss are those of the formula in float64."""
    out, lse = module.forward(problem, form)
    want, want_lse, leaves = dense(problem, graph)
    heard = want_lse != -torch.inf
    grad_out, grad_lse = cotangents(out, lse)
    loss = (want * grad_out.cpu().double()).sum() + (want_lse * grad_lse.cpu().double())[heard].sum()
    got = backward_of(
        module, problem, form, out, lse, grad_out, grad_lse.masked_fill(~heard.to(lse.device), 0)
    )
    truths = torch.autograd.grad(loss, [x for x in leaves if x is not None], allow_unused=True)
    assert torch.equal(lse.cpu() == -torch.inf, ~heard)
    assert_exact(out, want)
    assert_exact(lse, want_lse)
    got = [x for x in got if x is not None]
    assert_exact(
        got, [torch.zeros_like(x) if truth is None else truth for x, truth in zip(got, truths, strict=True)]
    )


def cotangents(*results):
    """Random gradients of some results."""
    rng = torch.Generator().manual_seed(1)
    return [
        torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.dtype).to(x.device) for x in results
    ]


def check_no_worse_than_sdpa(module, kind, dtype, device, dim=32):
    """Twice its error at most, gradients three times: the rule of the library, on numbers of this dtype."""
    graph = SMALL
    problem, form = (
        problem_of(graph, dtype, device, dim=dim, value_dim=dim),
        form_of(kind, graph, device=device),
    )
    out, lse = module.forward(problem, form)
    (grad_out,) = cotangents(out)
    gradients = [x.cpu() for x in backward_of(module, problem, form, out, lse, grad_out)[:3]]
    truth = attention_truth(*(x.cpu() for x in problem[:3]), graph, grad_out.cpu(), problem.scale)
    assert_rule(out.cpu(), dict(zip("qkv", gradients, strict=True)), truth.for_backend(BACKENDS["triton"]))


def check_nothing_off_an_edge(module, kind, hidden, number, device):
    """A token that is NaN or inf spoils the receivers that hear it (or are it), and nothing else changes by a
    bit.
    """
    graph = SMALL
    form, clean = form_of(kind, graph, device=device), problem_of(graph, torch.float32, device)
    tensors = {name: getattr(clean, name).clone() for name in "qkv"}
    tensors[hidden][:, :, 11, 3] = number
    spoiled = clean._replace(**tensors)
    mask = graph.mask()
    reached = mask.any(1) & (torch.arange(graph.num_dst) == 11) if hidden == "q" else mask[:, 11]
    (out, lse), (want, want_lse) = module.forward(spoiled, form), module.forward(clean, form)
    assert 0 < reached.sum() < graph.num_dst
    assert out[:, :, reached].isnan().all()
    assert lse[:, :, reached].isnan().all()
    assert torch.equal(out[:, :, ~reached], want[:, :, ~reached])
    assert torch.equal(lse[:, :, ~reached], want_lse[:, :, ~reached])
    _check_gradients(module, form, spoiled, clean, out, lse, want, want_lse, reached)


def _check_gradients(module, form, spoiled, clean, out, lse, want, want_lse, reached):
    """Spoiled receivers give nothing back: gradients are those of a loss that leaves them out."""
    (grad_out,) = cotangents(want)
    got = backward_of(module, spoiled, form, out, lse, grad_out)
    silent = want_lse.masked_fill(reached.to(want_lse.device), torch.nan)
    left_out = backward_of(module, clean, form, want, silent, grad_out)
    sender = torch.arange(spoiled.k.shape[2]) != 11
    assert torch.equal(got[0][:, :, ~reached], left_out[0][:, :, ~reached])
    for mine, other in zip(got[1:3], left_out[1:3], strict=True):
        assert torch.equal(mine[:, :, sender], other[:, :, sender])


def check_gradient_that_is_nan(module, kind, device):
    """A NaN in the gradient of one receiver reaches its own q and the senders that it hears, no other."""
    graph = SMALL
    problem, form = problem_of(graph, torch.float32, device), form_of(kind, graph, device=device)
    out, lse = module.forward(problem, form)
    (grad_out,) = cotangents(out)
    clean = backward_of(module, problem, form, out, lse, grad_out)
    grad_out[:, :, 9, 2] = torch.nan
    dirty = backward_of(module, problem, form, out, lse, grad_out)
    mine, heard = torch.arange(graph.num_dst) == 9, graph.mask()[9]
    assert 0 < heard.sum() < graph.num_src
    for got, want, reached in zip(dirty[:2], clean[:2], (mine, heard), strict=True):
        assert got[:, :, reached].isnan().any(-1).all()
        assert torch.equal(got[:, :, ~reached], want[:, :, ~reached])
    assert dirty[2][:, :, heard, 2].isnan().all()
    assert torch.equal(dirty[2][:, :, ~heard], clean[2][:, :, ~heard])


def check_minus_infinity_of_a_bias(module, kind, device):
    """Such an edge carries nothing, and a receiver all of whose edges are such hears nobody."""
    graph = SMALL
    problem, form = problem_of(graph, device=device, bias=(1, 1)), form_of(kind, graph, True, device)
    src, dst = graph.edge_index[:, (graph.edge_index[1] * graph.num_src + graph.edge_index[0]).argsort()]
    bias = problem.bias.clone()
    off = (dst == 4) | (src == 6)
    bias[..., off.to(device)] = -torch.inf
    keep = ga.convert.from_edge_index(torch.stack([src, dst])[:, ~off], graph.num_dst, graph.num_src)
    fewer = problem._replace(bias=problem.bias[..., ~off.to(device)])
    changed = problem._replace(bias=bias)
    (out, lse), (want, want_lse) = (
        module.forward(changed, form),
        module.forward(fewer, form_of(kind, keep, True, device)),
    )
    assert_exact(out, want)
    assert_exact(lse, want_lse)
    grads = backward_of(module, changed, form, out, lse, *cotangents(out))
    assert all(x.isfinite().all() for x in grads if x is not None)
    assert (grads[4][..., off.to(device)] == 0).all()


def check_strides(module, kind, device):
    """Token-major tensors, heads and samples that are one in memory, and a gradient with none: the same
    numbers.
    """
    graph = SMALL
    form, problem = (
        form_of(kind, graph, device=device),
        problem_of(graph, torch.float32, device, batch=2, kv_heads=2),
    )
    q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = (x[:1, :1].expand(2, 2, -1, -1) for x in (problem.k, problem.v))
    odd = torch.nn.functional.pad(v, (1, 2))[..., 1:-2]
    same = problem._replace(q=q.contiguous(), k=k.contiguous(), v=v.contiguous())
    other = problem._replace(q=q, k=k, v=odd)
    (out, lse), (want, want_lse) = module.forward(other, form), module.forward(same, form)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    ones = torch.ones(1, 1, 1, 1, device=device).expand(out.shape)
    got = backward_of(module, other, form, out, lse, ones)
    for x, y in zip(got[:3], backward_of(module, same, form, out, lse, ones.contiguous())[:3], strict=True):
        assert torch.equal(x, y)


def check_far_apart(module, kind, device):
    """Tokens whose distances are 2^31 numbers and more; the pages between them are never touched."""
    if device == "cuda" and torch.cuda.get_device_properties(0).total_memory < 2**35:
        pytest.skip("needs 9 GB of address space on the GPU")
    graph, shape = patterns.causal(4), (2, 2, 4, 16)
    problem, form = (
        problem_of(graph, torch.float16, device, 2, 2, 2, 16, 16),
        form_of(kind, graph, device=device),
    )
    far = torch.empty(2**32 + 2**12, dtype=torch.float16, device=device).as_strided(
        shape, (128, 64, 2**32 // 3, 1)
    )
    ones = torch.ones(shape, dtype=torch.float16, device=device)

    def results(problem, grad):
        out, lse = module.forward(problem, form)
        return [out, lse, *backward_of(module, problem, form, out, lse, grad)[:3]]

    near = results(problem, ones)
    for which, x in (*zip("qkv", problem[:3], strict=True), ("grad", ones)):
        far.copy_(x)
        found = results(problem, far) if which == "grad" else results(problem._replace(**{which: far}), ones)
        assert all(torch.equal(x, y) for x, y in zip(near, found, strict=True)), which


def check_nothing_to_do(module, kind, device):
    """No samples, no receivers, no senders."""
    for num_dst, num_src, batch in ((70, 45, 0), (0, 5, 1), (5, 0, 1), (0, 0, 1)):
        graph = (
            GRAPHS["irregular"]
            if batch == 0
            else ga.convert.from_edge_index(torch.zeros(2, 0).long(), num_dst, num_src)
        )
        problem, form = (
            problem_of(graph, torch.float32, device, batch=batch),
            form_of(kind, graph, device=device),
        )
        out, lse = module.forward(problem, form)
        assert not out.any()
        assert (lse == -torch.inf).all()
        for x, grad in zip(
            problem[:3], backward_of(module, problem, form, out, lse, torch.ones_like(out)), strict=False
        ):
            assert grad.shape == x.shape
            assert not grad.any()
