"""Malformed graphs given to Hugging Face models, which need transformers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from gnn_attention.convert import from_mask
from gnn_attention.patterns import causal, self_loops
from tests.guarantees.llama import llama
from tests.guarantees.malformed.case import Case, Of, Subject

IDS = torch.tensor([[1, 2, 3]])


def _model(attention: str = "gnn_attention") -> Any:
    """A Llama of one layer, always the same; its attention is registered first."""
    importlib.import_module("gnn_attention.huggingface")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return llama(attn_implementation=attention)


@torch.no_grad()
def _states(model: Any) -> Any:
    return model(IDS).last_hidden_state


def _states_under(model: Any, graph: Any, replace: bool = False) -> Any:
    with importlib.import_module("gnn_attention.huggingface").use_graph(model, graph, replace):
        return _states(model)


LLAMA = Subject("use_graph", _model, _states, lambda _: _states(_model("eager")), needs="transformers")


def cases() -> list[Case]:
    of = Of(LLAMA)
    by_sample = from_mask(torch.ones(2, 1, 3, 3).bool() & torch.tensor([True, False]).view(2, 1, 1, 1))
    return [
        of.type("^model must", "got int", lambda _: _states_under(3, causal(3))),
        of.type("^graph_or_function must", "got int", lambda model: _states_under(model, 3)),
        of.type("^graph_or_function must", "got str", lambda model: _states_under(model, "causal(3)")),
        of.value("^model: ", "'eager'", lambda _: _states_under(_model("eager"), causal(3))),
        of.value("^model: ", "Linear", lambda _: _states_under(nn.Linear(2, 2), causal(3))),
        of.value("too short", r"self_loops\(2\)", lambda model: _states_under(model, self_loops(2))),
        of.value("differ|sample", "batch|sample", lambda model: _states_under(model, by_sample)),
        of.type("graph", "got int", lambda model: _states_under(model, lambda layer, head, length: 3)),
        of.type(
            "^graph_or_function must take",
            r"\(length\)",
            lambda model: _states_under(model, lambda length: None),
        ),
    ]
