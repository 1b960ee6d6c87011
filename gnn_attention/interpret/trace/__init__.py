"""What happens in a call, step by step, and interventions in it."""

from gnn_attention.interpret.trace.api import (
    GLOSSARY,
    VIEWS,
    LayerTrace,
    Phase,
    Run,
    Surgery,
    Term,
    cut,
    flow,
    mute,
    operate,
    record,
    rollout,
)

__all__ = [
    "GLOSSARY",
    "VIEWS",
    "LayerTrace",
    "Phase",
    "Run",
    "Surgery",
    "Term",
    "cut",
    "flow",
    "mute",
    "operate",
    "record",
    "rollout",
]
