"""A module under audit: a copy, run on inputs of the auditor's choice, again and again in the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Bool, Float, Int, Tensor
from gnn_attention.interpret.audit.embedding import another, embedding_of, random_ids
from gnn_attention.interpret.audit.submodule import PartOf

__all__ = ["Runner", "Sample", "undisturbed"]

LARGEST_PASS = 2**23  # numbers in the outputs of one pass, or pairs of tokens: 64 MB
ROUNDING = 64  # units in the last place that do not count as a change


@dataclass(frozen=True)
class Sample:
    """One random input: states ``[1, T, width]``, and the token ids ``[1, T]`` behind them where the module takes ids."""

    states: Float[Tensor, "batch tokens width"]
    ids: Int[Tensor, "batch tokens"] | None = None

    def times(self, count: int) -> Sample:
        """So many copies of it in one batch."""
        states = self.states.expand(count, *self.states.shape[1:]).clone()
        return Sample(states, None if self.ids is None else self.ids.expand(count, -1).clone())

    def tracked(self, count: int) -> tuple[Tensor, Sample]:
        """So many copies, after the states that their gradient is to be taken by: the module may write into the copies."""
        copies = self.times(count)
        states = copies.states.requires_grad_()
        return states, Sample(states.clone(), copies.ids)


class Runner:
    """Runs a copy of a module in one dtype: the same weights, mode and random numbers in every pass.

    ``samples`` is how many samples a pass holds: 1 where the module mixes them (``crosses_samples``) or draws random numbers
    (dropout in training), since copies of one input would then not be run alike. ``forwards`` and ``backwards`` count passes,
    and ``watch(forwards, expected)`` is called after each: ``expected`` is about how many there will be.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[nn.Module, Tensor], Any],
        input_shape: Sequence[int],
        num_dst: int,
        embedding: nn.Module | str | None,
        samples: int,
        seed: int,
        dtype: torch.dtype = torch.float64,
        watch: Callable[[int, int], None] | None = None,
    ) -> None:
        self.module, self.dtype = _copied(module, dtype), dtype
        self.call, self.shape, self.num_dst, self.seed = call, tuple(input_shape), num_dst, seed
        self.forwards = self.backwards = self.expected = 0
        self.watch = watch
        self.device = next((t.device for t in (*self.module.parameters(), *self.module.buffers())), torch.device("cpu"))
        name = _name_of(embedding, module)
        self.embedding = embedding_of(self.module, name, call, self.shape[0]) if len(self.shape) == 1 else None
        self.samples, self.crosses_samples = samples, False
        self._check_finite()
        if samples > 1:
            self.samples, self.crosses_samples = self._together(samples)

    @property
    def inside(self) -> nn.Module:
        """What is looked into: the part, where one is audited in its place."""
        return self.module.inside if isinstance(self.module, PartOf) else self.module

    # -- inputs -------------------------------------------------------------------------------------------------------

    def draw(self, number: int) -> Sample:
        """Random input number so and so: N(0, 1), or the embeddings of random token ids."""
        generator = torch.Generator().manual_seed(self.seed + number)
        if self.embedding is None:
            return Sample(torch.randn(1, *self.shape, generator=generator, dtype=torch.float64).to(self.device, self.dtype))
        ids = random_ids(self.embedding, self.shape[0], generator).to(self.device)
        with torch.no_grad():
            return Sample(self.embedding(ids), ids)

    def nudged(self, sample: Sample, senders: Int[Tensor, " batch"], number: int) -> Sample:
        """A copy for each of the senders in which its input alone is another: its id where there are ids."""
        other, one = self.draw(number), sample.times(len(senders))
        rows = torch.arange(len(senders), device=self.device)
        places = senders.to(self.device)
        if self.embedding is None or one.ids is None or other.ids is None:
            one.states[rows, places] += other.states[0, places]
        else:
            new = torch.where(other.ids == one.ids[:1], another(other.ids, self.embedding), other.ids)
            one.ids[rows, places] = new[0, places]
        return one

    def poisoned(self, sample: Sample, senders: Int[Tensor, " batch"]) -> Sample:
        """A copy for each of the senders in which its state is NaN."""
        one = sample.times(len(senders))
        one.states[torch.arange(len(senders), device=self.device), senders.to(self.device)] = torch.nan
        return one

    # -- passes -------------------------------------------------------------------------------------------------------

    def run(self, sample: Sample, by_ids: bool = False) -> Float[Tensor, "batch dst channels"]:
        """The module's output; with ``by_ids`` the ids speak for themselves, else the states stand in for their embeddings."""
        self.forwards += 1
        torch.manual_seed(self.seed)  # inside :func:`undisturbed`: the caller's random numbers are not touched
        with self._placed(sample, by_ids):
            output = self.call(self.module, sample.states if sample.ids is None else sample.ids)
        if self.watch is not None:
            self.watch(self.forwards, max(self.forwards, self.expected))
        return self._checked(output, len(sample.states))

    def gradients(self, sample: Sample, asked: Bool[Tensor, "groups dst"], number: int) -> Float[Tensor, "groups src"]:
        """For each group of receivers the largest entry of the gradient that a random cotangent on them sends to each sender."""
        found, generator = [], self.cotangents(number)
        for part in torch.split(asked, self.samples):
            states, copies = sample.tracked(len(part))
            found.append(self.pulled_back(self.run(copies), part, states, generator))
        return torch.cat(found)

    def cotangents(self, number: int) -> torch.Generator:
        """Where cotangents come from: not the numbers of the inputs, to which a gradient may well be orthogonal."""
        return torch.Generator().manual_seed(self.seed + number + 2**31)

    def pulled_back(
        self, far: Tensor, asked: Bool[Tensor, "batch dst"], near: Tensor, generator: torch.Generator, again: bool = False
    ) -> Float[Tensor, "batch src"]:
        """What a random cotangent on the asked tokens of ``far`` sends back to each token of ``near``: the largest entry.

        ``again`` keeps the graph for further passes.
        """
        self.backwards += 1
        if not (far.requires_grad and near.requires_grad):  # detached: nothing flows that a gradient could see
            return torch.zeros(near.shape[:2], dtype=torch.float64, device="cpu")
        cotangent = torch.randn(far.shape, generator=generator, dtype=torch.float64)
        cotangent *= asked.view(*asked.shape, *[1] * (far.dim() - 2))
        (gradient,) = torch.autograd.grad(far, near, cotangent.to(far), retain_graph=again, allow_unused=True)
        sizes = torch.zeros_like(near) if gradient is None else gradient
        found = sizes.flatten(2).abs().amax(-1).double().cpu()
        return found.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a NaN is no zero: something flows

    def changed(self, sample: Sample, senders: Int[Tensor, " batch"], number: int) -> Bool[Tensor, "batch dst"]:
        """Whose output changes with the input of each of the senders alone."""
        before = self.run(sample.times(len(senders)), by_ids=True)
        after = self.run(self.nudged(sample, senders, number), by_ids=True)
        return differs(before, after).cpu()

    def reached_by_nan(self, sample: Sample, senders: Int[Tensor, " batch"]) -> Bool[Tensor, "batch dst"]:
        """Whose output is NaN when the state of each of the senders alone is."""
        return self.run(self.poisoned(sample, senders)).isnan().any(-1).cpu()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _together(self, samples: int) -> tuple[int, bool]:
        """How many samples a pass may hold, and whether they hear one another."""
        one, other = self.draw(-1), self.draw(-2)
        y, after, before = (self.run(_pair(*two), by_ids=True) for two in ((one, one), (one, other), (other, one)))
        crosses = bool(differs(y, torch.cat([after[:1], before[1:]])).any())
        alike = not bool(differs(y[:1], y[1:]).any())
        fitting = LARGEST_PASS // max(y[0].numel(), self.num_dst * self.shape[0])
        return (max(1, min(samples, fitting)) if alike and not crosses else 1), crosses

    def _check_finite(self) -> None:
        with torch.no_grad():
            bad = ~self.run(self.draw(0)).isfinite().all(-1)
        if bool(bad.any()):
            raise ValueError(
                f"the module returns NaN or inf for finite inputs, first at receiver {int(bad[0].nonzero()[0])}: mend that "
                "before an audit (perhaps a softmax over nobody: a receiver without in-edges)"
            )

    def _checked(self, output: Any, samples: int) -> Tensor:
        """The output as ``[B, dst, channels]``; ValueError where it is nothing of the kind."""
        y = _first_states(output)
        if y is None or y.dim() < 2 or y.shape[:2] != (samples, self.num_dst):
            got = f"shape {list(y.shape)}" if y is not None else f"{type(output).__name__}"
            raise ValueError(
                f"the module must return floating states [B, dst, ...] with B = {samples} samples and the graph's {self.num_dst} "
                f"receivers, got {got}: give call=lambda module, x: ... that does, samples=1 where it takes one sample only"
            )
        return y.flatten(2) if y.dim() > 2 else y.unsqueeze(-1)

    @contextmanager
    def _placed(self, sample: Sample, by_ids: bool) -> Iterator[None]:
        """The states stand in for what the embedding makes of the ids, all at once or in consecutive chunks (decoding)."""
        ids, states, met = sample.ids, sample.states, 0
        if self.embedding is None or ids is None or by_ids:
            yield
            return

        def replaced(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            nonlocal met
            given = arguments[0] if arguments else None
            if not isinstance(given, Tensor) or given.dim() != 2:
                return output
            first = 0 if given.shape == ids.shape else met % ids.shape[1]
            chunk = slice(first, first + given.shape[1])
            if not torch.equal(given, ids[:, chunk]):
                return output
            met += given.shape[1]
            return states[:, chunk]

        handle = self.embedding.register_forward_hook(replaced)
        try:
            yield
        finally:
            handle.remove()
        if not met:
            raise ValueError(
                f"embedding: {type(self.embedding).__name__} was not called with the token ids; name the one that is"
            )


def differs(before: Tensor, after: Tensor) -> Bool[Tensor, "batch tokens"]:
    """For each token whether its state is another, by more than rounding; a NaN equals a NaN."""
    before, after = before.flatten(2), after.flatten(2)
    rounding = ROUNDING * torch.finfo(before.dtype).eps * before.nan_to_num().abs().amax((1, 2), keepdim=True)
    apart = ~((before - after).abs() <= rounding)
    return (apart & ~(before.isnan() & after.isnan()) & (before != after)).any(-1)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Gradients on, whatever the caller has switched off, and the caller's random numbers as if nothing had been drawn."""
    devices = sorted({t.get_device() for t in (*module.parameters(), *module.buffers()) if t.is_cuda})
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        yield


# -- helpers ----------------------------------------------------------------------------------------------------------


def _copied(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in that dtype, tensors that are plain attributes (a mask, for example) included."""
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        raise NotImplementedError(
            f"the audit works on a copy, and {type(module).__name__} cannot be copied ({type(error).__name__}: {error}): "
            "take out what copy.deepcopy refuses"
        ) from error
    twin = twin.to(dtype).requires_grad_(False)
    for part in twin.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(part, name, value.to(dtype))
    return twin


def _first_states(output: Any) -> Tensor | None:
    """The tensor that an output is or holds: logits or last_hidden_state by name, else the first floating one."""
    if isinstance(output, Mapping):
        named = [output[name] for name in ("logits", "last_hidden_state") if output.get(name) is not None]
        output = [*named, *output.values()]
    if isinstance(output, Sequence) and not isinstance(output, str):
        output = next((part for part in output if isinstance(part, Tensor) and part.is_floating_point()), None)
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def _pair(one: Sample, other: Sample) -> Sample:
    ids = None if one.ids is None or other.ids is None else torch.cat([one.ids, other.ids])
    return Sample(torch.cat([one.states, other.states]), ids)


def _name_of(part: nn.Module | str | None, module: nn.Module) -> str | None:
    """The name of a submodule that was given as itself or by name; ValueError where it is none."""
    if part is None:
        return None
    for name, other in module.named_modules():
        if part is other or part == name:
            return str(name)
    raise ValueError(f"embedding must be a submodule of the module, or its name, got {quoted(part)}")
