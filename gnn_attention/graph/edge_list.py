"""Check, sort, search and multiply lists of edges, int64 ``[2, E]``."""

import math
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from gnn_attention._support import memory
from gnn_attention._support.dynamo import eager_mode, not_compiled
from gnn_attention._support.locks import silence_sparse_csr_warning
from gnn_attention._support.shapes import Tensor


def edge_keys(edges: Tensor, num_src: int) -> Tensor:
    """Return ``dst * num_src + src`` of each edge."""
    return torch.add(edges[0], edges[1], alpha=num_src)


def sort_by_receiver(edges: Tensor, num_src: int) -> tuple[Tensor, Tensor | None]:
    """Return the sorted keys and the permutation that sorts them (None if already increasing)."""
    keys = edge_keys(edges, num_src)
    # A stable sort leaves parallel edges in the order of the list.
    return (keys, None) if is_increasing(keys) else keys.sort(stable=True)


def is_increasing(keys: Tensor) -> bool:
    """Return True if the keys are sorted and distinct."""
    # NumPy takes a third of the time that torch takes for short lists.
    array = numpy_view(keys)
    return bool((array[1:] > array[:-1]).all())


def numpy_view(tensor: Tensor) -> NDArray[np.int64]:
    """Return an array that shares the memory of an integer tensor, even inside ``torch.func``."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with eager_mode():
        return tensor.numpy()


def find_edges(edges: Tensor, pairs: Tensor, num_src: int, name: str) -> Tensor:
    """Return the index of each pair in a list without duplicates; ValueError if one is missing."""
    keys, order = edge_keys(edges, num_src).sort()
    pair_keys = edge_keys(pairs, num_src)
    index = torch.searchsorted(keys, pair_keys).clamp(max=max(len(keys) - 1, 0))
    is_missing = keys[index] != pair_keys if len(keys) else torch.ones_like(pair_keys, dtype=torch.bool)
    if is_missing.any():
        src, dst = pairs[:, is_missing][:, 0].tolist()
        raise ValueError(f"{src} -> {dst} is not an edge of {name}")
    return order[index]


def mask_from_keys(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a bool tensor of this shape that is True at the flat indices ``keys``."""
    mask = torch.zeros(math.prod(shape), dtype=torch.bool, device=keys.device)
    return mask.index_fill_(0, keys, True).view(*shape)


# A dense matrix may have at most this many entries: 64 MB in float32.
MAX_DENSE_ENTRIES = 2**24
# An entry of a sparse matrix takes two indices and a value.
BYTES_PER_PAIR = 24
# A dense product does this many multiplications in the time that a sparse product needs for one.
DENSE_SPEEDUP = 256


def product(left: Tensor, right: Tensor, num_dst: int, num_mid: int, num_src: int) -> Tensor:
    """Return the edges of the product of two adjacency matrices, sorted by receiver, then sender."""
    num_entries = max(num_dst * num_mid, num_mid * num_src, num_dst * num_src)
    out_degree = left[0].bincount(minlength=num_mid).double()
    num_walks = out_degree @ right[1].bincount(minlength=num_mid).double()
    if num_entries <= MAX_DENSE_ENTRIES and num_walks * DENSE_SPEEDUP > num_dst * num_mid * num_src:
        left_mask = mask_from_keys(edge_keys(left, num_mid), (num_dst, num_mid))
        right_mask = mask_from_keys(edge_keys(right, num_src), (num_mid, num_src))
        return (left_mask.float() @ right_mask.float()).nonzero().t().flip(0)
    num_pairs = min(int(num_walks), num_dst * num_src)
    operation = f"the product of two graphs, up to {num_pairs:,} pairs of {num_dst:,} x {num_src:,} tokens"
    memory.check(operation, BYTES_PER_PAIR * num_pairs, "use some rows(start, stop) of the left graph")
    # torch.sparse.mm uses the CSR format, and torch would warn that the format is in beta.
    silence_sparse_csr_warning()
    left, right = _sparse_matrix(left, num_dst, num_mid), _sparse_matrix(right, num_mid, num_src)
    sparse: Tensor = torch.sparse.mm(left, right)
    return sparse.coalesce().indices().flip(0)


def _sparse_matrix(edges: Tensor, num_rows: int, num_columns: int) -> Tensor:
    ones = torch.ones(edges.shape[1], device=edges.device)
    return torch.sparse_coo_tensor(edges.flip(0), ones, (num_rows, num_columns), check_invariants=False)


