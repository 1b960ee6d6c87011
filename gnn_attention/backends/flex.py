"""FlexAttention on our tiles: tiles without an edge are skipped, and full tiles need no mask.

On a CPU it runs forward only and returns no lse; on CUDA it runs forward and backward. FlexAttention compiles
a kernel for each ``mask_mod``, in 3 to 10 seconds. So all graphs share one mask_mod, which reads a table of
bits (``_flex_block_mask``) and takes 1.1 to 1.4 times as long as the graph's own rule. Numbers of tokens are
symbolic. A new kernel is compiled for a call that has another

* dtype, device, number of threads, number of heads, channels, scale, or layout of q, k and v;
* kind of batch (one sample or many) or of graph (it may vary by sample, by head, by both or by neither);
* table size (``_flex_block_mask.TABLE_SIZES``), or a score_mod with other constants or shapes.
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
from gnn_attention.backends._flex_block_mask import Tables
from gnn_attention.backends.backend import REMEDIES, Backend, Capabilities, CompilationError
from gnn_attention.backends.call import AttentionCall
from gnn_attention.backends.cpu.dense_blocks_eager import isolated_rows
from gnn_attention.backends.gpu import flash_varlen
from gnn_attention.graph import memoized
from gnn_attention.score_mods import RelativeBias, ScoreMod, alibi, chain, log_multiplicity, relative_bias

Triple = tuple[Tensor, Tensor, Tensor]

MAX_KERNELS = 128  # Kernels stay in memory; only a loop over new kinds of calls needs more.
MAX_TABLE_BYTES = 4 * 2**30  # The lists of tiles and the table of bits take at most 4 GiB.
MIN_CHANNELS = 16  # Kernels for CUDA need 16 channels; tokens with fewer are padded with zeros.
_FAILED_KERNELS: set[str] = set()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Return ``(out, lse or None)``; raise NotImplementedError if the call cannot be compiled."""
    if call.q.is_meta or 0 in (*call.q.shape[:3], call.k.shape[2]):
        zeros, minus_infinity = isolated_rows(call, call.graph.num_dst)
        return zeros.to(call.q.dtype), minus_infinity if call.with_lse else None
    if call.score_mod is not None:
        _try_score_mod(call)
    device = call.q.device
    needs_lse = call.with_lse or call.sink_logits is not None
    q, k, v = (_pad_for_kernel(x, call.score_mod is None) for x in (call.q, call.k, call.v))
    tables = memoized(_flex_block_mask.make_tables, call.graph, device)
    score_mod = None if call.score_mod is None else _convert_score_mod(call.score_mod, device)
    out, lse = _run_flex((q, k, v), tables, score_mod, call.scale, needs_lse)
    out = out[:, :, : call.graph.num_dst, : call.v.shape[3]]
    return (out, None) if lse is None else call.with_sinks(out, lse[:, :, : call.graph.num_dst])


def unsupported_reason(call: AttentionCall) -> str | None:
    if call.q.is_meta:
        return None
    tensors = (call.q, call.k, call.v) if not torch.compiler.is_compiling() else ()
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        return "FlexAttention does not run under torch.vmap or torch.func.grad; use backend='dense'"
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        return "FlexAttention has no forward-mode derivative; use backend='dense'"
    if call.q.device.type == "cuda":
        message = "FlexAttention on CUDA needs Triton, which is not installed; pip install triton"
        reason = None if _has_triton() else message
    elif torch.compiler.is_compiling():
        # The compiler would fuse the operators around the call into the kernel, which fails.
        reason = "FlexAttention on a CPU does not run inside a compiled program; use backend='tiles'"
    elif torch.is_grad_enabled() and call.score_mod is not None and _try_score_mod(call).requires_grad:
        reason = (
            "it has no backward pass on cpu, and the score_mod has parameters; "
            f"{REMEDIES['backward']}, or use backend='dense'"
        )
    else:
        reason = _cpu_unsupported_reason()
    gib = 0.0 if reason else bytes_needed(call) / 2**30
    limit = MAX_TABLE_BYTES / 2**30
    if gib > limit:
        return f"the lists of tiles would take {gib:.1f} GiB, but the limit is {limit:.0f} GiB"
    return reason


