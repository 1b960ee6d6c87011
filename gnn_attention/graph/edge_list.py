"""Lists of edges as int64 ``[2, E]`` tensors: checks, duplicates, products."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gnn_attention._support import memory
from gnn_attention._support.dynamo import eager_mode, not_compiled
from gnn_attention._support.locks import accept_sparse_matrices
from gnn_attention._support.shapes import Tensor


def keys_of(edges: Tensor, num_src: int) -> Tensor:
    """``dst * num_src + src`` of every edge."""
    return torch.add(edges[0], edges[1], alpha=num_src)


def sort_by_receiver(edges: Tensor, num_src: int) -> tuple[Tensor, Tensor | None]:
    """The keys in ascending order, and the order of the edges by receiver, then sender.

    The order of a list that stands in it is None.
    """
    keys = keys_of(edges, num_src)
    # In a stable order, so that parallel edges stand in the order of the list.
    return (keys, None) if ascends(keys) else keys.sort(stable=True)


def ascends(key: Tensor) -> bool:
    """Whether each number is larger than the one before it: such a list is sorted, without duplicates."""
    # for short lists NumPy takes a third of the time
    array = numbers(key)
    return bool((array[1:] > array[:-1]).all())


def numbers(x: Tensor) -> NDArray[np.int64]:
    """The memory of an integer tensor as an array, also inside the transforms of ``torch.func``."""
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    with eager_mode():
        return x.numpy()


def first_of_each(key: Tensor) -> Tensor:
    ordered, position = key.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return position[is_first].sort().values


def positions(edges: Tensor, wanted: Tensor, num_src: int, name: str) -> Tensor:
    """Where each wanted edge stands in a list without duplicates; ValueError if one is missing."""
    keys, order = keys_of(edges, num_src).sort()
    key = keys_of(wanted, num_src)
    place = torch.searchsorted(keys, key).clamp(max=max(len(keys) - 1, 0))
    missing = torch.ones_like(key, dtype=torch.bool) if not len(keys) else keys[place] != key
    if missing.any():
        src, dst = wanted[:, missing][:, 0].tolist()
        raise ValueError(f"{src} -> {dst} is no edge of {name}")
    return order[place]


def mask(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """True at the places ``keys`` of a table of this shape."""
    cells = torch.zeros(math.prod(shape), dtype=torch.bool, device=keys.device)
    return cells.index_fill_(0, keys, True).view(*shape)


# of a dense matrix: 64 MB
MOST_CELLS = 2**24
# two indices and a number
BYTES_OF_A_PAIR = 24
# multiplications that a dense product does in the time of one of the sparse product
DENSE_GAIN = 256


def product(left: Tensor, right: Tensor, num_dst: int, num_mid: int, num_src: int) -> Tensor:
    """Two hops, by receiver, then sender: the boolean product of two adjacency matrices."""
    sides = (num_dst * num_mid, num_mid * num_src, num_dst * num_src)
    walks = left[0].bincount(minlength=num_mid).double() @ right[1].bincount(minlength=num_mid).double()
    if max(sides) <= MOST_CELLS and walks * DENSE_GAIN > num_dst * num_mid * num_src:
        left, right = (edges[1] * size + edges[0] for edges, size in ((left, num_mid), (right, num_src)))
        dense = mask(left, (num_dst, num_mid)).float() @ mask(right, (num_mid, num_src)).float()
        return dense.nonzero().t().flip(0)
    pairs = min(int(walks), num_dst * num_src)
    what = f"the product of two graphs, of up to {pairs:,} pairs of {num_dst:,} x {num_src:,} tokens"
    memory.check(what, BYTES_OF_A_PAIR * pairs, "take some rows(start, stop) of the left one")
    # the product is made in that format, about which torch would warn
    accept_sparse_matrices()
    sparse: Tensor = torch.sparse.mm(_sparse(left, num_dst, num_mid), _sparse(right, num_mid, num_src))
    return sparse.coalesce().indices().flip(0)


def _sparse(edges: Tensor, rows: int, columns: int) -> Tensor:
    ones = torch.ones(edges.shape[1], device=edges.device)
    return torch.sparse_coo_tensor(edges.flip(0), ones, (rows, columns), check_invariants=False)


SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@not_compiled
def elements(name: str, tensor: Tensor, layouts: Sequence[torch.layout] = (torch.strided,)) -> Tensor:
    """The tensor as a plain one of these layouts; ValueError where its memory does not hold its elements."""
    # EdgeIndex and Index of torch_geometric
    plain: Tensor = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor
    kind, inner, functorch = type(plain), plain, torch._C._functorch
    while functorch.is_gradtrackingtensor(inner):
        inner = functorch.get_unwrapped(inner)
    ways = (
        (plain.is_meta, "a tensor on the meta device has a shape alone"),
        (functorch.is_batchedtensor(inner), "torch.vmap varies it, so make the graph outside of torch.vmap"),
        (plain.is_nested, "torch.nested.to_padded_tensor makes one of a nested tensor"),
        (plain.is_quantized, "x.dequantize() makes one of a quantized tensor"),
        (plain.layout not in layouts, "x.to_dense() makes one, and convert.from_pyg takes a sparse adj_t"),
        (kind.__module__ == "torch.nn.attention.bias", "copies of a CausalBias are empty: give it itself"),
        (
            kind.__torch_dispatch__ is not Tensor.__torch_dispatch__,
            "a MaskedTensor has x.to_tensor(value), a DTensor x.full_tensor(), a traced program has none",
        ),
    )
    for applies, way in ways:
        if applies:
            got = f"a {kind.__name__} of {plain.dtype} and {plain.layout}"
            raise ValueError(f"{name} must hold values, as a plain tensor does, got {got}: {way}")
    # what has no gradient leaves the transform, in which numpy() fails
    plain = plain if plain.is_floating_point() else inner
    return plain if kind is Tensor else plain.as_subclass(Tensor)


def check_edge_index(edge_index: Tensor, num_dst: int, num_src: int) -> Tensor:
    """A copy of the list as int64 on the CPU; TypeError, ValueError or IndexError where it is none."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype not in SIGNED:
        got = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index must be a tensor of signed integers of shape [2, E], got {got}")
    plain = elements("edge_index", edge_index)
    if plain.dim() != 2 or plain.shape[0] != 2:
        hint = "; for a list of (src, dst) pairs use pairs.t()" if plain.shape[1:] == (2,) else ""
        shape = f"{list(plain.shape)}{hint}"
        raise ValueError(f"edge_index must have shape [2, E] (row 0 senders, row 1 receivers), got {shape}")
    edges = plain.detach().to("cpu", torch.int64, copy=True)
    low, high = map(int, edges.aminmax()) if edges.shape[1] else (0, -1)
    if low >= 0 and high < min(num_dst, num_src):
        return edges
    for row, word, size, count in ((0, "sender", "num_src", num_src), (1, "receiver", "num_dst", num_dst)):
        outside = (edges[row] < 0) | (edges[row] >= count)
        if outside.any():
            first = int(outside.nonzero()[0])
            wrong = f"edge_index[{row}, {first}] = {int(edges[row, first])} is no {word}"
            expected = f"0 .. {count - 1} ({size}={count}); negative indices do not count from the end"
            raise IndexError(f"{wrong}: expected {expected}")
    return edges


