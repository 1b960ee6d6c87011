"""Training on ranks: losses and weights of one process, checkpoints at any world size, lost ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import ranks
from support.bounds import assert_exact, assert_sum
from support.refusals import assert_refusals
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from examples.training import Checkpoints
from examples.training import trainer as training
from examples.training.parallel import Layout, Ranks, clip, lost, started
from gnn_attention import model as lm
from gnn_attention.verify.measure import EXACT, summation_bound

SIZES = lm.Config(vocabulary_size=1, width=16, num_heads=4, head_dim=4, mlp_width=32, reach=4)
SHORT = training.Recipe(4, 0, 4, 15, 280, warmup=2, precision="float32", graph="window(15, 5)")
CORPUS = training.Corpus(
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
        "data and tokens": Layout(tokens=2),
        "data and tokens under fsdp": Layout(tokens=2, data="fsdp"),
        "tokens and heads": Layout(tokens=2, heads=2, partition="zigzag"),
    },
}


def trained(recipe, work=None, folder=None, stop=None):
    """The losses of all steps, exactly, and the weights; with a checkpoint after every two steps."""
    losses: list[float] = []

    def watch(step, loss):
        losses.append(loss)
        if step == stop:
            raise StoppedError

    checkpoints = None if folder is None else Checkpoints(Path(folder), 2)
    model, _, _ = training.train(recipe, CORPUS, SIZES, watch=watch, ranks=work, checkpoints=checkpoints)
    return losses, model.state_dict()


class StoppedError(Exception):
    pass


def set_up(dtype):
    warnings.simplefilter("ignore")
    torch.set_default_dtype(dtype)
    training.measured = lambda *_: {}


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
        (2, 4, "float32", True, EXACT),
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


def stopped(recipe, work, folder, after):
    with pytest.raises(StoppedError):
        trained(recipe, work, folder, after)


def stop_on_ranks(rank, world_size, folder, layout):
    set_up(torch.float64)
    stopped(LONG, Ranks(layout, LONG), folder, 5)


def go_on_ranks(rank, world_size, folder, layout):
    set_up(torch.float64)
    return trained(LONG, Ranks(layout, LONG), folder)[0]


@pytest.fixture
def _wide(monkeypatch):
    monkeypatch.setattr(training, "measured", lambda *_: {})
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_goes_on(expected, found, after=4):
    assert_exact(torch.tensor(found), torch.tensor(expected[after:]))


@pytest.mark.usefixtures("_wide")
def test_a_training_goes_on_from_its_last_checkpoint_as_if_nothing_had_been(tmp_path):
    expected, weights = trained(LONG)
    stopped(LONG, None, str(tmp_path), 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    found, others = trained(LONG, None, str(tmp_path))
    # to the bit, in one process
    assert found == expected[4:]
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    # nothing is left to do
    assert trained(LONG, None, str(tmp_path))[0] == []


@pytest.mark.slow
def test_the_seconds_before_a_checkpoint_count(tmp_path):
    stopped(SHORT, None, str(tmp_path), 3)
    file = tmp_path / "step-00000002" / "training.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": 1000.0}))
    _, _, report = training.train(SHORT, CORPUS, SIZES, checkpoints=Checkpoints(tmp_path))
    assert 1000 < report["seconds"] < 1100


@pytest.mark.slow
@pytest.mark.usefixtures("_wide")
def test_what_ranks_saved_goes_on_in_one_process(tmp_path):
    ranks.run(2, stop_on_ranks, str(tmp_path), Layout(heads=2))
    check_goes_on(trained(LONG)[0], trained(LONG, None, str(tmp_path))[0])


@pytest.mark.slow
@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, Layout()), (4, Layout(data="fsdp"))),
        ((4, Layout(heads=2)), (2, Layout(tokens=2))),
    ],
)
def test_checkpoints_go_on_at_another_world_size(tmp_path, before, after):
    ranks.run(before[0], stop_on_ranks, str(tmp_path), before[1])
    expected = trained(LONG)[0]
    for found in ranks.run(after[0], go_on_ranks, str(tmp_path), after[1]):
        check_goes_on(expected, found)


@pytest.mark.slow
@pytest.mark.usefixtures("_wide")
def test_an_interrupt_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    stopped(LONG, None, str(tmp_path), 3)
    # inside torch, and after all
    for owner, name in ((FileSystemWriter, "finish"), (Path, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                trained(LONG, None, str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    check_goes_on(trained(LONG)[0], trained(LONG, None, str(tmp_path))[0], after=2)
    with pytest.raises(ValueError, match="expected a folder that exists"):
        Checkpoints(tmp_path / "missing" / "folder")


def test_what_a_killed_run_left_is_removed_by_the_next_checkpoint(tmp_path):
    (tmp_path / ".step-00000007.part").mkdir()
    (tmp_path / ".step-00000007.part" / "__0_0.distcp").write_bytes(b"half")
    stopped(SHORT, None, str(tmp_path), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


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


def test_layouts():
    assert Layout(tokens=2, heads=2).replicas(8) == 4
    ranks_of = "ranks must be a multiple of tokens 2 x heads 2, got 6"
    assert_refusals(
        [
            (lambda: Layout(tokens=2, heads=2).replicas(6), ValueError, ranks_of),
            (lambda: Layout(data="zero"), ValueError, "data must be one of 'ddp', 'fsdp', got 'zero'"),
            (lambda: Layout(tokens=0), ValueError, "tokens must be at least 1, got 0"),
            (lambda: Layout(data="ddp", heads=2), ValueError, "whole weights on every rank, heads > 1"),
        ]
    )


def test_one_process_has_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with started("cpu", 1.0) as device:
        assert device is None
    with pytest.raises(ValueError, match="timeout must be"), started("cpu", 0.0):
        pass


def test_errors_of_a_lost_rank():
    closed = "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:9"
    assert lost(RuntimeError(closed))
    assert lost(RuntimeError("Application timeout caused pair closure"))
    assert lost(torch.distributed.DistBackendError("a collective failed"))
    assert not lost(RuntimeError("expected scalar type Float but found Double"))


PROGRAM = """
import argparse, os, signal, sys
from examples.training import trainer as training
texts = "def one(x):\\n    return x + 1\\n" * 40, "def two(x):\\n    return x + 2\\n" * 10
corpus = training.Corpus({"a.py": texts[0]}, {"b.py": texts[1]})
training.corpus = lambda: corpus
step, hit = training._Fit.step, os.environ.get("HIT")
def stepped(fit, *arguments):
    step(fit, *arguments)
    if hit and len(fit.losses) == 5 and fit.ranks.rank == fit.ranks.count - 1:
        os.kill(os.getpid(), getattr(signal, hit))