def bytes_needed(call: AttentionCall) -> int:
    """Estimate the bytes of the lists of tiles and of the bit table."""
    return memoized(_flex_block_mask.table_bytes, call.graph, call.q.device)


def _try_score_mod(call: AttentionCall) -> Tensor:
    """Apply the score_mod to the first pair, to check the result and see if it needs a gradient."""
    score = torch.zeros(1, 1, 1, device=call.q.device)
    zero = torch.zeros(1, dtype=torch.int64, device=call.q.device)
    return call.apply_score_mod(score, zero, zero) if call.graph.num_dst and call.graph.num_src else score


@cache
def _cpu_unsupported_reason() -> str | None:
    if not torch.cpu._is_avx2_supported():
        return "FlexAttention on a CPU needs AVX2; use backend='dense'"
    from torch._inductor import config

    compilers = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else (config.cpp.cxx,)
    if any(name and shutil.which(name) for name in compilers):
        return None
    return "FlexAttention on a CPU needs a C++ compiler, such as g++; install one, or use backend='dense'"


@constant
def _has_triton() -> bool:
    """True if Triton can compile for this GPU, or, without a GPU, if Triton is installed."""
    from torch.utils._triton import has_triton, has_triton_package

    return bool(has_triton() if torch.cuda.is_available() else has_triton_package())


def _pad_for_kernel(x: Tensor, may_add_token: bool) -> Tensor:
    """Pad x to the channels that a kernel needs, and to two tokens (one would need another kernel)."""
    # A score_mod must not be called for an added token: its tables may have no entry for that token.
    new_tokens = max(0, 2 - x.shape[2]) if may_add_token else 0
    new_channels = max(0, (1 if x.device.type == "cpu" else MIN_CHANNELS) - x.shape[3])
    return functional.pad(x, (0, new_channels, 0, new_tokens)) if new_tokens or new_channels else x


def _convert_score_mod(score_mod: ScoreMod, device: torch.device) -> ScoreMod:
    """Convert a score_mod's tensors to float32: a kernel cannot convert tensors that it indexes."""
    if isinstance(score_mod, alibi):
        return partial(_add_alibi, _make_tensor(score_mod.slopes, device))
    if isinstance(score_mod, (relative_bias, RelativeBias)):
        return relative_bias(score_mod.table.to(device, torch.float32))
    if isinstance(score_mod, log_multiplicity):
        return partial(_add_logs, score_mod.multiplicity.to(device, torch.float32).log())
    if isinstance(score_mod, chain):
        return partial(_apply_in_order, tuple(_convert_score_mod(mod, device) for mod in score_mod.mods))
    return score_mod


