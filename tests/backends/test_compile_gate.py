"""Every kernel as it is launched, compiled for GPUs that are not there: no spills, wide loads, tensor cores
where they are meant.

Triton compiles for any GPU on any machine. The launches are real ones (``compile_gate``), in a process of its
own, and once more with the oldest Triton that is supported where ``GNN_ATTENTION_OLD_TRITON`` names a folder
that holds it (``.ci/run`` makes one: ``pip install --target FOLDER --no-deps triton==3.6.0``).
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.covering import pairwise
from support.extras import needs

ROOT = Path(__file__).parents[2]
OLD = os.environ.get("GNN_ATTENTION_OLD_TRITON")
HALF = ("bfloat16", "float16")
PASSES = (
    "forward",
    "backward_dst",
    "backward_src",
    "receivers",
    "receivers_backward",
    "senders_backward",
)  # they read rows
WIDEST = {
    "bfloat16": 256,
    "float16": 256,
    "float32": 128,
    "float64": 128,
}  # of windows and tiles; rows have 512 channels


def usual(gpu, options):
    """Every form at the usual width, in bfloat16, float32 and float64."""
    from support.gate_cases import FORMS

    every = [
        [form, dtype, 64, options, gpu] for form in FORMS for dtype in ("bfloat16", "float32", "float64")
    ]
    return [case for case in every if case[0] != "tiles of 128" or case[1] in HALF]


def sweep():
    """Every pinned configuration, plain, for sm_90."""
    from support.gate_cases import FORMS, configurations

    named = {2: "bfloat16", 4: "float32", 8: "float64"}
    pinned = {form: configurations(form) for form in FORMS if form not in ("windows of 16", "windows of 32")}
    cases = [
        [form, named[size], dim, "plain", "sm_90"] for form, keys in pinned.items() for size, dim in keys
    ]
    cases = [case for case in cases if case[0] != "tiles of 128" or case[1] in HALF]
    cases += [case for case in usual("sm_90", "plain") if case not in cases]
    cases += usual("sm_90", "everything") + usual("sm_80", "plain")
    cases += [case for case in usual("sm_100", "plain") if case[1] == "bfloat16"]
    cases += [[form, "float16", 80, "plain", "sm_90"] for form in FORMS]  # no power of two
    return cases


def covering():
    """Few cases: each form with each dtype and each set of options, at the widest and for sm_80."""
    from support.gate_cases import FORMS, OPTIONS

    def allowed(form, dtype, width, options, gpu):
        usual = width == "64" or (options == "plain" and gpu == "sm_90")
        narrow = options == "plain" or gpu == "sm_90"
        halves = dtype in HALF or form != "tiles of 128"
        newest = gpu != "sm_100" or (
            dtype == "bfloat16" and form in ("rows", "windows of 64", "tiles of 128")
        )
        no_power = width != "80" or (dtype == "float16" and form in ("rows", "tiles of 64"))
        return usual and narrow and halves and newest and no_power

    rows = pairwise(
        allowed,
        form=list(FORMS),
        dtype=["bfloat16", "float32", "float64", "float16"],
        width=["64", "widest", "80"],
        options=OPTIONS,
        gpu=["sm_90", "sm_80", "sm_100"],
    )
    return [
        [form, dtype, channels(form, dtype, width), options, gpu] for form, dtype, width, options, gpu in rows
    ]


def channels(form, dtype, width):
    """The number of a width that may be called widest."""
    widest = 512 if form == "rows" else WIDEST[dtype]
    return widest if width == "widest" else int(width)


def compiled(cases, triton=None):
    """``[(case, kernels)]`` from a process of its own."""
    paths = [
        *filter(None, [triton]),
        str(ROOT / "tests"),
        str(ROOT),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own
    command = [sys.executable, str(ROOT / "tests" / "support" / "gate_cases.py"), json.dumps(cases)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", timeout=3600, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == cases, (
        f"it ended with {done.returncode}:\n{done.stderr[-4000:]}"
    )
    broken = [f"{line['case']}: {line['error']}" for line in lines if "error" in line]
    assert not broken, "\n".join([*broken, done.stderr[-4000:]])
    return [(tuple(line["case"]), line["built"]) for line in lines]


def faults(case, kernels):
    """What is wrong with the kernels of a case."""
    found = [] if len(kernels) >= 3 else [f"{case}: only {len(kernels)} kernels were launched"]
    for kernel in kernels:
        found += [f"{case}, {kernel['kernel']} {fault}" for fault in kernel["faults"]]
        if kernel["kernel"] in PASSES:
            found += [
                f"{case}, {kernel['kernel']} has no {wanted}" for wanted in missing(case, kernel["counts"])
            ]
    return found


def missing(case, counts):
    """Instructions that a pass over edges should have and has not."""
    form, dtype, dim, options, gpu = case
    if (
        dim >= 64 and not counts["wide loads"]
    ):  # a warp has less than 16 bytes of narrower rows for each of its threads
        yield "load of 16 bytes"
    if form != "rows" and dtype in HALF:
        narrow = (
            form in ("windows of 16", "windows of 32") or options == "everything" or dim > 128
        )  # fewer than 64 tokens at a time
        wanted = {
            "sm_80": ["HMMA"],
            "sm_90": ["HGMMA", "HMMA"] if narrow else ["HGMMA"],
            "sm_100": ["tcgen05", "HMMA"],
        }[gpu]
        if not any(counts[name] for name in wanted):
            yield " or ".join(wanted)


def swept(cases, triton=None):
    """The faults of cases, compiled by two processes."""
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(lambda part: compiled(part, triton), [cases[::2], cases[1::2]])
    return [fault for half in halves for case in half for fault in faults(*case)]


@pytest.mark.slow
def test_pairs_of_forms_dtypes_widths_options_and_gpus():
    """A covering choice of what :func:`test_every_pinned_configuration` compiles."""
    assert swept(covering()) == []


@pytest.mark.nightly
def test_every_pinned_configuration():
    """All forms, dtypes and widths."""
    assert swept(sweep()) == []


needs_the_oldest = pytest.mark.skipif(
    OLD is None, reason="GNN_ATTENTION_OLD_TRITON names no folder that holds Triton 3.6.0"
)


@pytest.mark.slow
@needs_the_oldest
def test_every_form_and_dtype_with_the_oldest_triton():
    """Its code differs: what fits into registers with the one need not with the other."""
    plain, everything = usual("sm_90", "plain"), usual("sm_90", "everything")
    assert swept(plain[::2] + everything[1::2], OLD) == []


@pytest.mark.nightly
@needs_the_oldest
def test_the_usual_widths_with_the_oldest_triton():
    """Every form and dtype plain, and with everything."""
    assert swept(usual("sm_90", "plain") + usual("sm_90", "everything"), OLD) == []


@pytest.mark.slow
@pytest.mark.skipif("CI" not in os.environ, reason="CI installs the oldest Triton, others may")
def test_ci_compiles_with_the_oldest_triton_too():
    """It is not left out unseen."""
    assert OLD is not None
    assert (Path(OLD) / "triton").is_dir()


def examples(gpu, *launches):
    """The kernels of some launches of ``gate_examples``, compiled here."""
    from support import gate_examples
    from support.compile_gate import compiled_for

    with compiled_for(gpu) as built:
        for name, options in launches:
            getattr(gate_examples, name)(**options)
    return built


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Triton 3.9 warns unless somebody decides about fused multiply-adds."""
    needs("triton")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.slow
