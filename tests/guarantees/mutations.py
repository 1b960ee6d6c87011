"""How files are damaged: bytes of any format, values of JSON, parts of XML, and whole files of another kind.

A mutation is a function of what the file was and of a random generator; the same number always gives the same
file.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]
LARGEST = 2**20  # bytes of a mutated file, about
MARK = "gnn_attention_was_run"  # a file that a mutated file makes, if it is run
SECRET = "the secret of another file"  # what a mutated file may not make us say


def _flipped(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 8]) if found else 0):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _cut(content: bytes, rng: random.Random) -> bytes:
    """The beginning, or what is left without it."""
    place = rng.randint(0, len(content))
    return content[:place] if rng.random() < 0.8 else content[place:]


def _slice(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randint(0, len(content))
    return start, min(len(content), start + rng.choice([1, 2, 4, 8, 64, 1024]))


def _removed(content: bytes, rng: random.Random) -> bytes:
    start, stop = _slice(content, rng)
    return content[:start] + content[stop:]


def _repeated(content: bytes, rng: random.Random) -> bytes:
    """A slice twice, or so often that the file is large."""
    start, stop = _slice(content, rng)
    times = 2 if rng.random() < 0.9 else LARGEST // max(1, stop - start) // rng.choice([2, 16, 128])
    return content[:start] + content[start:stop] * times + content[stop:]


def _moved(content: bytes, rng: random.Random) -> bytes:
    start, stop = _slice(content, rng)
    rest = content[:start] + content[stop:]
    place = rng.randint(0, len(rest))
    return rest[:place] + content[start:stop] + rest[place:]


def _extreme(content: bytes, rng: random.Random) -> bytes:
    """1 to 8 bytes of all zeros or all ones: lengths, offsets and shapes blown up."""
    width = rng.choice([1, 2, 4, 8])
    place = rng.choice([0, rng.randint(0, len(content))])
    number = rng.choice(
        [b"\0" * width, b"\xff" * width, b"\xff" * (width - 1) + b"\x7f", b"\0" * (width - 1) + b"\x80"]
    )
    return content[:place] + number + content[place + width :]


def _digits(content: bytes, rng: random.Random) -> bytes:
    """A number in the text becomes another: negative, huge, of 10^5 digits, no number."""
    places = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    if not places:
        return _flipped(content, rng)
    place = rng.choice(places)
    other = rng.choice(
        [b"-1", b"1e999", b"NaN", b"9" * 20, b"1" * 100_000, b"18446744073709551616", b"0x10", b"1_0", b"01"]
    )
    return content[:place] + other + content[place + 1 :]


def _spliced(content: bytes, rng: random.Random) -> bytes:
    """Bytes that readers stumble over: no UTF-8, a NUL, a byte order mark, a terminal's escape."""
    place = rng.choice([0, rng.randint(0, len(content))])
    other = rng.choice(
        [
            *(b"\xff\xfe", b"\0", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[2J", b"\xc0\x80", b"\r"),
            b"\xe2\x80\xa8",
        ]
    )
    return content[:place] + other * rng.choice([1, 1, 1000]) + content[place:]


class _Payload:
    """What a pickle makes when it is run: a file by which it is known."""

    def __reduce__(self) -> tuple[Any, ...]:
        """By a builtin, so that any reader of pickles would find it."""
        return open, (MARK, "w")


def _zipped(name: str, content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)
    return stream.getvalue()


def _npy(header: str, content: bytes = b"") -> bytes:
    text = (header.ljust(117) + "\n").encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def _others() -> Iterator[bytes]:
    """Files of other kinds under this name: pickles, archives of them, bombs, endless nesting, nothing."""
    run, zeros = pickle.dumps(_Payload()), b"\0" * 2**24
    yield from (b"", b"\0", run, _zipped("data.pkl", run), _zipped("archive/data.pkl", run))
    yield _zipped("a.npy", _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", run))
    yield _zipped("a.npy", _npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10**15},), }}"))
    yield from (_zipped("bomb", zeros), gzip.compress(zeros), zlib.compress(zeros))
    yield from (
        *(b"[" * 100_000, b'{"a":' * 100_000, b"(" * 100_000, b"<a>" * 100_000, b"9" * 100_000),
        b"[]," * 300_000,
    )
    yield from (
        *(b"\x7fELF" + b"\0" * 64, b"#!/bin/sh\ntouch " + MARK.encode(), "\ufeff".encode() * 3, b"null"),
        *(b"[]", b"{}"),
    )


_OTHERS = tuple(_others())


def _other(content: bytes, rng: random.Random) -> bytes:
    return rng.choice(_OTHERS)


ANY: tuple[Mutation, ...] = (_flipped, _cut, _removed, _repeated, _moved, _extreme, _digits, _spliced, _other)


_NESTED = "[" * 100_000 + "]" * 100_000
_HOSTILE = (
    *("1e999", "-1e999", "NaN", "-Infinity", "1" * 100_000, "1" + "0" * 400, "-1", "0"),
    *("18446744073709551616", "0.5", "1e-320", "true", "null", '""', '"1"', "[]", "{}", '[["a"]]'),
    *('{"a": {"a": 1}}', _NESTED, '"\\ud800"', '"\\u0000"', '"\\u001b[2J"', json.dumps("x" * 300_000)),
    *(json.dumps("../../../../etc/passwd"), json.dumps("/dev/zero"), '{"a": 1, "a": 2}', "[1, 1.5]"),
)


