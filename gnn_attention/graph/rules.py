"""Rules ``rule(b, h, dst, src)``, and functions that the operators of a graph turn into rules.

The operators bind these functions by ``functools.partial``, not by closures, so that a graph can be
pickled. A bound function has the four named parameters that FlexAttention and Hugging Face expect.
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
from gnn_attention.graph.intervals.table_bounds import has_edge_in_boxes
from gnn_attention.graph.intervals.values import Interval

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# A rule receives tokens as a tensor, or as an Interval if it is evaluated on ranges.
Token = Any
# (batch, heads, num_dst, num_src), with 1 for an axis by which the graph does not differ
Shape = tuple[int, int, int, int]
# This key ends every sorted tensor of keys, so that a search always returns a valid index.
SENTINEL_KEY = torch.tensor([torch.iinfo(torch.int64).max], device="cpu")


def all_pairs(b: Token, h: Token, dst: Token, src: Token) -> Any:
    return (dst >= 0) & (src >= 0)


def no_pair(b: Token, h: Token, dst: Token, src: Token) -> Any:
    return (dst < 0) & (src < 0)


def causal(b: Token, h: Token, dst: Token, src: Token) -> Any:
    return src <= dst


def difference(left: Any, right: Any) -> Any:
    return left & ~right


def combine(
    operation: Callable[..., Tensor], rules: tuple[Rule, ...], b: Token, h: Token, dst: Token, src: Token
) -> Any:
    return operation(*(rule(b, h, dst, src) for rule in rules))


def transpose(inner: Rule, b: Token, h: Token, dst: Token, src: Token) -> Any:
    return inner(b, h, src, dst)


def map_tokens(
    inner: Rule, dst_map: int | Tensor, src_map: int | Tensor, b: Token, h: Token, dst: Token, src: Token
) -> Any:
    """Evaluate ``inner`` on mapped tokens: a map is an int that is added, or a table of tokens."""
    return inner(b, h, _map_token(dst_map, dst), _map_token(src_map, src))


def _map_token(token_map: int | Tensor, token: Token) -> Any:
    return token + token_map if isinstance(token_map, int) else token_map.to(token.device)[token]


def fix_slice(inner: Rule, batch: int, head: int, b: Token, h: Token, dst: Token, src: Token) -> Any:
    return inner(torch.full_like(b, batch), torch.full_like(h, head), dst, src)


def embed_rule(inner: Rule, rectangle: tuple[int, ...], b: Token, h: Token, dst: Token, src: Token) -> Any:
    """Apply ``inner`` inside ``rectangle = (top, left, height, width)``; no other pair is an edge."""
    top, left, height, width = rectangle
    i, j = dst - top, src - left
    is_inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
    # The inner rule must not see tokens outside the rectangle, except in a range.
    if not isinstance(dst, Interval):
        i, j = i.clamp(0, height - 1), j.clamp(0, width - 1)
    return is_inside & inner(b, h, i, j)


def is_listed(keys: Tensor, num_src: int, b: Token, h: Token, dst: Token, src: Token) -> Any:
    if isinstance(dst, Interval):
        return has_edge_in_boxes(keys.cpu(), num_src, dst, src)
    key = dst * num_src + src
    keys = keys.to(key.device)
    return keys[torch.searchsorted(keys, key)] == key


def is_chosen(keys: Tensor, shape: Shape, b: Token, h: Token, dst: Token, src: Token) -> Any:
    return is_listed(keys, shape[3], b, h, row_index(shape, b, h, dst), src)


def row_index(shape: Shape, b: Token, h: Token, dst: Token) -> Any:
    batch, heads, num_dst, _ = shape
    row = dst if heads == 1 else h * num_dst + dst
    return row if batch == 1 else b * (heads * num_dst) + row


def look_up(table: Tensor, b: Token, h: Token, *index: Token) -> Any:
    """Return ``table[b, h, *index]``, without ``b`` or ``h`` where the table has no such axis."""
    table = table.to(index[0].device)
    num_leading_axes = table.dim() - len(index)
    # If the table has both axes, the axis of heads may have size 1.
    if num_leading_axes == 2:
        return table[(b, h % table.shape[1], *index)]
    return table[(h, *index)] if num_leading_axes else table[index]


def look_up_blocks(table: Tensor, height: int, width: int, b: Token, h: Token, dst: Token, src: Token) -> Any:
    """Look up a table with an entry for each block of ``height x width`` pairs."""
    return look_up(table, b, h, dst // height, src // width)


def drop_future(rule: Rule, is_causal: bool = True) -> Rule:
    """Return the rule without edges from later tokens if ``is_causal``, otherwise unchanged."""
    return partial(combine, operator.and_, (rule, causal)) if is_causal else rule


def map_pairs(rule: Rule, b: Token, h: Token, dst: Token, src: Token) -> Any:
    """Map a rule that needs scalars over all pairs, in a thread outside of any transform."""
    if isinstance(dst, Interval) or dst.dim() == 0 == src.dim():
        return rule(b, h, dst, src)
    return single_pairs.call_in_thread(single_pairs.map_pairs, rule, b, h, dst, src)


def check_signature(rule: object) -> None:
    """Raise TypeError unless ``rule`` takes four positional parameters."""
    if not callable(rule):
        name = type(rule).__name__
        raise TypeError(f"rule must be a function rule(b, h, dst, src) -> bool tensor, got {name}")
    try:
        parameters = inspect.signature(rule).parameters.values()
    except ValueError:
        raise TypeError(f"rule must be a function (b, h, dst, src), got the builtin {quote(rule)}") from None
    positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    num_required = sum(p.kind in positional_kinds and p.default is p.empty for p in parameters)
    if num_required != 4:
        signature = f"({', '.join(map(str, parameters))})"
        raise TypeError(f"rule must take four named positional parameters (b, h, dst, src), got {signature}")
