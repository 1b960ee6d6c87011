"""Training on ranks: losses and weights of one process, and a checkpoint that any number of ranks reads."""

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
from gnn_attention.verify.measure import EXACT

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


def trained(recipe, work=None, file=None, stop=None):
    """The losses of all steps, exactly, and the weights; with a checkpoint after every two steps."""
    losses: list[float] = []

    def watch(step, loss):
        losses.append(loss)
        if step == stop:
            raise StoppedError

    checkpoint = None if file is None else Checkpoint(Path(file), 2)
    model, _, _ = trainer.train(recipe, CORPUS, SIZES, watch=watch, ranks=work, checkpoint=checkpoint)
    return losses, model.state_dict()


def set_up(dtype):
    warnings.simplefilter("ignore")
    torch.set_default_dtype(dtype)
    trainer.measured = lambda *_: {}


def compared(rank, world_size, recipe, wide):
    """For each layout, the relative error of the losses, and of the weights to the largest."""
    set_up(torch.float64 if wide else torch.float32)
    expected, weights = trained(recipe)
    found = {}
    for name, layout in LAYOUTS[world_size].items():
        losses, others = trained(recipe, Ranks(layout, recipe))
        assert len(losses) == recipe.steps
        assert weights.keys() == others.keys()
        far = max(abs(a - b) / a for a, b in zip(expected, losses, strict=True))
        largest = max(float(weight.abs().max()) for weight in weights.values())
        found[name] = far, max(float((weights[key] - others[key]).abs().max()) for key in weights) / largest
    return found


# Sums on the longest way to a loss: 280 words, 60 tokens, and eleven products over 16 numbers.
IN_FLOAT32 = summation_bound(280 + 60 + 11 * 16, 1.0, torch.float32)
# About 20 products in a row, each rounded to within u = 2^-8 of itself: sqrt(20) u, their squares added; of
# 45 tokens the mean.
IN_BFLOAT16 = (20 / 45) ** 0.5 * torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "batch", "precision", "wide", "allowed"),
    [
        # three windows for two ranks
        (2, 3, "float32", False, IN_FLOAT32),
        (2, 4, "bfloat16", False, IN_BFLOAT16),
        (4, 5, "float32", True, EXACT),
    ],
)
def test_losses_are_those_of_one_process(world_size, batch, precision, wide, allowed):
    # weights are rounded to float16 in the end: equal, or neighbours near the middle between two
    apart = torch.finfo(torch.float16).eps if wide else torch.inf
    recipe = replace(SHORT, batch=batch, precision=precision)
    for found in ranks.run(world_size, compared, recipe, wide, deadline=60.0):
        assert set(found) == set(LAYOUTS[world_size])
        assert not {name: far for name, far in found.items() if not (far[0] <= allowed and far[1] <= apart)}


LONG = replace(SHORT, steps=6)


def stop_on_ranks(rank, world_size, file, layout):
    set_up(torch.float64)
    with pytest.raises(StoppedError):
        trained(LONG, Ranks(layout, LONG), file, 5)


def go_on_ranks(rank, world_size, file, layout):
    set_up(torch.float64)
    return trained(LONG, Ranks(layout, LONG), file)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, Layout()), (4, Layout(data="fsdp"))),
        ((4, Layout(heads=2)), (2, Layout(tokens=2))),
    ],
)
def test_a_checkpoint_goes_on_at_another_world_size(tmp_path, monkeypatch, before, after):
    monkeypatch.setattr(trainer, "measured", lambda *_: {})
    file = str(tmp_path / "saved.pt")
    ranks.run(before[0], stop_on_ranks, file, before[1])
    torch.set_default_dtype(torch.float64)
    try:
        expected = trained(LONG)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    for found in ranks.run(after[0], go_on_ranks, file, after[1]):
        assert_exact(found, expected[4:])


def clipped(rank, world_size):
    """The norms, before and after, of gradients of three kinds: plain, of one mesh, of another."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    parts = [torch.full((4,), 3.0), torch.full((2, 2), 4.0), torch.full((8,), 5.0)]
    sharded = distribute_tensor(parts[1], mesh["a"], [Shard(0)])
    whole = [parts[0], sharded, distribute_tensor(parts[2], mesh, [Shard(0), Replicate()])]
    parameters = [nn.Parameter(torch.zeros_like(part)) for part in whole]
    for parameter, part in zip(parameters, whole, strict=True):
        parameter.grad = part
    norms = [clip(parameters, 2.0), clip(parameters, 100.0)]
    local = [getattr(part, "to_local", lambda part=part: part)() for part in whole]
    return [*norms, *(float(part.flatten()[0]) for part in local)]


@pytest.mark.slow
def test_gradients_of_several_meshes_have_one_norm():
    norm = (4 * 9 + 4 * 16 + 8 * 25) ** 0.5
    for found in ranks.run(2, clipped):
        for value, true in zip(found, [norm, 2.0, *(value * 2 / norm for value in (3, 4, 5))], strict=True):
            # 16 squares, a root, a quotient and a product
            assert_sum(value, true, 20, true)


def refused(rank, world_size):
    for layout, recipe, message in (
        (Layout(tokens=2, heads=2), SHORT, "ranks must be a multiple of tokens 2 x heads 2, got 2"),
        (Layout(), replace(SHORT, batch=1), "a window for each of the 2 ranks that share it, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Ranks(layout, recipe)


def test_wrong_layouts():
    assert_refusals(
        [
            (lambda: Layout(data="zero"), ValueError, "data must be one of 'ddp', 'fsdp', got 'zero'"),
            (lambda: Layout(tokens=0), ValueError, "tokens must be at least 1, got 0"),
            (lambda: Layout(data="ddp", heads=2), ValueError, "whole weights on every rank, heads > 1"),
        ]
    )
    ranks.run(2, refused)


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
    """The first rank reports and writes; losses are written with 4 digits behind the point."""
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = "-W ignore -m torch.distributed.run --standalone --nproc-per-node=2 program.py train --heads 2"
    words = "--steps 3 --pieces 260 --batch 4 --length 16 --precision float32"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, *launch.split(), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 steps, 192 tokens") == 1
    _, _, found = lm.load(tmp_path / "trained.safetensors")
    losses: list[float] = []
    recipe = Recipe(steps=3, pieces=260, batch=4, length=16, precision="float32")
    trainer.train(recipe, CORPUS, watch=lambda _, loss: losses.append(loss))
    assert found["losses"] == pytest.approx(losses, rel=IN_FLOAT32, abs=5e-5)
    assert found["ranks"]["data"] == "fsdp"
