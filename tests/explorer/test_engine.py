"""The engine of the explorer's page: every number that it tells is Python's, whatever was asked before."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import torch
from support.bounds import assert_exact
from support.explorer_engine import (
    TEXT,
    ask,
    check_run,
    data_of,
    doubles,
    edges_of,
    edit,
    mask_of,
    small,
    text_of_data,
)

from gnn_attention import FactoredHeads, MergedHeads, explorer
from gnn_attention import model as lm
from gnn_attention.explorer import _html, _pack
from gnn_attention.interpret import trace
from gnn_attention.model.tokenizer import BytePair

pytestmark = pytest.mark.slow  # node is started


@pytest.fixture(scope="module")
def shipped() -> tuple[lm.LanguageModel, BytePair]:
    return lm.load_trained()


@pytest.fixture(scope="module")
def page() -> explorer.Page:
    return explorer.page(TEXT, graph="window(n, 3)")


class TestEngine:
    def test_every_mask_of_a_page(self, page: explorer.Page, shipped: Any) -> None:
        data, (model, vocabulary) = data_of(page), shipped
        ids = vocabulary.encode(TEXT)
        asked = ask(
            page, [{"ask": "run", "mask": number, "edits": []} for number in range(len(data["masks"]))]
        )
        for number, said in enumerate(asked):
            check_run(said, model.state_dict(), ids, edges_of(data, number, [], len(ids), 2, 4))
        logits = doubles(asked[0]["said"]["logits"], len(ids), -1)[-1]
        assert_exact(logits, torch.tensor(data["expected"]["logits"], dtype=torch.float64))

    def test_edits(self, page: explorer.Page, shipped: Any) -> None:
        data, (model, vocabulary) = data_of(page), shipped
        ids = vocabulary.encode(TEXT)
        lists = [
            [edit(1, 4, layer=1, head=2)],
            [edit(0, 5), edit(3, 5, layer=0)],
            [edit(src, 5) for src in range(6)],
            [edit(9, 2, True), edit(9, 3, True, layer=1, head=0)],
            [edit(2, 6), edit(2, 6, True, layer=0), edit(2, 6, False, head=3)],
            [edit(50, 3, True), edit(0, 60)],
        ]
        asked = ask(page, [{"ask": "run", "mask": 0, "edits": edits} for edits in lists])
        for said, edits in zip(asked, lists, strict=True):
            check_run(said, model.state_dict(), ids, edges_of(data, 0, edits, len(ids), 2, 4))
        deaf = asked[2]["said"]["layers"][0]
        assert doubles(deaf["update"], len(ids), -1)[5].eq(0).all()
        assert doubles(deaf["weights"], 4, len(ids), -1)[:, 5].eq(0).all()
        alone = doubles(asked[0]["said"]["layers"][1]["weights"], 4, len(ids), -1).sum(-1)
        assert_exact(alone, torch.ones_like(alone))

    def test_a_run_after_a_run(self) -> None:
        model, vocabulary = small()
        made = explorer.page("abcdefg", (model, vocabulary), room=5)
        data, drawn = data_of(made), torch.Generator().manual_seed(0)

        def number(below: int) -> int:
            return int(torch.randint(below, (), generator=drawn))

        def any_edit() -> dict[str, Any]:
            layer, head = (number(4) - 1, number(3) - 1)
            named = ("all" if layer < 0 else layer, "all" if head < 0 else head)
            return edit(number(12), number(12), bool(number(2)), *named)

        questions, edits, ids, mask = [], [], list(b"abcdefg"), 0
        for _ in range(60):
            what = number(6)
            if what == 0:
                mask = number(len(data["masks"]))
            elif what == 1:
                ids = [*ids, number(256)][:12]
            elif what == 2:
                ids = ids[: number(len(ids) + 1)]
            elif what == 3 and ids:
                ids[number(len(ids))] = number(256)
            elif what == 4:
                edits = edits[: number(len(edits) + 1)]
            else:
                edits = [*edits, any_edit()]
            questions.append({"ask": "run", "mask": mask, "edits": list(edits), "tokenIds": list(ids)})
        for said, question in zip(ask(made, questions), questions, strict=True):
            count = len(question["tokenIds"])
            edges = edges_of(data, question["mask"], question["edits"], count, 3, 2)
            check_run(said, model.state_dict(), question["tokenIds"], edges)

    def test_a_run_stays_what_it_was(self, page: explorer.Page) -> None:
        first, _, _, again = ask(
            page,
            [
                {"ask": "run", "mask": 0, "edits": []},
                {"ask": "run", "mask": 0, "edits": [edit(1, 4)]},
                {"ask": "run", "mask": 2, "edits": [], "tokenIds": [5, 6, 7]},
                {"ask": "again", "number": 0},
            ],
        )
        assert first["said"]["layers"] == again["said"]["layers"]
        assert first["said"]["logits"] == again["said"]["logits"]

    def test_tokens_that_were_heard_are_taken_back(self, page: explorer.Page, shipped: Any) -> None:
        """In a graph that looks ahead, a row that heard a token which is gone is computed anew."""
        data, (model, vocabulary) = data_of(page), shipped
        ids, full = vocabulary.encode(TEXT), len(data["masks"]) - 1
        assert data["masks"][full]["name"] == "full(27)"
        counts = [11, 7, 9]
        asked = [{"ask": "run", "mask": full, "edits": [], "tokenIds": ids[:count]} for count in counts]
        for said, count in zip(ask(page, asked), counts, strict=True):
            check_run(said, model.state_dict(), ids[:count], edges_of(data, full, [], count, 2, 4))

    def test_a_cut_is_that_of_the_trace(self, page: explorer.Page, shipped: Any) -> None:
        _, vocabulary = shipped
        ids, double = vocabulary.encode(TEXT), lm.load_trained()[0].double()
        (said,) = ask(page, [{"ask": "run", "mask": 0, "edits": [edit(0, 5, layer=1, head=2)]}])
        with torch.no_grad():
            run = trace.record(double, torch.tensor([ids]), surgery=trace.cut([(0, 5)], layers=1, heads=2))
        for found, layer in zip(said["said"]["layers"], run.layers, strict=True):
            assert_exact(doubles(found["update"], len(ids), -1), layer.update[0])
        assert_exact(doubles(said["said"]["logits"], len(ids), -1), run.output[0])

    def test_forms_messages_and_contributions(self, page: explorer.Page, shipped: Any) -> None:
        _, vocabulary = shipped
        ids, double = vocabulary.encode(TEXT), lm.load_trained()[0].double()
        layer, head, src, dst, word = 1, 2, 3, 7, 65
        run_first = {"ask": "run", "mask": 0, "edits": [], "logits": False}
        _, forms, message, contribution = (
            said["said"]
            for said in ask(
                page,
                [
                    run_first,
                    {"ask": "forms", "with": [layer, head, src, dst]},
                    {"ask": "message", "with": [layer, head, src]},
                    {"ask": "contribution", "with": [layer, head, src, dst, word]},
                ],
            )
        )
        with torch.no_grad():
            call = trace.record(double, torch.tensor([ids])).layers[layer]
            heard = double.blocks[layer].attention_norm(double.states(torch.tensor([ids]))[2 * layer])
            sent, logit = call.messages([(src, dst)])[0, 0, head], call.logits([(src, dst)])[0, 0, head]
            along = call.along(double.unembedding.weight[word], [(src, dst)])[0, 0, head]
            patterns_of = {
                "factored": FactoredHeads.of(call.heads).patterns(heard)[0, head, dst],
                "merged": MergedHeads.of(call.heads).patterns(heard)[0, head, dst],
            }
            # A logit, and what a message adds to one, are sums that may cancel: no larger than these.
            largest = float(call.logits().abs().max())
            reach = float(sent.norm() * double.unembedding.weight[word].norm())
        for form in forms.values():
            assert_exact(form["logit"], float(logit), largest)
            assert_exact(doubles(form["message"], -1), sent)
        for name, pattern in patterns_of.items():
            assert_exact(doubles(forms[name]["pattern"], -1), pattern)
        for name, wanted in (
            ("q", call.q[0, head, dst]),
            ("k", call.k[0, head, src]),
            ("v", call.v[0, head, src]),
        ):
            assert_exact(doubles(forms["standard"][name], -1), wanted)
        assert_exact(doubles(message, -1), sent)
        assert_exact(contribution, float(along), reach)

    def test_the_next_token_and_a_decoding_step(self, page: explorer.Page, shipped: Any) -> None:
        _, vocabulary = shipped
        ids, double = vocabulary.encode(TEXT), lm.load_trained()[0].double()
        written = lm.generate(double, torch.tensor(ids), 6, temperature=0.0).tolist()
        questions: list[dict[str, Any]] = []
        for count in range(len(ids), len(written)):
            questions.append(
                {"ask": "run", "mask": 0, "edits": [], "tokenIds": written[:count], "logits": False}
            )
            questions.append({"ask": "pick", "with": [count - 1, 0, 0.5]})
        last = len(written) - 2
        draws = [0.0, 0.3, 0.7, 0.999999]
        questions += [
            {"ask": "next", "with": [last, 5]},
            *({"ask": "pick", "with": [last, 0.7, draw]} for draw in draws),
        ]
        said = [answer["said"] for answer in ask(page, questions)]
        assert said[1 : 2 * len(written[len(ids) :]) : 2] == written[len(ids) :]
        with torch.no_grad():
            logits = double(torch.tensor([written[:-1]]))[0, -1]
        shares = logits.softmax(-1).topk(5)
        likeliest = said[-5]
        assert [found["id"] for found in likeliest] == shares.indices.tolist()
        assert_exact(
            torch.tensor([found["chance"] for found in likeliest], dtype=torch.float64), shares.values
        )
        assert [found["text"] for found in likeliest] == [
            vocabulary.decode([found["id"]]) for found in likeliest
        ]
        below = (logits / 0.7).softmax(-1).cumsum(-1)
        assert said[-4:] == [int((below > draw).nonzero()[0]) for draw in draws]

    def test_reach(self, page: explorer.Page) -> None:
        data, token = data_of(page), 9
        edits = [edit(8, 9, layer=1), edit(0, 9, True, layer=0, head=1)]
        number = next(i for i, mask in enumerate(data["masks"]) if mask["name"].startswith("window(27, 3)"))
        (said,) = ask(
            page, [{"ask": "reach", "mask": number, "edits": edits, "token": token, "layers": 4, "size": 11}]
        )
        steps = edges_of(data, number, edits, 11, 4, 4).any(1) | torch.eye(11, dtype=torch.bool)
        known = [torch.eye(11)[token]]
        for last in range(4):
            heard = torch.eye(11)[token]
            for layer in range(last, -1, -1):
                heard = (heard @ steps[layer].float() > 0).float()
            known.append(heard)
        assert [list(base64.b64decode(found)) for found in said["said"]] == [
            row.int().tolist() for row in known[1:]
        ]

    def test_numbers_and_the_error_function(self, page: explorer.Page) -> None:
        x = torch.cat(
            [torch.linspace(-7, 7, 20001, dtype=torch.float64), torch.tensor([0.0, 1e-9, 6.0, 100.0])]
        )
        erf, halves = ask(page, [{"ask": "erf", "numbers": x.tolist()}, {"ask": "halves"}])
        # The remainder of Taylor's polynomial, max |6th derivative| / 720 / 128^6, is 1.2e-14; the series
        # behind its values has at most 96 terms, all positive, of three roundings each: 300 x 2^-53 = 3.3e-14
        # of a sum of at most 1.
        assert (doubles(erf["said"], -1) - torch.special.erf(x)).abs().max() < 1e-13
        wanted = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
        assert torch.equal(
            doubles(halves["said"], -1).nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0)
        )

    def test_no_token_and_one(self, page: explorer.Page, shipped: Any) -> None:
        data, state, ids = data_of(page), shipped[0].state_dict(), shipped[1].encode(TEXT)
        asked = [{"ask": "run", "mask": number, "edits": [], "tokenIds": ids[:number]} for number in (0, 1)]
        for number, said in enumerate(ask(page, asked)):
            check_run(said, state, ids[:number], edges_of(data, number, [], number, 2, 4))

    def test_as_many_tokens_as_a_page_takes(self, shipped: Any) -> None:
        model, vocabulary = shipped
        made = explorer.page(vocabulary.encode((TEXT + " ") * 60)[:512], room=2)
        data = data_of(made)
        ids = [token["id"] for token in data["tokens"]]
        (said,) = ask(made, [{"ask": "run", "mask": 2, "edits": [edit(3, 500)], "logits": False}])
        check_run(said, model.state_dict(), ids, edges_of(data, 2, [edit(3, 500)], 512, 2, 4))

    def test_sizes_texts_and_wrong_questions(self, page: explorer.Page, shipped: Any) -> None:
        data, ids = data_of(page), shipped[1].encode(TEXT)
        mask = mask_of(data, 1)
        pairs = [[1, src, dst] for dst in range(27) for src in range(27)]
        said = ask(
            page,
            [
                {"ask": "sizes", "ids": [ids[0], 10, 5000]},
                {"ask": "has", "pairs": [*pairs, [1, 27, 0], [1, 0, -1]]},
                {"ask": "run", "mask": 99, "edits": []},
                {"ask": "run", "mask": 0, "edits": [], "tokenIds": [0] * 28},
                {"ask": "run", "mask": 0, "edits": [], "tokenIds": [1024]},
            ],
        )
        assert said[0]["said"] == {"size": 27, "whole": True, "texts": [data["tokens"][0]["text"], "\n", ""]}
        assert said[1]["said"] == [*mask.flatten().tolist(), False, False]
        assert [answer["error"] for answer in said[2:]] == [
            f"RangeError: mask must be in 0 .. {len(data['masks']) - 1}, got 99",
            "RangeError: at most 27 tokens, got 28",
            "RangeError: tokens must be in 0 .. 1023, got 1024",
        ]

    @pytest.mark.parametrize(("count", "bound"), [(64, 250), (512, 3000)])
    def test_speed(self, count: int, bound: float, shipped: Any, capsys: pytest.CaptureFixture[str]) -> None:
        made = explorer.page(shipped[1].encode((TEXT + " ") * 60)[:count], room=0)
        lists = ([], [edit(2, count - 3)], [edit(2, count // 4, layer=0)])
        runs = [*({"mask": 0, "edits": edits} for edits in lists), {"mask": 2, "edits": []}]
        (said,) = ask(made, [{"ask": "times", "runs": runs, "rounds": 5 if count == 64 else 2}])
        names = ("all mended", "a cut near the end", "a cut near the start", "another graph")
        best = {name: min(times[1:]) for name, times in zip(names, said["said"], strict=True)}
        with capsys.disabled():
            print(f"\n{count} tokens: " + ", ".join(f"{name} {time:.1f} ms" for name, time in best.items()))
        assert max(best.values()) < bound

    def test_bfloat16_and_float32_in_the_engine(self) -> None:
        """A model whose weights are no float16 is carried exactly, too."""
        model, vocabulary = small(1, num_layers=1)
        with torch.no_grad():
            model.unembedding.weight.copy_(model.unembedding.weight.bfloat16())
        made = explorer.page("xyz", (model, vocabulary), room=0)
        data = data_of(made)
        tensors = data["model"]["tensors"]
        raw = model.unembedding.weight.detach().bfloat16()
        tensors["unembedding.weight"] = _pack.stored(raw)
        assert {tensor["dtype"] for tensor in tensors.values()} == {"float32", "bfloat16"}
        changed = explorer.Page(made.html.replace(text_of_data(made), _html.embedded(data)), "", 3)
        (said,) = ask(changed, [{"ask": "run", "mask": 0, "edits": []}])
        check_run(said, model.state_dict(), list(b"xyz"), edges_of(data, 0, [], 3, 1, 2))
