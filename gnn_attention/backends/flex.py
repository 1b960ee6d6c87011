"""FlexAttention on our tiles: tiles without an edge are skipped, full ones need no mask.

On a CPU it runs forward only and returns no lse; on CUDA forward and backward. It compiles a kernel for each
``mask_mod``, in 3 to 10 seconds: here one serves every graph, by looking bits up in a table
(``_flex_block_mask``, 1.1 to 1.4 times the time of the graph's own rule), and lengths are symbols. A kernel
is made anew for another

* dtype, device, number of threads, number of heads, channels, scale, and layout of q, k and v;
* one sample or many; graphs that are the same for all, that differ by head, by sample, or by both;
* size of the table (few sizes: ``_flex_block_mask.CAPACITIES``), and kind of score_mod: other tensors of the
  same shapes are no new kind, other Python numbers are.
"""

import importlib.util
import shutil
from contextlib import AbstractContextManager
from functools import cache, partial, reduce
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from gnn_attention._support.dynamo import constant
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import _flex_block_mask
from gnn_attention.backends.backend import REMEDIES, Backend, Capabilities, CompilationError
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cpu.dense_blocks_eager import isolated_rows
from gnn_attention.backends.gpu import flash_varlen
from gnn_attention.graph import memoized
from gnn_attention.score_mods import RelativeBias, ScoreMod, alibi, chain, log_multiplicity, relative_bias

Triple = tuple[Tensor, Tensor, Tensor]

MOST_KERNELS = 128  # of one process: more are compiled in a loop, and every one stays in memory
MOST_BYTES = 4 * 2**30  # of lists and table
FEWEST_CHANNELS = 16  # of a kernel for CUDA; fewer are filled up with zeros
_REFUSED: set[str] = set()  # kernels that were asked for and failed
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """``(out, lse or None)``; NotImplementedError where the call cannot be compiled."""
    if call.q.is_meta or 0 in (*call.q.shape[:3], call.k.shape[2]):
        nothing, minus_infinity = isolated_rows(call, call.graph.num_dst)
        return nothing.to(call.q.dtype), minus_infinity if call.with_lse else None
    if call.score_mod is not None:
        _first_score(call)
    device, value_dim = call.q.device, call.v.shape[3]
    needs_lse = call.with_lse or call.sink_logits is not None
    q, k, v = (_pad_for_kernel(x, call.score_mod is None) for x in (call.q, call.k, call.v))
    plan = memoized(_flex_block_mask.plan, call.graph, device)
    mod = None if call.score_mod is None else _in_kernel(call.score_mod, device)
    out, lse = _flex((q, k, v), plan, mod, call.scale, needs_lse)
    out = out[:, :, : call.graph.num_dst, :value_dim]
    return (out, None) if lse is None else call.with_sinks(out, lse[:, :, : call.graph.num_dst])


def unsupported_reason(call: AttentionCall) -> str | None:
    if call.q.is_meta:
        return None
    tensors = (call.q, call.k, call.v) if not torch.compiler.is_compiling() else ()
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        return "FlexAttention does not run under torch.vmap or torch.func.grad; take backend='dense'"
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        return "FlexAttention has no forward-mode derivative; take backend='dense'"
    if call.q.device.type == "cuda":
        missing = "FlexAttention on CUDA needs Triton, which is not installed; pip install triton"
        reason = None if _has_triton() else missing
    elif torch.compiler.is_compiling():
        # the compiler would join what a program computes before and after it to the kernel, which cannot be
        reason = "FlexAttention on a CPU does not run inside a compiled program; take backend='tiles'"
    elif torch.is_grad_enabled() and call.score_mod is not None and _first_score(call).requires_grad:
        reason = "it has no backward pass on cpu, and the score_mod has parameters"
        reason = f"{reason}; {REMEDIES['backward']}, or use backend='dense'"
    else:
        reason = _cpu_cannot_compile()
    needed = 0 if reason else bytes_needed(call)
    if needed > MOST_BYTES:
        limit = f"{MOST_BYTES / 2**30:.0f} GiB"
        return f"the lists of tiles would take {needed / 2**30:.1f} GiB, the limit is {limit}"
    return reason


def bytes_needed(call: AttentionCall) -> int:
    """The lists of tiles and the table of bits, which are cached with the graph."""
    return memoized(_flex_block_mask.plan_bytes, call.graph, call.q.device)


