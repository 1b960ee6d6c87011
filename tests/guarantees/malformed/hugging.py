"""Malformed graphs given to Hugging Face models, which need transformers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from gnn_attention.convert import from_mask
from gnn_attention.patterns import causal, self_loops
from tests.guarantees.malformed.case import Case, Of, Subject

__all__ = ["cases"]

IDS = torch.tensor([[1, 2, 3]])


def _model(attention: str = "gnn_attention") -> Any:
    """A Llama of one layer, always the same; its attention is registered first."""
    importlib.import_module("gnn_attention.huggingface")
    transformers = importlib.import_module("transformers")
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaModel(
            transformers.LlamaConfig(**sizes, attn_implementation=attention)
        ).eval()


@torch.no_grad()
def _states(model: Any) -> Any:
    return model(IDS).last_hidden_state


def _heard(model: Any, graph: Any, replace: bool = False) -> Any:
    with importlib.import_module("gnn_attention.huggingface").use_graph(model, graph, replace):
        return _states(model)


LLAMA = Subject("use_graph", _model, _states, lambda _: _states(_model("eager")), needs="transformers")


def cases() -> list[Case]:
    """Of the blocks of ``use_graph``, and of the calls in them."""
    of = Of(LLAMA)
    by_sample = from_mask(torch.ones(2, 1, 3, 3).bool() & torch.tensor([True, False]).view(2, 1, 1, 1))
    return [
        of.type("^model must", "got int", lambda _: _heard(3, causal(3))),
        of.type("^graph_or_function must", "got int", lambda model: _heard(model, 3)),
        of.type("^graph_or_function must", "got str", lambda model: _heard(model, "causal(3)")),
        of.value("^use_graph", "'eager'", lambda _: _heard(_model("eager"), causal(3))),
        of.value("use_graph|attention", "Linear", lambda _: _heard(nn.Linear(2, 2), causal(3))),
        of.value("too short", r"self_loops\(2\)", lambda model: _heard(model, self_loops(2))),
        of.value("differ|sample", "batch|sample", lambda model: _heard(model, by_sample)),
        of.type("graph", "got int", lambda model: _heard(model, lambda layer, head, length: 3)),
        of.type(
            "^graph_or_function must take", r"\(length\)", lambda model: _heard(model, lambda length: None)
        ),
    ]
