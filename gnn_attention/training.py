"""``gnn-attention train``: the small language model, trained on text that every Python installation has.

The corpus is the source of the standard library, code and docstrings alike. Some files are held out, chosen by a hash of
their names, and the loss on them is what the model is judged by. Everything that decides the result stands in a
:class:`Recipe`, whose defaults made the weights that ship with the package: same recipe, same corpus, same machine, same
weights.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gnn_attention import _checks, expressions, patterns
from gnn_attention._corpus import Corpus, Encoded, corpus, encoded
from gnn_attention._shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.bytepair import BytePair
from gnn_attention.graph import TokenGraph
from gnn_attention.model import Config, LanguageModel, generate, induction_scores, previous_token_scores, save

__all__ = ["Corpus", "Encoded", "Recipe", "add_arguments", "add_recipe", "corpus", "encoded", "run", "train"]

_PROMPT = "def read(self, size=-1):\n"
_SECONDS_BETWEEN_LINES = 2.0
_REPEATS_FALL = 0.8  # of the share of repeating windows, from the first step to the last
_STEPS_BETWEEN_LOOKS = 500
_LOSSES_KEPT = 100  # of the first steps, in the report
_WINDOWS_JUDGED = 512
_WINDOWS_LOOKED_AT = 64
_HELP = {
    "steps": "batches to learn from",
    "seed": "of the first weights and of the windows",
    "batch": "windows in a batch",
    "length": "tokens in a window",
    "pieces": "size of the vocabulary",
    "rate": "highest learning rate",
    "warmup": "steps until it is reached",
    "decay": "weight decay",
    "clip": "largest norm of the gradient",
    "repeats": "share of windows, at first, that say one stretch of text again and again",
    "precision": "of the products: float32 or bfloat16",
    "graph": "who hears whom in a window, an expression such as 'window(8192, 256)'; causal unless given",
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights, beside the corpus and the machine.

    ``repeats`` is the share of training windows, at the beginning, that say one stretch of text (an eighth to a half of the
    window) again and again until the window is full; it falls evenly to a fifth of that, and all other windows are text as it
    stands. Text alone gave this model no induction head within four million tokens (score 0.01). With these windows the score
    passed 0.5 within three million, reached 0.64, and was 0.56 in the end; ``history`` in the file tells it all.

    ``rate`` is the highest learning rate, reached after ``warmup`` steps; it falls to a tenth along a cosine.

    Raises TypeError or ValueError for a value that makes no sense.
    """

    steps: int = 20000
    seed: int = 0
    batch: int = 8
    length: int = 128
    pieces: int = 1024
    rate: float = 3e-3
    warmup: int = 200
    decay: float = 0.1
    clip: float = 1.0
    repeats: float = 0.5
    precision: str = "bfloat16"
    graph: str = ""

    def __post_init__(self) -> None:
        """Check every value."""
        for name, least in (("steps", 1), ("seed", 0), ("batch", 1), ("length", 8), ("pieces", 256), ("warmup", 0)):
            _checks.size(name, getattr(self, name), least)
        _checks.choice("precision", self.precision, ("float32", "bfloat16"))
        for name in ("rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not 0 <= self.repeats <= 1 or not self.decay >= 0:
            raise ValueError(f"repeats must be a share from 0 to 1 and decay at least 0, got {self.repeats!r}, {self.decay!r}")
        self.edges()

    def edges(self) -> TokenGraph:
        """The graph of a window; ValueError if it has another number of tokens."""
        if not self.graph:
            return patterns.causal(self.length)
        return _fitting(expressions.parse(self.graph), self)


def _fitting(graph: TokenGraph, recipe: Recipe) -> TokenGraph:
    if (graph.num_dst, graph.num_src) != (recipe.length, recipe.length):
        raise ValueError(f"graph must be one of length = {recipe.length} tokens, got {graph!r}")
    return graph


def train(
    recipe: Recipe | None = None,
    text: Corpus | Encoded | None = None,
    config: Config | None = None,
    minutes: float | None = None,
    out: Path | None = None,
    progress: bool | None = None,
    backend: str | Backend = "auto",
    graph: TokenGraph | None = None,
    watch: Callable[[int, float], None] | None = None,
) -> tuple[LanguageModel, BytePair, dict[str, Any]]:
    """A trained model, its vocabulary and a report of how it was made and what it reached.

    Args:
        recipe: what decides the result, ``Recipe()`` unless given.
        text: what to learn from, :func:`corpus` unless given; ``pieces`` is not looked at where it is encoded already.
        config: sizes of the model; its ``vocabulary_size`` is replaced by what the vocabulary has.
        minutes: end after so long if the steps are not done before; the learning rate falls accordingly.
        out: a file to save the three to, in the end and in full or not at all.
        progress: a line on stderr every two seconds; None means only when it is a terminal.
        backend: what attends, a name of ``list_backends()``, "auto" or one of your own.
        graph: who hears whom in a window, instead of the recipe's.
        watch: called after every step with the number of steps and the loss of the last.

    The weights are rounded to float16, as they are saved, before the report's figures are taken. Raises ValueError for a
    corpus shorter than one window, or a graph of another size than a window.
    """
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes!r}; None sets no limit")
    recipe = recipe or Recipe()
    graph = recipe.edges() if graph is None else _fitting(graph, recipe)
    lines = sys.stderr.isatty() if progress is None else progress
    text, vocabulary, tokens, held_out = text if isinstance(text, Encoded) else encoded(text, recipe.pieces)
    _check_long_enough(recipe, tokens, held_out)
    model = _new_model(replace(config or Config(1), vocabulary_size=len(vocabulary)), recipe)
    model.backend = backend
    came = _Fit(model, recipe, minutes, graph, watch).run(tokens, held_out, lines)
    model.eval().load_state_dict({name: weight.half().float() for name, weight in model.state_dict().items()})
    report = _description(recipe, text, minutes) | {"graph": graph.name} | came | _measured(model, tokens, held_out, graph)
    if out is not None:
        save(out, model, vocabulary, report)
    return model, vocabulary, report


