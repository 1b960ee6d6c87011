"""What one token and one edge cost in each form of the weights: the rates from which ``cost`` makes its sums.

======== ============================= ============================= ========= ==========================
form     a receiver                    a sender                      an edge   cached per sender
======== ============================= ============================= ========= ==========================
standard query and output `dH(D + V)`  key and value `dG(D + V)`     `D + V`   key and value `G(D + V)`
factored pattern `2dHD`                message `2dHV`                `2d`      pattern and message `2Hd`
merged   pattern `Hd^2`                message `Hd^2`                `2d`      the same
======== ============================= ============================= ========= ==========================

in multiply-accumulates and numbers, with d the width, H and G the query and the key/value heads, D and V the
widths of keys and values (seeds S1.5, S1.14, S1.21). Only products with matrices, logits and weighted sums
count: biases, norms, rotations and the softmax are few in comparison. Latent attention (DeepSeek-V2, arXiv
2405.04434, section 2.1) has two forms of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gnn_attention._support import checks


@dataclass(frozen=True)
class Sizes:
    """The sizes of heads with keys and values, under the names of :class:`gnn_attention.StandardHeads`.

    ``bias``: which of ``"QKVO"`` have one. ``qk_norm``: queries and keys are normed. Both count as parameters
    alone.
    """

    width: int
    num_heads: int
    head_dim: int
    value_dim: int
    num_kv_heads: int
    bias: str = ""
    qk_norm: bool = False

    @classmethod
    def of(
        cls,
        width: int,
        num_heads: int,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: str = "",
        qk_norm: bool = False,
    ) -> Sizes:
        """With the defaults of StandardHeads; ValueError or TypeError for sizes that no heads have.

        >>> Sizes.of(512, 8)
        Sizes(width=512, num_heads=8, head_dim=64, value_dim=64, num_kv_heads=8, bias='', qk_norm=False)
        """
        sizes = checks.head_sizes(width, num_heads, head_dim, value_dim, num_kv_heads)
        if not set(bias) <= set("QKVO") or len(set(bias)) < len(bias):
            raise ValueError(f"bias must be some of the letters QKVO, got {checks.quoted(bias)}")
        return cls(*sizes, bias, qk_norm)


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of latent attention, under the names of :class:`gnn_attention.LatentHeads`."""

    width: int
    num_heads: int
    content_dim: int
    rotary_dim: int
    latent_dim: int
    value_dim: int
    query_dim: int | None = None

    @classmethod
    def of(
        cls,
        width: int,
        num_heads: int,
        content_dim: int,
        rotary_dim: int,
        latent_dim: int,
        value_dim: int | None = None,
        query_dim: int | None = None,
    ) -> LatentSizes:
        """With the defaults of LatentHeads; ValueError or TypeError for what is no positive integer."""
        given = {"width": width, "num_heads": num_heads, "content_dim": content_dim, "rotary_dim": rotary_dim}
        given |= {"latent_dim": latent_dim, "value_dim": content_dim if value_dim is None else value_dim}
        sizes = {name: checks.size(name, value, 1) for name, value in given.items()}
        return cls(**sizes, query_dim=None if query_dim is None else checks.size("query_dim", query_dim, 1))


@dataclass(frozen=True)
class Rates:
    """What one token and one edge cost, in multiply-accumulates and in numbers that are made or cached.

    ``receive`` and ``collect`` of each receiver, ``send`` of each sender, ``logit`` and ``weighting`` of each
    edge of each head. ``received`` (queries or patterns, and mixtures) and ``sent`` (keys and values or
    messages) are numbers between states and updates. ``cache`` names each way to cache a sender.
    """

    receive: int
    send: int
    logit: int
    weighting: int
    collect: int
    parameters: int
    received: int
    sent: int
    cache: Mapping[str, int]


def rates(form: str, sizes: Sizes | LatentSizes) -> Rates:
    """The rates of a form; ValueError for a form that heads of these sizes do not have.

    >>> rates("merged", Sizes.of(4096, 1, head_dim=128)).send
    16777216
    """
    own = LATENT_FORMS if isinstance(sizes, LatentSizes) else FORMS
    rate: Callable[[Any], Rates] = own[checks.choice("form", form, own)]
    return rate(sizes)


