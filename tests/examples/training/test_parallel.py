"""Training on ranks equals training in one process, and any number of ranks can resume from a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import ranks
from support.bounds import assert_exact, assert_sum, summation_bound
from support.refusals import assert_refusals
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from examples.training import Checkpoint, Corpus, Layout, Ranks, Recipe, trainer
from examples.training.parallel import clip
from gnn_attention import model as lm
from gnn_attention.verify.measure import FLOAT64_RTOL

SIZES = lm.Config(vocabulary_size=1, width=16, num_heads=4, head_dim=4, mlp_width=32, reach=4)
SHORT = Recipe(4, 0, 4, 15, 280, warmup=2, precision="float32", graph="window(15, 5)")
CORPUS = Corpus(
    {"a.py": "def one(x):\n    return x + 1\n" * 40}, {"b.py": "def two(x):\n    return x + 2\n" * 10}
)

LAYOUTS = {
    2: {
        "ddp": Layout(),
        "fsdp": Layout(data="fsdp"),
        "heads": Layout(heads=2),
        "tokens under fsdp, zigzag": Layout(tokens=2, data="fsdp", partition="zigzag"),
        "tokens by edges": Layout(tokens=2, partition="by_edges"),
    },
    4: {
        "data and heads": Layout(heads=2),
        "data and tokens under fsdp": Layout(tokens=2, data="fsdp"),
        "tokens and heads": Layout(tokens=2, heads=2, partition="zigzag"),
    },
}


class StoppedError(Exception):
    pass


def train(recipe, group=None, file=None, stop=None):
    """Return the losses of all steps and the parameters; write a checkpoint after every two steps."""
    losses: list[float] = []

    def watch(step, loss):
        losses.append(loss)
        if step == stop:
            raise StoppedError

    checkpoint = None if file is None else Checkpoint(Path(file), 2)
    model, _, _ = trainer.train(recipe, CORPUS, SIZES, watch=watch, ranks=group, checkpoint=checkpoint)
    return losses, model.state_dict()


def set_up(dtype):
    warnings.simplefilter("ignore")
    torch.set_default_dtype(dtype)
    trainer.measure = lambda *_: {}


def measure_errors(rank, world_size, recipe, is_float64):
    """Return the relative errors of the losses and of the parameters for each layout."""
    set_up(torch.float64 if is_float64 else torch.float32)
    expected, parameters = train(recipe)
    largest = max(float(tensor.abs().max()) for tensor in parameters.values())
    errors = {}
    for name, layout in LAYOUTS[world_size].items():
        losses, results = train(recipe, Ranks(layout, recipe))
        assert len(losses) == recipe.steps
        assert parameters.keys() == results.keys()
        loss_error = max(abs(a - b) / a for a, b in zip(expected, losses, strict=True))
        difference = max(float((parameters[key] - results[key]).abs().max()) for key in parameters)
        errors[name] = loss_error, difference / largest
    return errors


# The longest chain of sums in a loss has 280 words, 60 tokens, and eleven products over 16 numbers.
FLOAT32_BOUND = summation_bound(280 + 60 + 11 * 16, 1.0, torch.float32)
# About 20 successive products each have a relative error u = 2^-8. The squares of errors add up to 20 u^2,
# and the loss is a mean over 45 tokens.
BFLOAT16_BOUND = (20 / 45) ** 0.5 * torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "batch", "precision", "is_float64", "allowed"),
    [
        # Two ranks share three windows, which do not divide evenly.
        (2, 3, "float32", False, FLOAT32_BOUND),
        (2, 4, "bfloat16", False, BFLOAT16_BOUND),
        (4, 5, "float32", True, FLOAT64_RTOL),
    ],
)
def test_losses_are_those_of_one_process(world_size, batch, precision, is_float64, allowed):
    # Parameters are rounded to float16 at the end, so close ones may become neighbours.
    bounds = (allowed, torch.finfo(torch.float16).eps if is_float64 else torch.inf)
    recipe = replace(SHORT, batch=batch, precision=precision)
    for errors in ranks.run(world_size, measure_errors, recipe, is_float64, deadline=60.0):
        assert set(errors) == set(LAYOUTS[world_size])
        assert not {name: e for name, e in errors.items() if not (e[0] <= bounds[0] and e[1] <= bounds[1])}


LONG = replace(SHORT, steps=6)


def stop_on_ranks(rank, world_size, file, layout):
    set_up(torch.float64)
    with pytest.raises(StoppedError):
        train(LONG, Ranks(layout, LONG), file, 5)


def resume_on_ranks(rank, world_size, file, layout):
    set_up(torch.float64)
    return train(LONG, Ranks(layout, LONG), file)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, Layout()), (4, Layout(data="fsdp"))), ((4, Layout(heads=2)), (2, Layout(tokens=2)))],
)
def test_a_checkpoint_resumes_at_another_world_size(tmp_path, monkeypatch, before, after):
    monkeypatch.setattr(trainer, "measure", lambda *_: {})
    file = str(tmp_path / "saved.pt")
    ranks.run(before[0], stop_on_ranks, file, before[1])
    torch.set_default_dtype(torch.float64)
    try:
        expected = train(LONG)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    for losses in ranks.run(after[0], resume_on_ranks, file, after[1]):
        assert_exact(losses, expected[4:])


def clip_gradients(rank, world_size):
    """Clip a tensor and DTensors of two meshes; return the norms before and after, and the gradients."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    parts = [torch.full((4,), 3.0), torch.full((2, 2), 4.0), torch.full((8,), 5.0)]
    shards = distribute_tensor(parts[1], mesh["a"], [Shard(0)])
    tensors = [parts[0], shards, distribute_tensor(parts[2], mesh, [Shard(0), Replicate()])]
    parameters = [nn.Parameter(torch.zeros_like(part)) for part in tensors]
    for parameter, part in zip(parameters, tensors, strict=True):
        parameter.grad = part
    norms = [clip(parameters, 2.0), clip(parameters, 100.0)]
    local = [getattr(part, "to_local", lambda part=part: part)() for part in tensors]
    return [*norms, *(float(part.flatten()[0]) for part in local)]


