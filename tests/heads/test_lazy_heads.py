"""Heads without widths become StandardHeads of the right ones, however a module is moved or saved."""

import copy
import pickle

import pytest
import torch

from gnn_attention import MergedHeads, MessagePassingAttention, StandardHeads, patterns
from gnn_attention.heads.lazy import LazyHeads


def layer(**options):
    """A layer before its first call."""
    own = LazyHeads(num_heads=4, head_dim=6, value_dim=5, num_kv_heads=2, bias=True, **options)
    return MessagePassingAttention(own)


def pair():
    """Seven senders of width 8, five receivers of width 12."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 8, generator=generator), torch.randn(5, 12, generator=generator)


GRAPH = patterns.full(7).rows(0, 5)


def test_the_first_call_makes_standard_heads():
    """Same class, sizes, names and distribution as heads with given widths."""
    lazy = layer()
    own = lazy.heads
    y = lazy(pair(), GRAPH)
    wanted = StandardHeads(12, 4, 6, 5, 2, bias=True, source_width=8)
    assert type(own) is StandardHeads
    assert lazy.heads is own
    shapes = [{name: part.shape for name, part in x.named_parameters()} for x in (own, wanted)]
    assert shapes[0] == shapes[1]
    assert set(vars(own)) == set(vars(wanted))
    assert repr(own) == repr(wanted)
    wanted.load_state_dict(own.state_dict())
    assert torch.equal(MessagePassingAttention(wanted)(pair(), GRAPH), y)
    assert torch.equal(lazy(pair(), GRAPH), y)
    wide = LazyHeads(4, 64)
    wide.meet(256, 128)
    for name, rows in (("W_Q", 256), ("W_K", 128), ("W_V", 128), ("W_O", 256)):
        assert abs(getattr(wide, name).std() * rows**0.5 - 1) < 0.05, name
    assert (own.b_O == 0).all()


@pytest.mark.parametrize(
    "move", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.double().float()]
)
def test_moved_before_the_first_call(move):
    """A copy, a pickle or a cast is as lazy as the original, and independent of it."""
    lazy = layer()
    other = move(lazy)
    assert type(other.heads) is LazyHeads
    assert other(pair(), GRAPH).shape == (5, 12)
    assert type(other.heads) is StandardHeads
    assert other is lazy or type(lazy.heads) is LazyHeads


def test_states_go_in_and_out():
    """The state of a met layer fixes the widths of another, which is not drawn anew."""
    met, lazy = layer(), layer()
    y = met(pair(), GRAPH)
    lazy.load_state_dict(met.state_dict())
    assert torch.equal(lazy(pair(), GRAPH), y)
    fresh = layer()
    fresh.load_state_dict(layer().state_dict())
    assert type(fresh.heads) is LazyHeads
    assert fresh(pair(), GRAPH).shape == y.shape


UNKNOWN = [
    lambda heads: heads.receive(torch.zeros(1, 2, 3)),
    lambda heads: heads.width,
    lambda heads: MergedHeads.of(heads),
]


@pytest.mark.parametrize("ask", UNKNOWN)
def test_what_it_cannot_say_is_named(ask):
    """Widths and what needs them."""
    with pytest.raises(ValueError, match="no widths before their layer's first call"):
        ask(LazyHeads(2, 4))


def test_wrong_sizes_are_named_and_a_wrong_call_changes_nothing():
    """As StandardHeads; states that do not fit the graph leave the heads lazy."""
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads"):
        LazyHeads(4, 6, num_kv_heads=3)
    lazy = layer()
    with pytest.raises(ValueError, match="does not fit x"):
        lazy(pair(), patterns.full(7))
    assert type(lazy.heads) is LazyHeads
