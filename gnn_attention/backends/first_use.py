"""What "auto" does at the first use of a kernel on a GPU: it looks whether it runs, and whether it is right.

A configuration is what a kernel is compiled for: device, dtype, channels, options; not the graph. One that
cannot be launched is not tried again in this process. On a class of device that no record verified each is
compared once with the formula in float64, at a few receivers. A backend that was named is
taken as it is, and programs are compiled with what was found before.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from gnn_attention._support.dynamo import constant
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, dense, nonfinite, reference, split, triton
from gnn_attention.backends.backend import Backend
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.gpu.devices import device_of
from gnn_attention.backends.plan.decompose import Part

Result = tuple[Tensor, Tensor | None]
Run = Callable[[AttentionCall], Result]
RECEIVERS = 64  # in the middle for the first sample and head, and at the end for the last
TRIED = ("triton", "split", "flex")  # compiled at their first use, or made of what is
# of the call or of memory: no failures of a kernel
OF_THE_CALL = (ValueError, TypeError, IndexError, torch.OutOfMemoryError)
_FAILED: dict[tuple[Any, ...], str] = {}
_RIGHT: set[tuple[Any, ...]] = set()


def configuration(name: str, call: AttentionCall) -> tuple[Any, ...]:
    """What the kernels of a backend are compiled for, as a value; the name, form and device come first."""
    sizes = call.q.shape[1] // call.k.shape[1], call.q.shape[3], call.v.shape[3]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
    options = call.bias is not None, call.dropout > 0, call.sink_logits is not None, call.with_lse, learns
    form = triton.form_name(call) if name == "triton" else ""
    return name, form, call.q.device, call.q.dtype, type(call.score_mod).__name__, *sizes, *options


@constant
def failure(key: tuple[Any, ...]) -> str | None:
    """Why a configuration failed at an earlier use, or None."""
    return _FAILED.get(key)


def run(
    attempt: Callable[[Backend, AttentionCall], Result],
    choose: Callable[[AttentionCall], Backend],
    chosen: Backend,
    call: AttentionCall,
) -> Result:
    """``attempt(chosen, call)``, or what ``choose`` takes instead if that fails; with a warning by name."""
    transformed = torch._C._are_functorch_transforms_active()
    if chosen.name not in TRIED or nonfinite.is_program(call.q) or transformed:
        return attempt(chosen, call)
    key = configuration(chosen.name, call)
    try:
        result = attempt(chosen, call)
        wrong = None if key in _RIGHT else _difference(key, call, result[0])
    except OF_THE_CALL:
        raise
    except Exception as error:  # every compiler and driver has its own
        wrong = f"{type(error).__name__}: {str(error).strip()[:200]}"
    if wrong is None:
        _RIGHT.add(key)
        return result
    _FAILED[key] = wrong
    instead = choose(call)
    kernel = f"{chosen.name} {key[1]}".strip()
    what = f"the kernel {kernel!r} failed on {_named(call.q.device)} in {call.q.dtype} ({wrong})"
    warnings.warn(f"{what}; backend='auto' takes {instead.name!r} from now on", RuntimeWarning, stacklevel=4)
    return run(attempt, choose, instead, call)


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _difference(key: tuple[Any, ...], call: AttentionCall, out: Tensor) -> str | None:
    """How output or gradients differ from the formula; None where they do not, or are not looked at."""
    _, form, *_, learns = key
    if device_of(call.q.device).verified or 0 in (*out.shape, *call.k.shape):
        return None
    kernel = BACKENDS[f"triton-{form}"].run if form and learns else None
    for sample, found in _samples(call, out.detach()):
        for what, error, allowed in _errors(sample, found, kernel):
            if not error <= allowed:
                return f"its {what} differs from the formula by {error:.2g}, where {allowed:.2g} is allowed"
    return None


def _errors(call: AttentionCall, out: Tensor, kernel: Run | None) -> Iterator[tuple[str, float, float]]:
    """Of the output, and of the gradients by a kernel, each with 2 and 3 times what SDPA has in the dtype."""
    plain = AttentionCall(call.q, call.k, call.v, call.graph, call.scale, finite=True)
    runs = (reference.BACKEND.run, _wide(call)), (dense.run, plain), (reference.BACKEND.run, _wide(plain))
    with torch.no_grad():
        exact, sdpa, formula = (run(given)[0] for run, given in runs)
    yield "output", _largest(out - exact), 2 * _unit(sdpa - formula, exact, out.dtype)
    if kernel is not None:
        slopes = [_slopes(run, given) for run, given in ((kernel, call), *runs)]
        for x, found, exact, sdpa, formula in zip("qkv", *slopes, strict=True):
            allowed = 3 * _unit(sdpa - formula, exact, out.dtype)
            yield f"gradient of {x}", _largest(found - exact), allowed


def _slopes(run: Run, call: AttentionCall) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
        out, _ = run(replace(call, q=q, k=k, v=v))
        return torch.autograd.grad(out.square().sum(), (q, k, v))


def _wide(call: AttentionCall) -> AttentionCall:
    return replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())


def _unit(of_sdpa: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """The error of SDPA, or the last place of the largest number, of which TF32 has fewer."""
    short = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return max(_largest(of_sdpa), (2**-10 if short else torch.finfo(dtype).eps) * _largest(exact))


def _samples(call: AttentionCall, out: Tensor) -> list[tuple[AttentionCall, Tensor]]:
    """Calls of one sample and head on half of the receivers that are looked at each, with their outputs."""
    found, count = [], min(RECEIVERS // 2, call.graph.num_dst)
    ends = (
        (0, 0, (call.graph.num_dst - count) // 2),
        (out.shape[0] - 1, out.shape[1] - 1, call.graph.num_dst - count),
    )
    for b, h, first in ends:
        one, rows = call.part(b, h), (first, first + count)
        part = Part(one.graph.rows(*rows), rows, (0, one.graph.num_src), "sample")
        # sinks are those of whole rows
        cut = replace(split.cut(one, part), sink_logits=one.sink_logits, with_lse=False)
        found.append((cut, out[b : b + 1, h : h + 1, slice(*rows)]))
    return found


def _largest(x: Tensor) -> float:
    """inf where x is NaN."""
    return float(x.abs().nan_to_num(nan=torch.inf).max())
