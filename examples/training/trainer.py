"""Train the language model, write checkpoints and a report, and define the command ``train``.

The corpus is the source code of the standard library, of which some files are held out. The same
:class:`Recipe`, corpus and machine give the same parameters. The default recipe made the parameters in the
wheel, except that their vocabulary, learned without ``tokenizers``, has its pieces in another order.
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
from examples.training.metrics import describe_inputs, measure, measure_progress, peak_memory, round_number
from examples.training.parallel import Layout, Ranks, SingleProcess, clip, process_group
from examples.training.recipe import Recipe, add_recipe, check_corpus, check_graph, learning_rate, windows
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
# From the first step to the last, the share of repeating windows falls by this fraction.
_REPEATS_FALL = 0.8
# The held-out loss is measured for the history after every so many steps.
_HISTORY_STEPS = 500
_LOSSES_REPORTED = 100


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
    ranks: SingleProcess | None = None,
    checkpoint: Checkpoint | None = None,
) -> tuple[LanguageModel, BytePair, dict[str, Any]]:
    """Train a model, and return it with its vocabulary and a report of its inputs and results.

    Args:
        recipe: the settings, by default ``Recipe()``.
        text: the corpus, by default :func:`corpus`; if it is encoded, ``recipe.pieces`` is ignored.
        config: sizes of the model; its ``vocabulary_size`` is replaced.
        minutes: time limit of the training, to which the schedule of the learning rate adapts.
        out: file to save model, vocabulary and report to, at the end.
        progress: whether to show the progress on stderr; None: only on a terminal.
        backend: the attention backend: a name of ``list_backends()``, "auto" or your own backend.
        graph: the graph of a window, instead of the recipe's.
        watch: called after every step with the number of steps and the loss of the last step.
        ranks: :class:`Ranks` if several processes train one model; each calls this function.
        checkpoint: the :class:`Checkpoint` to resume from, if its file exists, and to write to.

    Parameters are rounded to float16, as they are saved, before the report is made. Raises ValueError for a
    corpus shorter than a window, a graph of another size, or a checkpoint of another training.
    """
    recipe = recipe or Recipe()
    config = config or Config(1)
    ranks = ranks or SingleProcess()
    graph = recipe.parse_graph() if graph is None else check_graph(graph, recipe)
    shown = sys.stderr.isatty() if progress is None else progress
    with Progress("train", show=shown and ranks.rank == 0) as bar:
        bar.expect(None, note="reading the text")
        data = text if isinstance(text, Encoded) else encoded(text or corpus(), recipe.pieces)
        text, vocabulary, tokens, held_out = data
        check_corpus(recipe, tokens, held_out)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = LanguageModel(replace(config, vocabulary_size=len(vocabulary)), backend)
        inputs = describe_inputs(recipe, text, minutes) | {"graph": graph.name} | ranks.description()
        fit = _Fit(model, recipe, graph, ranks, inputs, minutes=minutes, watch=watch, checkpoint=checkpoint)
        fit.resume()
        history = fit.run(tokens, held_out, bar)
        bar.advance(0, "measuring the trained model")
        model = ranks.gather(model)
        rounded = {name: tensor.half().float() for name, tensor in model.state_dict().items()}
        model.eval().load_state_dict(rounded)
        report = inputs | history | measure(model, tokens, held_out, graph)
        model.cpu()
    if out is not None and ranks.rank == 0:
        save(out, model, vocabulary, report)
    return model, vocabulary, report


@dataclass
class _Fit:
    model: LanguageModel
    recipe: Recipe
    graph: TokenGraph
    ranks: SingleProcess
    inputs: Mapping[str, Any]
    minutes: float | None
    watch: Callable[[int, float], None] | None
    checkpoint: Checkpoint | None
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module = self.ranks.place(self.model)
        # Weight decay is only for matrices, not for norms, biases and the tables of relative positions.
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self.model.named_parameters():
            is_matrix = parameter.dim() >= 2 and not name.endswith("table")
            (matrices if is_matrix else others).append(parameter)
        decay = self.recipe.decay
        groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.recipe.rate, betas=(0.9, 0.98))
        self.generator = torch.Generator().manual_seed(self.recipe.seed)
        self.identity = {name: self.inputs[name] for name in ("recipe", "corpus_sha256", "graph")}
        self.start = time.monotonic()

    def run(self, tokens: Tensor, held_out: Tensor, bar: Progress) -> dict[str, Any]:
        """Run all steps, or as many as the time allows, and return this part of the report."""
        bar.expect(self.recipe.steps, done_before=len(self.losses))
        while (progress := self.progress()) < 1:
            share = self.recipe.repeats * (1 - _REPEATS_FALL * progress)
            self.step(windows(tokens, self.recipe, share, self.generator), progress)
            if len(self.losses) % _HISTORY_STEPS == 0:
                entry = {"step": len(self.losses), "training_loss": round_number(self.recent_loss())}
                model = self.ranks.gather(self.model)
                self.history.append(entry | measure_progress(model, held_out, self.graph))
            self.save_if_due()
            self.show(bar)
            if self.watch is not None:
                self.watch(len(self.losses), self.losses[-1])
        return {
            "steps": len(self.losses),
            "tokens_seen": self.tokens_seen(),
            "seconds": round(self.seconds(), 3),
            "peak_memory_mb": peak_memory(),
            "losses": [round_number(loss) for loss in self.losses[:_LOSSES_REPORTED]],
            "history": self.history,
        }

    def step(self, window: Tensor, progress: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, len(self.losses), progress)
        loss = self.ranks.loss(self.module, window, self.graph, self.recipe.precision)
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
        if record := self.checkpoint.restore(self.model, self.optimizer, self.generator, self.identity):
            self.losses = record["losses"]
            self.history = record["history"]
            self.start -= record["seconds"]

    def show(self, bar: Progress) -> None:
        note = f"loss {self.recent_loss():.3f}, {self.tokens_seen() / self.seconds():,.0f} tokens/s"
        if self.history:
            names = ("held_out_loss", "induction", "previous_token")
            note += "".join(f", {name} {self.history[-1][name]:.3f}" for name in names)
        if self.minutes:
            expected_steps = round(len(self.losses) * self.minutes * 60 / self.seconds())
            bar.total = min(self.recipe.steps, expected_steps)
        bar.advance(1, note)

    def progress(self) -> float:
        """Return the finished share of the steps or of the time, whichever is larger."""
        steps = len(self.losses) / self.recipe.steps
        if not self.minutes:
            return steps
        # The clocks of ranks differ, and all must end after the same step.
        return max(steps, self.ranks.broadcast(self.seconds() / 60 / self.minutes))

    def recent_loss(self) -> float:
        return fmean(self.losses[-_HISTORY_STEPS // 5 :])

    def tokens_seen(self) -> int:
        return len(self.losses) * self.recipe.batch * self.recipe.length

    def seconds(self) -> float:
        return time.monotonic() - self.start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command ``train``, among them one for each field of :class:`Recipe`."""
    add, default = parser.add_argument, "(default: %(default)s)"
    out = Path("trained.safetensors")
    add("--out", type=Path, default=out, metavar="FILE", help=f"file for the trained model {default}")
    add("--minutes", type=float, help="time limit of the training (default: none)")
    add("--backend", default="auto", choices=["auto", *BACKENDS], help=f"attention backend {default}")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show progress on stderr")
    add_recipe(parser)
    add("--checkpoint", type=Path, metavar="FILE", help="file to resume from, if it exists, and to write to")
    add("--every", type=int, default=100, help=f"steps between checkpoints {default}")
    add("--device", default="cpu", choices=["cpu", "cuda"], help=f"device of the training {default}")
    launch = "torchrun --nproc-per-node 2 -m examples.training train ..."
    add = parser.add_argument_group("on several ranks", launch).add_argument
    add(
        "--data",
        choices=["ddp", "fsdp"],
        help="replicate or shard parameters (default: ddp; fsdp with --heads)",
    )
    add("--tokens", type=int, default=1, help=f"ranks that share the tokens of a window {default}")
    add("--heads", type=int, default=1, help=f"ranks that share the heads of a layer {default}")
    add("--partition", default="contiguous", choices=list(PARTITIONS), help=f"partition of tokens {default}")
    add("--timeout", type=float, default=120.0, help=f"seconds that a rank waits for another {default}")


