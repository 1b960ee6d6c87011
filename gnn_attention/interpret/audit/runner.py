"""A module under audit: a copy, run on random inputs and the caller's, and what three detectors see there.

The detectors are gradients, replaced inputs and NaN, each for every pair of tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Bool, Float, Int, Tensor

Call = Callable[[nn.Module, Tensor], Any]
Pairs = Bool[Tensor, "dst src"]
# numbers in the outputs of one pass, or pairs of tokens: 64 MB
LARGEST_PASS = 2**23
# random inputs: what is 0 or cancels at one of them does so at the other with probability 0
ROUNDS = 2
# units in the last place that do not count as a change
ROUNDING = 64


@dataclass(frozen=True)
class Sample:
    """One input: states ``[1, T, width]``, and their token ids ``[1, T]`` if there are any."""

    states: Float[Tensor, "batch tokens width"]
    ids: Int[Tensor, "batch tokens"] | None = None

    def times(self, count: int) -> Sample:
        states = self.states.expand(count, *self.states.shape[1:]).clone()
        return Sample(states, None if self.ids is None else self.ids.expand(count, -1).clone())

    def differentiable_copies(self, count: int) -> tuple[Tensor, Sample]:
        """The states to differentiate by, and so many copies for the module, which may write into them."""
        copies = self.times(count)
        states = copies.states.requires_grad_()
        return states, Sample(states.clone(), copies.ids)


class Runner:
    """Runs a copy of a module in one dtype: the same weights, mode and random numbers in every pass.

    ``samples`` is how many samples a pass holds: 1 where the module mixes them (``crosses_samples``) or draws
    random numbers (dropout in training), since copies of one input would then differ. After each of the
    ``forwards`` passes ``watch(forwards, expected)`` is called.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        shape: Sequence[int],
        num_dst: int,
        embedding: nn.Module | str | None,
        samples: int,
        seed: int,
        dtype: torch.dtype = torch.float64,
        watch: Callable[[int, int], None] | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> None:
        self.module, self.dtype, self.watch = _copy_module(module, dtype), dtype, watch
        self.call, self.shape, self.num_dst, self.seed = call, tuple(shape), num_dst, seed
        self.forwards = self.expected = 0
        tensors = (*self.module.parameters(), *self.module.buffers())
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        self.embedding: Any = None
        if len(shape) == 1:
            self.embedding = _embedding_of(module, self.module, embedding)
            self.known_ids = _known_ids(self.embedding)
        self.samples, self.crosses_samples = samples, False
        # The inputs of all rounds: first the random ones, then the caller's.
        self.probes = [self.draw(number) for number in range(ROUNDS)]
        self.probes += [self._sample_of(one) for one in inputs]
        self._check_finite()
        if samples > 1:
            self.samples, self.crosses_samples = self._together(samples)

    @property
    def samples_below_tokens(self) -> int:
        # so that states [T, B, ...] are not taken for [B, T, ...]
        return max(1, min(self.samples, self.shape[0] - 1))

    def draw(self, number: int) -> Sample:
        """The random input of that number: N(0, 1), or the embeddings of random token ids."""
        generator = torch.Generator().manual_seed(self.seed + number)
        if self.embedding is None:
            states = torch.randn(1, *self.shape, generator=generator, dtype=torch.float64)
            return Sample(states.to(self.device, self.dtype))
        chosen = torch.randint(len(self.known_ids), (1, self.shape[0]), generator=generator)
        return self._sample_of_ids(self.known_ids[chosen])

    def _sample_of(self, value: Tensor) -> Sample:
        if self.embedding is None:
            return Sample(value.to(self.device, self.dtype))
        size = len(self.embedding.weight)
        if not bool(((value >= 0) & (value < size)).all()):
            raise IndexError(
                f"inputs must be token ids in 0 .. {size - 1}, the vocabulary of the embedding, got ids from "
                f"{int(value.min())} to {int(value.max())}: give ids of the model's own tokenizer"
            )
        return self._sample_of_ids(value.long())

    def _sample_of_ids(self, ids: Int[Tensor, "batch tokens"]) -> Sample:
        ids = ids.to(self.device)
        with torch.no_grad():
            return Sample(self.embedding(ids), ids)

    def perturb_senders(self, sample: Sample, senders: Int[Tensor, " batch"], number: int) -> Sample:
        other, copies = self.draw(number), sample.times(len(senders))
        rows, places = torch.arange(len(senders), device=self.device), senders.to(self.device)
        if copies.ids is None or other.ids is None:
            copies.states[rows, places] += other.states[0, places]
        else:
            following = torch.searchsorted(self.known_ids, other.ids.cpu()) + 1
            following = self.known_ids[following % len(self.known_ids)].to(self.device)
            new = torch.where(other.ids == copies.ids[:1], following, other.ids)
            copies.ids[rows, places] = new[0, places]
        return copies

    def run(self, sample: Sample, by_ids: bool = False) -> Float[Tensor, "batch dst channels"]:
        """The module's output for the ids (``by_ids``), else for the states in place of their embeddings."""
        self.forwards += 1
        # the audit keeps the caller's random numbers apart
        torch.manual_seed(self.seed)
        with self._embeddings_replaced(sample, by_ids):
            output = self.call(self.module, sample.states if sample.ids is None else sample.ids)
        if self.watch is not None:
            self.watch(self.forwards, max(self.forwards, self.expected))
        return self._check_output(output, len(sample.states))

    def gradients(self, number: int) -> Float[Tensor, "dst src"]:
        """The sizes of gradients at the input of a round, by a random cotangent on each receiver."""
        rows, generator = [], self.cotangents(number)
        receivers = torch.eye(self.num_dst, dtype=torch.bool, device="cpu")
        for part in torch.split(receivers, self.samples):
            states, copies = self.probes[number].differentiable_copies(len(part))
            rows.append(self.pulled_back(self.run(copies), part, states, generator))
        return torch.cat(rows)

    def cotangents(self, number: int) -> torch.Generator:
        # Other numbers than the inputs', to which a gradient may be orthogonal.
        return torch.Generator().manual_seed(self.seed + number + 2**31)

    def pulled_back(
        self, far: Tensor, receivers: Tensor, near: Tensor, generator: torch.Generator, again: bool = False
    ) -> Float[Tensor, "batch src"]:
        """The largest gradient entry at each token of ``near`` by a random cotangent on ``far``."""
        # detached: a gradient sees no flow
        if not (far.requires_grad and near.requires_grad):
            return torch.zeros(near.shape[:2], dtype=torch.float64, device="cpu")
        cotangent = torch.randn(far.shape, generator=generator, dtype=torch.float64)
        cotangent *= receivers.view(*receivers.shape, *[1] * (far.dim() - 2))
        (gradient,) = torch.autograd.grad(far, near, cotangent.to(far), retain_graph=again, allow_unused=True)
        sizes = torch.zeros_like(near) if gradient is None else gradient
        found = sizes.flatten(2).abs().amax(-1).double().cpu()
        # a NaN is no zero: something flows
        return found.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def receivers_changed_by(self, senders: Int[Tensor, " batch"], number: int) -> Bool[Tensor, "batch dst"]:
        """The receivers whose output changes with the input of each of the senders alone."""
        # what replaces a sender's is drawn with a number of its own
        sample = self.probes[number]
        before = self.run(sample.times(len(senders)), by_ids=True)
        after = self.run(self.perturb_senders(sample, senders, number + len(self.probes)), by_ids=True)
        return differs(before, after).cpu()

    def reached_by_nan(self, senders: Int[Tensor, " batch"], number: int) -> Bool[Tensor, "batch dst"]:
        """The receivers whose output is NaN when the state of each of the senders alone is."""
        copies = self.probes[number].times(len(senders))
        copies.states[torch.arange(len(senders), device=self.device), senders.to(self.device)] = torch.nan
        return self.run(copies).isnan().any(-1).cpu()

    def _together(self, samples: int) -> tuple[int, bool]:
        # how many samples a pass may hold, and whether they influence one another
        one, other = self.draw(-1), self.draw(-2)

        def together(first: Sample, second: Sample) -> Tensor:
            ids = None if first.ids is None or second.ids is None else torch.cat([first.ids, second.ids])
            return self.run(Sample(torch.cat([first.states, second.states]), ids), by_ids=True)

        y, after, before = together(one, one), together(one, other), together(other, one)
        crosses = bool(differs(y, torch.cat([after[:1], before[1:]])).any())
        repeatable = not bool(differs(y[:1], y[1:]).any())
        fitting = LARGEST_PASS // max(y[0].numel(), self.num_dst * self.shape[0])
        return (max(1, min(samples, fitting)) if repeatable and not crosses else 1), crosses

    def _check_finite(self) -> None:
        for sample in self.probes:
            with torch.no_grad():
                bad = ~self.run(sample).isfinite().all(-1)
            if bool(bad.any()):
                place = f"first at receiver {int(bad[0].nonzero()[0])} (perhaps an isolated row's softmax)"
                raise ValueError(f"the module returns NaN or inf for finite inputs, {place}: mend that first")

    def _check_output(self, output: Any, samples: int) -> Float[Tensor, "batch dst channels"]:
        # Logits or last_hidden_state by name, else the first.
        by_name = output if isinstance(output, Mapping) else {}
        named = [by_name.get("logits"), by_name.get("last_hidden_state"), *floating_tensors(output)]
        y = next((states for states in named if states is not None), None)
        if y is None or y.dim() < 2 or y.shape[:2] != (samples, self.num_dst):
            got = f"shape {list(y.shape)}" if y is not None else type(output).__name__
            expected = f"[B, dst, ...] = [{samples}, {self.num_dst}, ...], got {got}"
            advice = "give call=lambda module, x: ... that does, or samples=1"
            raise ValueError(f"the module must return floating states {expected}: {advice}")
        return y.flatten(2) if y.dim() > 2 else y.unsqueeze(-1)

    @contextmanager
    def _embeddings_replaced(self, sample: Sample, by_ids: bool) -> Iterator[None]:
        # all at once or in consecutive chunks (decoding)
        ids, states, met = sample.ids, sample.states, 0
        if self.embedding is None or ids is None or by_ids:
            yield
            return

        def replace_output(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            nonlocal met
            chunk_ids = arguments[0] if arguments else None
            if not isinstance(chunk_ids, Tensor) or chunk_ids.dim() != 2:
                return output
            first = 0 if chunk_ids.shape == ids.shape else met % ids.shape[1]
            chunk = slice(first, first + chunk_ids.shape[1])
            if not torch.equal(chunk_ids, ids[:, chunk]):
                return output
            met += chunk_ids.shape[1]
            return states[:, chunk]

        with self.embedding.register_forward_hook(replace_output):
            yield
        if not met:
            raise ValueError("embedding was not called with the token ids; name the one that is")


def differs(before: Tensor, after: Tensor) -> Bool[Tensor, "batch tokens"]:
    """For each token whether its state differs by more than rounding; a NaN equals a NaN."""
    before, after = before.flatten(2), after.flatten(2)
    rounding = ROUNDING * torch.finfo(before.dtype).eps * before.nan_to_num().abs().amax((1, 2), keepdim=True)
    beyond = ~((before - after).abs() <= rounding)
    return (beyond & ~(before.isnan() & after.isnan()) & (before != after)).any(-1)


def _copy_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    # tensors that are plain attributes (a mask, for example) included
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        why = f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error})"
        raise NotImplementedError(f"{why}: take out what copy.deepcopy refuses") from error
    twin = twin.to(dtype).requires_grad_(False)
    for part in twin.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(part, name, value.to(dtype))
    return twin


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Those of an input or output: itself, or what stands in a mapping or sequence."""
    inside = value.values() if isinstance(value, Mapping) else value
    inside = inside if isinstance(value, (Mapping, list, tuple)) else [value]
    yield from (part for part in inside if isinstance(part, Tensor) and part.is_floating_point())


def _embedding_of(module: nn.Module, twin: nn.Module, given: nn.Module | str | None) -> nn.Module:
    """In the copy: the part that is given, that of ``get_input_embeddings()``, or the only table."""
    if given is not None:
        names = [name for name, part in module.named_modules() if part is given or name == given]
        if not names:
            raise ValueError(f"embedding must be a submodule of the module, or its name, got {quote(given)}")
        return twin.get_submodule(names[0])
    if hasattr(twin, "get_input_embeddings"):
        embedding: nn.Module = twin.get_input_embeddings()  # type: ignore[operator]
        return embedding
    tables = {name: part for name, part in twin.named_modules() if isinstance(part, nn.Embedding)}
    if len(tables) != 1:
        raise ValueError(
            f"the module has {len(tables)} embeddings {list(tables)}, one of which takes the token ids: "
            "give embedding='name', or input_shape=(T, width) for states"
        )
    return next(iter(tables.values()))


def _known_ids(embedding: nn.Module) -> Int[Tensor, " ids"]:
    """All ids but the padding's, which models treat differently."""
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"embedding must have a weight [vocabulary, width], got {type(embedding).__name__}")
    ids, padding = torch.arange(len(weight), device="cpu"), getattr(embedding, "padding_idx", None)
    return ids if padding is None else ids[ids != padding]


