"""Functions that change the score of an edge: ``score_mod(score, b, h, dst, src) -> score``.

FlexAttention accepts the same functions. ``score`` is the scaled dot product; b, h, dst and src are index
tensors (h is the query head, dst and src are absolute positions). Score_mods are applied before
``bias``. Those below are objects, not closures, so that they can be printed, copied and pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakIdKeyDictionary

from gnn_attention._support import checks, edge_checks, single_pairs
from gnn_attention._support.deterministic_index import entries
from gnn_attention._support.dynamo import constant
from gnn_attention._support.shapes import Tensor

__all__ = ["RelativeBias", "ScoreMod", "alibi", "alibi_slopes", "chain"]
__all__ += ["log_multiplicity", "relative_bias", "softcap"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Since torch 2.13 a compiled program may pass objects to a function marked `constant`.
SUPPORTS_CONSTANT_OBJECTS = TorchVersion(torch.__version__) >= "2.13"
# In a compiled program, the arguments of a partial are constants if they have these types.
CONSTANT_TYPES = (Tensor, int, float, str, FunctionType)
# fit_score_mod calls a user's function through one of these wrappers.
WRAPPERS = (single_pairs.map_pairs, single_pairs.call_on_tensors)
# This maps a score_mod to {(device, is_fake): result of _supports_only_scalars}.
_probes = WeakIdKeyDictionary()


def check_score_mod(score_mod: ScoreMod | None) -> ScoreMod | None:
    """Return ``score_mod``; TypeError unless it is None or takes ``(score, b, h, dst, src)``."""
    # A compiled program cannot read signatures, but the compiler reports a wrong call clearly.
    if score_mod is not None and not torch.compiler.is_compiling():
        function = score_mod.forward if isinstance(score_mod, nn.Module) else score_mod
        checks.check_signature("score_mod", function, "score", "b", "h", "dst", "src")
    return score_mod


def fit_score_mod(score_mod: ScoreMod, pair: tuple[int, int], query: Tensor) -> ScoreMod:
    """Return ``score_mod``, or a function that maps it over all pairs if it supports only scalars.

    To find out, ``score_mod`` is called on one ``pair`` of positions, on the device of ``query``.
    """
    is_fake = hasattr(query, "fake_mode")
    if torch.compiler.is_compiling() and not is_fake:
        needs_mapping: bool | None = SUPPORTS_CONSTANT_OBJECTS and _needs_mapping(score_mod, query.device)
        if needs_mapping and torch.compiler.is_exporting():
            raise NotImplementedError(
                "torch.export(strict=True) cannot map a score_mod over pairs: export with strict=False"
            )
    else:
        try:
            results: dict[Any, bool | None] = _probes.setdefault(score_mod, {})  # type: ignore[no-untyped-call]
        # An object that cannot be weakly referenced is probed in every call.
        except TypeError:
            results = {}
        key = query.device, is_fake
        if key not in results:
            results[key] = _supports_only_scalars(score_mod, pair, query)
        needs_mapping = results[key]
    # A mapped function is correct even where a transform replaces the tensors that it holds.
    if needs_mapping or (needs_mapping is None and torch._C._are_functorch_transforms_active()):
        return partial(single_pairs.map_pairs, score_mod)
    is_plain = needs_mapping is False
    return score_mod if is_plain else partial(single_pairs.call_on_tensors, "score_mod", score_mod)


def _needs_mapping(score_mod: Any, device: torch.device) -> bool:
    # A chain, method or partial that a compiled program makes is not a constant, but its parts are.
    if isinstance(score_mod, chain):
        return any(_needs_mapping(mod, device) for mod in score_mod.mods)
    if isinstance(score_mod, MethodType):
        return _function_needs_mapping(device, score_mod.__func__, "", score_mod.__self__)
    if not isinstance(score_mod, partial):
        return _function_needs_mapping(device, score_mod, "")
    values = [*score_mod.args, *score_mod.keywords.values()]
    are_constants = all(isinstance(x, CONSTANT_TYPES) for x in values)
    if not are_constants or not isinstance(score_mod.func, FunctionType):
        return False
    return _function_needs_mapping(device, score_mod.func, " ".join(score_mod.keywords), *values)


@constant
def _function_needs_mapping(device: torch.device, function: Any, keywords: str, *values: Any) -> bool:
    names = keywords.split()
    num_positional = len(values) - len(names)
    keyword_values = dict(zip(names, values[num_positional:], strict=True))
    score_mod = partial(function, *values[:num_positional], **keyword_values) if values else function
    return bool(_supports_only_scalars(score_mod, (0, 0), torch.empty(0, device=device)))


def _supports_only_scalars(score_mod: Any, pair: tuple[int, int], query: Tensor) -> bool | None:
    """Return True if a score_mod needs scalars, False if it does not, None if it fails either way."""
    if isinstance(score_mod, chain):
        results = [_supports_only_scalars(mod, pair, query) for mod in score_mod.mods]
        return None if None in results and True not in results else True in results
    if _is_known(score_mod):
        return False
    check_score_mod(score_mod)
    # torch.export pushes a called module on a stack, from which a failed call does not remove it.
    function = score_mod.forward if isinstance(score_mod, nn.Module) else score_mod

    def probe() -> bool | None:
        fake_mode = getattr(query, "fake_mode", nullcontext())
        # A score_mod that draws random numbers must not advance the call's generator.
        with fake_mode, torch.no_grad(), torch.random.fork_rng(devices=[]):
            indices = [torch.full((1, 1, 1, 1), i, device=query.device) for i in (0, 0, *pair)]
            score = torch.zeros(1, 1, 1, 1, device=query.device)
            evaluate_pair = lambda mod: mod(score, *indices).expand(1, 1, 1, 1)  # noqa: E731
            return single_pairs.needs_single_pairs(evaluate_pair, function, [score, *indices])

    return single_pairs.call_in_thread(probe)


def _is_known(score_mod: Any) -> bool:
    """Return True if a score_mod and its parts all come from this library or from transformers."""
    parts: tuple[Any, ...] = ()
    if isinstance(score_mod, chain):
        parts = score_mod.mods
    elif isinstance(score_mod, partial) and score_mod.func not in WRAPPERS:
        parts = tuple(filter(callable, score_mod.args))
    return single_pairs.broadcasts(score_mod) and all(map(_is_known, parts))


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi: ``2^(-8 i / n)`` for heads i = 1 .. n, if n is a power of two.

    For other n, the slopes for the next lower power are followed by every second slope for the next higher.

    Source: Press et al. 2022, "Train Short, Test Long" (arXiv 2108.12409), section 3 and its published code.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    num_heads = checks.size("num_heads", num_heads, 1)
    lower_power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / lower_power) for i in range(1, lower_power + 1)]
    if lower_power < num_heads:
        slopes += alibi_slopes(2 * lower_power)[0::2][: num_heads - lower_power]
    return tuple(slopes)


def _hash_fields(value: object) -> int:
    """Hash the fields that are set, because Dynamo before torch 2.12 hashes unfinished objects."""
    return hash((type(value), *vars(value).values()))


@dataclass(frozen=True)
class alibi:  # noqa: N801 (it is used like a function)
    """Attention with linear biases: ``score - slope_h * |dst - src|``.

    Source: Press et al. 2022 (arXiv 2108.12409). The distance to a later sender is also positive.

    >>> h, dst, src = torch.tensor(0), torch.tensor(5), torch.tensor(3)
    >>> alibi(alibi_slopes(4))(torch.tensor(1.0), h, h, dst, src)
    tensor(0.5000)
    """

    slopes: tuple[float, ...]
    __hash__ = _hash_fields

    def __post_init__(self) -> None:
        if not isinstance(self.slopes, (tuple, list)):
            raise TypeError(f"slopes must be a list or alibi_slopes(n), got {checks.quote(self.slopes)}")
        slopes = tuple(checks.number("each entry of slopes", slope) for slope in self.slopes)
        object.__setattr__(self, "slopes", slopes)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        slopes = torch.tensor(self.slopes, dtype=score.dtype, device=score.device)
        return score - slopes[h] * (dst - src).abs()


@dataclass(frozen=True)
class softcap:  # noqa: N801
    """Bound scores to (-cap, cap) by ``cap * tanh(score / cap)``.

    Source: Gemma 2 (arXiv 2408.00118), section 2.

    >>> zero = torch.tensor(0)
    >>> softcap(2.0)(torch.tensor(100.0), zero, zero, zero, zero)
    tensor(2.)
    """

    cap: float
    __hash__ = _hash_fields

    def __post_init__(self) -> None:
        checks.number("cap", self.cap, positive=True)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


@dataclass(frozen=True, eq=False)
class log_multiplicity:  # noqa: N801
    """Count a sender, or an edge, m times: ``score + log m``.

    ``multiplicity`` is ``[src]``, one count for each sender, or ``[dst, src]``, one for each pair.
    One edge with ``+ log m`` can replace the m parallel edges of a multigraph.

    >>> zero, twice = torch.tensor(0), log_multiplicity(torch.tensor([2.0]))
    >>> twice(torch.tensor(0.0), zero, zero, zero, zero)
    tensor(0.6931)
    """

    multiplicity: Tensor

    def __post_init__(self) -> None:
        checks.instance("multiplicity", self.multiplicity, Tensor)
        if self.multiplicity.dim() not in (1, 2):
            raise ValueError(f"multiplicity must be [src] or [dst, src], got {list(self.multiplicity.shape)}")

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        log_m = self.multiplicity.to(score.device, score.dtype).log()
        return score + (entries(log_m, src) if log_m.dim() == 1 else entries(log_m, dst, src))


@dataclass(frozen=True, eq=False)
class relative_bias:  # noqa: N801
    """Add ``table[h, clamp(dst - src, -reach, reach) + reach]``, a scalar for each head and distance.

    ``table`` is ``[heads, 2 * reach + 1]``. Distances beyond ``reach`` use the first or last entry.

    Source: Shaw et al. 2018 (arXiv 1803.02155), section 3.2 (clipping), with a scalar for each head as in T5
        (arXiv 1910.10683).

    >>> h, dst, src = torch.tensor(0), torch.tensor(1), torch.tensor(0)
    >>> relative_bias(torch.tensor([[-1.0, 0.0, 7.0]]))(torch.tensor(0.0), h, h, dst, src)
    tensor(7.)
    """

    table: Tensor

    def __post_init__(self) -> None:
        edge_checks.floats("table", self.table, "[heads, 2 * reach + 1]")
        if self.table.dim() != 2 or self.table.shape[1] % 2 == 0:
            raise ValueError(f"table must be [heads, 2 * reach + 1], got {list(self.table.shape)}")

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        reach = self.table.shape[-1] // 2
        column = (dst - src).clamp(-reach, reach) + reach
        return score + entries(self.table.to(score.device, score.dtype), h, column)


class RelativeBias(nn.Module):
    """A learned :class:`relative_bias`: the parameter ``table [heads, 2 * reach + 1]`` starts at 0."""

    def __init__(self, num_heads: int, reach: int) -> None:
        """``reach`` is the largest distance with its own entry."""
        super().__init__()
        num_heads, reach = checks.size("num_heads", num_heads, 1), checks.size("reach", reach)
        self.table = nn.Parameter(torch.zeros(num_heads, 2 * reach + 1))

    def reset_parameters(self) -> None:
        """Set the table to zero."""
        nn.init.zeros_(self.table)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """Add the table's entry for the head and distance."""
        return relative_bias(self.table)(score, b, h, dst, src)


class chain(nn.Module):  # noqa: N801
    """Apply score_mods from left to right. A chain is a module, so that its parameters are trained.

    >>> zero = torch.tensor(0)
    >>> chain(softcap(1.0), softcap(1.0))(torch.tensor(100.0), zero, zero, zero, zero)
    tensor(0.7616)
    """

    def __init__(self, *mods: ScoreMod) -> None:
        """``chain()`` is the identity. Raises TypeError for a link that cannot be called."""
        super().__init__()
        for mod in mods:
            if not callable(mod):
                raise TypeError(f"every link must be a score_mod, got {type(mod).__name__}")
        self.mods = mods
        self.learned = nn.ModuleList(mod for mod in mods if isinstance(mod, nn.Module))

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.mods))})"

    def forward(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """Apply each score_mod to the score."""
        for mod in self.mods:
            score = mod(score, b, h, dst, src)
        return score
