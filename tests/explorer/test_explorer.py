"""The explorer: its data and graphs, its page as a safe file, its command."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.explorer_engine import TEXT, WEB, data_of, mask_of, needs_node, small, text_of_data

from gnn_attention import TokenGraph, explorer, patterns
from gnn_attention import model as lm
from gnn_attention.__main__ import main
from gnn_attention.convert import expressions
from gnn_attention.explorer import _html, _masks, _pack
from gnn_attention.interpret import trace
from gnn_attention.model.tokenizer import BytePair


@pytest.fixture(scope="module")
def shipped() -> tuple[lm.LanguageModel, BytePair]:
    return lm.load_trained()


@pytest.fixture(scope="module")
def page() -> explorer.Page:
    return explorer.page(TEXT, graph="window(n, 3)")


class TestData:
    def test_a_tensor_comes_back_exactly(self) -> None:
        """In the smallest dtype that holds it: what comes back equals what went in."""
        drawn = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
        for tensor, dtype in (
            (drawn.half(), torch.float16),
            (drawn.half().float(), torch.float16),
            (drawn, torch.float32),
            (drawn.bfloat16(), torch.bfloat16),
            (drawn.half().double(), torch.float16),
            (drawn.mT, torch.float32),
        ):
            found = _pack.stored(tensor)
            raw = torch.frombuffer(bytearray(base64.b64decode(found["data"])), dtype=dtype).view(
                found["shape"]
            )
            assert f"torch.{found['dtype']}" == str(dtype)
            assert torch.equal(raw.double(), tensor.double())

    @pytest.mark.parametrize(("tokens", "room"), [(1, 0), (1, 1), (2, 0), (3, 16), (11, 16), (100, 7)])
    def test_the_zoo_fits_every_text(self, tokens: int, room: int) -> None:
        for choice in _masks.zoo(tokens, room):
            assert choice.mask.shape == (tokens + room, tokens + room)
            assert choice.meaning.endswith("." if not choice.meaning.endswith(")") else ")")
            assert len(choice.meaning) < 120

    def test_the_masks_of_a_page(self, page: explorer.Page) -> None:
        data = data_of(page)
        names = [mask["name"] for mask in data["masks"]]
        assert names[:2] == ["causal(27)", "window(27, 3)"]
        assert (data["start"], data["room"], len(data["tokens"])) == (1, 16, 11)
        assert len({mask["bits"] for mask in data["masks"]}) == len(names) >= 13
        assert [mask["name"] for mask in data["masks"] if not mask["causal"]] == ["prefix(27, 6)", "full(27)"]
        assert data["masks"][1]["meaning"].startswith(
            "Each token attends to the last w tokens, itself included"
        )
        for number, name in enumerate(names):
            if "[27 parents]" not in name:
                assert torch.equal(mask_of(data, number), expressions.parse(name).mask()), name

    def test_graphs_of_ones_own(self) -> None:
        edges = TokenGraph.from_edges(torch.tensor([[0, 2], [2, 0]]), 11, name="two edges")
        given = ["window(n, 2)", "causal(11) - causal(11).T", edges, patterns.window(10_000, 4)]
        data = data_of(explorer.page(TEXT, graph=given, masks=["self_loops(n)"]))
        assert [mask["name"] for mask in data["masks"]] == [
            *(
                "causal(27)",
                "window(27, 2)",
                "causal(11) - causal(11).T",
                "two edges",
                "window(10000, 4)",
                "self_loops(27)",
            )
        ]
        assert [mask["tokens"] for mask in data["masks"]] == [27, 27, 11, 11, 27, 27]
        assert mask_of(data, 3).nonzero().tolist() == [[0, 2], [2, 0]]
        assert torch.equal(mask_of(data, 4), patterns.window(27, 4).mask())
        assert not mask_of(data, 2)[11:].any()

    def test_the_glossary(self, page: explorer.Page) -> None:
        data = data_of(page)
        assert data["views"] == list(trace.VIEWS)
        assert [term["name"] for term in data["words"]] == [term.name for term in trace.GLOSSARY]
        assert data["words"][0]["words"]["message exchange"] == "receiving channel"

    def test_refusals(self, shipped: Any) -> None:
        model, _ = shipped
        per_head = expressions.parse("duo_attention(32, 4, [0], 4)")
        for options, error, match in (
            ({"text_or_tokens": ""}, ValueError, "text_or_tokens must hold at least one token, got none"),
            (
                {"text_or_tokens": "a " * 600},
                ValueError,
                r"has \d+ tokens, and a page shows at most 512: shorten it",
            ),
            ({"text_or_tokens": [5000]}, IndexError, r"ids\[0\] is 5000: expected a token from 0 to 1023"),
            ({"text_or_tokens": [0.5]}, TypeError, "expected an iterable of integers"),
            (
                {"text_or_tokens": 7},
                TypeError,
                "text_or_tokens must be a string or the ids of tokens, got int",
            ),
            ({"text_or_tokens": "a\ud800"}, ValueError, "a lone surrogate"),
            ({"room": -1}, ValueError, "room must be at least 0, got -1"),
            ({"room": 1000}, ValueError, "room must leave at most 576 tokens in all"),
            ({"graph": "windw(9, 2)"}, ValueError, "there is no builder 'windw'; did you mean 'window'"),
            (
                {"graph": "window(5, 2)"},
                ValueError,
                r"at least the 11 tokens of the text \(27 to write on\).*n stands for 27",
            ),
            ({"graph": "cross(30, 40)"}, ValueError, "all senders and receivers"),
            ({"graph": per_head}, ValueError, "differs by head or sample"),
            ({"graph": [3]}, TypeError, "a graph must be a TokenGraph or an expression such as 'window"),
            ({"title": 3}, TypeError, "title must be a string, got int"),
            ({"layers": [0]}, ValueError, "is for a Hugging Face model"),
            (
                {"model": model},
                TypeError,
                r"a LanguageModel needs its vocabulary: give model=\(model, vocabulary\)",
            ),
            ({"model": 3}, TypeError, "model must be a file, a name"),
        ):
            with pytest.raises(error, match=match):
                explorer.page(**({"text_or_tokens": TEXT} | options))

    def test_models_that_are_no_plain_ones(self) -> None:
        model, vocabulary = small(num_layers=1)
        model.blocks[0].mlp[1] = torch.nn.ReLU()
        with pytest.raises(ValueError, match="with a GELU in each"):
            explorer.page("a", (model, vocabulary))
        model, vocabulary = small(num_layers=1)
        model.unembedding = torch.nn.Linear(12, 256)
        with pytest.raises(
            ValueError, match=r"standard heads without biases; differs in \['unembedding.bias'\]"
        ):
            explorer.page("a", (model, vocabulary))


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]><img src=x onerror=alert(1)>",
    "&lt;b&gt; &amp;",
    "\u2028\u2029\x00\x1b[31m",
    "\"'`${1}\\",
    "\u202eabc\u2066\u200f",
    "\ud800 half \udfff",
    "__DATA__ __TITLE__ $& $1",
    "</title><style>*{display:none}</style>",
]


class Elements(html.parser.HTMLParser):
    """Every tag with its attributes, the text of the title, and that of each script and style."""

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
    @pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
    def test_hostile_words_are_inert(self, words: str) -> None:
        model, vocabulary = small(num_layers=1)
        graph = TokenGraph.from_edges(torch.tensor([[0], [1]]), 3, name=words)
        plain = explorer.page("abc", (model, vocabulary), title="plain", graph=patterns.causal(3), masks=[])
        data = data_of(explorer.page("abc", (model, vocabulary), title=words, graph=graph, masks=[]))
        assert data["title"] == data["masks"][1]["name"] == words
        data["model"]["name"] = data["tokens"][1]["text"] = data["model"]["vocabulary"][7] = words
        text = _html.assembled(words, data)
        assert Elements(text).tags == Elements(plain.html).tags
        assert json.loads(text_of_data(explorer.Page(text, words, 3))) == data
        before, after = plain.html.split(text_of_data(plain))
        assert text.startswith(before.split("<title>")[0])
        assert text.endswith(after)
        text.encode("utf-8")

    def test_the_title_is_what_was_given(self) -> None:
        model, vocabulary = small(num_layers=1)
        for title, shown in (
            ("a < b & c", "a < b & c"),
            ("x\n\u202ey\x00z", "x y z"),
            ("\ud83e\udd99 \ud800", "\U0001f999 \ufffd"),
        ):
            made = explorer.page("abc", (model, vocabulary), title=title)
            assert Elements(made.html).texts["title"] == [shown]

    def test_only_this_script_and_this_style_may_run(self, page: explorer.Page) -> None:
        elements = Elements(page.html)
        (policy,) = (dict(attrs)["content"] for tag, attrs in elements.tags if dict(attrs).get("http-equiv"))
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        data, script = elements.texts["script"]
        for text, rule in (
            (script, "script-src"),
            *((style, "style-src") for style in elements.texts["style"]),
        ):
            assert (
                rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            )
        assert {name: rule for name, rule in rules.items() if not name.startswith(("script", "style"))} == {
            "default-src": "'none'",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        assert [tag for tag, _ in elements.tags].index("meta") < [tag for tag, _ in elements.tags].index(
            "style"
        )
        for tag, attrs in elements.tags:
            assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
            assert not [
                name for name, _ in attrs if name in ("src", "href", "style") or name.startswith("on")
            ]
        addresses = set(re.findall(r"\w+://[^\s\"'`)]+", page.html.replace(data, "")))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}

    def test_size(self, page: explorer.Page) -> None:
        assert _html.TEMPLATE.stat().st_size < 200_000
        assert len(page.html) < 2_100_000

    def test_saved_and_shown(self, page: explorer.Page, tmp_path: Path) -> None:
        (tmp_path / ".page.html.part").write_text("of somebody else")
        path = page.save(tmp_path / "page.html")
        assert path.read_bytes().decode("utf-8") == page.html
        assert {child.name for child in tmp_path.iterdir()} == {"page.html", ".page.html.part"}
        assert (tmp_path / ".page.html.part").read_text() == "of somebody else"
        assert _html.is_ours(path)
        with pytest.raises(OSError, match="nowhere"):
            page.save(tmp_path / "nowhere" / "page.html")
        shown = page._repr_html_()
        (frame,) = Elements(shown).tags
        assert frame[0] == "iframe"
        assert dict(frame[1])["srcdoc"] == page.html
        assert dict(frame[1])["sandbox"] == "allow-scripts"
        assert repr(page) == f"Page('{TEXT}', 11 tokens, {len(page.html) / 1e6:.1f} MB)"

    def test_the_committed_page_is_that_of_the_sources(self, tmp_path: Path) -> None:
        """Npm run build, byte for byte."""
        node = needs_node()
        subprocess.run([node, WEB / "build.mjs", tmp_path / "page.html"], check=True, capture_output=True)
        assert (tmp_path / "page.html").read_bytes() == _html.TEMPLATE.read_bytes(), (
            "run npm run build and commit page.html"
        )

    def test_the_sources_are_clean(self) -> None:
        """Npm run check: types, and words that the page must not hold."""
        node = needs_node()
        subprocess.run(
            [node, WEB / "node_modules" / "typescript" / "bin" / "tsc", "--noEmit", "-p", WEB], check=True
        )
        subprocess.run([node, WEB / "check.mjs"], check=True)

    @pytest.mark.slow
    def test_a_fresh_install_builds_the_same_page(self, tmp_path: Path) -> None:
        """Npm ci from the lock file, in a copy without what is installed here, then the build."""
        needs_node()
        copy = tmp_path / "explorer" / "web"
        shutil.copytree(WEB, copy, ignore=shutil.ignore_patterns("node_modules"))
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=copy, check=True, capture_output=True)
        subprocess.run(["npm", "run", "build"], cwd=copy, check=True, capture_output=True)
        assert (copy.parent / "page.html").read_bytes() == _html.TEMPLATE.read_bytes()

    def test_versions_are_exact(self) -> None:
        """What builds the page is pinned, so that it builds the same tomorrow."""
        package = json.loads((WEB / "package.json").read_text())
        lock = json.loads((WEB / "package-lock.json").read_text())
        assert set(package["devDependencies"]) == {"esbuild", "typescript", "playwright-core", "axe-core"}
        for name, version in package["devDependencies"].items():
            assert re.fullmatch(r"\d+\.\d+\.\d+", version)
            assert lock["packages"][f"node_modules/{name}"]["version"] == version

    def test_the_wheel_holds_the_page_and_not_its_sources(self) -> None:
        root = Path(explorer.__file__).parents[2]
        wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
            "wheel"
        ]
        assert "gnn_attention/explorer/web" in wheel["exclude"]


class TestCommand:
    def test_writes_a_page(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "page.html"
        graphs = ["--graph", "window(n, 4) | sinks(n, 1)", "--graph", "self_loops(n)"]
        assert main(["explore", TEXT, "-o", str(out), *graphs, "--room", "3", "--title", "A title"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{out}: 11 tokens, 1.9 MB")
        data = data_of(explorer.Page(out.read_text(encoding="utf-8"), "", 0))
        assert [mask["name"] for mask in data["masks"]][1:3] == [
            "window(14, 4) | sinks(14, 1)",
            "self_loops(14)",
        ]
        assert (data["title"], data["room"], data["model"]["name"]) == ("A title", 3, "trained")

    def test_a_page_is_written_again_and_another_file_is_not(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "page.html"
        (tmp_path / "text.txt").write_text("def read(", encoding="utf-8")
        assert main(["explore", "--file", str(tmp_path / "text.txt"), "-o", str(out)]) == 0
        assert main(["explore", "again", "-o", str(out)]) == 0
        out.write_text("my notes")
        assert main(["explore", "again", "-o", str(out)]) == 2
        assert (
            "exists and is no page of the explorer: give another name, or --force" in capsys.readouterr().err
        )
        assert out.read_text() == "my notes"
        assert main(["explore", "again", "-o", str(out), "--force"]) == 0
        assert _html.is_ours(out)

    def test_a_device_is_written_to_and_a_pipe_is_not_waited_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`-o /dev/null` stays what it is; without --force nothing is written to either."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        for place in (Path(os.devnull), pipe):
            assert main(["explore", "abc", "-o", str(place)]) == 2
            assert "exists and is no page of the explorer" in capsys.readouterr().err
        assert main(["explore", "abc", "-o", os.devnull, "--force"]) == 0
        assert Path(os.devnull).is_char_device()
        assert pipe.is_fifo()

    def test_a_file_that_is_no_text_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "text.txt").write_bytes(b"ab\xff")
        assert main(["explore", "--file", str(tmp_path / "text.txt"), "-o", str(tmp_path / "page.html")]) == 2
        assert "text.txt is no text in UTF-8: invalid start byte at byte 2" in capsys.readouterr().err

    def test_another_model(self, tmp_path: Path) -> None:
        lm.save(tmp_path / "tiny.safetensors", *small(num_layers=1), {})
        assert (
            main(
                [
                    "explore",
                    "abc",
                    "--model",
                    str(tmp_path / "tiny.safetensors"),
                    "-o",
                    str(tmp_path / "page.html"),
                ]
            )
            == 0
        )
        data = data_of(explorer.Page((tmp_path / "page.html").read_text(encoding="utf-8"), "", 0))
        assert (data["model"]["name"], data["model"]["layers"], len(data["tokens"])) == ("tiny", 1, 3)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "give either a text, such as 'Llamas do not output words', or --file FILE"),
            (["a", "--file", "b"], "give either a text"),
            (["--file", "no_such_file"], "no_such_file"),
            ([""], "text_or_tokens must hold at least one token, got none"),
            (["a", "-o", "no/such/page.html"], "-o no/such/page.html: expected a folder that exists"),
            (["a", "-o", "."], "-o . is a folder"),
            (["a", "--graph", "windw(n, 4)"], "there is no builder 'windw'; did you mean 'window'?"),
            (["a", "--layers", "1"], "is for a Hugging Face model"),
            (["a", "--model", "none.safetensors"], "model 'none.safetensors' is no file"),
        ],
    )
    def test_wrong_arguments(
        self,
        arguments: list[str],
        words: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["explore", *arguments]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("gnn-attention explore: ")
        assert words in said.err
        assert (said.out, list(tmp_path.iterdir())) == ("", [])
