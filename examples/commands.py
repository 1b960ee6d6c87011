"""What the commands of this folder share: errors in one line, training with progress, and times."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import torch

from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor


def run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    command: Callable[[argparse.Namespace], object] | None = None,
) -> int:
    """Parse the arguments, call the command (by default ``args.run``) and return the exit code.

    The exit code is 0, 2 for wrong arguments, or 130 after Ctrl-C.
    """
    args = parser.parse_args(arguments)
    try:
        atomic_files.check_output_path("--json", getattr(args, "json", None))
        (command or args.run)(args)
    except KeyboardInterrupt as interrupt:
        print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130
    except (ValueError, TypeError, IndexError, ImportError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def minimise(
    name: str, loss: Callable[[], Tensor], parameters: Iterable[Tensor], steps: int, learning_rate: float
) -> float:
    """Minimise ``loss()`` by Adam, with OneCycleLR up to ``learning_rate``, and return the seconds."""
    start = time.perf_counter()
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    with Progress(name, total=steps) as progress:
        for _ in range(steps):
            value = loss()
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            progress.advance(note=f"loss {float(value.detach()):.4f}")
    return time.perf_counter() - start


def median_milliseconds(call: Callable[[], object], repeats: int = 9) -> float:
    """Return the median time of ``repeats`` calls, after one that is not counted."""
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * median(seconds[1:])
