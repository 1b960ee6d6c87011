"""Record what each edge carried in a run, and run models with edges cut, muted or patched.

>>> import torch
>>> from gnn_attention import model as lm
>>> model, vocabulary = lm.load_trained()
>>> tokens = torch.tensor([vocabulary.encode("Llamas do not output words")])
>>> run = record(model, tokens, interventions=cut([(0, 5)], layers=1, heads=2))
>>> run.layers[1].carried([(0, 5)], heads=2).shape  # [B, edges, heads, width]
torch.Size([1, 1, 1, 128])

Tensors of size tokens x tokens or edges x heads x width are computed only on request.
"""

from gnn_attention.interpret.trace.edge_attribution import Attribution, Effect, PrunedGraphs, attribute, prune
from gnn_attention.interpret.trace.intervention import Intervention, cut, intervene, mute, operate, patch
from gnn_attention.interpret.trace.layer import LayerTrace
from gnn_attention.interpret.trace.run import Phase, Run, record
from gnn_attention.layer.glossary import GLOSSARY, VIEWS, Term

__all__ = ["GLOSSARY", "VIEWS", "Attribution", "Effect", "Intervention", "LayerTrace", "Phase"]
__all__ += ["PrunedGraphs", "Run", "Term", "attribute", "cut", "intervene", "mute", "operate", "patch"]
__all__ += ["prune", "record"]