SIGNED_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@not_compiled
def unwrap_tensor(name: str, tensor: Tensor, layouts: Sequence[torch.layout] = (torch.strided,)) -> Tensor:
    """Return an ordinary tensor; ValueError if ``tensor`` has no values or an unsupported layout."""
    # torch_geometric's EdgeIndex and Index have as_tensor.
    values: Tensor = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor
    cls = type(values)
    inner = values
    while torch._C._functorch.is_gradtrackingtensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    is_wrapper = cls.__torch_dispatch__ is not Tensor.__torch_dispatch__
    remedies = (
        (values.is_meta, "a tensor on the meta device has no values"),
        (torch._C._functorch.is_batchedtensor(inner), "make the graph outside of torch.vmap"),
        (values.is_nested, "pad a nested tensor with torch.nested.to_padded_tensor"),
        (values.is_quantized, "convert a quantized tensor with x.dequantize()"),
        (values.layout not in layouts, "use x.to_dense(), or convert.from_pyg for a sparse adj_t"),
        (cls.__module__ == "torch.nn.attention.bias", "a copy of a CausalBias is empty: pass the original"),
        (is_wrapper, "use x.to_tensor(value) for a MaskedTensor, x.full_tensor() for a DTensor"),
    )
    for is_needed, remedy in remedies:
        if is_needed:
            raise ValueError(
                f"{name} must hold values, as an ordinary, untraced tensor does, "
                f"got a {cls.__name__} of {values.dtype} and {values.layout}: {remedy}"
            )
    # numpy() fails inside a transform. Integers have no gradient, so they can be unwrapped.
    values = values if values.is_floating_point() else inner
    return values if cls is Tensor else values.as_subclass(Tensor)


def check_edge_index(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    """Copy an edge list to int64 on the CPU; TypeError, ValueError or IndexError if it is invalid."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype not in SIGNED_DTYPES:
        kind = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index must be a tensor of signed integers of shape [2, E], got {kind}")
    values = unwrap_tensor("edge_index", edge_index)
    if values.dim() != 2 or values.shape[0] != 2:
        hint = "; for a list of (src, dst) pairs use pairs.t()" if values.shape[1:] == (2,) else ""
        shape = f"{list(values.shape)}{hint}"
        raise ValueError(f"edge_index must have shape [2, E] (row 0 senders, row 1 receivers), got {shape}")
    edges = values.detach().to("cpu", torch.int64, copy=True)
    min_index, max_index = map(int, edges.aminmax()) if edges.shape[1] else (0, -1)
    if min_index >= 0 and max_index < min(num_dst, num_src):
        return edges
    for row, role, name, size in ((0, "sender", "num_src", num_src), (1, "receiver", "num_dst", num_dst)):
        is_outside = (edges[row] < 0) | (edges[row] >= size)
        if is_outside.any():
            index = int(is_outside.nonzero()[0])
            raise IndexError(
                f"edge_index[{row}, {index}] = {int(edges[row, index])} is not a {role}: expected "
                f"0 .. {size - 1} ({name}={size}); negative indices do not count from the end"
            )
    return edges


def raise_duplicate_error(edges: Tensor, num_src: int) -> NoReturn:
    """Raise ValueError for a list that holds an edge more than once."""
    keys = edge_keys(edges, num_src)
    unique_keys, counts = torch.unique(keys, return_counts=True)
    i, j = (keys == unique_keys[counts > 1][0]).nonzero().flatten()[:2].tolist()
    src, dst = edges[:, i].tolist()
    raise ValueError(
        f"edge_index holds {int((counts - 1).sum())} duplicate edges (the edge {src} -> {dst} is at "
        f"{i} and {j}), but a graph is a set: pass coalesce=True to keep the first of each, "
        "or pass each edge once with bias=log(m) for its m copies"
    )


def edges_between(edges: Tensor, dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> Tensor:
    """Return the edges from ``src`` to ``dst``; tokens become indices in ``src`` and ``dst``."""
    new_src, new_dst = _invert_token_map(src, num_src), _invert_token_map(dst, num_dst)
    new_edges = torch.stack([new_src[edges[0]], new_dst[edges[1]]])
    return new_edges[:, (new_edges >= 0).all(0)]


def _invert_token_map(tokens: Tensor, num_tokens: int) -> Tensor:
    """Return the index in ``tokens`` of each token 0 .. num_tokens - 1, or -1 if it is missing."""
    index = torch.full((num_tokens,), -1, dtype=torch.int64, device="cpu")
    return index.index_copy_(0, tokens, torch.arange(len(tokens), device="cpu"))
