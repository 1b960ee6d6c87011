"""The training itself: steps, checkpoints, the report and the command.

The corpus is the source of the standard library, of which some files are held out. The settings are a
:class:`Recipe`: same recipe, same corpus, same machine, same weights. Its defaults made the weights that
ship, except that their vocabulary was learned before ``tokenizers`` was used: the pieces in another order.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from examples.training.checkpoints import Checkpoint
from examples.training.metrics import description, look, measured, peak_memory, rounded
from examples.training.parallel import Alone, Layout, Ranks, clip, started
from examples.training.recipe import Recipe, add_recipe, check_long_enough, fitting, rate, windows
from examples.training.text_corpus import Corpus, Encoded, corpus, encoded
from gnn_attention._support import atomic_files
from gnn_attention._support.progress import Progress
from gnn_attention._support.shapes import Tensor
from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.distributed import PARTITIONS
from gnn_attention.graph import TokenGraph
from gnn_attention.model import Config, LanguageModel, generate, save
from gnn_attention.model.tokenizer import BytePair

_PROMPT = "def read(self, size=-1):\n"
_REPEATS_FALL = 0.8  # of the share of repeating windows, from the first step to the last
_STEPS_BETWEEN_LOOKS = 500
_LOSSES_REPORTED = 100  # of the first steps


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
    ranks: Alone | None = None,
    checkpoint: Checkpoint | None = None,
) -> tuple[LanguageModel, BytePair, dict[str, Any]]:
    """A trained model, its vocabulary and a report of how it was made and what it reached.

    Args:
        recipe: the settings, ``Recipe()`` unless given.
        text: what to learn from, :func:`corpus` unless given; if encoded, ``pieces`` is ignored.
        config: sizes of the model; its ``vocabulary_size`` is replaced.
        minutes: end after so long if the steps are not done before; the learning rate falls accordingly.
        out: a file to save the three to, in the end and in full or not at all.
        progress: whether stderr shows it, a bar or a line every 5 s; None: only on a terminal.
        backend: what attends, a name of ``list_backends()``, "auto" or one of your own.
        graph: the graph of a window, instead of the recipe's.
        watch: called after every step with the number of steps and the loss of the last.
        ranks: :class:`Ranks` where several processes train one model; each calls this with the whole batch.
        checkpoint: where to write a :class:`Checkpoint`; the training goes on from what is there.

    The weights are rounded to float16, as they are saved, before the report is made. Raises ValueError for a
    corpus shorter than one window, a graph of another size, or the checkpoint of another training.
    """
    recipe, config, ranks = recipe or Recipe(), config or Config(1), ranks or Alone()
    graph = recipe.edges() if graph is None else fitting(graph, recipe)
    progress = sys.stderr.isatty() if progress is None else progress
    with Progress("train", show=progress and ranks.rank == 0) as shown:
        shown.expect(None, note="reading the text")
        known = text if isinstance(text, Encoded) else encoded(text or corpus(), recipe.pieces)
        text, vocabulary, tokens, held_out = known
        check_long_enough(recipe, tokens, held_out)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = LanguageModel(replace(config, vocabulary_size=len(vocabulary)), backend)
        inputs = description(recipe, text, minutes) | {"graph": graph.name} | ranks.description()
        fit = _Fit(model, recipe, minutes, graph, watch, ranks, checkpoint, inputs)
        fit.resume()
        progress_made = fit.run(tokens, held_out, shown)
        shown.advance(0, "measuring what was learnt")
        model = ranks.whole(model)
        rounded_weights = {name: weight.half().float() for name, weight in model.state_dict().items()}
        model.eval().load_state_dict(rounded_weights)
        report = inputs | progress_made | measured(model, tokens, held_out, graph)
        model.cpu()
    if out is not None and ranks.rank == 0:
        save(out, model, vocabulary, report)
    return model, vocabulary, report


def _optimizer(model: LanguageModel, recipe: Recipe) -> torch.optim.AdamW:
    # no weight decay for norms, biases and tables of distances
    decay: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, parameter in model.named_parameters():
        decay[parameter.dim() >= 2 and not name.endswith("table")].append(parameter)
    groups = [{"params": decay[1], "weight_decay": recipe.decay}, {"params": decay[0], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98))


@dataclass
class _Fit:
    # a training in progress

    model: LanguageModel
    recipe: Recipe
    minutes: float | None
    graph: TokenGraph
    watch: Callable[[int, float], None] | None
    ranks: Alone
    checkpoint: Checkpoint | None
    inputs: Mapping[str, Any]
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.called = self.ranks.place(self.model)
        self.optimizer = _optimizer(self.model, self.recipe)
        self.generator = torch.Generator().manual_seed(self.recipe.seed)
        self.identity = {name: self.inputs[name] for name in ("recipe", "corpus_sha256", "graph")}
        self.began = time.monotonic()

    def run(self, tokens: Tensor, held_out: Tensor, shown: Progress) -> dict[str, Any]:
        # all steps, or as many as the minutes allow; part of the report
        shown.expect(self.recipe.steps, done_before=len(self.losses))
        while (done := self.share_done()) < 1:
            share = self.recipe.repeats * (1 - _REPEATS_FALL * done)
            self.step(windows(tokens, self.recipe, share, self.generator), done)
            if len(self.losses) % _STEPS_BETWEEN_LOOKS == 0:
                recent = {"step": len(self.losses), "training_loss": rounded(self.recent_loss())}
                self.history.append(recent | look(self.ranks.whole(self.model), held_out, self.graph))
            self.save_if_due()
            self.show(shown)
            if self.watch is not None:
                self.watch(len(self.losses), self.losses[-1])
        return {
            "steps": len(self.losses),
            "tokens_seen": self.tokens_seen(),
            "seconds": round(self.seconds(), 3),
            "peak_memory_mb": peak_memory(),
            "losses": [rounded(loss) for loss in self.losses[:_LOSSES_REPORTED]],
            "history": self.history,
        }

    def step(self, window: Tensor, done: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.recipe, len(self.losses), done)
        loss = self.ranks.loss(self.called, window, self.graph, self.recipe.precision)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.losses.append(self.ranks.mean(loss))

    def save_if_due(self) -> None:
        step = len(self.losses)
        if self.checkpoint is None or (step % self.checkpoint.every and step < self.recipe.steps):
            return
        record = {**self.identity, "losses": self.losses, "history": self.history, "seconds": self.seconds()}
        self.checkpoint.save(self.model, self.optimizer, self.generator, record, self.ranks.rank == 0)

    def resume(self) -> None:
        if self.checkpoint is None:
            return
        if before := self.checkpoint.restore(self.model, self.optimizer, self.generator, self.identity):
            self.losses, self.history = before["losses"], before["history"]
            self.began -= before["seconds"]

    def show(self, shown: Progress) -> None:
        note = f"loss {self.recent_loss():.3f}, {self.tokens_seen() / self.seconds():,.0f} tokens/s"
        if self.history:
            names = ("held_out_loss", "induction", "previous_token")
            note += "".join(f", {name} {self.history[-1][name]:.3f}" for name in names)
        if self.minutes:
            in_time = round(len(self.losses) * self.minutes * 60 / self.seconds())
            shown.total = min(self.recipe.steps, in_time)
        shown.advance(1, note)

    def share_done(self) -> float:
        # of the steps, or of the time if that is scarcer
        steps = len(self.losses) / self.recipe.steps
        return max(steps, self.ranks.of_first(self.seconds() / 60 / self.minutes)) if self.minutes else steps

    def recent_loss(self) -> float:
        return fmean(self.losses[-_STEPS_BETWEEN_LOOKS // 5 :])

    def tokens_seen(self) -> int:
        return len(self.losses) * self.recipe.batch * self.recipe.length

    def seconds(self) -> float:
        return time.monotonic() - self.began


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command, one for each field of :class:`Recipe` among them."""
    add, shown = parser.add_argument, "(default: %(default)s)"
    out = Path("trained.safetensors")
    add("--out", type=Path, default=out, metavar="FILE", help=f"where to write the weights {shown}")
    add("--minutes", type=float, help="end after so long if the steps are not done before")
    add("--backend", default="auto", choices=["auto", *BACKENDS], help=f"what attends {shown}")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="on stderr (default: yes)")
    add_recipe(parser)
    add("--checkpoint", type=Path, metavar="FILE", help="where to store it; it goes on from what is there")
    add("--every", type=int, default=100, help=f"steps between checkpoints {shown}")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    launch = "torchrun --nproc-per-node 2 -m examples.training train ..."
    add = parser.add_argument_group("on several ranks", launch).add_argument
    add("--data", choices=["ddp", "fsdp"], help="weights whole, or a part (default: ddp, with --heads fsdp)")
    add("--tokens", type=int, default=1, help=f"ranks that share the tokens of a window {shown}")
    add("--heads", type=int, default=1, help=f"ranks that share the heads of a layer {shown}")
    add("--partition", default="contiguous", choices=list(PARTITIONS), help=f"of tokens {shown}")
    add("--timeout", type=float, default=120.0, help=f"seconds that a rank waits for another {shown}")


