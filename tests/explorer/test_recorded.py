"""From the record of a Hugging Face model, the page computes what the model computed."""

from __future__ import annotations

import importlib
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import assert_exact, error
from support.explorer_engine import TEXT, ask, data_of, doubles, edit, run
from support.extras import needs
from torch import Tensor

from gnn_attention import explorer
from gnn_attention.__main__ import main
from gnn_attention.explorer import _pack

pytestmark = pytest.mark.slow  # node is started

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 4}
COMMON = {**SIZES, "intermediate_size": 24, "num_hidden_layers": 2}
CAPPED = {"sliding_window": 2, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaModel", {**COMMON, "num_key_value_heads": 2}),
    "GPT-2": ("GPT2Model", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "Gemma 2": ("Gemma2Model", {**COMMON, **CAPPED, "num_key_value_heads": 2, "head_dim": 4}),
    "Qwen 3": ("Qwen3Model", {**COMMON, "num_key_value_heads": 2, "head_dim": 8}),
    "BERT": ("BertModel", {**COMMON, "max_position_embeddings": 64}),
}


def make_model(name: str) -> Any:
    """Make a tiny model of a family, with large queries and keys so that weights differ."""
    transformers = needs("transformers")
    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind.replace("Model", "Config"))(**sizes)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if re.search(r"q_proj|k_proj|query|key|c_attn|bias", key):
                parameter.add_(torch.randn_like(parameter))
    return model