def run(args: argparse.Namespace) -> None:
    """Train, write the model to a file and print a summary."""
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    layout = Layout(**{field.name: getattr(args, field.name) for field in fields(Layout)})
    atomic_files.check_output_path("--out", str(args.out))
    checkpoint = None if args.checkpoint is None else Checkpoint(args.checkpoint, args.every)
    options = {name: getattr(args, name) for name in ("minutes", "out", "progress", "backend")}
    with process_group(args.device, args.timeout) as device:
        if device is None and layout != Layout():
            raise ValueError("--data, --tokens, --heads and --partition need several ranks: use torchrun")
        ranks = SingleProcess(args.device) if device is None else Ranks(layout, recipe, device)
        try:
            model, vocabulary, report = train(recipe, **options, ranks=ranks, checkpoint=checkpoint)
        except KeyboardInterrupt:
            if checkpoint is None or not checkpoint.file.exists():
                raise KeyboardInterrupt("nothing was written") from None
            raise KeyboardInterrupt(f"the same command resumes from {checkpoint.file}") from None
    if ranks.rank == 0:
        print(_summary(args.out, model, vocabulary, report))


def _summary(out: Path, model: LanguageModel, vocabulary: BytePair, report: Mapping[str, Any]) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        "{steps} steps, {tokens_seen:,} tokens in {seconds} s, {threads} threads, peak {peak_memory_mb:,} MB",
        "loss {training_loss:.3f}, held out {held_out_loss:.3f}, uniform guess {uniform_loss:.3f}",
    ]
    for name in ("induction", "previous_token"):
        for layer, row in enumerate(report[f"{name}_scores"]):
            scores = " ".join(f"{score:.3f}" for score in row)
            lines.append(f"{name.replace('_', ' ')}, layer {layer}: {scores}")
    sample = generate(model, torch.tensor(vocabulary.encode(_PROMPT)), count=80, temperature=0.7)
    title = f"{out}: {out.stat().st_size:,} bytes, {count:,} parameters"
    body = [line.format_map(report) for line in lines]
    return "\n".join([title, *body, "", vocabulary.decode(sample.tolist())])