def run(args: argparse.Namespace) -> None:
    """Train, write the file and print the report."""
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    layout = Layout(**{field.name: getattr(args, field.name) for field in fields(Layout)})
    atomic_files.check_output_path("--out", str(args.out))
    checkpoint = None if args.checkpoint is None else Checkpoint(args.checkpoint, args.every)
    options = {name: getattr(args, name) for name in ("minutes", "out", "progress", "backend")}
    with started(args.device, args.timeout) as device:
        if device is None and layout != Layout():
            ranked = "--data, --tokens, --heads and --partition"
            raise ValueError(f"{ranked} are for several ranks: start with torchrun")
        ranks = Alone(args.device) if device is None else Ranks(layout, recipe, device)
        try:
            model, vocabulary, report = train(recipe, **options, ranks=ranks, checkpoint=checkpoint)
        except KeyboardInterrupt:
            if checkpoint is None or not checkpoint.file.exists():
                raise KeyboardInterrupt("nothing was written") from None
            raise KeyboardInterrupt(f"the same command goes on from {checkpoint.file}") from None
    if ranks.rank == 0:
        print(_summary(args.out, model, vocabulary, report))


def _summary(out: Path, model: LanguageModel, vocabulary: BytePair, report: Mapping[str, Any]) -> str:
    # with a text that the model goes on to write
    count = sum(weight.numel() for weight in model.parameters())
    lines = [
        "{steps} steps, {tokens_seen:,} tokens in {seconds} s, {threads} threads, peak {peak_memory_mb:,} MB",
        "loss {training_loss:.3f}, held out {held_out_loss:.3f}, knowing nothing {uniform_loss:.3f}",
    ]
    for name in ("induction", "previous_token"):
        for layer, row in enumerate(report[f"{name}_scores"]):
            scores = " ".join(f"{score:.3f}" for score in row)
            lines.append(f"{name.replace('_', ' ')}, layer {layer}: {scores}")
    text = generate(model, torch.tensor(vocabulary.encode(_PROMPT)), count=80, temperature=0.7)
    first = f"{out}: {out.stat().st_size:,} bytes, {count:,} weights"
    return "\n".join(
        [first, *(line.format_map(report) for line in lines), "", vocabulary.decode(text.tolist())]
    )
