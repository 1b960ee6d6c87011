"""F10: files that were damaged, or made by somebody hostile, in every format that the library reads.

Each is read, or refused in one short sentence that names it; nothing in it is run, no other file is touched,
and it takes at most two seconds of the processor and 256 MB. A file is damaged by ``mutations``, and read in
a ``sandbox``.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.guarantees import sandbox
from tests.guarantees.file_forms import FORMS, Form
from tests.guarantees.guarantee import Guarantee, Measured, Tell
from tests.guarantees.mutations import MARK, SECRET
from tests.guarantees.sandbox import Seen

MOST_SECONDS, MOST_MEMORY = 2.0, 2**28
LONGEST_MESSAGE = 1000  # characters


def mutated(form: Form, content: bytes, number: int) -> bytes:
    """Case ``number`` of a form, of which ``content`` is a whole file: the same bytes everywhere.

    >>> from tests.guarantees.file_forms import FORMS
    >>> mutated(FORMS[0], b"0123456789", 0) == mutated(FORMS[0], b"0123456789", 0) != b"0123456789"
    True
    """
    rng = random.Random(f"{form.name}: {number}")
    found = form.mutations[number % len(form.mutations)](content, rng)
    return (
        form.mutations[rng.randrange(len(form.mutations[:4]))](found, rng) if rng.random() < 0.1 else found
    )  # both


def judged(form: Form, path: Path, content: bytes) -> str | None:
    """What is wrong with how a file was read or refused; None if nothing is."""
    try:
        found = form.read(path)
    except (ValueError, TypeError, OSError) as error:
        return _badly_said(str(error), path.name if form.named is None else form.named)
    return form.check(content, found)


def _badly_said(message: str, named: str) -> str | None:
    if named not in message:
        return f"refused without a name: {message[:200]!r}"
    if len(message) > LONGEST_MESSAGE:
        return f"refused in {len(message):,} characters: {message[:200]!r}"
    if not all(letter.isprintable() or letter == "\n" for letter in message):
        return f"refused with what cannot be printed: {message[:200]!a}"
    return "refused with what is in another file" if SECRET in message else None


def _case(form: Form, folder: Path) -> Callable[[int], Callable[[], str | None]]:
    """What writes case ``number`` into the folder and gives what reads it."""
    path = form.make(folder)
    whole = path.read_bytes()

    def make(number: int) -> Callable[[], str | None]:
        content = mutated(form, whole, number)
        path.write_bytes(content)
        return lambda: judged(form, path, content)

    if (complaint := judged(form, path, whole)) is not None:  # also loads what is loaded at the first call
        raise ValueError(f"{form.name}: the whole file: {complaint}")
    return make


def _seen(form: Form, numbers: Sequence[int]) -> Iterator[Seen]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "files"
        place.mkdir()
        (Path(folder) / "secret.txt").write_text(SECRET, encoding="utf-8")
        yield from sandbox.seen(_case(form, place), numbers, MOST_MEMORY)
        if list(Path.cwd().glob(MARK)) or list(Path(folder).rglob(MARK)):
            yield Seen(-1, 0.0, f"one of {len(numbers)} files was run")


def measure(count: int, tell: Tell, forms: Sequence[Form] = FORMS) -> Measured:
    if (reason := sandbox.available()) is not None:
        return Measured("nothing was read", skipped=(f"every file: {reason}",))
    failures: list[str] = []
    slowest, total = 0.0, 0
    for form in forms:
        tell(f"{form.name}: {count:,} files, {len(failures)} failures so far")
        for found in _seen(form, range(count)):
            total, slowest = total + 1, max(slowest, found.seconds)
            late = f"took {found.seconds:.1f} s of the processor" if found.seconds > MOST_SECONDS else None
            if complaint := found.complaint or late:
                failures.append(f"{form.name}, file {found.number}: {complaint}")
    value = f"{len(failures)} of {total:,} files of {len(forms)} forms failed; slowest {slowest:.2f} s, none beyond 256 MB"
    return Measured(value, tuple(failures), () if total else ("every file: 0 cases",))


GUARANTEE = Guarantee(
    name="F10",
    promise="damaged and hostile files of every format are read, or refused by name; nothing in them is run",
    bar=(
        f"10,000 of each of {len(FORMS)} forms: 0 crashes, 0 code runs, each named in a sentence, at most 2 "
        "s and 256 MB a file"
    ),
    quick=26,
    full=10_000,
    measure=measure,
)
