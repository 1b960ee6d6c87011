"""Every kernel as it is launched, compiled for GPUs that are not there: no spills, wide loads, tensor cores.

Triton compiles for any GPU on any machine. The launches are real ones (``compile_gate``), in a process of its
own, and once more with the oldest Triton that is supported where ``GNN_ATTENTION_OLD_TRITON`` names a folder
that holds it (``.ci/run`` makes one: ``pip install --target FOLDER --no-deps triton==3.6.0``).
"""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.covering import pairwise
from support.extras import needs

ROOT = Path(__file__).parents[2]
OLD = os.environ.get("GNN_ATTENTION_OLD_TRITON")
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4, "float64": 8}
# tensor cores that take operands from registers, 99 KiB of shared memory: users' own GPUs
CONSUMER = ("sm_86", "sm_89", "sm_120")
PADDED = ("rows", "tiles of 64")  # forms whose channels are padded to a power of two
# receivers whose steps fetch ahead which pairs are edges, and by ``ex2`` flush what is no weight
STEP = ("tiles of 128", "bfloat16", 64, "plain", "sm_90")
# both passes of that, and the one that needs most of the little memory that programs of users' GPUs share
ALWAYS = [(*STEP, 0), (*STEP, 1), ("tiles of 128", "bfloat16", 128, "plain", "sm_120", 1)]
CASES = {
    "form": ["rows", *(f"windows of {size}" for size in (16, 32, 64)), "tiles of 64", "tiles of 128"],
    "dtype": list(SIZES),
    "dim": [64, 80, 256, 512, 128, 16, 32],
    "options": ["plain", "everything"],
    "gpu": ["sm_90", "sm_80", "sm_100", *CONSUMER],
}


def allowed(form, dtype, dim, options, gpu):
    """Every configuration plain for sm_90, the usual width with every option and for other GPUs, too.

    Users' own GPUs have less shared memory: there wide rows of blocks as well, but for float64, which
    spills with 128 channels where no tensor core multiplies it.
    """
    from support.gate_cases import configurations

    small = form in ("windows of 16", "windows of 32")
    pinned = (SIZES[dtype], dim) in configurations(form) and not (small and dim != 64)
    wanted = (pinned and (dtype != "float16" or dim == 64)) or (dtype == "float16" and dim == 80)
    own = gpu in CONSUMER and form != "rows" and dtype == "bfloat16" and dim >= 128
    usual = dim == 64 or (options == "plain" and (gpu == "sm_90" or own))
    newest = gpu != "sm_100" or dtype == "bfloat16"
    # the products of rows are sums
    able = (SIZES[dtype] == 2 or form != "tiles of 128") and (dtype != "tf32" or form != "rows")
    return wanted and usual and newest and able and (options == "plain" or gpu == "sm_90")


def every():
    return [case for case in itertools.product(*CASES.values()) if allowed(*case)]


def in_turn(cases):
    """Of each case one of the three passes over edges; of some what adds chunks."""
    return [*((*case, n % 3) for n, case in enumerate(cases)), *((*case, 3) for case in cases[::8])]


def chosen():
    """Pairs of arguments: of widths of no power of two some, small windows of 16 or 32 in turn."""
    few = {"form": [form for form in CASES["form"] if form != "windows of 32"], "dim": [64, 256, 512]}
    cases = [*pairwise(allowed, **CASES | few), *((form, "float16", 80, "plain", "sm_90") for form in PADDED)]
    sizes = itertools.cycle(["windows of 16", "windows of 32"])
    return [(next(sizes), *case[1:]) if case[0] == "windows of 16" else case for case in cases]


def usual():
    """Every form at the usual width."""
    return [case for case in every() if case[2] == 64 and case[4] == "sm_90" and case[1] != "float16"]


