"""Run a copy of the audited module, and detect between which tokens information flows.

The copy runs on random inputs and on the caller's. The detectors use gradients, replaced inputs and
NaN.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Bool, Float, Int, Tensor

Call = Callable[[nn.Module, Tensor], Any]
Pairs = Bool[Tensor, "dst src"]
# Neither the entries of the output nor the pairs of tokens of a pass exceed this: 64 MB in float64.
MAX_PASS_ENTRIES = 2**23
# A gradient that is zero by chance at one random input is almost surely not zero at a second one.
NUM_RANDOM_PROBES = 2
# A difference of up to this many units in the last place is rounding, not a change.
ROUNDING_ULPS = 64


@dataclass(frozen=True)
class Sample:
    """An input: states ``[1, T, width]``, and token ids ``[1, T]`` if the module takes ids."""

    states: Float[Tensor, "batch tokens width"]
    ids: Int[Tensor, "batch tokens"] | None = None

    def repeat(self, num_copies: int) -> "Sample":
        states = self.states.expand(num_copies, *self.states.shape[1:]).clone()
        return Sample(states, None if self.ids is None else self.ids.expand(num_copies, -1).clone())

    def differentiable_copies(self, num_copies: int) -> "tuple[Tensor, Sample]":
        """Return states to differentiate by, and copies for the module, which may overwrite them."""
        copies = self.repeat(num_copies)
        states = copies.states.requires_grad_()
        return states, Sample(states.clone(), copies.ids)


class Runner:
    """Runs a copy of a module in one dtype, with the same mode and random numbers in every pass.

    A pass holds ``batch_size`` samples: one if the module mixes samples (``crosses_samples``) or
    draws random numbers (dropout in training), since copies of one input would then differ. After
    each pass, ``watch(num_passes, expected_passes)`` is called. ``probes`` holds random inputs,
    then the caller's.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        shape: Sequence[int],
        num_dst: int,
        embedding: nn.Module | str | None,
        batch_size: int,
        seed: int,
        dtype: torch.dtype = torch.float64,
        watch: Callable[[int, int], None] | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> None:
        self.module = _copy_module(module, dtype)
        self.call = call
        self.shape = tuple(shape)
        self.num_dst = num_dst
        self.seed = seed
        self.dtype = dtype
        self.watch = watch
        self.num_passes = self.expected_passes = 0
        tensors = (*self.module.parameters(), *self.module.buffers())
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        self.embedding: Any = None
        if len(shape) == 1:
            self.embedding = _find_embedding(module, self.module, embedding)
            self.usable_ids = _list_usable_ids(self.embedding)
        self.batch_size, self.crosses_samples = batch_size, False
        self.probes = [self.draw(index) for index in range(NUM_RANDOM_PROBES)]
        self.probes += [self._make_sample(value) for value in inputs]
        self._check_finite()
        if batch_size > 1:
            self.batch_size, self.crosses_samples = self._choose_batch_size(batch_size)

    @property
    def hooked_batch_size(self) -> int:
        """A batch size below T, so that hooks can tell states ``[T, B, ...]`` from ``[B, T, ...]``."""
        return max(1, min(self.batch_size, self.shape[0] - 1))

    def draw(self, seed_offset: int) -> Sample:
        """Return a random input: states from N(0, 1), or the embeddings of random token ids."""
        generator = torch.Generator().manual_seed(self.seed + seed_offset)
        if self.embedding is None:
            states = torch.randn(1, *self.shape, generator=generator, dtype=torch.float64)
            return Sample(states.to(self.device, self.dtype))
        index = torch.randint(len(self.usable_ids), (1, self.shape[0]), generator=generator)
        return self._embed_ids(self.usable_ids[index])

    def _make_sample(self, states_or_ids: Tensor) -> Sample:
        if self.embedding is None:
            return Sample(states_or_ids.to(self.device, self.dtype))
        ids, num_ids = states_or_ids, len(self.embedding.weight)
        if not bool(((ids >= 0) & (ids < num_ids)).all()):
            span = f"{int(ids.min())} .. {int(ids.max())}"
            raise IndexError(f"inputs must be ids of the model's tokenizer, 0 .. {num_ids - 1}, got {span}")
        return self._embed_ids(ids.long())

    def _embed_ids(self, ids: Int[Tensor, "batch tokens"]) -> Sample:
        ids = ids.to(self.device)
        with torch.no_grad():
            return Sample(self.embedding(ids), ids)

    def perturb_senders(self, sample: Sample, senders: Int[Tensor, " batch"], seed_offset: int) -> Sample:
        """Repeat the sample for each sender, and change the sender's input at random."""
        replacement, copies = self.draw(seed_offset), sample.repeat(len(senders))
        rows = torch.arange(len(senders), device=self.device)
        senders = senders.to(self.device)
        if copies.ids is None or replacement.ids is None:
            copies.states[rows, senders] += replacement.states[0, senders]
        else:
            # If the drawn id equals the old one, the next usable id is used.
            next_index = torch.searchsorted(self.usable_ids, replacement.ids.cpu()) + 1
            next_ids = self.usable_ids[next_index % len(self.usable_ids)].to(self.device)
            new_ids = torch.where(replacement.ids == copies.ids[:1], next_ids, replacement.ids)
            copies.ids[rows, senders] = new_ids[0, senders]
        return copies

    def run(self, sample: Sample, use_ids: bool = False) -> Float[Tensor, "batch dst channels"]:
        """Return the output for the ids (``use_ids``), or for the states in place of embeddings."""
        self.num_passes += 1
        # The audit restores the caller's random state at its end.
        torch.manual_seed(self.seed)
        with self._replace_embeddings(sample, use_ids):
            output = self.call(self.module, sample.states if sample.ids is None else sample.ids)
        if self.watch is not None:
            self.watch(self.num_passes, max(self.num_passes, self.expected_passes))
        return self._read_output(output, len(sample.states))

    def compute_gradients(self, probe_index: int) -> Float[Tensor, "dst src"]:
        """Return the sizes of the gradients at a probe, for a random cotangent at each receiver."""
        rows = []
        generator = self.cotangent_generator(probe_index)
        identity = torch.eye(self.num_dst, dtype=torch.bool, device="cpu")
        for receivers in torch.split(identity, self.batch_size):
            states, copies = self.probes[probe_index].differentiable_copies(len(receivers))
            rows.append(self.compute_gradient_sizes(self.run(copies), receivers, states, generator))
        return torch.cat(rows)

    def cotangent_generator(self, probe_index: int) -> torch.Generator:
        # A gradient may be orthogonal to the inputs, so cotangents need other random numbers.
        return torch.Generator().manual_seed(self.seed + probe_index + 2**31)

    @staticmethod
    def compute_gradient_sizes(
        y: Tensor, receivers: Tensor, x: Tensor, generator: torch.Generator, retain: bool = False
    ) -> Float[Tensor, "batch src"]:
        """Return the largest gradient entry at each token of x, for a random cotangent on y."""
        # Autograd follows no flow through a detached tensor.
        if not (y.requires_grad and x.requires_grad):
            return torch.zeros(x.shape[:2], dtype=torch.float64, device="cpu")
        cotangent = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        cotangent *= receivers.view(*receivers.shape, *[1] * (y.dim() - 2))
        (gradient,) = torch.autograd.grad(y, x, cotangent.to(y), retain_graph=retain, allow_unused=True)
        gradient = torch.zeros_like(x) if gradient is None else gradient
        sizes: Tensor = gradient.flatten(2).abs().amax(-1).double().cpu()
        # A NaN counts as a flow, since it is not zero.
        return sizes.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def find_changed(self, senders: Int[Tensor, " batch"], probe_index: int) -> Bool[Tensor, "batch dst"]:
        """Find the receivers whose output changes when the input of one sender is replaced."""
        sample = self.probes[probe_index]
        before = self.run(sample.repeat(len(senders)), use_ids=True)
        # The replacements are drawn with seeds that no probe uses.
        after = self.run(self.perturb_senders(sample, senders, probe_index + len(self.probes)), use_ids=True)
        return differs(before, after).cpu()

    def find_nan(self, senders: Int[Tensor, " batch"], probe_index: int) -> Bool[Tensor, "batch dst"]:
        """Find the receivers whose output is NaN when the state of one sender is NaN."""
        copies = self.probes[probe_index].repeat(len(senders))
        copies.states[torch.arange(len(senders), device=self.device), senders.to(self.device)] = torch.nan
        return self.run(copies).isnan().any(-1).cpu()

    def _choose_batch_size(self, max_batch_size: int) -> tuple[int, bool]:
        """Return the batch size, and whether samples of a batch influence one another."""
        first, second = self.draw(-1), self.draw(-2)

        def run_pair(a: Sample, b: Sample) -> Tensor:
            ids = None if a.ids is None or b.ids is None else torch.cat([a.ids, b.ids])
            return self.run(Sample(torch.cat([a.states, b.states]), ids), use_ids=True)

        first_first = run_pair(first, first)
        first_second = run_pair(first, second)
        second_first = run_pair(second, first)
        crosses_samples = bool(differs(first_first, torch.cat([first_second[:1], second_first[1:]])).any())
        is_repeatable = not bool(differs(first_first[:1], first_first[1:]).any())
        if crosses_samples or not is_repeatable:
            return 1, crosses_samples
        max_samples = MAX_PASS_ENTRIES // max(first_first[0].numel(), self.num_dst * self.shape[0])
        return max(1, min(max_batch_size, max_samples)), crosses_samples

    def _check_finite(self) -> None:
        for sample in self.probes:
            with torch.no_grad():
                is_nonfinite = ~self.run(sample).isfinite().all(-1)
            if bool(is_nonfinite.any()):
                receiver = int(is_nonfinite[0].nonzero()[0])
                raise ValueError(
                    f"the module returns NaN or inf for finite inputs, first at receiver {receiver}: fix it "
                    "first (perhaps the receiver is isolated, and its softmax is NaN)"
                )

    def _read_output(self, output: Any, num_samples: int) -> Float[Tensor, "batch dst channels"]:
        """Return the output named logits or last_hidden_state, else the first floating tensor."""
        fields = output if isinstance(output, Mapping) else {}
        candidates = [fields.get("logits"), fields.get("last_hidden_state"), *floating_tensors(output)]
        y = next((states for states in candidates if states is not None), None)
        if y is None or y.dim() < 2 or y.shape[:2] != (num_samples, self.num_dst):
            shape = type(output).__name__ if y is None else f"shape {list(y.shape)}"
            raise ValueError(
                f"the module must return floating states [B, dst, ...] = [{num_samples}, {self.num_dst}, ...]"
                f", got {shape}: pass call=lambda module, x: ... that returns them, or samples=1"
            )
        return y.flatten(2) if y.dim() > 2 else y.unsqueeze(-1)

    @contextmanager
    def _replace_embeddings(self, sample: Sample, use_ids: bool) -> Iterator[None]:
        """Make the embedding return the sample's states. Decoding embeds one chunk at a time."""
        num_replaced_tokens = 0
        ids, states = sample.ids, sample.states
        if self.embedding is None or ids is None or use_ids:
            yield
            return

        def replace_output(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            nonlocal num_replaced_tokens
            chunk_ids = arguments[0] if arguments else None
            if not isinstance(chunk_ids, Tensor) or chunk_ids.dim() != 2:
                return output
            start = 0 if chunk_ids.shape == ids.shape else num_replaced_tokens % ids.shape[1]
            chunk = slice(start, start + chunk_ids.shape[1])
            if not torch.equal(chunk_ids, ids[:, chunk]):
                return output
            num_replaced_tokens += chunk_ids.shape[1]
            return states[:, chunk]

        with self.embedding.register_forward_hook(replace_output):
            yield
        if not num_replaced_tokens:
            raise ValueError("embedding was not called with the token ids: pass the one that is")


def differs(before: Tensor, after: Tensor) -> Bool[Tensor, "batch tokens"]:
    """Return for each token whether its state differs by more than rounding. A NaN equals a NaN."""
    before, after = before.flatten(2), after.flatten(2)
    max_entry = before.nan_to_num().abs().amax((1, 2), keepdim=True)
    rounding = ROUNDING_ULPS * torch.finfo(before.dtype).eps * max_entry
    exceeds = ~((before - after).abs() <= rounding)
    return (exceeds & ~(before.isnan() & after.isnan()) & (before != after)).any(-1)


def _copy_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    try:
        module_copy = copy.deepcopy(module)
    except Exception as error:
        reason = f"copy.deepcopy: {type(error).__name__}: {error}"
        raise NotImplementedError(f"{type(module).__name__} cannot be copied by {reason}") from error
    module_copy = module_copy.to(dtype).requires_grad_(False)
    # module.to() does not convert tensors that are neither parameters nor buffers, such as a mask.
    for part in module_copy.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(part, name, value.to(dtype))
    return module_copy


def floating_tensors(value: Any) -> Iterator[Tensor]:
    values = value.values() if isinstance(value, Mapping) else value
    values = values if isinstance(value, (Mapping, list, tuple)) else [value]
    yield from (x for x in values if isinstance(x, Tensor) and x.is_floating_point())


def _find_embedding(module: nn.Module, clone: nn.Module, embedding: nn.Module | str | None) -> nn.Module:
    if embedding is not None:
        names = [name for name, part in module.named_modules() if part is embedding or name == embedding]
        if not names:
            raise ValueError(f"embedding must be a submodule or the name of one, got {quote(embedding)}")
        return clone.get_submodule(names[0])
    if hasattr(clone, "get_input_embeddings"):
        input_embedding: nn.Module = clone.get_input_embeddings()  # type: ignore[operator]
        return input_embedding
    tables = {name: part for name, part in clone.named_modules() if isinstance(part, nn.Embedding)}
    if len(tables) != 1:
        raise ValueError(
            f"the module has {len(tables)} embeddings {list(tables)}: pass embedding='name' of the one "
            "that takes the token ids, or input_shape=(T, width) for states"
        )
    return next(iter(tables.values()))


def _list_usable_ids(embedding: nn.Module) -> Int[Tensor, " ids"]:
    """List all ids except the padding id, which models treat differently."""
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"embedding must have a weight [vocabulary, width], got {type(embedding).__name__}")
    ids = torch.arange(len(weight), device="cpu")
    padding = getattr(embedding, "padding_idx", None)
    return ids if padding is None else ids[ids != padding]