@not_compiled
def duplicate_message(edges: Tensor, key: Tensor) -> str:
    """The error message for a list that holds an edge twice; ``key`` is one number for each edge."""
    values, counts = torch.unique(key, return_counts=True)
    first = (key == values[counts > 1][0]).nonzero().flatten()[:2].tolist()
    src, dst = edges[:, first[0]].tolist()
    number, places = int((counts - 1).sum()), f"{src} -> {dst} stands at {first[0]} and {first[1]}"
    advice = "pass coalesce=True to keep the first of each, or give them a multiplicity m by bias=log(m)"
    return f"edge_index holds {number} duplicate edges (the edge {places}), but a graph is a set: {advice}"


def edges_between(edges: Tensor, dst: Tensor, src: Tensor, num_dst: int, num_src: int) -> Tensor:
    """The edges between these receivers and senders, numbered by their places among them, in order."""
    places = torch.stack([_places(src, num_src)[edges[0]], _places(dst, num_dst)[edges[1]]])
    return places[:, (places >= 0).all(0)]


def _places(tokens: Tensor, count: int) -> Tensor:
    """Where each of the tokens 0 .. count - 1 stands in ``tokens``, -1 if it does not."""
    places = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    return places.index_copy_(0, tokens, torch.arange(len(tokens), device="cpu"))