def test_the_gate_sees_a_spill_a_narrow_load_and_tensor_cores():
    """Kernels made for it: one that spills; one whose rows are not aligned, and are; a product."""
    spilling, aligned, ragged, product = examples(
        "sm_90",
        ("launch_spilling", {}),
        ("launch_gather", {}),
        ("launch_gather", {"stride": 65}),
        ("launch_product", {}),
    )
    assert spilling.spills
    assert [fault.split(":")[0] for fault in spilling.faults()] == ["spills"]
    assert (aligned.counts["wide loads"] > 0, ragged.counts["wide loads"] > 0) == (True, False)
    assert product.counts["HGMMA"] > 0
    assert [kernel.faults() for kernel in (aligned, ragged, product)] == [[], [], []]


def test_a_case_that_does_not_compile_fails_with_its_error(monkeypatch, capsys):
    """The other process prints why; here a form is unknown."""
    from support import gate_cases

    case = ["no form", "bfloat16", 64, "plain", "sm_90"]
    gate_cases.report([case])
    said = SimpleNamespace(stdout=capsys.readouterr().out, stderr="", returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: said)
    with pytest.raises(AssertionError, match=r"'no form'.*KeyError"):
        compiled([case])
    with pytest.raises(AssertionError, match="it ended with 0"):
        compiled([case, case])
