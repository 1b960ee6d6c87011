"""The command ``gnn-attention heads``: what each head looks for and says, and whether cutting shows it."""

import argparse
import hashlib
import inspect
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gnn_attention
from gnn_attention import model
from gnn_attention._support import json_option
from gnn_attention._support.progress import Progress
from gnn_attention.interpret import circuits
from gnn_attention.interpret.circuits import Reading

PAIR = re.compile(r"(\d+)(?:\.(\d+))?")
SMOLLM2, TRAINED = "smollm2", "trained"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of ``gnn-attention heads``."""
    command.set_defaults(run=_heads)
    add, default = command.add_argument, "(default %(default)s)"
    add("only", nargs="*", metavar="HEAD", help="layers (5) or heads (5.3) to read (default: all)")
    add("--model", choices=[SMOLLM2, TRAINED], action="append", help="may be repeated (default trained)")
    add("--text", metavar="FILE", help="read and test on this text (default: Python's collections.py)")
    add("--passages", type=int, default=32, metavar="N", help=f"half to read, half to test {default}")
    add("--length", type=int, default=48, metavar="T", help=f"tokens of a passage {default}")
    add("--seed", type=int, default=0, help=f"of the random edges {default}")
    json_option.add_json(command)


def _heads(args: argparse.Namespace) -> int:
    text = text_of(args.text)
    models = list(dict.fromkeys(args.model or [TRAINED]))
    with Progress("heads", unit="heads") as progress:
        found = {name: _readings(name, text, args, progress) for name in models}
    rows = [{"model": name} | _row(reading) for name, rows in found.items() for reading in rows]
    about = {"text": args.text or "collections.py", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    about |= {"passages": args.passages, "length": args.length, "seed": args.seed, "rows": rows}
    tables = (_table(name, readings) for name, readings in found.items())
    json_option.write_json(args.json, about, "\n\n".join(tables))
    return 0


def _readings(name: str, text: str, args: argparse.Namespace, progress: Progress) -> list[Reading]:
    progress.advance(0, f"{name} reads the text")
    language_model, ids, word = _loaded(name, text)
    tokens = circuits.passages(ids, args.passages, args.length)
    sizes = _sizes(language_model)
    heads = [pair for only in args.only for pair in _pairs(only, sizes)] or None
    return circuits.readings(language_model, tokens, word, heads, args.seed, progress)


def _loaded(name: str, text: str) -> tuple[Any, Sequence[int], Callable[[int], str]]:
    if name == TRAINED:
        trained, vocabulary = model.load_trained()
        return trained, vocabulary.encode(text), lambda token: vocabulary.decode([token])
    smollm2, tokenizer = gnn_attention.lm.load(name)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return smollm2, ids, lambda token: str(tokenizer.decode([token]))


def _sizes(language_model: Any) -> tuple[int, int]:
    config = language_model.config
    if isinstance(language_model, model.LanguageModel):
        return config.num_layers, config.num_heads
    return config.num_hidden_layers, config.num_attention_heads


def _pairs(text: str, sizes: tuple[int, int]) -> list[tuple[int, int]]:
    """Heads that an argument names; ValueError for one that names none.

    >>> _pairs("5.3", (30, 9)), _pairs("5", (30, 2))
    ([(5, 3)], [(5, 0), (5, 1)])
    """
    found = PAIR.fullmatch(text)
    layer, head = (0, None) if found is None else (int(found[1]), found[2])
    if found is None or layer >= sizes[0] or int(head or 0) >= sizes[1]:
        expected = f"a layer below {sizes[0]}, or with a head below {sizes[1]} such as 1.3"
        raise ValueError(f"HEAD must be {expected}, got {text!r}")
    return [(layer, int(head))] if head is not None else [(layer, number) for number in range(sizes[1])]


def _row(reading: Reading) -> dict[str, Any]:
    effects = {
        name: effect._asdict() for name in ("looks", "said", "loss") if (effect := getattr(reading, name))
    }
    return {**reading._asdict(), **effects, "holds": reading.holds}


def _table(name: str, readings: Sequence[Reading]) -> str:
    """Two lines a head; what is not shown by cutting is marked."""
    jobs = Counter(reading.job for reading in readings)
    counts = ", ".join(f"{count} {job}" for job, count in jobs.most_common())
    right = sum(reading.holds for reading in readings)
    title = f"{name}: {len(readings)} heads ({counts}); {right} sentences hold, the others are marked WRONG"
    legend = (
        "moved: KL of the predictions (nats a token); fall: of the logits said; each against random edges"
    )
    return "\n".join([title, legend, *map(_line, readings)])


def _line(reading: Reading) -> str:
    looks, said = reading.looks, reading.said
    moved = f"moved {looks.claimed:.2g} against {looks.control:.2g} (p {looks.p_holm:.2g})"
    # a sink says nothing: there it is the length of its messages
    what, sign = ("length", -1) if reading.job == "sink" else ("fall", 1)
    fall = f"{what} {sign * said.claimed:.3f} against {sign * said.control:.3f} (p {said.p_holm:.2g})"
    loss = f"loss {reading.loss.claimed:+.4f} against {reading.loss.control:+.4f}"
    return f"{reading}\n    {moved}; {fall}; {loss}"


def text_of(file: str | None) -> str:
    """The text of a file; of Python's collections.py without one."""
    if file is None:
        return inspect.getsource(inspect.getmodule(OrderedDict))  # type: ignore[arg-type]
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {file} is no text in UTF-8: {error.reason} at byte {error.start}") from None
