"""One glossary: what this library calls the parts of attention, and what four other ways of telling it call
them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GLOSSARY", "VIEWS", "Term"]


@dataclass(frozen=True)
class Term:
    """One part of attention: its name here, TransformerLens' hook, and its name in each view (None: the view
    has no word).

    Sources: docs/guide.md; TransformerLens, ``HookedTransformer``; seeds S4.1 and S4.17 for the views.
        Attention is a soft
    ``search``, the ``routing`` of information between residual streams, two coupled ``transforms``, or a
    ``message exchange``.

    >>> [term.message_exchange for term in GLOSSARY][:3]
    ['receiving channel', 'sending channel', 'channel overlap']
    """

    name: str
    hook: str
    search: str | None
    routing: str | None
    transforms: str | None
    message_exchange: str | None


VIEWS = ("search", "routing", "transforms", "message exchange")
GLOSSARY = (  # in the order of the protocol's seven steps
    Term("q", "attn.hook_q", "query", None, None, "receiving channel"),
    Term("k", "attn.hook_k", "key", None, None, "sending channel"),
    Term("logits", "attn.hook_attn_scores", "relevance score", None, "score matrix", "channel overlap"),
    Term(
        "weights",
        "attn.hook_pattern",
        "soft result ranking",
        "attention matrix",
        "column-probability matrix",
        "listening distribution",
    ),
    Term("v", "attn.hook_v", "value", "information read", None, "outgoing message"),
    Term("z", "attn.hook_z", "mixture result", "information routed", None, "mixed incoming message"),
    Term(
        "update",
        "hook_attn_out",
        "interpretation",
        "information written",
        "mixture of updates",
        "state update",
    ),
)