def detect(runner: Runner, tolerance: float) -> tuple[Float[Tensor, "dst src"], dict[str, Pairs]]:
    """Gradients as shares of the largest one, and the pairs that each detector found."""
    rounds = range(len(runner.probes))
    by_receiver, by_sender = (math.ceil(n / runner.samples) for n in (runner.num_dst, runner.shape[0]))
    runner.expected = runner.forwards + len(rounds) * (by_receiver + 3 * by_sender)
    sizes = torch.stack([runner.gradients(number) for number in rounds]).amax(0)
    largest = float(sizes.masked_fill(~sizes.isfinite(), 0.0).max())
    found = {
        "jacobian": sizes > tolerance * largest,
        "perturbation": _by_sender(runner, runner.receivers_changed_by, rounds),
        "nan": _by_sender(runner, runner.reached_by_nan, rounds),
    }
    return sizes / (largest or 1.0), found


def _by_sender(
    runner: Runner, reached: Callable[[Int[Tensor, " batch"], int], Tensor], rounds: Iterable[int]
) -> Pairs:
    """Where ``reached(senders, round) [senders, dst]`` is true in any round, for all senders."""
    senders = torch.split(torch.arange(runner.shape[0], device="cpu"), runner.samples)
    with torch.no_grad():
        by_round = [torch.cat([reached(part, number) for part in senders]) for number in rounds]
    return torch.stack(by_round).any(0).T