def _standard(s: Sizes) -> Rates:
    pair = s.head_dim + s.value_dim
    return Rates(
        receive=s.width * s.num_heads * s.head_dim,
        send=s.width * s.num_kv_heads * pair,
        logit=s.head_dim,
        weighting=s.value_dim,
        collect=s.num_heads * s.value_dim * s.width,
        parameters=_factors(s),
        received=s.num_heads * pair,
        sent=s.num_kv_heads * pair,
        cache={"key, value": s.num_kv_heads * pair},
    )


def _factored(s: Sizes) -> Rates:
    """Every query head makes messages of its own: values are shared by a group, ``W_O`` is not."""
    thin = 2 * s.width * s.num_heads
    return _in_model_space(s, receive=thin * s.head_dim, send=thin * s.value_dim, parameters=_factors(s))


def _merged(s: Sizes) -> Rates:
    # a bias is one more row (and column) of a product
    pattern = s.width + bool(set("QK") & set(s.bias))
    message = s.width + ("V" in s.bias)
    parameters = s.num_heads * (pattern**2 + message * s.width) + s.width * ("O" in s.bias)
    square = s.num_heads * s.width**2
    return _in_model_space(s, receive=square, send=square, parameters=parameters)


def _in_model_space(s: Sizes, receive: int, send: int, parameters: int) -> Rates:
    """Patterns and messages are as wide as the states, and heads are summed without a matrix."""
    wide = s.num_heads * s.width
    cache = {"pattern, message": 2 * wide, "state, message": s.width + wide, "state and a 1": s.width + 1}
    return Rates(receive, send, s.width, s.width, 0, parameters, received=2 * wide, sent=wide, cache=cache)


def _factors(s: Sizes) -> int:
    query, key = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    value, mixture = s.num_kv_heads * s.value_dim, s.num_heads * s.value_dim
    biases = {"Q": query, "K": key, "V": value, "O": s.width}
    factors = s.width * (query + key + value + mixture)
    return factors + sum(biases[name] for name in s.bias) + 2 * s.head_dim * s.qk_norm


def _latent(s: LatentSizes) -> Rates:
    """As in :class:`gnn_attention.LatentHeads`: the heads' matrices act on receivers, one latent for all."""
    down, source = _query_source(s)
    key = s.latent_dim + s.rotary_dim
    return Rates(
        receive=down + s.num_heads * (source * (s.content_dim + s.rotary_dim) + s.content_dim * s.latent_dim),
        send=s.width * key,
        logit=key,
        weighting=s.latent_dim,
        collect=s.num_heads * s.value_dim * (s.latent_dim + s.width),
        parameters=_latent_parameters(s),
        received=s.num_heads * (key + s.latent_dim),
        sent=key + s.latent_dim,
        cache={"latent, rotated key": key},
    )


def _expanded(s: LatentSizes) -> Rates:
    """As the paper writes it: every sender's latent becomes a key and a value for each head."""
    down, source = _query_source(s)
    key = s.content_dim + s.rotary_dim
    pair, key_value = s.num_heads * (key + s.value_dim), s.content_dim + s.value_dim
    return Rates(
        receive=down + s.num_heads * source * key,
        send=s.width * (s.latent_dim + s.rotary_dim) + s.num_heads * s.latent_dim * key_value,
        logit=key,
        weighting=s.value_dim,
        collect=s.num_heads * s.value_dim * s.width,
        parameters=_latent_parameters(s),
        received=pair,
        sent=pair,
        cache={"key, value": pair},
    )


def _query_source(s: LatentSizes) -> tuple[int, int]:
    return (0, s.width) if s.query_dim is None else (s.width * s.query_dim, s.query_dim)


def _latent_parameters(s: LatentSizes) -> int:
    down, source = _query_source(s)
    norms = s.latent_dim + (s.query_dim or 0)
    query, key_value = s.content_dim + s.rotary_dim, s.content_dim + s.value_dim
    of_heads = source * query + s.latent_dim * key_value + s.value_dim * s.width
    return down + s.width * (s.latent_dim + s.rotary_dim) + s.num_heads * of_heads + norms


FORMS: Mapping[str, Callable[[Sizes], Rates]]
FORMS = {"standard": _standard, "factored": _factored, "merged": _merged}
LATENT_FORMS: Mapping[str, Callable[[LatentSizes], Rates]] = {"expanded": _expanded, "latent": _latent}