def _first_score(call: AttentionCall) -> Tensor:
    """The score_mod at the first pair: its result is checked, and its parameters are seen."""
    score = torch.zeros(1, 1, 1, device=call.q.device)
    zero = torch.zeros(1, dtype=torch.int64, device=call.q.device)
    return call.apply_score_mod(score, zero, zero) if call.graph.num_dst and call.graph.num_src else score


@cache
def _cpu_cannot_compile() -> str | None:
    if not torch.cpu._is_avx2_supported():
        return "FlexAttention on a CPU needs AVX2; take backend='dense'"
    from torch._inductor import config

    names = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else (config.cpp.cxx,)
    if any(name and shutil.which(name) for name in names):
        return None
    return "FlexAttention on a CPU needs a C++ compiler, such as g++; install one, or take backend='dense'"


@constant
def _has_triton() -> bool:
    """Whether FlexAttention's kernels can be compiled; without a GPU at hand, whether Triton is installed."""
    from torch.utils._triton import has_triton, has_triton_package

    return bool(has_triton() if torch.cuda.is_available() else has_triton_package())


def _pad_for_kernel(x: Tensor, may_add_token: bool) -> Tensor:
    """At least two tokens, since one would be a kernel of its own, and as many channels as a kernel needs."""
    # a score_mod must not see another token: its tables may end at the last
    tokens = max(0, 2 - x.shape[2]) if may_add_token else 0
    channels = max(0, (1 if x.device.type == "cpu" else FEWEST_CHANNELS) - x.shape[3])
    return functional.pad(x, (0, channels, 0, tokens)) if tokens or channels else x


def _in_kernel(score_mod: ScoreMod, device: torch.device) -> ScoreMod:
    """The score_mod with its tensors made before: a kernel changes none that it indexes."""
    if isinstance(score_mod, alibi):
        return partial(_add_alibi, _numbers(score_mod.slopes, device))
    if isinstance(score_mod, (relative_bias, RelativeBias)):
        return relative_bias(score_mod.table.to(device, torch.float32))
    if isinstance(score_mod, log_multiplicity):
        return partial(_add_logs, score_mod.multiplicity.to(device, torch.float32).log())
    if isinstance(score_mod, chain):
        return partial(_apply_in_order, tuple(_in_kernel(mod, device) for mod in score_mod.mods))
    return score_mod


