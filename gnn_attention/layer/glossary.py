"""One glossary: what this library calls the parts of attention, and their names in four other views."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """One part of attention: its name here, TransformerLens' hook, its name in each view (None: no word).

    Attention is a soft ``search``, the ``routing`` of information between residual streams, two coupled
    ``transforms``, or a ``message exchange``. An overlap is ``q . k``; scale, score_mod and bias make it a
    logit, for which the views have no word. Tokens are rows here, so ``W_A`` is ``W_Q W_K^T``, ``W_I`` is
    ``W_V W_O``, each the transpose of the text's.

    Sources: docs/semantics.md; TransformerLens, ``HookedTransformer``; seeds S4.1, S4.4, S4.17 for the views.

    >>> [term.message_exchange for term in GLOSSARY][:3]
    ['receiving channel', 'sending channel', 'channel overlap']
    """

    name: str
    hook: str | None
    search: str | None
    routing: str | None
    transforms: str | None
    message_exchange: str | None


VIEWS = ("search", "routing", "transforms", "message exchange")
SCORES, PATTERN = "attn.hook_attn_scores", "attn.hook_pattern"
COLUMNS, WEIGHTS = "column-probability matrix", "listening distribution"
MIXED, MIXTURE, WRITTEN = "mixed incoming message", "mixture of updates", "information written"
# in the order of the protocol's seven steps, then what only the transforms name
GLOSSARY = (
    Term("q", "attn.hook_q", "query", None, None, "receiving channel"),
    Term("k", "attn.hook_k", "key", None, None, "sending channel"),
    Term("overlaps", None, "relevance score", None, "score matrix", "channel overlap"),
    Term("logits", SCORES, None, None, None, None),
    Term("weights", PATTERN, "soft result ranking", "attention matrix", COLUMNS, WEIGHTS),
    Term("v", "attn.hook_v", "value", "information read", None, "outgoing message"),
    Term("z", "attn.hook_z", "mixture result", "information routed", None, MIXED),
    Term("update", "hook_attn_out", "interpretation", WRITTEN, MIXTURE, "state update"),
    Term("W_A", None, None, None, "attention transform", None),
    Term("W_I", None, None, None, "information transform", None),
    Term("u", None, None, None, "update matrix", None),
)