def detect_flows(runner: Runner, tolerance: float) -> tuple[Float[Tensor, "dst src"], dict[str, Pairs]]:
    """Return gradients as fractions of the largest one, and the pairs that each detector finds."""
    indices = range(len(runner.probes))
    num_dst_chunks = math.ceil(runner.num_dst / runner.batch_size)
    num_src_chunks = math.ceil(runner.shape[0] / runner.batch_size)
    runner.expected_passes = runner.num_passes + len(indices) * (num_dst_chunks + 3 * num_src_chunks)
    sizes = torch.stack([runner.compute_gradients(index) for index in indices]).amax(0)
    max_size = float(sizes.masked_fill(~sizes.isfinite(), 0.0).max())
    flows = {
        "jacobian": sizes > tolerance * max_size,
        "perturbation": _detect_by_sender(runner, runner.find_changed),
        "nan": _detect_by_sender(runner, runner.find_nan),
    }
    return sizes / (max_size or 1.0), flows


@torch.no_grad()
def _detect_by_sender(runner: Runner, detector: Callable[[Int[Tensor, " batch"], int], Tensor]) -> Pairs:
    """Return pairs for which ``detector(senders, index) [senders, dst]`` is True at any probe."""
    chunks = torch.split(torch.arange(runner.shape[0], device="cpu"), runner.batch_size)
    indices = range(len(runner.probes))
    masks = [torch.cat([detector(senders, index) for senders in chunks]) for index in indices]
    return torch.stack(masks).any(0).T