# -- the windows ------------------------------------------------------------------------------------------------------


def _check_long_enough(recipe: Recipe, *parts: Tensor) -> None:
    for tokens in parts:
        if len(tokens) <= recipe.length:
            raise ValueError(f"the corpus has a part of {len(tokens)} tokens: expected more than length = {recipe.length}")


def _windows(tokens: Tensor, recipe: Recipe, share: float, generator: torch.Generator) -> Tensor:
    """A batch ``[batch, length + 1]`` of text from anywhere, of which a share says one stretch again and again."""
    place, shape = torch.arange(recipe.length + 1), (recipe.batch, 1)
    start = torch.randint(len(tokens) - recipe.length, shape, generator=generator)
    period = torch.randint(recipe.length // 8, recipe.length // 2 + 1, shape, generator=generator)
    again = torch.rand(shape, generator=generator) < share
    return tokens[start + torch.where(again, place % period, place)]


# -- the steps --------------------------------------------------------------------------------------------------------


def _new_model(config: Config, recipe: Recipe) -> LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LanguageModel(config)


def _optimizer(model: LanguageModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; what is no matrix of a map (norms, biases, tables of distances) does not decay."""
    named = dict(model.named_parameters())
    kept = [name for name, parameter in named.items() if parameter.dim() < 2 or name.endswith("table")]
    groups = [
        {"params": [named[name] for name in named if name not in kept], "weight_decay": recipe.decay},
        {"params": [named[name] for name in kept], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98))


def _rate(recipe: Recipe, step: int, done: float) -> float:
    """The learning rate of a step, when a share ``done`` of the training is over."""
    return recipe.rate * min(1.0, (step + 1) / (recipe.warmup + 1)) * (0.55 + 0.45 * math.cos(math.pi * done))


def _loss(model: LanguageModel, window: Tensor, graph: TokenGraph, precision: str = "float32") -> Tensor:
    """The mean of ``-log p(next token)`` over the windows ``[B, T + 1]``, in nats."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(window[:, :-1], graph)
    return functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


class _Fit:
    """One training under way: the model, its optimizer and what happened so far."""

    def __init__(
        self,
        model: LanguageModel,
        recipe: Recipe,
        minutes: float | None,
        graph: TokenGraph,
        watch: Callable[[int, float], None] | None,
    ) -> None:
        self.model, self.recipe, self.minutes, self.graph, self.watch = model, recipe, minutes, graph, watch
        self.optimizer = _optimizer(model, recipe)
        self.losses: list[float] = []
        self.history: list[dict[str, float]] = []
        self.began = self.last_line = time.monotonic()

    def run(self, tokens: Tensor, held_out: Tensor, lines: bool) -> dict[str, Any]:
        """All steps, or as many as the minutes allow; tells how far it came."""
        generator = torch.Generator().manual_seed(self.recipe.seed)
        while (done := self.share_done()) < 1:
            self.step(_windows(tokens, self.recipe, self.recipe.repeats * (1 - _REPEATS_FALL * done), generator), done)
            if len(self.losses) % _STEPS_BETWEEN_LOOKS == 0:
                self.history.append(self.look(held_out))
            if lines:
                self.tell()
            if self.watch is not None:
                self.watch(len(self.losses), self.losses[-1])
        seen, seconds = self.tokens_seen(), self.seconds()
        return {
            "steps": len(self.losses),
            "tokens_seen": seen,
            "seconds": round(seconds, 3),
            "peak_memory_mb": _peak_memory(),
            "losses": [_rounded(loss) for loss in self.losses[:_LOSSES_KEPT]],
            "history": self.history,
        }

    def step(self, window: Tensor, done: float) -> None:
        """One step down the gradient of the loss on a batch of windows."""
        for group in self.optimizer.param_groups:
            group["lr"] = _rate(self.recipe, len(self.losses), done)
        loss = _loss(self.model, window, self.graph, self.recipe.precision)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.losses.append(loss.item())

    def look(self, held_out: Tensor) -> dict[str, float]:
        """Where the training stands: losses, and the strongest induction and previous-token head."""
        return {
            "step": len(self.losses),
            "training_loss": _rounded(self.recent_loss()),
            "held_out_loss": _rounded(_evaluated(self.model, held_out, self.graph, _WINDOWS_LOOKED_AT)),
            "induction": _rounded(induction_scores(self.model).max()),
            "previous_token": _rounded(previous_token_scores(self.model)[0].max()),
        }

    def tell(self) -> None:
        """A line of progress on stderr, if the last one is old enough."""
        if time.monotonic() - self.last_line < _SECONDS_BETWEEN_LINES:
            return
        self.last_line = time.monotonic()
        step, rate = len(self.losses), self.tokens_seen() / self.seconds()
        line = f"step {step}/{self.recipe.steps}  loss {self.recent_loss():.3f}  {rate:,.0f} tokens/s"
        if self.history:
            names = ("held_out_loss", "induction", "previous_token")
            line += "".join(f"  {name} {self.history[-1][name]:.3f}" for name in names)
        print(line, file=sys.stderr, flush=True)

    def share_done(self) -> float:
        """How much of the steps, or of the time if that is scarcer, is used up."""
        return max(len(self.losses) / self.recipe.steps, self.seconds() / 60 / self.minutes if self.minutes else 0.0)

    def recent_loss(self) -> float:
        """The mean loss of the last steps."""
        recent = self.losses[-_STEPS_BETWEEN_LOOKS // 5 :]
        return sum(recent) / len(recent)

    def tokens_seen(self) -> int:
        """Tokens that were predicted so far."""
        return len(self.losses) * self.recipe.batch * self.recipe.length

    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self.began


# -- the report -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _evaluated(model: LanguageModel, tokens: Tensor, graph: TokenGraph, most: int) -> float:
    """The mean loss over windows that lie evenly in the text: at most so many, and no more tokens than so many of 128 have."""
    length = graph.num_dst
    windows = max(1, min(most, most * 128 // length))
    starts = torch.linspace(0, len(tokens) - length - 1, windows).long()
    text = tokens[starts.unsqueeze(1) + torch.arange(length + 1)]
    parts = [_loss(model, part, graph).item() * len(part) for part in torch.split(text, max(1, min(32, 32 * 128 // length)))]
    return sum(parts) / windows


def _description(recipe: Recipe, text: Corpus, minutes: float | None) -> dict[str, Any]:
    """What went in: recipe, command, corpus, versions, date."""
    content = "".join((*text.training.values(), *text.held_out.values())).encode()
    return {
        "recipe": asdict(recipe),
        "seed": recipe.seed,
        "command": _command(recipe, minutes),
        "corpus_files": len(text.training) + len(text.held_out),
        "corpus_held_out_files": len(text.held_out),
        "corpus_bytes": len(content),
        "corpus_sha256": hashlib.sha256(content).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _command(recipe: Recipe, minutes: float | None) -> str:
    """The command that trains by this recipe: only what differs from the defaults is named."""
    changed = [f"--{key} {shlex.quote(str(value))}" for key, value in asdict(recipe).items() if value != getattr(Recipe, key)]
    return " ".join(["gnn-attention train", *changed, *([f"--minutes {minutes:g}"] if minutes else [])])


def _measured(model: LanguageModel, tokens: Tensor, held_out: Tensor, graph: TokenGraph) -> dict[str, Any]:
    """What came out: losses over text as it is, and what the heads do."""
    return {
        "training_loss": _rounded(_evaluated(model, tokens, graph, _WINDOWS_JUDGED)),
        "held_out_loss": _rounded(_evaluated(model, held_out, graph, _WINDOWS_JUDGED)),
        "uniform_loss": _rounded(math.log(model.config.vocabulary_size)),
        "induction_scores": _table(induction_scores(model)),
        "previous_token_scores": _table(previous_token_scores(model)),
    }


def _peak_memory() -> int:
    """The most that this process ever held, in MB."""
    import resource  # not on Windows

    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def _table(scores: Tensor) -> list[list[float]]:
    return [[_rounded(score) for score in layer] for layer in scores.tolist()]


def _rounded(number: float | Tensor) -> float:
    return round(float(number), 4)


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``gnn-attention train``: where to write, how long, and one for each field of :class:`Recipe`."""
    where = "where to write the weights (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("trained.safetensors"), metavar="FILE", help=where)
    parser.add_argument("--minutes", type=float, help="end after so long if the steps are not done before")
    parser.add_argument("--backend", default="auto", choices=["auto", *BACKENDS], help="what attends (default: %(default)s)")
    parser.add_argument("--progress", action="store_true", help="lines on stderr even if it is no terminal")
    add_recipe(parser)


def add_recipe(parser: argparse.ArgumentParser, defaults: Recipe | None = None, without: Collection[str] = ()) -> None:
    """An option for each field of :class:`Recipe`, those ``without`` left out."""
    for name, default in asdict(defaults or Recipe()).items():
        if name not in without:
            parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{_HELP[name]} (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """``gnn-attention train``: train, write the file, print the report; 0 if it is there, 130 if it was interrupted."""
    try:
        recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
        if not args.out.parent.is_dir():
            raise ValueError(f"--out {args.out}: expected a folder that exists, make {args.out.parent} first")
        model, vocabulary, report = train(
            recipe, minutes=args.minutes, out=args.out, progress=args.progress or None, backend=args.backend
        )
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"gnn-attention train: {error}", file=sys.stderr)
        return 2
    print(_summary(args.out, model, vocabulary, report))
    return 0


def _summary(out: Path, model: LanguageModel, vocabulary: BytePair, report: Mapping[str, Any]) -> str:
    """The report to read, with a text that the model goes on to write."""
    text = generate(model, torch.tensor(vocabulary.encode(_PROMPT)), count=80, temperature=0.7)
    return "\n".join(
        [
            f"{out}: {out.stat().st_size:,} bytes, {sum(weight.numel() for weight in model.parameters()):,} weights",
            f"{report['steps']} steps, {report['tokens_seen']:,} tokens in {report['seconds']} s, "
            f"{report['threads']} threads, peak memory {report['peak_memory_mb']:,} MB",
            "loss {training_loss:.3f}, held out {held_out_loss:.3f}, knowing nothing {uniform_loss:.3f}".format_map(report),
            *_rows("induction", report["induction_scores"]),
            *_rows("previous token", report["previous_token_scores"]),
            "",
            vocabulary.decode(text.tolist()),
        ]
    )


def _rows(name: str, scores: list[list[float]]) -> list[str]:
    return [f"{name}, layer {layer}: " + " ".join(f"{score:.3f}" for score in row) for layer, row in enumerate(scores)]