training._Fit.step = stepped
parser = argparse.ArgumentParser()
training.add_arguments(parser)
sys.exit(training.run(parser.parse_args()))
"""
WORDS = "--steps 8 --pieces 260 --batch 4 --length 16 --precision float32"
WORDS += " --checkpoints saved --every 2 --timeout 5"
DEADLINE = 90.0  # two processes that import torch, on a machine that has other work


def started_process(folder, words, options=(), **more):
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, *words, "program.py", *WORDS.split(), *options]
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **fixed, **more}, **pipes)


def torchrun(folder, hit, *options):
    # torchrun looks every two seconds: a rank that lost another writes its message before torchrun ends it
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=2"]
    with started_process(folder, launch, options, **hit) as process:
        try:
            return (*process.communicate(timeout=DEADLINE), process.returncode)
        finally:
            process.kill()


@pytest.mark.nightly
def test_torchrun_goes_on_after_a_rank_was_killed(tmp_path):
    _, err, code = torchrun(tmp_path, {"HIT": "SIGKILL"}, "--data", "fsdp")
    assert code == 1, err
    assert "rank 0 lost another: " in err
    assert "saved/step-00000004 is whole: the same command goes on from there" in err
    out, err, code = torchrun(tmp_path, {}, "--heads", "2")
    assert code == 0, err
    # the first rank reports
    assert out.count("8 steps, 512 tokens") == 1
    _, _, found = lm.load(tmp_path / "trained.safetensors")
    recipe = training.Recipe(steps=8, pieces=260, batch=4, length=16, precision="float32")
    losses: list[float] = []
    training.train(recipe, CORPUS, watch=lambda _, loss: losses.append(loss))
    # in float32, by another layout, written with 4 digits behind the point: 5e-5 by that alone
    assert found["losses"] == pytest.approx(losses, rel=IN_FLOAT32, abs=5e-5)
    assert found["ranks"]["data"] == "fsdp"


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_after_the_timeout(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HIT": "SIGSTOP"}
    both = [started_process(tmp_path, (), RANK=str(rank), **where) for rank in (0, 1)]
    try:
        # until it is stopped
        _, state = os.waitpid(both[1].pid, os.WUNTRACED)
        assert os.WIFSTOPPED(state)
        began = time.monotonic()
        _, said = both[0].communicate(timeout=DEADLINE)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[0].returncode == 1, said
    # --timeout 5, on a busy machine
    assert 3.0 < time.monotonic() - began < 25.0
    assert "rank 0 lost another: " in said
    assert "step-00000004 is whole" in said


def test_an_interrupted_command_names_its_checkpoint(tmp_path, monkeypatch, capsys):
    def step(fit, *_):
        fit.losses.append(1.0)
        if len(fit.losses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "corpus", lambda: CORPUS)
    monkeypatch.setattr(training._Fit, "step", step)
    parser = training.argparse.ArgumentParser()
    training.add_arguments(parser)
    words = ["--out", f"{tmp_path}/a.safetensors", "--length", "16", "--pieces", "260"]
    saved = ["--checkpoints", f"{tmp_path}/saved", "--every"]
    for more, code, said in (
        ([], 130, "interrupted: nothing was written"),
        ([*saved, "10"], 130, f"interrupted: there is no checkpoint in {tmp_path}/saved yet"),
        ([*saved, "2"], 130, "saved/step-00000002 is whole: the same command goes on from there"),
        ([*saved, "2", "--heads", "2"], 2, "are for several ranks: start with torchrun"),
    ):
        assert training.run(parser.parse_args([*words, *more])) == code
        assert said in capsys.readouterr().err
    assert not (tmp_path / "a.safetensors").exists()
