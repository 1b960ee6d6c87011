"""Describe what each head of a model looks for and says, and test each description by cutting its edges.

``python -m examples.heads 18.6 --model smollm2 --text FILE``

The exit code is 0, 2 for wrong arguments, or 130 after Ctrl-C.
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

HEAD = re.compile(r"(\d+)(?:\.(\d+))?")
SMOLLM2, TRAINED = "smollm2", "trained"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, by default with the arguments of ``sys.argv``, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.heads", description=__doc__)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("heads", nargs="*", metavar="HEAD", help="layers (5) or heads (5.3) to describe (default: all)")
    add("--model", choices=[SMOLLM2, TRAINED], action="append", help="may be repeated (default: trained)")
    add("--text", metavar="FILE", help="text for the passages (default: Python's collections.py)")
    add("--passages", type=int, default=32, metavar="N", help=f"half to describe, half to test {default}")
    add("--length", type=int, default=48, metavar="T", help=f"number of tokens of a passage {default}")
    add("--seed", type=int, default=0, help=f"seed of the random edges {default}")
    atomic_files.add_json(parser)
    return commands.run(parser, arguments, _read)


def _read(args: argparse.Namespace) -> None:
    text = Path(args.text).read_text(encoding="utf-8") if args.text else inspect.getsource(collections)
    rows: list[dict[str, Any]] = []
    tables = []
    for name in dict.fromkeys(args.model or [TRAINED]):
        language_model, ids, decode = _load(name, text)
        config = language_model.config
        num_heads = config.num_heads if name == TRAINED else config.num_attention_heads
        heads = [head for argument in args.heads for head in _parse_heads(argument, num_heads)] or None
        tokens = passages(ids, args.passages, args.length)
        model_readings = readings(language_model, tokens, decode, heads, args.seed, progress=True)
        for reading in model_readings:
            effects = {test: getattr(reading, test)._asdict() for test in ("looks", "said", "loss")}
            rows.append({"model": name, **reading._asdict(), **effects, "holds": reading.holds})
        tables.append(_table(name, model_readings))
    record = {"text": args.text or "collections.py", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    record |= {"passages": args.passages, "length": args.length, "seed": args.seed, "rows": rows}
    atomic_files.write_json(args.json, record, "\n\n".join(tables))


def _load(name: str, text: str) -> tuple[Any, Sequence[int], Callable[[int], str]]:
    if name == TRAINED:
        trained, vocabulary = model.load_trained()
        return trained, vocabulary.encode(text), lambda token: vocabulary.decode([token])
    smollm2, tokenizer = gnn_attention.lm.load(name)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return smollm2, ids, lambda token: str(tokenizer.decode([token]))


def _parse_heads(argument: str, num_heads: int) -> list[tuple[int, int]]:
    """Return the pairs (layer, head) that an argument names.

    >>> _parse_heads("5.3", 9), _parse_heads("5", 2)
    ([(5, 3)], [(5, 0), (5, 1)])
    """
    match = HEAD.fullmatch(argument)
    if match is None:
        raise ValueError(
            f"HEAD must be a layer such as 5, or a layer and a head such as 5.3, got {argument!r}"
        )
    return [(int(match[1]), head) for head in ([int(match[2])] if match[2] else range(num_heads))]


def _table(name: str, readings: Sequence[Reading]) -> str:
    jobs = collections.Counter(reading.job for reading in readings)
    counts = ", ".join(f"{count} {job}" for job, count in jobs.most_common())
    holding = sum(reading.holds for reading in readings)
    title = f"{name}: {len(readings)} heads ({counts}); {holding} sentences hold, the others are marked WRONG"
    legend = "KL: divergence of predictions (nats per token); fall: of the said logits; against random edges"
    return "\n".join([title, legend, *map(_lines, readings)])


def _lines(reading: Reading) -> str:
    looks, said = reading.looks, reading.said
    divergence = f"KL {looks.claimed:.2g} against {looks.control:.2g} (p {looks.p_holm:.2g})"
    # A sink says nothing, so its test measures the length of its messages instead.
    measure, sign = ("length", -1) if reading.job == "sink" else ("fall", 1)
    fall = f"{measure} {sign * said.claimed:.3f} against {sign * said.control:.3f} (p {said.p_holm:.2g})"
    loss = f"loss {reading.loss.claimed:+.4f} against {reading.loss.control:+.4f}"
    return f"{reading}\n    {divergence}; {fall}; {loss}"


if __name__ == "__main__":
    sys.exit(main())
