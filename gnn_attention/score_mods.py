"""What an edge adds to its logit: ``score_mod(score, b, h, dst, src) -> score``, FlexAttention's form.

``score`` is the scaled dot product; b, h, dst, src are broadcastable index tensors (h counts query heads,
dst and src are absolute positions). Each is a small object, not a closure, so that layers with one can be
printed, copied and pickled. They are applied after the scale and before the per-edge ``bias``.
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
# Since torch 2.13 a compiler takes objects as arguments of a function whose result is a constant.
COMPILERS_KNOW_OBJECTS = TorchVersion(torch.__version__) >= "2.13"
# A compiler makes a constant of these, among the arguments of a partial.
CONSTANTS = (Tensor, int, float, str, FunctionType)
# how fit_score_mod calls a user's function
FITTED = (single_pairs.map_pairs, single_pairs.call_on_tensors)
# score_mod -> {(device, whether tensors are fake): whether it needs single numbers, None if neither works}
_probed = WeakIdKeyDictionary()


def check_score_mod(score_mod: ScoreMod | None) -> ScoreMod | None:
    """``score_mod`` if it can be called as ``(score, b, h, dst, src)``, or None; else TypeError."""
    # A compiler cannot take a signature, and names a function that does not fit.
    if score_mod is not None and not torch.compiler.is_compiling():
        function = score_mod.forward if isinstance(score_mod, nn.Module) else score_mod
        checks.check_signature("score_mod", function, "score", "b", "h", "dst", "src")
    return score_mod


def fit_score_mod(score_mod: ScoreMod, first: tuple[int, int], like: Tensor) -> ScoreMod:
    """A checked ``score_mod``, or a function that maps it over the pairs if it needs single numbers.

    It is tried once on one pair, that of the positions ``first``.
    """
    is_fake = hasattr(like, "fake_mode")
    if torch.compiler.is_compiling() and not is_fake:
        is_mapped: bool | None = COMPILERS_KNOW_OBJECTS and _is_mapped_by_a_compiler(score_mod, like.device)
        if is_mapped and torch.compiler.is_exporting():
            raise NotImplementedError(
                "torch.export(strict=True) cannot map a score_mod of single numbers over the pairs: "
                "export with strict=False, the default"
            )
    else:
        try:
            tried: dict[Any, bool | None] = _probed.setdefault(score_mod, {})  # type: ignore[no-untyped-call]
        # An object without weak references is tried in every call.
        except TypeError:
            tried = {}
        key = like.device, is_fake
        if key not in tried:
            tried[key] = _needs_single_pairs(score_mod, first, like)
        is_mapped = tried[key]
    # A mapped function is right wherever it runs, also where a transform replaces the tensors that it holds.
    if is_mapped or (is_mapped is None and torch._C._are_functorch_transforms_active()):
        return partial(single_pairs.map_pairs, score_mod)
    return score_mod if is_mapped is False else partial(single_pairs.call_on_tensors, "score_mod", score_mod)


def _is_mapped_by_a_compiler(score_mod: Any, device: torch.device) -> bool:
    # A compiler knows the links of a chain that is made in the program, but not the whole.
    if isinstance(score_mod, chain):
        return any(_is_mapped_by_a_compiler(mod, device) for mod in score_mod.mods)
    # The parts of a method or a partial are constants for a compiler, but the whole is none.
    if isinstance(score_mod, MethodType):
        return _parts_need_mapping(device, score_mod.__func__, "", score_mod.__self__)
    if not isinstance(score_mod, partial):
        return _parts_need_mapping(device, score_mod, "")
    values = [*score_mod.args, *score_mod.keywords.values()]
    are_constants = all(isinstance(x, CONSTANTS) for x in values)
    if not are_constants or not isinstance(score_mod.func, FunctionType):
        return False
    return _parts_need_mapping(device, score_mod.func, " ".join(score_mod.keywords), *values)


@constant
def _parts_need_mapping(device: torch.device, function: Any, keywords: str, *values: Any) -> bool:
    names = keywords.split()
    places = len(values) - len(names)
    named = dict(zip(names, values[places:], strict=True))
    score_mod = partial(function, *values[:places], **named) if values else function
    return bool(_needs_single_pairs(score_mod, (0, 0), torch.empty(0, device=device)))


def _needs_single_pairs(score_mod: Any, first: tuple[int, int], like: Tensor) -> bool | None:
    """Whether a score_mod needs single numbers, by its operators for one pair; None if neither works."""
    if isinstance(score_mod, chain):
        links = [_needs_single_pairs(mod, first, like) for mod in score_mod.mods]
        return None if None in links and True not in links else True in links
    if _is_known(score_mod):
        return False
    check_score_mod(score_mod)
    # torch.export keeps the modules that are called on a stack, from which a call that fails is not removed.
    function = score_mod.forward if isinstance(score_mod, nn.Module) else score_mod

    def probe() -> bool | None:
        fake_mode = getattr(like, "fake_mode", nullcontext())
        # Random numbers that the score_mod draws here are not those of the call.
        with fake_mode, torch.no_grad(), torch.random.fork_rng(devices=[]):
            ends = [torch.full((1, 1, 1, 1), at, device=like.device) for at in (0, 0, *first)]
            score = torch.zeros(1, 1, 1, 1, device=like.device)
            scores = lambda mod: mod(score, *ends).expand(1, 1, 1, 1)  # noqa: E731
            return single_pairs.needs_single_pairs(scores, function, [score, *ends])

    return single_pairs.call_in_thread(probe)


def _is_known(score_mod: Any) -> bool:
    """True for a score_mod of this library or of transformers, if all mods that it holds are known."""
    inner: tuple[Any, ...] = ()
    if isinstance(score_mod, chain):
        inner = score_mod.mods
    elif isinstance(score_mod, partial) and score_mod.func not in FITTED:
        inner = tuple(filter(callable, score_mod.args))
    return single_pairs.broadcasts(score_mod) and all(map(_is_known, inner))


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi: ``2^(-8 i / n)`` for i = 1 .. n where n is a power of two; else those of the power
    below, then every second one of the power above.

    Source: Press et al. 2022, "Train Short, Test Long" (arXiv 2108.12409), section 3 and its published code.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    num_heads = checks.size("num_heads", num_heads, 1)
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    if below < num_heads:
        slopes += alibi_slopes(2 * below)[0::2][: num_heads - below]
    return tuple(slopes)


def _hash_field(value: object) -> int:
    """A hash by the fields as they are: Dynamo before torch 2.12 hashes a value that is not filled yet."""
    return hash((type(value), *vars(value).values()))


@dataclass(frozen=True)
class alibi:  # noqa: N801 (a value used like the function it stands for)
    """Attention with linear biases: ``score - slope_h * |dst - src|``.

    Source: Press et al. 2022 (arXiv 2108.12409); here distances to later senders are positive, too.

    >>> h, dst, src = torch.tensor(0), torch.tensor(5), torch.tensor(3)
    >>> alibi(alibi_slopes(4))(torch.tensor(1.0), h, h, dst, src)
    tensor(0.5000)
    """

    slopes: tuple[float, ...]
    __hash__ = _hash_field

    def __post_init__(self) -> None:
        if not isinstance(self.slopes, (tuple, list)):
            raise TypeError(
                f"slopes must be those of alibi_slopes(num_heads), got {checks.quote(self.slopes)}"
            )
        slopes = tuple(checks.number("each of slopes", slope) for slope in self.slopes)
        object.__setattr__(self, "slopes", slopes)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        slopes = torch.tensor(self.slopes, dtype=score.dtype, device=score.device)
        return score - slopes[h] * (dst - src).abs()


@dataclass(frozen=True)
class softcap:  # noqa: N801
    """Scores bent into (-cap, cap): ``cap * tanh(score / cap)``.

    Source: Gemma 2 (arXiv 2408.00118), section 2.

    >>> zero = torch.tensor(0)
    >>> softcap(2.0)(torch.tensor(100.0), zero, zero, zero, zero)
    tensor(2.)
    """

    cap: float
    __hash__ = _hash_field

    def __post_init__(self) -> None:
        checks.number("cap", self.cap, positive=True)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


@dataclass(frozen=True, eq=False)
class log_multiplicity:  # noqa: N801
    """A sender (or an edge) that counts m times: ``score + log m``.

    ``multiplicity`` is ``[src]``, one number for each sender, or ``[dst, src]``, one for each pair. A graph
    is a set; this makes it a multigraph: a softmax over m equal edges is that over one plus log m.

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
        logs = self.multiplicity.to(score.device, score.dtype).log()
        return score + (entries(logs, src) if logs.dim() == 1 else entries(logs, dst, src))