@torch.no_grad()
def attention_outputs(model: Any, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Run eager attention, and return what each attention layer adds, and its weights."""
    model.set_attn_implementation("eager")
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for name, part in model.named_modules():
            match = re.search(r"(self_attn|\battn|attention\.self|attention)$", name)
            if match and (hasattr(part, "o_proj") or hasattr(part, "c_proj")):
                hooks.enter_context(part.register_forward_hook(lambda m, x, y: outputs.append(y[0][0])))
        output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    return outputs, [weights[0] for weights in output.attentions]


class TestRecorded:
    @pytest.mark.parametrize(("name", "count"), [*((name, 11) for name in FAMILIES), ("Llama", 3)])
    def test_the_weights_and_updates_of_the_model(self, name: str, count: int, monkeypatch: Any) -> None:
        """They are right from stored messages (few tokens) and from W_O (many), in every family."""
        model, ids = make_model(name), [7 * i % 60 + 1 for i in range(count)]
        page = explorer.page(ids, model)
        data = data_of(page)
        first = data["model"]["layers"][0]
        assert (data["model"]["kind"], data["room"], len(data["model"]["layers"])) == ("record", 0, 2)
        assert (first["output"] is None) == (count < first["v"]["shape"][2])
        (answer,) = ask(page, [run()])
        # In a single sequence, the largest error of eager attention may be small by luck.
        sequences = [ids, *([(number + 11 * other) % 60 + 1 for number in ids] for other in range(1, 8))]
        single = [attention_outputs(model, other_ids) for other_ids in sequences]
        importlib.import_module("support.hf_models").keep_float64(monkeypatch)
        double = [attention_outputs(model.double(), other_ids) for other_ids in sequences]
        assert answer["said"]["logits"] is None
        (outputs, weights), layers = double[0], answer["said"]["layers"]
        assert len(outputs) == (0 if name == "BERT" else 2)
        updates = [doubles(layer["update"], count, -1) for layer in layers[: len(outputs)]]
        matrices = [doubles(layer["weights"], *w.shape) for layer, w in zip(layers, weights, strict=True)]
        # The page computes in float64 from a float32 record, with at most twice the error of eager float32.
        for index, numbers in enumerate((updates, matrices)):
            eager_error = max(error(a[index], b[index]) for a, b in zip(single, double, strict=True))
            assert error(numbers, double[0][index]) <= 2 * eager_error
        causal = "graph: every token attends to itself and all tokens before it"
        graphs = "graphs, which differ from layer to layer"
        meanings = {"BERT": "graph: every token attends to every token", "Gemma 2": graphs}
        assert data["masks"][0]["meaning"] == f"The model's own {meanings.get(name, causal)}."
        assert data["masks"][0]["causal"] == (name != "BERT")

    def test_the_page_knows_each_layers_own_edges(self) -> None:
        pairs = [(src, dst, layer) for layer in (0, 1) for dst in range(7) for src in range(7)]
        for name, window in (("Gemma 2", 2), ("Llama", 7)):
            page = explorer.page([5, 3, 1, 4, 1, 5, 9], make_model(name))
            last = len(data_of(page)["masks"]) - 1  # All layers share the last graph of the zoo.
            questions = [{"ask": "has", "pairs": [[mask, *pair] for pair in pairs]} for mask in (0, last)]
            questions.append({"ask": "varies", "masks": [0, last]})
            has, shared, varies = (answer["said"] for answer in ask(page, questions))
            expected = [0 <= dst - src < (7 if layer else window) for src, dst, layer in pairs]
            assert has == expected
            assert shared[:49] == shared[49:]
            assert varies == [window < 7, False]

    def test_a_cut_changes_only_its_layer(self) -> None:
        model, ids = make_model("GPT-2"), [3, 1, 4, 1, 5, 9, 2, 6]
        page = explorer.page(ids, model)
        edits = ([], [edit(2, 6, layer=0, head=1)], [edit(src, 4) for src in range(5)])
        plain, cut, isolated = (answer["said"]["layers"] for answer in ask(page, [run(0, e) for e in edits]))
        plain_weights, cut_weights = (doubles(layers[0]["weights"], 4, 8, 8) for layers in (plain, cut))
        expected = plain_weights.clone()
        expected[1, 6, 2] = 0
        expected[1, 6] /= expected[1, 6].sum()
        assert_exact(cut_weights, expected)
        assert plain[1] == cut[1]
        bias = model.h[0].attn.c_proj.bias.detach().double()
        assert torch.equal(doubles(isolated[0]["update"], 8, -1)[4], bias)

    def test_what_a_record_cannot_answer(self) -> None:
        questions = [{"ask": "forms", "with": [0, 0, 0, 1]}, {"ask": "next", "with": [2, 5]}]
        questions += [{"ask": "contribution", "with": [0, 0, 0, 1, 5]}, run(0, tokenIds=[1, 2])]
        _, *answers = ask(explorer.page([1, 2, 3], make_model("Llama")), [run(), *questions])
        assert [answer.get("said") for answer in answers[:2]] == [None, []]
        assert "a record has no unembedding" in answers[2]["error"]
        assert "a record has the tokens that it was made of" in answers[3]["error"]

    def test_the_model_is_left_as_it_was(self) -> None:
        model = make_model("Llama").train()
        model.layers[0].eval()
        implementation = model.config._attn_implementation
        page = explorer.page([1, 2, 3], model, layers=[1])
        assert (model.training, model.layers[0].training, model.layers[1].training) == (True, False, True)
        assert model.config._attn_implementation == implementation
        assert [layer["number"] for layer in data_of(page)["model"]["layers"]] == [1]

    def test_a_folder_with_a_tokenizer(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """``--model`` reads a model and its tokenizer from a folder; here each word is a token."""
        tokenizers, transformers = needs("tokenizers"), needs("transformers")
        words = {word: number for number, word in enumerate(["[UNK]", *TEXT.split()])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
        fast.save_pretrained(tmp_path / "model")
        make_model("Llama").save_pretrained(tmp_path / "model")
        out = tmp_path / "page.html"
        arguments = ["--model", str(tmp_path / "model"), "--layers", "0", "-o", str(out)]
        assert main(["explore", TEXT, *arguments]) == 0
        data = data_of(out)
        assert [token["text"] for token in data["tokens"]] == TEXT.split()
        assert data["title"] == TEXT
        assert (data["masks"][0]["name"], data["masks"][0]["causal"]) == ("the model's mask", True)
        assert "5 tokens" in capsys.readouterr().out

    def test_refusals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        transformers = needs("transformers")
        llama = make_model("Llama")
        t5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
        pair, linear = transformers.T5Model(transformers.T5Config(**t5)), torch.nn.Linear(2, 2)
        for ids, model, kind, match in (
            (TEXT, llama, TypeError, r"needs the model's tokenizer: pass model=\(model, tokenizer\)"),
            ([1, 2], linear, TypeError, "model must be a Hugging Face text model or a LanguageModel"),
            ([1, 2], pair, NotImplementedError, "has an encoder and a decoder"),
        ):
            with pytest.raises(kind, match=match):
                explorer.page(ids, model)
        with pytest.raises(IndexError, match=r"layers must be in 0 .. 1, got \[2\]"):
            explorer.page([1, 2], llama, layers=2)
        with monkeypatch.context() as patched:
            patched.setattr(_pack, "MAX_CHARACTERS", 1000)
            with pytest.raises(
                ValueError, match="LlamaModel would make a page of 0 MB, at most 0: use fewer"
            ):
                explorer.page([1, 2], llama)
        with torch.no_grad():
            llama.embed_tokens.weight[2] = torch.nan
        with pytest.raises(ValueError, match="q of layer 0 has non-finite numbers"):
            explorer.page([1, 2], llama)
