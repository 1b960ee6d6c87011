"""Every number of the explorer's engine equals Python's, whatever was asked before."""

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
    run,
    small,
)

from gnn_attention import FactoredHeads, MergedHeads, explorer
from gnn_attention import model as lm
from gnn_attention.explorer import _html, _pack
from gnn_attention.interpret import trace

pytestmark = pytest.mark.slow  # node is started

MODEL, VOCABULARY = lm.load_trained()
DOUBLE = lm.load_trained()[0].double()
IDS = VOCABULARY.encode(TEXT)
PAGE = explorer.page(TEXT, graph="window(n, 3)")
DATA = data_of(PAGE)


def test_every_mask_of_a_page() -> None:
    """An isolated receiver has an update of 0."""
    answers = ask(PAGE, [run(number) for number in range(len(DATA["masks"]))])
    for number, answer in enumerate(answers):
        edges = edges_of(DATA, number, [], len(IDS), 2, 4)
        check_run(answer, MODEL.state_dict(), IDS, edges)
        updates = doubles(answer["said"]["layers"][0]["update"], len(IDS), -1)
        assert updates[~edges[0].any(0).any(-1)].eq(0).all()
    assert not all(mask_of(DATA, number)[0].any() for number in range(len(DATA["masks"])))
    logits = doubles(answers[0]["said"]["logits"], len(IDS), -1)[-1]
    assert_exact(logits, DOUBLE(torch.tensor([IDS]))[0, -1].detach())


