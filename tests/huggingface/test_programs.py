"""Hugging Face models in programs of one piece: ``torch.compile(fullgraph=True)`` and ``torch.export``."""

# ruff: noqa: E402
import pytest
import torch
from support.extras import needs
from torch import nn

needs("transformers")

from support import hf_models
from support.hf_models import TOKENS, inputs

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.huggingface import attention, interface

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "bert", "t5")]
RTOL, ATOL = 1e-4, 1e-4  # float32, logits of some units


def model_of(name):
    model = hf_models.build(name)
    model.set_attn_implementation("gnn_attention")
    options = {"use_cache": False} if hasattr(model.config, "use_cache") and name != "bert" else {}
    return model, inputs(name, dtype=torch.float32) | options


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", ["mistral", *SLOW])
def test_a_program_of_one_piece_trains(name):
    """Logits and gradients are those of the eager call."""
    model, given = model_of(name)
    expected = hf_models.result(name, model, given)
    gradients = hf_models.gradients(name, model, given)
    model.zero_grad()
    program = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = hf_models.result(name, program, given)
    assert_same(found, expected)
    hf_models.direction(found).backward()
    # a program has a gradient of 0 where the eager call has none, as for an output that is not used
    own = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    assert all(k in gradients or not gradient.any() for k, gradient in own.items())
    assert_same({k: own[k] for k in gradients}, gradients)


@pytest.mark.parametrize("name", ["gemma2", *SLOW])
def test_an_exported_program(name):
    """With padding, too, where the model takes it."""
    model, given = model_of(name)
    padded = hf_models.EVERY[name].padded and hf_models.EVERY[name].inputs == "text"
    given |= inputs(name, "left") if padded else {}
    with torch.no_grad():
        expected = hf_models.result(name, model, given)
        program = torch.export.export(model, (), given, strict=False).module()
        assert_same(hf_models.result(name, program, given), expected)


def test_a_program_does_not_ignore_a_block():
    """It is compiled anew, and says that it holds no other graphs; outside it goes on."""
    model, given = model_of("llama")
    program = torch.compile(model, fullgraph=True, backend="eager")
    before = program(**given).logits
    for block in (ga.use_graph(model, patterns.window(TOKENS, 2)), interface.attending("reference")):
        # torch.compile makes an Unsupported of the NotImplementedError, with its message
        with pytest.raises(RuntimeError, match="need graph breaks"), block:
            program(**given)
    assert torch.equal(program(**given).logits, before)


def test_what_a_program_adds_to_logits():
    """Softcap, a bias, a float mask, and sinks; a receiver without in-edges is 0."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 8, generator=draw) for h in (4, 2, 2))
    edge = torch.rand(2, 1, 5, 5, generator=draw) < 0.5
    edge[:, :, 2] = False
    numbers = torch.randn(2, 1, 5, 5, generator=draw).masked_fill(~edge, -torch.inf)
    bias, sinks = torch.randn(1, 4, 5, 5, generator=draw), torch.randn(4, generator=draw)
    options = [{}, {"softcap": 1.5}, {"position_bias": bias}, {"sinks": sinks}]
    options += [{"output_attentions": True}, {"softcap": 2.0, "position_bias": bias, "sinks": sinks}]
    for mask in (edge, numbers):
        for more in options:
            call = lambda q, mask=mask, more=more: attention(nn.Module(), q, k, v, mask, **more)  # noqa: E731
            torch._dynamo.reset()
            found, weights = torch.compile(call, fullgraph=True, backend="eager")(q)
            expected, theirs = call(q)
            torch.testing.assert_close((found, weights), (expected, theirs))
            assert not found[:, 2].any()
