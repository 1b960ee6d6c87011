"""torch's flash attention over packed tokens, with the formula in the place of its two calls."""

from itertools import pairwise

import pytest
import torch
from support.bounds import assert_exact

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends.gpu import flash_varlen
from gnn_attention.backends.gpu.flash_varlen import Sequences, attention

WINDOWS = {
    "causal": ((-1, 0), patterns.causal),
    "full": ((-1, -1), patterns.full),
    "window": ((3, 0), lambda n: patterns.window(n, 4)),
    "both sides": ((2, 1), lambda n: patterns.window(n, 3) | patterns.window(n, 2).T),
}


def weights(q, k, numbers, scale):
    """Logits of one sequence, -inf where there is no edge."""
    dst, src = torch.arange(q.shape[0]).unsqueeze(1), torch.arange(k.shape[0])
    left, right = (side if side >= 0 else 10**6 for side in numbers[2:4])
    hidden = (dst - src > left) | (src - dst > right)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(hidden, -torch.inf)


def spans(bounds):
    sides = [[slice(start, stop) for start, stop in pairwise(ends.tolist())] for ends in bounds]
    return zip(*sides, strict=True)


def forward_kernel(q, k, v, bounds, numbers, scale):
    """As the kernel: what hides behind weight 0 is multiplied by it."""
    assert q.dim() == k.dim() == v.dim() == 3
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert q.shape[2] % 8 == 0
    assert all(x.stride(2) == 1 for x in (q, k, v))
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    for dst, src in spans(bounds):
        assert dst.stop - dst.start <= numbers[0]
        assert src.stop - src.start <= numbers[1]
        logits = weights(q[dst], k[src], numbers, scale)
        value = v[src].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[dst] = torch.einsum("hij,jhd->ihd", logits.softmax(-1), value)
        lse[:, dst] = logits.logsumexp(-1).nan_to_num(torch.inf, torch.inf, torch.inf)
    return out, lse


def backward_kernel(tensors, lse, bounds, numbers, scale):
    """As the kernel: from lse and ``delta = sum(grad_out * out)``."""
    grad, q, k, v, out = tensors
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for dst, src in spans(bounds):
        p = (weights(q[dst], k[src], numbers, scale) - lse[:, dst].unsqueeze(-1)).exp()
        key, value = (x[src].repeat_interleave(group, 1) for x in (k, v))
        delta = (grad[dst] * out[dst]).sum(-1).T.unsqueeze(-1)
        slope = p * (torch.einsum("ihd,jhd->hij", grad[dst], value) - delta) * scale
        dq[dst] += torch.einsum("hij,jhd->ihd", slope, key)
        for total, weight, x in ((dk, slope, q), (dv, p, grad)):
            each = torch.einsum("hij,ihd->jhd", weight, x[dst])
            total[src] += each.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.fixture(autouse=True)
def formulas(monkeypatch):
    """In the place of the kernel."""
    monkeypatch.setattr(flash_varlen, "_forward_kernel", forward_kernel)
    monkeypatch.setattr(flash_varlen, "_backward_kernel", backward_kernel)


def qkv(tokens, *, batch=2, heads=4, kv_heads=2, dim=12, value_dim=9, src=None):
    generator = torch.Generator().manual_seed(2)
    sizes = ((heads, tokens, dim), (kv_heads, src or tokens, dim), (kv_heads, src or tokens, value_dim))
    options = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    return [torch.randn(batch, *size, **options) for size in sizes]


def packed(lengths, window):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Sequences(bounds, bounds, (max(lengths), max(lengths)), window)


def documents(lengths, kind):
    """The same as a graph."""
    mask = torch.block_diag(*(WINDOWS[kind][1](n).mask().float() for n in lengths)).bool()
    return ga.convert.from_mask(mask)


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (12, 9), (8, 24)])
def test_equal_to_the_reference(kind, batch, dim, value_dim):
    """Output, lse, and the gradients of a function of both; then of each alone."""
    lengths = [5, 1, 8]
    given = qkv(14, batch=batch, dim=dim, value_dim=value_dim)
    graph = documents(lengths, kind)
    out, lse = attention(*given, packed(lengths, WINDOWS[kind][0]), 0.3)
    exact, info = ga.attend(*given, graph, scale=0.3, backend="reference", return_info=True)
    assert_exact(out, exact)
    assert_exact(lse, info.lse)
    for loss, other in (
        (out.sin().sum() + lse.cos().sum(), exact.sin().sum() + info.lse.cos().sum()),
        (out.sin().sum(), exact.sin().sum()),
        (lse.cos().sum(), info.lse.cos().sum()),
    ):
        options = {"retain_graph": True, "materialize_grads": True}
        for a, b in zip(*(torch.autograd.grad(x, given, **options) for x in (loss, other)), strict=True):
            assert_exact(a, b)


