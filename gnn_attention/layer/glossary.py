"""One glossary: what this library calls the parts of attention, and their names in four other views."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """One part of attention: its name here, TransformerLens' hook, its name in each view (None: no word).

    Attention is a soft ``search``, the ``routing`` of information between residual streams, two coupled
    ``transforms``, or a ``message exchange``.

    Sources: docs/guide.md; TransformerLens, ``HookedTransformer``; seeds S4.1 and S4.17 for the views.

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
SCORES, PATTERN = "attn.hook_attn_scores", "attn.hook_pattern"
COLUMNS, WEIGHTS = "column-probability matrix", "listening distribution"
MIXED, MIXTURE, WRITTEN = "mixed incoming message", "mixture of updates", "information written"
GLOSSARY = (  # in the order of the protocol's seven steps
    Term("q", "attn.hook_q", "query", None, None, "receiving channel"),
    Term("k", "attn.hook_k", "key", None, None, "sending channel"),
    Term("logits", SCORES, "relevance score", None, "score matrix", "channel overlap"),
    Term("weights", PATTERN, "soft result ranking", "attention matrix", COLUMNS, WEIGHTS),
    Term("v", "attn.hook_v", "value", "information read", None, "outgoing message"),
    Term("z", "attn.hook_z", "mixture result", "information routed", None, MIXED),
    Term("update", "hook_attn_out", "interpretation", WRITTEN, MIXTURE, "state update"),
)