def _places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value, the outermost first."""
    yield path
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, part in parts:
        yield from _places(part, (*path, key))


def _with(found: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    made = dict(found) if isinstance(found, dict) else list(found)
    made[path[0]] = _with(made[path[0]], path[1:], value)
    return made


def _value(content: bytes, rng: random.Random) -> bytes:
    found, marker = json.loads(content), "the place of the value"
    path = rng.choice(list(_places(found)))
    return json.dumps(_with(found, path, marker)).replace(json.dumps(marker), rng.choice(_HOSTILE)).encode()


def _name(content: bytes, rng: random.Random) -> bytes:
    """A name is gone, another, there twice, or an unexpected one comes too."""
    found, marker = json.loads(content), "the place of the name"
    objects = [path for path in _places(found) if isinstance(_at(found, path), dict) and _at(found, path)]
    if not objects:
        return _value(content, rng)
    path = rng.choice(objects)
    inside, other = (
        dict(_at(found, path)),
        rng.choice(["x" * 300_000, "__class__", "", "\ud800", *map(str, _at(found, path))]),
    )
    value = inside.pop(rng.choice(list(inside))) if rng.random() < 0.7 else None
    text = json.dumps(_with(found, path, inside | {marker: value} if rng.random() < 0.8 else inside))
    return text.replace(json.dumps(marker), json.dumps(other)).encode()


def _at(found: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        found = found[key]
    return found


JSON: tuple[Mutation, ...] = (_value, _name)


def _in_header(mutation: Mutation) -> Mutation:
    """A mutation of the header of a safetensors file, whose length is made to fit."""

    def mutated(content: bytes, rng: random.Random) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = mutation(content[8 : 8 + length], rng)
        return len(header).to_bytes(8, "little") + header + content[8 + length :]

    return mutated


def _in_metadata(content: bytes, rng: random.Random) -> bytes:
    """A mutation of JSON inside the metadata of a safetensors file."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata: Mapping[str, str] = header.get("__metadata__", {})
    inside = [name for name, text in metadata.items() if text.startswith(("{", "["))]
    if not inside:
        return _in_header(_value)(content, rng)
    name, mutation = rng.choice(inside), rng.choice(JSON)
    text = mutation(metadata[name].encode(), rng).decode("utf-8", "replace")
    other = json.dumps(header | {"__metadata__": {**metadata, name: text}}).encode()
    return len(other).to_bytes(8, "little") + other + content[8 + int.from_bytes(content[:8], "little") :]


SAFETENSORS: tuple[Mutation, ...] = (
    _in_header(_value),
    _in_header(_name),
    _in_header(_flipped),
    _in_metadata,
)


_LAUGHS = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
_PROLOGUES = (
    f'<!DOCTYPE a [<!ENTITY a0 "ha">{_LAUGHS}]>',
    '<!DOCTYPE a [<!ENTITY a11 SYSTEM "secret.txt">]>',
    '<!DOCTYPE a SYSTEM "http://127.0.0.1:9/a.dtd">',
    '<!doctype a [<!ENTITY % a11 SYSTEM "file:///etc/hostname"> %a11;]>',
    '<?xml version="1.0" encoding="utf-7"?>',
    '<?xml version="1.0" encoding="utf-16"?>',
    '<?xml-stylesheet href="http://127.0.0.1:9/a.xsl"?>',
)
_PARTS = (
    *('<node id="&a11;"/>', '<node id="01"/>', '<node id="-1"/>', '<node id="1e3"/>', '<node id=" 1"/>'),
    *('<node id="٣"/>', '<node id="99999999999999999999"/>', "<node/>", '<edge source="0"/>'),
    *('<edge source="0" target="7"/>', "<hyperedge/>", '<graph edgedefault="directed"/>'),
    *('<port name="a"/>', '<data key="nobody">1</data>', "<![CDATA[<node/>]]>", "<!--"),
    *('<node id="&#0;"/>', '<node id="&#xD800;"/>', "<a>" * 20_000, '<a b="' + "x" * 300_000 + '"/>'),
    *('<a b="1" b="2"/>', "&a11;"),
)


def _prologue(content: bytes, rng: random.Random) -> bytes:
    """Entities that grow without limit or fetch another file; another encoding than there is."""
    body = content.split(b"?>", 1)[-1]
    part = rng.choice([b"", b"", b'<node id="&a11;"/>', b"&a11;"])
    text = rng.choice(_PROLOGUES).encode() + body.replace(b"</graph>", part + b"</graph>")
    return text.decode().encode("utf-16") if rng.random() < 0.1 else text


def _part(content: bytes, rng: random.Random) -> bytes:
    pieces = content.split(b">")
    place = rng.randrange(len(pieces))
    pieces[place] = (
        rng.choice([b"", pieces[place]]) + b">" + rng.choice(_PARTS).encode("utf-8", "replace")[:-1]
    )
    return b">".join(pieces)


XML: tuple[Mutation, ...] = (_prologue, _part)

_STRANGE = (
    *("__import__('os').mkdir('x')", "eval('1')", "().__class__.__mro__", "lambda: 0", "open('x','w')"),
    *("causal.__globals__", "(" * 5000, "~" * 9000, "1+" * 4000 + "1", "9" * 9000, "causal(9**9**9)"),
    *("full(10**9)", "causal(4)**99", "[0]*10**9", "'\\ud800'", "\x00", "\u202e", "f'{1}'"),
    *("randn(10000,10000,10)", "closure(full(4000))", "causal(True)", "tensor([[[[]]]])", "window(8,", "n"),
    *("*", "\x1b[2J", "1e308", "-1", "float('nan')", "causal(n=4,n=4)", "'x'*10**9", "{1:2}", "x:=1"),
)


def _word(content: bytes, rng: random.Random) -> bytes:
    words = content.split(b" ")
    words[rng.randrange(len(words))] = rng.choice(_STRANGE).encode("utf-8", "surrogatepass")
    return b" ".join(words)


WORDS: tuple[Mutation, ...] = (_word,)
