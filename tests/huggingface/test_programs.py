"""Hugging Face models run in full-graph programs: ``torch.compile(fullgraph=True)``, ``torch.export``."""

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
RTOL, ATOL = 1e-4, 1e-4  # Results in float32 are compared.


def model_of(name):
    model = hf_models.build(name)
    model.set_attn_implementation("gnn_attention")
    options = {"use_cache": False} if hasattr(model.config, "use_cache") and name != "bert" else {}
    return model, inputs(name, dtype=torch.float32) | options


def assert_same(output, expected):
    torch.testing.assert_close(output, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", ["mistral", *SLOW])
def test_a_full_graph_program_trains(name):
    """Its logits and gradients are those of the eager call."""
    model, batch = model_of(name)
    expected = hf_models.result(name, model, batch)
    gradients = hf_models.gradients(name, model, batch)
    model.zero_grad()
    program = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = hf_models.result(name, program, batch)
    assert_same(output, expected)
    hf_models.direction(output).backward()
    # A program has a gradient of 0 where the eager call has none, as for an unused output.
    program_gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    assert all(k in gradients or not gradient.any() for k, gradient in program_gradients.items())
    assert_same({k: program_gradients[k] for k in gradients}, gradients)


@pytest.mark.parametrize("name", ["gemma2", *SLOW])
def test_an_exported_program(name):
    """Its numbers are right with padding, too, if the model supports padding."""
    model, batch = model_of(name)
    padded = hf_models.EVERY[name].padded and hf_models.EVERY[name].inputs == "text"
    batch |= inputs(name, "left") if padded else {}
    with torch.no_grad():
        expected = hf_models.result(name, model, batch)
        program = torch.export.export(model, (), batch, strict=False).module()
        assert_same(hf_models.result(name, program, batch), expected)


def test_a_program_does_not_ignore_a_context():
    """Inside, it is compiled again and refuses the context; outside, it still runs."""
    model, batch = model_of("llama")
    program = torch.compile(model, fullgraph=True, backend="eager")
    logits = program(**batch).logits
    for context in (ga.use_graph(model, patterns.window(TOKENS, 2)), interface.attending("reference")):
        # torch.compile raises Unsupported with the message of the NotImplementedError.
        with pytest.raises(RuntimeError, match="need graph breaks"), context:
            program(**batch)
    assert torch.equal(program(**batch).logits, logits)


def test_what_a_program_adds_to_logits():
    """Softcap, a bias, a float mask and sinks equal the eager call; an isolated receiver gets 0."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 8, generator=draw) for h in (4, 2, 2))
    edge = torch.rand(2, 1, 5, 5, generator=draw) < 0.5
    edge[:, :, 2] = False
    numbers = torch.randn(2, 1, 5, 5, generator=draw).masked_fill(~edge, -torch.inf)
    bias, sinks = torch.randn(1, 4, 5, 5, generator=draw), torch.randn(4, generator=draw)
    cases = [{}, {"softcap": 1.5}, {"position_bias": bias}, {"sinks": sinks}]
    cases += [{"output_attentions": True}, {"softcap": 2.0, "position_bias": bias, "sinks": sinks}]
    for mask in (edge, numbers):
        for options in cases:
            call = lambda q, mask=mask, options=options: attention(nn.Module(), q, k, v, mask, **options)  # noqa: E731
            torch._dynamo.reset()
            output, weights = torch.compile(call, fullgraph=True, backend="eager")(q)
            expected, expected_weights = call(q)
            torch.testing.assert_close((output, weights), (expected, expected_weights))
            assert not output[:, 2].any()