def compiled(cases, triton=None):
    """``[(case, kernels)]`` from a process of its own."""
    paths = filter(None, [triton, str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH")])
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own
    command = [sys.executable, str(ROOT / "tests" / "support" / "gate_cases.py"), json.dumps(cases)]
    options = {"capture_output": True, "text": True, "errors": "replace", "timeout": 3600, "check": False}
    done = subprocess.run(command, env=environment, **options)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [(tuple(line["case"]), line["built"]) for line in lines]
    assert [case for case, _ in found] == cases, f"it ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return found


def faults(case, kernels):
    """What is wrong with the kernels of a case."""
    from support.gate_cases import CHUNKS, kernels_of

    wanted, names = kernels_of(case[0], *case[5:]), {each["kernel"] for each in kernels}
    found = [f"{case}: {name} was not launched" for name in sorted(wanted - names)]
    for kernel in kernels:
        of_edges = kernel["kernel"] not in CHUNKS
        absent = missing(*case[:5], kernel["kernel"], kernel["counts"]) if of_edges else []
        wrong = [*kernel["faults"], *(f"has no {wanted}" for wanted in absent)]
        found += [f"{case}, {kernel['kernel']} {fault}" for fault in wrong]
    return found


def missing(form, dtype, dim, options, gpu, name, counts):
    """Instructions that a pass over edges should have and has not."""
    tiles = (form, dtype, dim, options, gpu) == STEP and name.startswith("receivers")
    if tiles and not counts["words ahead"]:
        yield "load of words a step ahead"
    if tiles and counts["powers of small numbers"]:
        yield "power without scaling"
    # a warp has less than 16 bytes of narrower rows for each of its threads
    if dim >= 64 and not counts["wide loads"]:
        yield "load of 16 bytes"
    if form != "rows" and (SIZES[dtype] == 2 or dtype == "tf32"):
        # fewer than 64 tokens at a time
        narrow = form in ("windows of 16", "windows of 32") or options == "everything" or dim > 128
        hopper = ["HGMMA", "HMMA"] if narrow or dtype == "tf32" else ["HGMMA"]
        wanted = {"sm_90": hopper, "sm_100": ["tcgen05", "HMMA"]}.get(gpu, ["HMMA"])
        if not any(counts[name] for name in wanted):
            yield " or ".join(wanted)


def swept(cases, triton=None, processes=1):
    """The faults of cases."""
    with ThreadPoolExecutor(processes) as pool:
        parts = pool.map(lambda n: compiled(cases[n::processes], triton), range(processes))
    return [fault for part in parts for case in part for fault in faults(*case)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Triton 3.9 warns unless somebody decides about fused multiply-adds."""
    needs("triton")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


FITTING = {
    # float64 without tensor cores: rows of both operands spread over eight warps
    "float64 with": ("tiles of 64", "float64", 64, "receivers", "sm_80", (16, 16, 4, 1)),
    "float64 without": ("tiles of 64", "float64", 64, "receivers", "sm_120", (16, 16, 8, 1)),
    # a second stage would spill
    "float32": ("tiles of 64", "float32", 64, "senders", "sm_90", (32, 32, 8, 2)),
    "tf32": ("tiles of 64", "tf32", 64, "senders", "sm_90", (32, 16, 8, 1)),
    # one stage less would spill by Triton 3.9
    "float32 of windows": ("windows of 64", "float32", 64, "senders", "sm_90", (16, 16, 8, 3)),
    "wide of windows": ("windows of 64", "bfloat16", 256, "senders", "sm_120", (32, 16, 8, 2)),
    "float32 of few": ("windows of 16", "float32", 64, "senders", "sm_120", (16, 16, 8, 1)),
    "tf32 of windows": ("windows of 64", "tf32", 64, "senders", "sm_90", (32, 16, 8, 1)),
    "tf32 of few": ("tiles of 64", "tf32", 64, "senders", "sm_86", (32, 16, 8, 1)),
    # more would spill in the careful launch by Triton 3.9
    "float32, long rows": ("tiles of 64", "float32", 128, "forward", "sm_90", (32, 16, 8, 2)),
    "float64, long rows": ("windows of 64", "float64", 128, "forward", "sm_90", (16, 16, 4, 1)),
    # half as many warps with rows as long
    "wide": ("tiles of 128", "bfloat16", 128, "forward", "sm_90", (128, 64, 8, 3)),
    "wide of 64": ("tiles of 64", "bfloat16", 128, "forward", "sm_90", (64, 32, 4, 3)),
    "wide of few": ("tiles of 128", "bfloat16", 128, "forward", "sm_89", (64, 32, 4, 3)),
}


@pytest.mark.parametrize(("form", "dtype", "dim", "step", "gpu", "wanted"), FITTING.values(), ids=FITTING)
def test_configurations_fit_the_gpu(form, dtype, dim, step, gpu, wanted):
    """As compiled without spills; the tests below compile all of them."""
    from support import compile_gate, gate_cases

    with compile_gate.without_gpu(gpu):
        assert gate_cases.configuration(form, dtype, dim, step) == wanted


@pytest.mark.slow
def test_pairs_of_forms_dtypes_widths_options_gpus_and_passes():
    """A covering choice of what :func:`test_every_pinned_configuration` compiles, of each case one pass."""
    assert swept([*in_turn(chosen()), *ALWAYS]) == []


@pytest.mark.nightly
def test_every_pinned_configuration():
    """All forms, dtypes and widths, all passes."""
    assert swept(every(), processes=2) == []


# where CI runs, the oldest Triton must be there
needs_the_oldest = pytest.mark.skipif(
    OLD is None and "CI" not in os.environ,
    reason="GNN_ATTENTION_OLD_TRITON names no folder with Triton 3.6.0",
)


@needs_the_oldest
@pytest.mark.parametrize(
    "whole", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.nightly)]
)
def test_the_usual_width_with_the_oldest_triton(whole):
    """Its code differs: what fits into registers with the one need not with the other."""
    assert OLD is not None
    assert (Path(OLD) / "triton").is_dir()
    cases = usual() if whole else [*in_turn(usual()[::3]), *ALWAYS[:2]]
    assert swept(cases, OLD, 2 if whole else 1) == []


@pytest.mark.slow
def test_the_gate_sees_a_spill():
    """Of a kernel that holds more numbers at once than there are registers for."""
    from support import gate_examples
    from support.compile_gate import compiled_for

    with compiled_for("sm_90") as built:
        gate_examples.launch_spilling()
    assert [fault.split(":")[0] for fault in built[0].faults()] == ["spills"]
