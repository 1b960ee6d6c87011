"""Groups of tokens seen inside ``x [B, H, T, D]``: taken without a copy where they are strided, gathered where they are not."""

from __future__ import annotations

from gnn_attention._support.shapes import Float, Tensor
from gnn_attention.backends.plan.plan import Gathered, Groups, Strided

__all__ = ["add", "put", "take"]


def take(x: Tensor, sample: int | None, groups: Groups) -> Float[Tensor, "groups heads size dim"]:
    """The tokens of each group of one sample; with ``sample=None`` those of the only group, in every sample."""
    if sample is None:
        return _of_all(x, groups)
    if isinstance(groups, Strided):
        return _strided(x[sample], groups)
    rows = x[sample].transpose(0, 1).index_select(0, groups.index.flatten())
    return rows.view(*groups.index.shape, *rows.shape[1:]).transpose(1, 2)


def put(x: Tensor, sample: int | None, groups: Groups, value: Float[Tensor, "groups heads size dim"]) -> None:
    """Write the groups' tokens, which must not overlap."""
    if isinstance(groups, Strided):
        take(x, sample, groups).copy_(value)
    elif sample is None:
        x.index_copy_(2, groups.index[0], value.to(x.dtype))
    else:
        x[sample].transpose(0, 1).index_copy_(0, groups.index.flatten(), _as_rows(value).to(x.dtype))


def add(x: Tensor, sample: int | None, groups: Groups, value: Float[Tensor, "groups heads size dim"]) -> None:
    """Add to the groups' tokens, which may overlap."""
    if isinstance(groups, Gathered):
        index, rows = groups.index.flatten(), value.to(x.dtype)
        if sample is None:
            x.index_add_(2, index, rows)
        else:
            x[sample].transpose(0, 1).index_add_(0, index, _as_rows(rows))
    elif groups.count == 1 or groups.stride >= groups.size:
        take(x, sample, groups).add_(value)
    elif groups.stride == 0:
        take(x, sample, groups.part(0, 1)).add_(value.sum(0, keepdim=True))
    else:
        _add_in_strips(x, sample, groups, value)


def _of_all(x: Tensor, groups: Groups) -> Tensor:
    if isinstance(groups, Gathered):
        return x.index_select(2, groups.index[0])
    return x[:, :, groups.start : groups.start + groups.size]


def _strided(x: Float[Tensor, "heads tokens dim"], groups: Strided) -> Tensor:
    head, token, channel = x.stride()
    shape = (groups.count, x.shape[0], groups.size, x.shape[2])
    return x.as_strided(shape, (groups.stride * token, head, token, channel), x.storage_offset() + groups.start * token)


def _as_rows(value: Float[Tensor, "groups heads size dim"]) -> Float[Tensor, "tokens heads dim"]:
    return value.transpose(1, 2).flatten(0, 1)


def _add_in_strips(x: Tensor, sample: int | None, groups: Strided, value: Tensor) -> None:
    """Overlapping groups, a strip of ``stride`` tokens of each at a time: strips of one turn do not overlap."""
    for offset in range(0, groups.size, groups.stride):
        size = min(groups.stride, groups.size - offset)
        strip = Strided(groups.start + offset, groups.stride, groups.count, size)
        take(x, sample, strip).add_(value[:, :, offset : offset + size])
