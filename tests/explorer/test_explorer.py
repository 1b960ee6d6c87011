"""Test the data and graphs of the explorer, its page as a safe file, and its command."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.explorer_engine import HOSTILE, TEXT, WEB, data_of, mask_of, needs_node, small, text_of_data

from gnn_attention import TokenGraph, explorer, patterns
from gnn_attention import model as lm
from gnn_attention.__main__ import main
from gnn_attention.convert import expressions
from gnn_attention.explorer import _html, _masks, _pack
from gnn_attention.interpret import trace


@pytest.fixture(scope="module")
def page() -> explorer.Page:
    return explorer.page(TEXT, graph="window(n, 3)")


class TestData:
    def test_a_tensor_comes_back_exactly(self) -> None:
        """A tensor is encoded in the smallest dtype that represents it."""
        random, half = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.float16
        for tensor, dtype in (
            *((random.half(), half), (random.half().float(), half), (random.half().double(), half)),
            *((random, torch.float32), (random.mT, torch.float32), (random.bfloat16(), torch.bfloat16)),
        ):
            encoded = _pack.encode_tensor(tensor)
            raw = torch.frombuffer(bytearray(base64.b64decode(encoded["data"])), dtype=dtype)
            assert f"torch.{encoded['dtype']}" == str(dtype)
            assert torch.equal(raw.view(encoded["shape"]).double(), tensor.double())

    @pytest.mark.parametrize(("tokens", "room"), [(1, 0), (1, 1), (2, 0), (3, 16), (11, 16), (100, 7)])
    def test_the_zoo_fits_every_text(self, tokens: int, room: int) -> None:
        for choice in _masks.zoo(tokens, room):
            assert choice.mask.shape == (tokens + room, tokens + room)
            assert choice.meaning.endswith((".", ")"))
            assert len(choice.meaning) < 120

    def test_the_masks_and_words_of_a_page(self, page: explorer.Page) -> None:
        """The model's mask comes first, then the user's, then others; no mask comes twice."""
        data = data_of(page)
        names = [mask["name"] for mask in data["masks"]]
        assert names[:2] == ["causal(27)", "window(27, 3)"]
        assert (data["start"], data["room"], len(data["tokens"])) == (1, 16, 11)
        assert len({mask["bits"] for mask in data["masks"]}) == len(names) >= 13
        assert [mask["name"] for mask in data["masks"] if not mask["causal"]] == ["prefix(27, 6)", "full(27)"]
        assert data["masks"][1]["meaning"] == "Your graph, with 78 edges."
        for number, name in enumerate(names):
            if "[27 parents]" not in name:
                assert torch.equal(mask_of(data, number), expressions.parse(name).mask()), name
        assert data["views"] == list(trace.VIEWS)
        assert [term["name"] for term in data["words"]] == [term.name for term in trace.GLOSSARY]
        assert data["words"][0]["words"]["message exchange"] == "receiving channel"

    def test_graphs_of_the_user(self) -> None:
        """Graphs may be expressions or a TokenGraph, and larger than the text; masks replace the zoo."""
        edges = TokenGraph.from_edges(torch.tensor([[0, 2], [2, 0]]), 11, name="two edges")
        graphs = ["window(n, 2)", "causal(11) - causal(11).T", edges, patterns.window(10_000, 4)]
        data = data_of(explorer.page(TEXT, graph=graphs, masks=["self_loops(n)"]))
        names = ["causal(27)", "window(27, 2)", graphs[1], "two edges", "window(10000, 4)", "self_loops(27)"]
        assert [mask["name"] for mask in data["masks"]] == names
        assert [mask["tokens"] for mask in data["masks"]] == [27, 27, 11, 11, 27, 27]
        assert mask_of(data, 3).nonzero().tolist() == [[0, 2], [2, 0]]
        assert torch.equal(mask_of(data, 4), patterns.window(27, 4).mask())
        assert not mask_of(data, 2)[11:].any()

    def test_refusals(self) -> None:
        model, _ = small(num_layers=1)
        per_head = expressions.parse("duo_attention(32, 4, [0], 4)")
        tokens, no_gelu, bias = "text_or_tokens", small(num_layers=1), small(num_layers=1)
        no_gelu[0].blocks[0].mlp[1] = torch.nn.ReLU()
        bias[0].unembedding = torch.nn.Linear(12, 256)
        for options, error, match in (
            ({tokens: ""}, ValueError, "text_or_tokens must hold at least one token, got none"),
            ({tokens: "a " * 600}, ValueError, r"has \d+ tokens, at most 512 fit: shorten it, or pass ids"),
            ({tokens: [5000]}, IndexError, r"ids\[0\] is 5000: expected a token from 0 to 1023"),
            ({tokens: torch.zeros(2, 2)}, TypeError, "entry of text_or_tokens must be an integer, got .0.0"),
            ({"room": 1000}, ValueError, "room must leave at most 576 tokens in all"),
            ({"graph": "window(5, 2)"}, ValueError, r"the 11 tokens of the text \(27 with .*n stands for 27"),
            ({"graph": per_head}, ValueError, "varies by head or sample"),
            ({"masks": 3}, TypeError, "masks must be TokenGraphs or expressions"),
            ({"layers": [0]}, ValueError, "is for a Hugging Face model"),
            ({"model": model}, TypeError, r"needs its vocabulary: pass model=\(model, vocabulary\)"),
            ({"model": no_gelu}, ValueError, "with a GELU in each"),
            ({"model": bias}, ValueError, r"bias-free heads; differs in \['unembedding.bias'\]"),
        ):
            with pytest.raises(error, match=match):
                explorer.page(**({tokens: TEXT} | options))


MARKS = ["</title><style>*{display:none}</style>", "__DATA__ __TITLE__ $& $1", *HOSTILE]


class Elements(html.parser.HTMLParser):
    """A parser that collects every tag with its attributes, and the texts of title, scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, Any]] = []
        self.inside = ""
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag
        self.tags.append((tag, attrs))

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in ("title", "script", "style"):
            self.texts.setdefault(self.inside, []).append(data)

    def handle_comment(self, data: str) -> None:
        self.tags.append(("comment", data))