@constant
def _numbers(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _add_alibi(slopes: Tensor, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return score - slopes[h] * (dst - src).abs()


def _add_logs(logs: Tensor, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return score + (logs[src] if logs.dim() == 1 else logs[dst, src])


def _apply_in_order(
    mods: tuple[ScoreMod, ...], score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    return reduce(lambda score, mod: mod(score, b, h, dst, src), mods, score)


def _flex(
    tokens: Triple, plan: _flex_block_mask.Plan, score_mod: ScoreMod | None, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """FlexAttention, compiled; where the caller is being compiled, as part of it."""
    on_cpu = tokens[0].device.type == "cpu"
    if torch.compiler.is_compiling():
        flash = _kernel(tokens[0].device, tokens[0].dtype)
        return _attention(*tokens, *plan, score_mod, scale, with_lse, flash)
    q, k, v = (_of_any_size(x.detach() if on_cpu else x, 0, 2) for x in tokens)
    table, lists = plan[0], tuple(_of_any_size(x, *range(x.dim())) for x in plan[1])
    kernel = _compile_kernel(torch.get_num_threads() if on_cpu else 0)
    given, flash = (q, k, v, table, lists, score_mod, scale, with_lse), _kernel(q.device, q.dtype)
    # Python numbers are constants, and tensors keep their shapes unless marked: kernels for CPUs support
    # neither a captured number nor a captured tensor whose size is a symbol. A kernel too many is an error,
    # and not the slow path, as it is by default.
    limits = {"recompile_limit": MOST_KERNELS, "accumulated_recompile_limit": 2 * MOST_KERNELS}
    constants = {"specialize_float": True, "specialize_int": True, "automatic_dynamic_shapes": False}
    rarely: AbstractContextManager[Any] = torch._dynamo.config.patch({**limits, **constants})
    try:
        with rarely, torch.set_grad_enabled(torch.is_grad_enabled() and not on_cpu):
            try:
                out, lse = kernel(*given, flash)
            except Exception:  # experimental
                if not flash:
                    raise
                _REFUSED.add(flash)
                out, lse = kernel(*given, "")
    except Exception as error:
        raise _translate_error(error) from error
    return out, lse


@constant
def _kernel(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel to ask FlexAttention for: "FLASH", of FA4, where it is installed; "": its own choice."""
    from torch.nn.attention.flex_attention import FlexKernelOptions

    # torch 2.9 has no choice of the kernel
    if (
        "BACKEND" not in FlexKernelOptions.__annotations__
        or device.type != "cuda"
        or dtype not in flash_varlen.DTYPES
        or "FLASH" in _REFUSED
    ):
        return ""
    try:
        found = importlib.util.find_spec("flash_attn.cute")
    except ImportError:  # of its parent
        found = None
    return "FLASH" if found and torch.cuda.get_device_capability(device)[0] in (9, 10) else ""


def _of_any_size(x: Tensor, *axes: int) -> Tensor:
    """A view of x (the caller's stays unmarked) whose sizes in these axes are symbols to the compiler."""
    view = x.view_as(x)
    torch._dynamo.maybe_mark_dynamic(view, list(axes))
    return view


def _translate_error(error: Exception) -> Exception:
    """An error of the compiler, or of what it made, in words of the call; others as they are."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError

    if isinstance(error, FailOnRecompileLimitHit):
        advice = "give a score_mod its numbers as a tensor, not as Python numbers that change"
        made = f"{MOST_KERNELS} kernels, one for each kind of call"
        return NotImplementedError(f"backend 'flex' has compiled {made}: {advice}; or torch.compiler.reset()")
    if isinstance(error, (TorchDynamoException, InductorError)):
        first = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        wanted = "a score_mod must be made of pointwise operators and tensors that were made before it"
        what = f"backend 'flex' cannot compile this call ({first})"
        return CompilationError(f"{what}: {wanted}; or take backend='dense'")
    if type(error) is RuntimeError and "index out of bounds" in str(error):
        first = str(error).splitlines()[0].split(", ")[-1]
        return IndexError(f"the score_mod reads beyond the end of a tensor: {first}")
    return error


@cache
def _compile_kernel(threads: int) -> Any:
    """The one compiled function; kernels for CPUs have buffers for so many threads."""
    options: dict[str, Any] | None = {"cpp.threads": threads} if threads else None
    return torch.compile(_attention, fullgraph=True, dynamic=None, options=options)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lists: tuple[Tensor, ...],
    score_mod: ScoreMod | None,
    scale: float,
    with_lse: bool,
    kernel: str = "",
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    block = _flex_block_mask.block_of(q.device)

    def is_edge(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return _flex_block_mask.is_edge(table, block, b, h, dst, src)

    def apply_score_mod(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        wide = score.to(torch.float32)
        dst, src = dst + table[_flex_block_mask.DST_OFFSET], src + table[_flex_block_mask.SRC_OFFSET]
        changed = score_mod(wide, b, h, dst, src).to(torch.float32)  # type: ignore[misc]
        return torch.where(wide == wide, changed, wide)  # of the shape of the score

    eight: Any = [*lists, None, None, None, None][:8]
    mask = BlockMask((q.shape[2], k.shape[2]), *eight, BLOCK_SIZE=(block, block), mask_mod=is_edge)  # type: ignore[misc]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    options |= {"kernel_options": {"BACKEND": kernel}} if kernel else {}
    mod = None if score_mod is None else apply_score_mod
    if not with_lse:
        return flex_attention(q, k, v, mod, mask, **options), None
    out, aux = flex_attention(q, k, v, mod, mask, return_aux=AuxRequest(lse=True), **options)
    return out, aux.lse


BACKEND = Backend(
    "flex",
    run,
    "FlexAttention, compiled: for score_mods and masks of structure",
    unsupported_reason,
    bytes_needed,
    compiled=True,
    recomputes=True,
    capabilities=Capabilities(
        parallel_edges="refused",
        devices=("cpu", "cuda", "meta"),
        dtypes=DTYPES,
        bias=False,
        dropout=False,
        sink_logits="cuda",
        lse="cuda",
        backward="cuda",
        visits_non_edges=True,
        double_backward=False,
    ),
)
