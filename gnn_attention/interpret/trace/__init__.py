"""What each edge carried in a run, and runs in which edges are cut or muted.

>>> import torch
>>> import gnn_attention.interpret.trace as trace
>>> from gnn_attention import model as lm
>>> model, vocabulary = lm.load_trained()
>>> tokens = torch.tensor([vocabulary.encode("Llamas do not output words")])
>>> with torch.no_grad():
...     run = trace.record(model, tokens)
...     changed = trace.record(model, tokens, surgery=trace.cut([(0, 5)], layers=1, heads=2))
>>> len(run.layers), len(run.states), run["blocks.1.attn.hook_pattern"].shape
(2, 5, torch.Size([1, 4, 66]))
>>> run.layers[1].weights([(0, 5)]).shape  # [B, edges, heads]
torch.Size([1, 1, 4])
>>> run.layers[1].carried([(0, 5)], heads=2).shape  # [B, edges, heads, width]
torch.Size([1, 1, 1, 128])
>>> bool(changed.layers[1].weights([(0, 5)])[0, 0, 2] == 0)
True

Tensors of size tokens x tokens or edges x heads x width are made on request only.
"""

from gnn_attention.interpret.trace.attribution import flow, rollout
from gnn_attention.interpret.trace.interventions import Surgery, cut, mute, operate
from gnn_attention.interpret.trace.layer import LayerTrace
from gnn_attention.interpret.trace.run import Phase, Run, record
from gnn_attention.layer.glossary import GLOSSARY, VIEWS, Term

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