def test_a_run_after_a_run() -> None:
    """Runs keep nothing stale of earlier masks, edits and tokens, and do not write into earlier arrays."""
    model, vocabulary = small()
    page = explorer.page("abcdefg", (model, vocabulary), room=5)
    data, generator = data_of(page), torch.Generator().manual_seed(0)

    def draw_number(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    questions, edits, ids, mask = [], [], list(b"abcdefg"), 0
    for _ in range(40):
        action = draw_number(6)
        if action == 0:
            mask = draw_number(len(data["masks"]))
        elif action in (1, 2):
            ids = [*ids, draw_number(256)][:12] if action == 1 else ids[: draw_number(len(ids) + 1)]
        elif action == 3 and ids:
            ids[draw_number(len(ids))] = draw_number(256)
        elif action == 4:
            edits = edits[: draw_number(len(edits) + 1)]
        else:
            layer, head = ["all", 0, 1, 2][draw_number(4)], ["all", 0, 1][draw_number(3)]
            edits = [*edits, edit(draw_number(12), draw_number(12), bool(draw_number(2)), layer, head)]
        questions.append(run(mask, edits, tokenIds=list(ids)))
    *answers, repeated_answer = ask(page, [*questions, {"ask": "again", "number": 0}])
    assert repeated_answer["said"]["layers"] == answers[0]["said"]["layers"]
    for answer, question in zip(answers, questions, strict=True):
        tokens = question["tokenIds"]
        edges = edges_of(data, question["mask"], question["edits"], len(tokens), 3, 2)
        check_run(answer, model.state_dict(), tokens, edges)


@torch.no_grad()
def test_forms_messages_and_contributions() -> None:
    """The page computes one edge in three forms, and what it adds to a logit, as the library does."""
    layer, head, src, dst, word = 1, 2, 3, 7, 65
    arguments = {"forms": [layer, head, src, dst], "message": [layer, head, src]}
    arguments["contribution"] = [layer, head, src, dst, word]
    questions = [run(0, logits=False), *({"ask": name, "with": values} for name, values in arguments.items())]
    _, forms, message, contribution = (answer["said"] for answer in ask(PAGE, questions))
    ids = torch.tensor([IDS])
    call = trace.record(DOUBLE, ids).layers[layer]
    x = DOUBLE.blocks[layer].attention_norm(DOUBLE.states(ids)[2 * layer])
    sent_message, logit = call.messages([(src, dst)])[0, 0, head], call.logits([(src, dst)])[0, 0, head]
    unembedding = DOUBLE.unembedding.weight[word]
    # Logits and contributions are sums that may cancel, so errors are relative to these sizes.
    largest, bound = float(call.logits().abs().max()), float(sent_message.norm() * unembedding.norm())
    for form in forms.values():
        assert_exact(form["logit"], float(logit), largest)
        assert_exact(doubles(form["message"], -1), sent_message)
    for name, kind in (("factored", FactoredHeads), ("merged", MergedHeads)):
        assert_exact(doubles(forms[name]["pattern"], -1), kind.of(call.heads).patterns(x)[0, head, dst])
    standard = {"q": call.q[0, head, dst], "k": call.k[0, head, src], "v": call.v[0, head, src]}
    for name, expected in standard.items():
        assert_exact(doubles(forms["standard"][name], -1), expected)
    assert_exact(doubles(message, -1), sent_message)
    assert_exact(contribution, float(call.carried([(src, dst)])[0, 0, head] @ unembedding), bound)


def test_the_next_token_and_a_decoding_step() -> None:
    """Greedy steps write what ``generate`` writes, and a draw follows the probabilities."""
    all_ids = lm.generate(DOUBLE, torch.tensor(IDS), 6, temperature=0.0).tolist()
    questions: list[dict[str, Any]] = []
    for count in range(len(IDS), len(all_ids)):
        questions.append(run(0, tokenIds=all_ids[:count], logits=False))
        questions.append({"ask": "pick", "with": [count - 1, 0, 0.5]})
    last, draws = len(all_ids) - 2, [0.0, 0.3, 0.7, 0.999999]
    questions.append({"ask": "next", "with": [last, 5]})
    questions += [{"ask": "pick", "with": [last, 0.7, draw]} for draw in draws]
    answers = [answer["said"] for answer in ask(PAGE, questions)]
    assert answers[1 : 2 * len(all_ids[len(IDS) :]) : 2] == all_ids[len(IDS) :]
    with torch.no_grad():
        logits = DOUBLE(torch.tensor([all_ids[:-1]]))[0, -1]
    top, likeliest = logits.softmax(-1).topk(5), answers[-5]
    assert [guess["id"] for guess in likeliest] == top.indices.tolist()
    chances = torch.tensor([guess["chance"] for guess in likeliest], dtype=torch.float64)
    assert_exact(chances, top.values)
    assert all(guess["text"] == VOCABULARY.decode([guess["id"]]) for guess in likeliest)
    cumulative = (logits / 0.7).softmax(-1).cumsum(-1)
    assert answers[-4:] == [int((cumulative > draw).nonzero()[0]) for draw in draws]


def test_reach() -> None:
    """Reach is a product of the layers' masks with self loops, after the edits of each layer."""
    token, size = 9, 11
    edits = [edit(8, 9, layer=1), edit(0, 9, True, layer=0, head=1)]
    number = next(i for i, mask in enumerate(DATA["masks"]) if mask["name"].startswith("window(27, 3)"))
    question = {"ask": "reach", "mask": number, "edits": edits, "token": token, "layers": 4, "size": size}
    (answer,) = ask(PAGE, [question])
    steps = edges_of(DATA, number, edits, size, 4, 4).any(1) | torch.eye(size, dtype=torch.bool)
    for last in range(4):
        is_reached = torch.eye(size)[token]
        for layer in range(last, -1, -1):
            is_reached = (is_reached @ steps[layer].float() > 0).float()
        assert list(base64.b64decode(answer["said"][last])) == is_reached.int().tolist()


def test_numbers_and_the_error_function() -> None:
    grid = torch.linspace(-7, 7, 20001, dtype=torch.float64)
    x = torch.cat([grid, torch.tensor([0.0, 1e-9, 6.0, 100.0])])
    erf, halves = ask(PAGE, [{"ask": "erf", "numbers": x.tolist()}, {"ask": "halves"}])
    # Taylor's remainder, max |6th derivative| / 720 / 128^6, is 1.2e-14. The values are sums of at most 1, of
    # at most 96 positive terms with three roundings each, so they are off by 300 x 2^-53 = 3.3e-14.
    assert (doubles(erf["said"], -1) - torch.special.erf(x)).abs().max() < 1e-13
    expected = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    output = doubles(halves["said"], -1)
    assert torch.equal(output.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


def test_sizes_texts_and_wrong_questions() -> None:
    pairs = [[1, src, dst] for dst in range(27) for src in range(27)]
    questions = [
        {"ask": "sizes", "ids": [IDS[0], 10, 5000]},
        {"ask": "has", "pairs": [*pairs, [1, 27, 0], [1, 0, -1]]},
        *(run(99), run(0, tokenIds=[0] * 28), run(0, tokenIds=[1024])),
    ]
    answers = ask(PAGE, questions)
    texts = [DATA["tokens"][0]["text"], "\n", ""]
    assert answers[0]["said"] == {"size": 27, "whole": True, "texts": texts}
    assert answers[1]["said"] == [*mask_of(DATA, 1).flatten().tolist(), False, False]
    assert [answer["error"] for answer in answers[2:]] == [
        f"RangeError: mask must be in 0 .. {len(DATA['masks']) - 1}, got 99",
        "RangeError: at most 27 tokens, got 28",
        "RangeError: tokens must be in 0 .. 1023, got 1024",
    ]


def test_bfloat16_and_float32_in_the_engine() -> None:
    model, vocabulary = small(1, num_layers=1)
    with torch.no_grad():
        model.unembedding.weight.copy_(model.unembedding.weight.bfloat16())
    page = explorer.page("xyz", (model, vocabulary), room=0)
    data = data_of(page)
    tensors = data["model"]["tensors"]
    tensors["unembedding.weight"] = _pack.encode_tensor(model.unembedding.weight.bfloat16())
    assert {tensor["dtype"] for tensor in tensors.values()} == {"float32", "bfloat16"}
    new_page = explorer.Page(_html.assemble_page("", data), "", 3)
    (answer,) = ask(new_page, [run()])
    check_run(answer, model.state_dict(), list(b"xyz"), edges_of(data, 0, [], 3, 1, 2))