class TestFile:
    def test_hostile_words_are_inert(self) -> None:
        """Hostile words as title, token or name of a mask add no elements to a page."""
        source, graph = small(num_layers=1), patterns.causal(3)
        page = explorer.page("abc", source, title="plain", graph=graph, masks=[])
        for words in MARKS:
            data = data_of(page)
            data["title"] = data["tokens"][1]["text"] = data["masks"][1]["name"] = words
            text = _html.assemble_page(words, data)
            assert Elements(text).tags == Elements(page.html).tags
            assert json.loads(text_of_data(explorer.Page(text, words, 3))) == data
            text.encode("utf-8")

    def test_the_title(self) -> None:
        unusual = {"x\n\u202ey\x00z": "x y z", "\ud83e\udd99 \ud800": "\U0001f999 \ufffd"}
        for title, text in {"a < b & c": "a < b & c", **unusual}.items():
            page = explorer.page("abc", small(num_layers=1), title=title)
            assert Elements(page.html).texts["title"] == [text]
        # A title shows the lines of the text, so that texts of the same words differ.
        assert explorer.page("a\n  b  c\n\nd", small(num_layers=1)).title == "a ⏎ b c ⏎ d"

    def test_only_this_script_and_this_style_may_run(self, page: explorer.Page) -> None:
        """The policy has the hashes of script and style; no element carries code or addresses."""
        elements = Elements(page.html)
        (policy,) = (dict(attrs)["content"] for tag, attrs in elements.tags if dict(attrs).get("http-equiv"))
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        data, script = elements.texts["script"]
        styles = [(style, "style-src") for style in elements.texts["style"]]
        for text, rule in [(script, "script-src"), *styles]:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert rules[rule] == f"'sha256-{digest}'"
        other_rules = {name: rule for name, rule in rules.items() if not name.startswith(("script", "style"))}
        assert other_rules == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
        names = [tag for tag, _ in elements.tags]
        assert names.index("meta") < names.index("style")
        assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(names)
        for name in (name for _, attrs in elements.tags for name, _ in attrs):
            assert name not in ("src", "href", "style")
            assert not name.startswith("on")
        addresses = set(re.findall(r"\w+://[^\s\"'`)]+", page.html.replace(data, "")))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}

    def test_saved_and_shown(self, page: explorer.Page, tmp_path: Path) -> None:
        # A page adds the float16 weights of the model in base64 to the template.
        assert _html.TEMPLATE.stat().st_size < 200_000
        assert len(page.html) < 2_100_000
        path = page.save(tmp_path / "page.html")
        assert path.read_bytes().decode("utf-8") == page.html
        assert [child.name for child in tmp_path.iterdir()] == ["page.html"]
        assert _html.is_explorer_page(path)
        with pytest.raises(OSError, match="nowhere"):
            page.save(tmp_path / "nowhere" / "page.html")
        # A frame may be decoded in any encoding, and the hashes must be right in each.
        assert _html.TEMPLATE.read_bytes().isascii()
        ((tag, frame),) = Elements(page._repr_html_()).tags
        assert (tag, dict(frame)["srcdoc"], dict(frame)["sandbox"]) == ("iframe", page.html, "allow-scripts")
        assert repr(page) == f"Page('{TEXT}', 11 tokens, {len(page.html) / 1e6:.1f} MB)"

    def test_the_committed_page_is_that_of_the_sources(self, tmp_path: Path) -> None:
        """``npm run build`` makes the same bytes, and ``npm run check`` finds no errors."""
        node = needs_node()
        subprocess.run([node, WEB / "build.mjs", tmp_path / "page.html"], check=True, capture_output=True)
        is_same = (tmp_path / "page.html").read_bytes() == _html.TEMPLATE.read_bytes()
        assert is_same, "run npm run build, then python docs/make.py, and commit page.html and explore.html"
        tsc = WEB / "node_modules" / "typescript" / "bin" / "tsc"
        subprocess.run([node, tsc, "--noEmit", "-p", WEB], check=True)
        subprocess.run([node, WEB / "check.mjs"], check=True)