@constant
def _make_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _add_alibi(slopes: Tensor, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return score - slopes[h] * (dst - src).abs()


def _add_logs(logs: Tensor, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return score + (logs[src] if logs.dim() == 1 else logs[dst, src])


def _apply_in_order(
    mods: tuple[ScoreMod, ...], score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    return reduce(lambda score, mod: mod(score, b, h, dst, src), mods, score)


def _run_flex(
    tokens: Triple, tables: Tables, score_mod: ScoreMod | None, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Run FlexAttention compiled on its own, or as part of the program that is being compiled."""
    is_on_cpu = tokens[0].device.type == "cpu"
    kernel = _choose_kernel(tokens[0].device, tokens[0].dtype)
    if torch.compiler.is_compiling():
        return _attention(tokens, tables, score_mod, scale, with_lse, kernel)
    q, k, v = (_mark_dynamic(x.detach() if is_on_cpu else x, 0, 2) for x in tokens)
    table, lists = tables
    lists = tuple(_mark_dynamic(x, *range(x.dim())) for x in lists)
    attention = _compile_attention(torch.get_num_threads() if is_on_cpu else 0)
    run_kernel = partial(attention, (q, k, v), (table, lists), score_mod, scale, with_lse)
    # Kernels for CPUs support no captured scalars or captured tensors of symbolic size, so scalars
    # are constants, and only marked tensors are dynamic. Too many kernels raise an error.
    limits = {"recompile_limit": MAX_KERNELS, "accumulated_recompile_limit": 2 * MAX_KERNELS}
    constants = {"specialize_float": True, "specialize_int": True, "automatic_dynamic_shapes": False}
    config: AbstractContextManager[Any] = torch._dynamo.config.patch({**limits, **constants})
    try:
        with config, torch.set_grad_enabled(torch.is_grad_enabled() and not is_on_cpu):
            try:
                out, lse = run_kernel(kernel)
            except Exception:  # The kernel "FLASH" is experimental and may fail.
                if not kernel:
                    raise
                _FAILED_KERNELS.add(kernel)
                out, lse = run_kernel("")
    except Exception as error:
        raise _translate_error(error) from error
    return out, lse


@constant
def _choose_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return "FLASH" for FlashAttention-4 if it is installed, "" for FlexAttention's own choice."""
    from torch.nn.attention.flex_attention import FlexKernelOptions

    # torch 2.9 cannot choose the kernel.
    if (
        "BACKEND" not in FlexKernelOptions.__annotations__
        or device.type != "cuda"
        or dtype not in flash_varlen.DTYPES
        or "FLASH" in _FAILED_KERNELS
    ):
        return ""
    try:
        spec = importlib.util.find_spec("flash_attn.cute")
    except ImportError:  # The package flash_attn is missing.
        spec = None
    return "FLASH" if spec and torch.cuda.get_device_capability(device)[0] in (9, 10) else ""


def _mark_dynamic(x: Tensor, *axes: int) -> Tensor:
    """Return a view of x whose sizes along ``axes`` are symbolic to the compiler."""
    view = x.view_as(x)
    torch._dynamo.maybe_mark_dynamic(view, list(axes))
    return view


def _translate_error(error: Exception) -> Exception:
    """Explain an error of the compiler or its kernel in terms of the call, or return it unchanged."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError

    if isinstance(error, FailOnRecompileLimitHit):
        return NotImplementedError(
            f"backend 'flex' has compiled {MAX_KERNELS} kernels, one for each kind of call: "
            "pass the numbers of a score_mod as a tensor, or call torch.compiler.reset()"
        )
    if isinstance(error, (TorchDynamoException, InductorError)):
        first_line = str(error).strip().splitlines()[0][:200]
        return CompilationError(
            f"backend 'flex' cannot compile this call ({type(error).__name__}: {first_line}): a score_mod "
            "must be made of pointwise operators and existing tensors; or use backend='dense'"
        )
    if type(error) is RuntimeError and "index out of bounds" in str(error):
        message = str(error).splitlines()[0].split(", ")[-1]
        return IndexError(f"the score_mod reads beyond the end of a tensor: {message}")
    return error


@cache
def _compile_attention(num_threads: int) -> Any:
    """Compile attention; a kernel for CPUs has buffers for this number of threads only."""
    options: dict[str, Any] | None = {"cpp.threads": num_threads} if num_threads else None
    return torch.compile(_attention, fullgraph=True, dynamic=None, options=options)


def _attention(
    tokens: Triple, tables: Tables, score_mod: ScoreMod | None, scale: float, with_lse: bool, kernel: str
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    q, k, v = tokens
    table, lists = tables
    block = _flex_block_mask.block_size(q.device)

    def is_edge(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return _flex_block_mask.is_edge(table, block, b, h, dst, src)

    def apply_score_mod(score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        upcast = score.to(torch.float32)
        dst, src = dst + table[_flex_block_mask.DST_OFFSET], src + table[_flex_block_mask.SRC_OFFSET]
        result = score_mod(upcast, b, h, dst, src).to(torch.float32)  # type: ignore[misc]
        return torch.where(upcast == upcast, result, upcast)  # This expands the result to the score's shape.

    eight_lists: Any = [*lists, None, None, None, None][:8]
    mask = BlockMask((q.shape[2], k.shape[2]), *eight_lists, BLOCK_SIZE=(block, block), mask_mod=is_edge)  # type: ignore[misc]
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
    "FlexAttention, compiled: for score_mods and structured masks",
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