@pytest.mark.slow
def test_gradients_of_several_meshes_have_one_norm():
    norm = (4 * 9 + 4 * 16 + 8 * 25) ** 0.5
    expected = [norm, 2.0, *(value * 2 / norm for value in (3, 4, 5))]
    for results in ranks.run(2, clip_gradients):
        for value, number in zip(results, expected, strict=True):
            # A result takes a sum of 16 squares, a root, a quotient and a product.
            assert_sum(value, number, 20, number)


def check_refusals(rank, world_size):
    for layout, recipe, message in (
        (Layout(tokens=2, heads=2), SHORT, "ranks must be a multiple of tokens x heads = 2 x 2, got 2"),
        (Layout(), replace(SHORT, batch=1), "batch must be at least 2, one for each data shard, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Ranks(layout, recipe)


def test_wrong_layouts():
    assert_refusals(
        [
            (lambda: Layout(data="zero"), ValueError, "data must be one of 'ddp', 'fsdp', got 'zero'"),
            (lambda: Layout(tokens=0), ValueError, "tokens must be at least 1, got 0"),
            (lambda: Layout(data="ddp", heads=2), ValueError, "data must be 'fsdp' for heads > 1"),
        ]
    )
    ranks.run(2, check_refusals)


PROGRAM = """
import sys
from examples.training import Corpus, trainer
from examples.training.__main__ import main
texts = "def one(x):\\n    return x + 1\\n" * 40, "def two(x):\\n    return x + 2\\n" * 10
trainer.corpus = lambda: Corpus({"a.py": texts[0]}, {"b.py": texts[1]})
sys.exit(main())
"""


@pytest.mark.nightly
def test_torchrun(tmp_path):
    """The first rank prints and writes the report, whose losses are those of one process to four digits."""
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = "-W ignore -m torch.distributed.run --standalone --nproc-per-node=2 program.py train --heads 2"
    options = "--steps 3 --pieces 260 --batch 4 --length 16 --precision float32"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, *launch.split(), *options.split()]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("3 steps, 192 tokens") == 1
    _, _, report = lm.load(tmp_path / "trained.safetensors")
    losses: list[float] = []
    recipe = Recipe(steps=3, pieces=260, batch=4, length=16, precision="float32")
    trainer.train(recipe, CORPUS, watch=lambda _, loss: losses.append(loss))
    assert report["losses"] == pytest.approx(losses, rel=FLOAT32_BOUND, abs=5e-5)
    assert report["ranks"]["data"] == "fsdp"