class TestCommand:
    def test_writes_a_page(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "page.html"
        graphs = ["--graph", "window(n, 4) | sinks(n, 1)", "--graph", "self_loops(n)"]
        assert main(["explore", TEXT, "-o", str(out), *graphs, "--room", "3", "--title", "A title"]) == 0
        assert capsys.readouterr().out.startswith(f"{out}: 11 tokens, 1.9 MB")
        data = data_of(out)
        names = [mask["name"] for mask in data["masks"]]
        assert names[1:3] == ["window(14, 4) | sinks(14, 1)", "self_loops(14)"]
        assert (data["title"], data["room"], data["model"]["name"]) == ("A title", 3, "trained")
        tiny = tmp_path / "tiny.safetensors"
        lm.save(tiny, *small(num_layers=1), {})
        assert main(["explore", "abc", "--model", str(tiny), "-o", str(out)]) == 0
        data = data_of(out)
        assert (data["model"]["name"], data["model"]["layers"], len(data["tokens"])) == ("tiny", 1, 3)

    def test_only_a_page_is_overwritten(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out, text = tmp_path / "page.html", tmp_path / "text.txt"
        text.write_text("def read(", encoding="utf-8")
        assert main(["explore", f"@{text}", "-o", str(out)]) == 0
        assert main(["explore", "-o", str(out)]) == 0
        assert "".join(token["text"] for token in data_of(out)["tokens"]) == explorer.FIRST
        out.write_text("my notes")
        assert main(["explore", "abc", "-o", str(out)]) == 2
        message = "exists and is not an explorer page: use another name or --force"
        assert message in capsys.readouterr().err
        assert out.read_text() == "my notes"
        assert main(["explore", "again", "-o", str(out), "--force"]) == 0
        assert data_of(out)["title"] == "again"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["@latin.txt"], "can't decode byte 0xff in position 2"),
            ([""], "text must not be empty: pass one such as"),
            (["a", "-o", "no/such/page.html"], "-o no/such/page.html: expected a folder that exists"),
            (["a", "--layers", "1"], "is for a Hugging Face model"),
            (["a", "--model", "none.safetensors"], "model 'none.safetensors' is not a file"),
        ],
    )
    def test_wrong_arguments(self, arguments, words, tmp_path, monkeypatch, capsys) -> None:
        monkeypatch.chdir(tmp_path)
        Path("latin.txt").write_bytes(b"ab\xff")
        assert main(["explore", *arguments]) == 2
        output = capsys.readouterr()
        assert output.err.startswith("gnn-attention explore: ")
        assert words in output.err
        assert (output.out, [path.name for path in tmp_path.iterdir()]) == ("", ["latin.txt"])
