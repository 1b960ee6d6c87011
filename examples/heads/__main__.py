"""What each head looks for and says, in words, and whether cutting those edges shows it.

``python -m examples.heads 18.6 --model smollm2 --text FILE``

Exit code 0, 2 for wrong arguments.
"""

import argparse
import collections
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gnn_attention
from examples import commands
from examples.heads.reading import Reading, passages, readings
from gnn_attention import model
from gnn_attention._support import atomic_files

PAIR = re.compile(r"(\d+)(?:\.(\d+))?")
SMOLLM2, TRAINED = "smollm2", "trained"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the heads, by default of ``sys.argv``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.heads", description=__doc__)
    add, default = parser.add_argument, "(default %(default)s)"
    add("only", nargs="*", metavar="HEAD", help="layers (5) or heads (5.3) to read (default: all)")
    add("--model", choices=[SMOLLM2, TRAINED], action="append", help="may be repeated (default trained)")
    add("--text", metavar="FILE", help="read and test on this text (default: Python's collections.py)")
    add("--passages", type=int, default=32, metavar="N", help=f"half to read, half to test {default}")
    add("--length", type=int, default=48, metavar="T", help=f"tokens of a passage {default}")
    add("--seed", type=int, default=0, help=f"of the random edges {default}")
    atomic_files.add_json(parser)
    return commands.run(parser, arguments, _read)


def _read(args: argparse.Namespace) -> None:
    text = Path(args.text).read_text(encoding="utf-8") if args.text else inspect.getsource(collections)
    rows: list[dict[str, Any]] = []
    tables = []
    for name in dict.fromkeys(args.model or [TRAINED]):
        language_model, ids, word = _loaded(name, text)
        config = language_model.config
        num_heads = config.num_heads if name == TRAINED else config.num_attention_heads
        heads = [pair for only in args.only for pair in _pairs(only, num_heads)] or None
        tokens = passages(ids, args.passages, args.length)
        of_model = readings(language_model, tokens, word, heads, args.seed, progress=True)
        rows += [{"model": name} | _row(reading) for reading in of_model]
        tables.append(_table(name, of_model))
    about = {"text": args.text or "collections.py", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    about |= {"passages": args.passages, "length": args.length, "seed": args.seed, "rows": rows}
    atomic_files.write_json(args.json, about, "\n\n".join(tables))


def _loaded(name: str, text: str) -> tuple[Any, Sequence[int], Callable[[int], str]]:
    if name == TRAINED:
        trained, vocabulary = model.load_trained()
        return trained, vocabulary.encode(text), lambda token: vocabulary.decode([token])
    smollm2, tokenizer = gnn_attention.lm.load(name)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return smollm2, ids, lambda token: str(tokenizer.decode([token]))


def _pairs(text: str, num_heads: int) -> list[tuple[int, int]]:
    """Heads that an argument names; ValueError for one that names none.

    >>> _pairs("5.3", 9), _pairs("5", 2)
    ([(5, 3)], [(5, 0), (5, 1)])
    """
    named = PAIR.fullmatch(text)
    if named is None:
        raise ValueError(f"HEAD must be a layer such as 5, or a layer and a head such as 5.3, got {text!r}")
    return [(int(named[1]), head) for head in ([int(named[2])] if named[2] else range(num_heads))]


def _row(reading: Reading) -> dict[str, Any]:
    effects = {name: getattr(reading, name)._asdict() for name in ("looks", "said", "loss")}
    return {**reading._asdict(), **effects, "holds": reading.holds}


def _table(name: str, readings: Sequence[Reading]) -> str:
    """Two lines a head; what is not shown by cutting is marked."""
    jobs = collections.Counter(reading.job for reading in readings)
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
    # A sink says nothing: what is tested is the length of its messages.
    what, sign = ("length", -1) if reading.job == "sink" else ("fall", 1)
    fall = f"{what} {sign * said.claimed:.3f} against {sign * said.control:.3f} (p {said.p_holm:.2g})"
    loss = f"loss {reading.loss.claimed:+.4f} against {reading.loss.control:+.4f}"
    return f"{reading}\n    {moved}; {fall}; {loss}"


if __name__ == "__main__":
    sys.exit(main())
