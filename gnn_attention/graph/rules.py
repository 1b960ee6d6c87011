"""Rules made from rules: what the operators of a graph do to ``rule(b, h, dst, src)``.

They are functions of this module bound by ``functools.partial``, not closures, so that a graph can be
pickled; the four named parameters that FlexAttention and Hugging Face expect remain.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gnn_attention._support import single_pairs
from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph.intervals.arithmetic import evaluate
from gnn_attention.graph.intervals.table_bounds import in_boxes
from gnn_attention.graph.intervals.values import Interval

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# after the keys of a list, so that every search ends inside the table
LAST_KEY = torch.tensor([torch.iinfo(torch.int64).max], device="cpu")


def everyone(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst >= 0) & (src >= 0)


def no_pair(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return (dst < 0) & (src < 0)


def causal(b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return src <= dst


def or_(left: Rule, right: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return evaluate(left, b, h, dst, src) | evaluate(right, b, h, dst, src)


def and_(left: Rule, right: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return evaluate(left, b, h, dst, src) & evaluate(right, b, h, dst, src)


def minus(left: Rule, right: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return evaluate(left, b, h, dst, src) & ~evaluate(right, b, h, dst, src)


def xor(left: Rule, right: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return evaluate(left, b, h, dst, src) ^ evaluate(right, b, h, dst, src)


def not_(inner: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return ~evaluate(inner, b, h, dst, src)


def transposed(inner: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return inner(b, h, src, dst)


def shifted(inner: Rule, start: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return inner(b, h, dst + start, src)


def of_tokens(
    inner: Rule, of_dst: int | Tensor, of_src: int | Tensor, b: Tensor, h: Tensor, dst: Tensor, src: Tensor
) -> Tensor:
    """The rule of rows that stand for tokens: for those from a number on, or those in a table."""
    return inner(b, h, _token(of_dst, dst), _token(of_src, src))


def _token(tokens: int | Tensor, row: Tensor) -> Tensor:
    return row + tokens if isinstance(tokens, int) else tokens.to(row.device)[row]


def pinned(inner: Rule, batch: int, head: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    return inner(torch.full_like(b, batch), torch.full_like(h, head), dst, src)


def is_listed(keys: Tensor, num_src: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    if isinstance(dst, Interval):
        return in_boxes(keys.cpu(), num_src, dst, src)
    key = dst * num_src + src
    table = keys.to(key.device)
    return table[torch.searchsorted(table, key)] == key


def look_up(table: Tensor, b: Tensor, h: Tensor, *index: Tensor) -> Tensor:
    """``table[b, h, *index]``, where it has such axes (heads 1 = the same for all), at the tokens' device."""
    here, extra = table.to(index[0].device), table.dim() - len(index)
    if extra == 2:
        return here[(b, h % table.shape[1], *index)]
    return here[(h, *index)] if extra else here[index]


def on_device(part: Any, device: torch.device) -> Any:
    """Return a rule, or a value bound to one, with all of its tables on ``device``.

    FlexAttention cannot compile a ``mask_mod`` that copies a table from another device.

    >>> table = torch.tensor([0, 0, 1])
    >>> on_device(partial(past, partial(look_up, table)), torch.device("meta")).args[0].args[0].device
    device(type='meta')
    """
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, partial):
        arguments = (on_device(argument, device) for argument in part.args)
        return partial(part.func, *arguments, **{k: on_device(v, device) for k, v in part.keywords.items()})
    return tuple(on_device(entry, device) for entry in part) if type(part) is tuple else part


def chosen(table: Tensor, height: int, width: int, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """The rule of a table with a row for ``height`` receivers each, and a column for ``width`` senders."""
    return look_up(table, b, h, dst // height, src // width)


def past(rule: Rule, only: bool = True) -> Rule:
    return partial(and_, rule, causal) if only else rule


def map_pairs(rule: Rule, b: Tensor, h: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """A rule that is written for single numbers, on all pairs at once: no transform sees a graph's edges."""
    if isinstance(dst, Interval):
        return evaluate(rule, b, h, dst, src)
    if dst.dim() == 0 == src.dim():
        return rule(b, h, dst, src)
    return single_pairs.call_apart(single_pairs.map_pairs, rule, b, h, dst, src)


def check_signature(rule: object) -> None:
    """TypeError unless ``rule`` takes four positional parameters."""
    expected = "rule must be a function rule(b, h, dst, src) -> bool tensor"
    if not callable(rule):
        raise TypeError(f"{expected}, got {type(rule).__name__}")
    try:
        parameters = inspect.signature(rule).parameters.values()
    except ValueError:
        raise TypeError(f"{expected}, got the builtin {quoted(rule)}") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    if len(needed) != 4:
        got = ", ".join(map(str, parameters))
        raise TypeError(f"rule must take four named positional parameters (b, h, dst, src), got ({got})")