@dataclass(frozen=True, eq=False)
class relative_bias:  # noqa: N801
    """A number for each head and distance: ``score + table[h, clamp(dst - src, -reach, reach) + reach]``.

    ``table`` is ``[heads, 2 * reach + 1]``; its middle column is distance 0, the ends all beyond.

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
    """A learned :class:`relative_bias`: ``table [heads, 2 * reach + 1]`` is a parameter, zero at first."""

    def __init__(self, num_heads: int, reach: int) -> None:
        """``reach``: the largest distance with an entry of its own."""
        super().__init__()
        num_heads, reach = checks.size("num_heads", num_heads, 1), checks.size("reach", reach)
        self.table = nn.Parameter(torch.zeros(num_heads, 2 * reach + 1))

    def reset_parameters(self) -> None:
        """Set the table to zero."""
        nn.init.zeros_(self.table)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """Add the entry of the distance."""
        return relative_bias(self.table)(score, b, h, dst, src)


class chain(nn.Module):  # noqa: N801
    """Several score_mods, applied from left to right; a module, so that a learned link is trained.

    >>> zero = torch.tensor(0)
    >>> chain(softcap(1.0), softcap(1.0))(torch.tensor(100.0), zero, zero, zero, zero)
    tensor(0.7616)
    """

    def __init__(self, *mods: ScoreMod) -> None:
        """``chain()`` alone changes nothing. TypeError for a link that cannot be called."""
        super().__init__()
        for mod in mods:
            if not callable(mod):
                raise TypeError(f"every link must be a score_mod, got {type(mod).__name__}")
        self.mods = mods
        self.learned = nn.ModuleList(mod for mod in mods if isinstance(mod, nn.Module))

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.mods))})"

    def forward(self, score: Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        """Apply each."""
        for mod in self.mods:
            score = mod(score, b, h, dst, src)
        return score