@pytest.mark.parametrize("batch", [1, 2])
def test_more_senders_than_receivers(batch):
    """A full rectangle."""
    given = qkv(5, batch=batch, src=11)
    bounds = (torch.tensor([0, count], dtype=torch.int32) for count in (5, 11))
    sequences = Sequences(*bounds, (5, 11), (-1, -1))
    out, _ = attention(*given, sequences, 0.3)
    exact = ga.attend(*given, patterns.cross(5, 11), scale=0.3, backend="reference")
    assert_exact(out, exact)
    for a, b in zip(*(torch.autograd.grad(x.sin().sum(), given) for x in (out, exact)), strict=True):
        assert_exact(a, b)


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
def test_what_is_not_finite_stays_with_who_hears_it(kind, value, where):
    """Other outputs, and gradients of a loss over them, are those without it."""
    graph = documents([5, 1, 8], kind)
    reached = graph.mask()[:, 8] if where else torch.arange(14) == 8
    untouched = ~graph.mask()[reached].any(0)
    results = []
    for poison in (None, value):
        given = [x.detach().clone() for x in qkv(14)]
        if poison is not None:
            given[where][:, :, 8, 3] = poison
        given = [x.requires_grad_() for x in given]
        out, lse = attention(*given, packed([5, 1, 8], WINDOWS[kind][0]), 0.3)
        loss = out[:, :, ~reached].sum() + lse[:, :, ~reached].sum()
        grads = torch.autograd.grad(loss, given)
        results.append((out[:, :, ~reached], grads[1][:, :, untouched], grads[2][:, :, untouched]))
    assert_exact(*results)
    if value != value:
        assert out.isnan().any(-1)[0, 0].tolist() == reached.tolist()


def test_a_nan_in_a_full_sequence_is_told_by_lse():
    """The kernel says inf."""
    q, k, v = (x.detach() for x in qkv(14))
    q[:, :, 3] = torch.nan
    out, lse = attention(q, k, v, packed([5, 1, 8], (-1, -1)), 0.3)
    assert out.isnan().all(-1)[0, 0].tolist() == lse.isnan()[0, 0].tolist() == [i == 3 for i in range(14)]


# torch 2.15 on its own copies
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operators_are_told_to_torch_as_they_are():
    """Schema, shapes, autograd and dispatch, in torch's own words."""
    given, bounds = qkv(14, dim=8, value_dim=8), torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    given = [x.detach().float().requires_grad_() for x in given]
    arguments = *given, [bounds, bounds], [8, 8, -1, 0, 1], 0.3
    torch.library.opcheck(torch.ops.gnn_attention.flash_sequences, arguments)


def test_errors():
    """No channel left for the gradient of lse; no second derivative."""
    given = qkv(6, batch=1, heads=1, kv_heads=1, dim=256, value_dim=256)
    _, lse = attention(*given, packed([6], (-1, 0)), 1.0)
    message = "a channel more than the 256 of torch's flash attention, v has 256"
    with pytest.raises(NotImplementedError, match=message):
        lse.sum().backward()
    given = qkv(6)
    out, _ = attention(*given, packed([6], (-1, 0)), 1.0)
    (slope,) = torch.autograd.grad(out.sin().sum(), given[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives do not pass"):
        slope.sum().backward()


def test_the_calls_of_the_kernel_are_what_this_torch_takes(monkeypatch):
    """Both, without numbers: names, order and kinds of arguments, shapes of results."""
    monkeypatch.undo()
    q = torch.empty(14, 4, 16, device="meta", dtype=torch.float16)
    k, bounds = q[:, :2], torch.zeros(4, dtype=torch.int32, device="meta")
    numbers = [8, 8, 3, 0, 1]
    out, lse = flash_varlen._forward_kernel(q, k, k, [bounds, bounds], numbers, 0.3)
    assert (out.shape, lse.shape) == (q.shape, (4, 14))
    grads = flash_varlen._backward_kernel((q, q, k, k, out), lse, [bounds, bounds], numbers, 0.3)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
