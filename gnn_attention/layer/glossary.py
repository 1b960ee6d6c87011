"""The names of the parts of attention, in this library and in four views of attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A part of attention: its name here, its hook in TransformerLens, and its name in each view.

    Attention can be seen as a soft ``search``, as the ``routing`` of information between residual
    streams, as two coupled ``transforms`` or as a ``message exchange``. A view that lacks the part
    has None. An overlap is ``q . k``; scale, score_mod and bias turn it into a logit. Tokens are rows
    here, so ``W_A = W_Q W_K^T`` and ``W_I = W_V W_O`` are the transposes of those in the source.

    Sources: docs/semantics.md; TransformerLens's ``HookedTransformer``; S4.1, S4.4, S4.17 of docs/sources.md.

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
SCORES_HOOK, PATTERN_HOOK = "attn.hook_attn_scores", "attn.hook_pattern"
COLUMN_MATRIX, LISTENING = "column-probability matrix", "listening distribution"
MIXED_MESSAGE, MIXTURE, INFORMATION = "mixed incoming message", "mixture of updates", "information written"
# The first rows follow the computation. Only the transforms name the parts in the last rows.
GLOSSARY = (
    Term("q", "attn.hook_q", "query", None, None, "receiving channel"),
    Term("k", "attn.hook_k", "key", None, None, "sending channel"),
    Term("overlaps", None, "relevance score", None, "score matrix", "channel overlap"),
    Term("logits", SCORES_HOOK, None, None, None, None),
    Term("weights", PATTERN_HOOK, "soft result ranking", "attention matrix", COLUMN_MATRIX, LISTENING),
    Term("v", "attn.hook_v", "value", "information read", None, "outgoing message"),
    Term("z", "attn.hook_z", "mixture result", "information routed", None, MIXED_MESSAGE),
    Term("update", "hook_attn_out", "interpretation", INFORMATION, MIXTURE, "state update"),
    Term("W_A", None, None, None, "attention transform", None),
    Term("W_I", None, None, None, "information transform", None),
    Term("u", None, None, None, "update matrix", None),
)
