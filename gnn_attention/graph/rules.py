"""Rules made from rules: what the operators of a graph do to ``rule(b, h, dst, src)``.

They are functions of this module bound by ``functools.partial``, not closures, so that a graph can be
pickled; the four named parameters that FlexAttention and Hugging Face expect remain.
"""

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gnn_attention._support import single_pairs
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Tensor
from gnn_attention.graph.intervals.table_bounds import in_boxes
from gnn_attention.graph.intervals.values import Interval

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# tokens as a tensor, or as a range of them
Token = Any
# (batch, heads, num_dst, num_src), with 1 where the graph does not vary
Shape = tuple[int, int, int, int]
# after the keys of a list, so that every search ends inside the table
LAST_KEY = torch.tensor([torch.iinfo(torch.int64).max], device="cpu")


def all_pairs(b: Token, h: Token, dst: Token, src: Token) -> Any:
    return (dst >= 0) & (src >= 0)


def no_pair(b: Token, h: Token, dst: Token, src: Token) -> Any:
    return (dst < 0) & (src < 0)


def causal(b: Token, h: Token, dst: Token, src: Token) -> Any:
    return src <= dst


def difference(left: Any, right: Any) -> Any:
    return left & ~right


def combine(
    join: Callable[..., Tensor], rules: tuple[Rule, ...], b: Token, h: Token, dst: Token, src: Token
) -> Any:
    return join(*(rule(b, h, dst, src) for rule in rules))


def transposed(inner: Rule, b: Token, h: Token, dst: Token, src: Token) -> Any:
    return inner(b, h, src, dst)


def of_tokens(
    inner: Rule, of_dst: int | Tensor, of_src: int | Tensor, b: Token, h: Token, dst: Token, src: Token
) -> Any:
    """The rule of rows that stand for tokens: for those from a number on, or those in a table."""
    return inner(b, h, _token_of_row(of_dst, dst), _token_of_row(of_src, src))


def _token_of_row(tokens: int | Tensor, row: Token) -> Any:
    return row + tokens if isinstance(tokens, int) else tokens.to(row.device)[row]


def fix_slice(inner: Rule, batch: int, head: int, b: Token, h: Token, dst: Token, src: Token) -> Any:
    return inner(torch.full_like(b, batch), torch.full_like(h, head), dst, src)


def corner(inner: Rule, place: tuple[int, int, int, int], b: Token, h: Token, dst: Token, src: Token) -> Any:
    """The rule of ``place[2]`` receivers and ``place[3]`` senders, the first of them ``place[:2]``."""
    row, column, height, width = place
    i, j = dst - row, src - column
    inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
    # A rule is evaluated on tokens that it has. Ranges may reach beyond them.
    if not isinstance(dst, Interval):
        i, j = i.clamp(0, height - 1), j.clamp(0, width - 1)
    return inside & inner(b, h, i, j)


def is_listed(keys: Tensor, num_src: int, b: Token, h: Token, dst: Token, src: Token) -> Any:
    if isinstance(dst, Interval):
        return in_boxes(keys.cpu(), num_src, dst, src)
    key = dst * num_src + src
    table = keys.to(key.device)
    return table[torch.searchsorted(table, key)] == key


def is_chosen(keys: Tensor, shape: Shape, b: Token, h: Token, dst: Token, src: Token) -> Any:
    """The rule of rows of senders of all samples and heads, one after the other."""
    return is_listed(keys, shape[3], b, h, row_of(shape, b, h, dst), src)


def row_of(shape: Shape, b: Token, h: Token, dst: Token) -> Any:
    batch, heads, num_dst, _ = shape
    row = dst if heads == 1 else h * num_dst + dst
    return row if batch == 1 else b * (heads * num_dst) + row


def look_up(table: Tensor, b: Token, h: Token, *index: Token) -> Any:
    """``table[b, h, *index]``, where it has such axes (heads 1 = the same for all), at the tokens' device."""
    here, extra = table.to(index[0].device), table.dim() - len(index)
    if extra == 2:
        return here[(b, h % table.shape[1], *index)]
    return here[(h, *index)] if extra else here[index]


def look_up_blocks(table: Tensor, height: int, width: int, b: Token, h: Token, dst: Token, src: Token) -> Any:
    """The rule of a table with a row for ``height`` receivers each, and a column for ``width`` senders."""
    return look_up(table, b, h, dst // height, src // width)


def past(rule: Rule, only: bool = True) -> Rule:
    return partial(combine, operator.and_, (rule, causal)) if only else rule


def map_pairs(rule: Rule, b: Token, h: Token, dst: Token, src: Token) -> Any:
    """A rule that is written for single numbers, on all pairs at once: no transform sees a graph's edges."""
    if isinstance(dst, Interval) or dst.dim() == 0 == src.dim():
        return rule(b, h, dst, src)
    return single_pairs.call_in_thread(single_pairs.map_pairs, rule, b, h, dst, src)


def check_signature(rule: object) -> None:
    """TypeError unless ``rule`` takes four positional parameters."""
    expected = "rule must be a function rule(b, h, dst, src) -> bool tensor"
    if not callable(rule):
        raise TypeError(f"{expected}, got {type(rule).__name__}")
    try:
        parameters = inspect.signature(rule).parameters.values()
    except ValueError:
        raise TypeError(f"{expected}, got the builtin {quote(rule)}") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    if len(needed) != 4:
        got = ", ".join(map(str, parameters))
        raise TypeError(f"rule must take four named positional parameters (b, h, dst, src), got ({got})")
