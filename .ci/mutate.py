"""Mutation testing: change one operator or constant of a module, and see whether its tests notice.

    pip install cosmic-ray==8.7.0  # only its operators are used
    python .ci/mutate.py graph/token_graph edge_softmax --count 40 --jobs 2 --json mutants.json

The program prints, for each module, the share of mutants that tests catch, and the change of each survivor. Mutants
are drawn with a seed, at most one for each place, from changes that affect what runs (annotations and docstrings do
not). A mutant that survives the TESTS of its module is tested with the random draws of guarantee F1. A mutant also
counts as caught if a step takes ten seconds more than three times its usual time.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
NEAR = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul BitOr_BitAnd BitAnd_BitOr RShift_LShift LShift_RShift"
BACKEND = (
    "test_backend",
    "test_attend",
    "test_equality",
    "test_score_mods",
    "test_dropout",
    "test_verify",
)
GRAPH = ("test_graph", "test_counting", "test_algebra", "test_convert", "test_indices")
TESTS = {
    "edge_softmax": ("test_edge_softmax", "test_layer", "test_equality"),
    "graph/token_graph": (*GRAPH, "test_first_calls"),
    "graph/edge_list": (*GRAPH, "test_malformed"),
    "graph/edges/chosen": ("test_edges", "test_selectors", *GRAPH),
    "graph/edges/listed": ("test_edges", "test_tiling", *GRAPH),
    "graph/rules": ("test_kernel_masks", *GRAPH),
    "algebra/products": ("test_algebra", "test_results"),
    "convert/formats": ("test_convert", "test_foreign_graphs"),
    "patterns/local": ("test_patterns", "test_kin", "test_errors"),
    "heads/model_space": ("heads/test_heads", "test_layer"),
    "heads/standard": ("heads/test_heads", "test_layer"),
    "layer/attention": ("test_layer", "test_overriding", "test_pyg"),
    "score_mods": ("test_score_mods", *BACKEND),
    "rotary": ("test_rotary", "test_cache"),
    "selectors/top_k": ("test_selectors",),
    "cache/caches": ("test_cache", "test_cache_operations"),
    "attend": ("test_attend", "test_equality", "test_backend", "test_halo", "test_dispatch", "test_trace"),
    "backends/reference": ("test_reference", *BACKEND),
    "backends/dense": ("test_dense", "test_attend", "test_varlen", *BACKEND),
    "backends/flex": ("test_flex", *BACKEND, "slow test_flex"),
    "backends/rows": ("test_rows", "test_csr", *BACKEND),
    "backends/tiles": ("test_tiles", "test_attention_op", "test_planner", *BACKEND),
    "backends/gpu/row_attention": ("test_row_attention", "test_interpreted"),
    "backends/varlen": ("test_varlen",),
}
# Mutated lines that behave like the original, so no test can catch them. They are not drawn.
EQUIVALENT = {
    # On the machines that run tests, no device with autocast has a name after "meta" in the alphabet.
    "attend": ('device >= "meta" or',),
    # Graphs that vary by head are refused earlier.
    "backends/tiles": ("select_slice(call.graph, 0, -1)",),
    # All tensors are on one device; some changes matter only on a GPU.
    "backends/flex": (
        "tokens[ 1].device",
        "tokens[ -1].device",
        'tokens[0].device.type >= "cpu"',
    ),
    # Only the shape and dtype of the column are used.
    "heads/model_space": ("zeros_like(matrix[:, -1])", "zeros_like(matrix[:, 1])"),
}
DRAWS = "from tests.guarantees.registry import GUARANTEES; import sys; sys.exit(not GUARANTEES['F1'].measure(150, str).holds)"


@dataclass(frozen=True)
class Mutant:
    """A module with one change, and the step that caught it."""

    module: str
    line: int
    diff: str
    source: str = ""
    caught_by: str | None = None


@dataclass(frozen=True)
class Copy:
    """A copy of the project, and the process that runs commands in it."""

    folder: Path
    server: subprocess.Popen[str]

    def run(self, step: tuple[str, ...], limit: float) -> int:
        """Run a step and return its exit code, or 1 if it takes too long."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps([step, str(self.folder), limit]) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())


def main() -> int:
    """Survey the modules of the command line; return 1 if tests catch at most 90 % of a module's mutants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=list(TESTS), metavar="MODULE", help=", ".join(TESTS))
    parser.add_argument("--count", type=int, default=40, help="mutants of each module (default 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once (default 2)")
    parser.add_argument("--json", metavar="FILE", help="write every mutant")
    args = parser.parse_args()
    all_mutants: list[Mutant] = []
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        copies = Queue[Copy]()
        for number in range(args.jobs):
            copies.put(serve(Path(folder) / str(number)))
        for module in args.modules:
            mutants = survey(module, args.count, args.seed, copies, args.jobs)
            shares.append(report(module, mutants))
            all_mutants += mutants
            if args.json:
                record = [asdict(mutant) | {"source": None} for mutant in all_mutants]
                Path(args.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 0 if min(shares) > 0.9 else 1


def copy_to(folder: Path) -> Path:
    """Copy all files that tests read, so that mutants do not change the working tree."""
    for name in ("benchmarks", "docs", "examples", "gnn_attention", "notebooks", "tests"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("node_modules", "__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def survey(module: str, count: int, seed: int, copies: Queue[Copy], jobs: int) -> list[Mutant]:
    """Draw mutants of a module and test each, with the steps that pass on the unchanged module."""
    drawn_mutants = draw(module, count, seed)
    copy = copies.get()
    limits = {step: limit for step in steps(module) if (limit := time_limit(step, copy)) is not None}
    copies.put(copy)
    dropped = [step[-1] for step in steps(module) if step not in limits]
    without = f", without {', '.join(dropped)}: nothing to run, or it fails unchanged" if dropped else ""
    print(f"{module}: {len(limits)} steps{without}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda mutant: run_tests(mutant, limits, copies), drawn_mutants))


def steps(module: str) -> list[tuple[str, ...]]:
    """Return commands, the fastest first: the doctests of the module, its tests, and random draws."""
    pytest = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin")
    tests = [(*pytest, *arguments(name)) for name in dict.fromkeys(TESTS[module])]
    return [(*pytest, f"gnn_attention/{module}.py"), *tests, ("-c", DRAWS)]


def arguments(name: str) -> tuple[str, ...]:
    """Return the pytest arguments for a test file; "slow NAME" selects only its slow tests."""
    *slow, name = name.split()
    return ("-m", "slow", find_test_file(name)) if slow else (find_test_file(name),)


def find_test_file(name: str) -> str:
    """Find a test file by its path below tests/, or by its name alone in any folder."""
    path = ROOT / "tests" / f"{name}.py"
    (file,) = [path] if path.exists() else (ROOT / "tests").rglob(f"{name}.py")
    return file.relative_to(ROOT).as_posix()


def time_limit(step: tuple[str, ...], copy: Copy) -> float | None:
    """Return the time limit of a step, or None if it fails on the unchanged module (or has no tests)."""
    start = time.time()
    passed = copy.run(step, 1800) == 0
    return 3 * (time.time() - start) + 10 if passed else None


def run_tests(mutant: Mutant, limits: dict[tuple[str, ...], float], copies: Queue[Copy]) -> Mutant:
    """Test a mutant and return it with the first step that catches it."""
    copy = copies.get()
    path = copy.folder / "gnn_attention" / f"{mutant.module}.py"
    original = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutant.source, encoding="utf-8")
        caught_by = next((step[-1] for step, limit in limits.items() if copy.run(step, limit) != 0), None)
    finally:
        path.write_text(original, encoding="utf-8")
        copies.put(copy)
    print("." if caught_by else "S", end="", file=sys.stderr, flush=True)
    caught_by = "random draws" if caught_by == DRAWS else caught_by
    return Mutant(mutant.module, mutant.line, mutant.diff, caught_by=caught_by)


def serve(folder: Path) -> Copy:
    """Copy the project and start a process that runs commands in the copy."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    warm = [sys.executable, str(ROOT / ".ci" / "warm.py")]
    return Copy(
        copy_to(folder),
        subprocess.Popen(warm, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE),
    )


def draw(module: str, count: int, seed: int) -> list[Mutant]:
    """Draw mutants_by_place of a module without replacement, and one change at each place."""
    source = (ROOT / "gnn_attention" / f"{module}.py").read_text(encoding="utf-8")
    equivalent = [text for text in EQUIVALENT.get(module, ()) if text not in source]
    mutants_by_place: dict[str, list[Mutant]] = {}
    for mutated in changes(source):
        is_same = any(text in mutated for text in equivalent)
        if not is_same and dump_code(mutated) != dump_code(source):
            diff = difflib.unified_diff(source.splitlines(), mutated.splitlines(), lineterm="", n=0)
            hunk, *changed_lines = list(diff)[2:]
            line = int(hunk.split()[1].lstrip("-").split(",")[0])
            mutant = Mutant(module, line, "\n".join(changed_lines), mutated)
            mutants_by_place.setdefault(place_of_change(source, mutated), []).append(mutant)
    rng = random.Random(seed)
    names = rng.sample(sorted(mutants_by_place), min(count, len(mutants_by_place)))
    return [rng.choice(mutants_by_place[name]) for name in names]


def changes(source: str) -> list[str]:
    """Return the source with every possible change of one operator, comparison, constant, branch or loop."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    binary, near = "core/ReplaceBinaryOperator_", NEAR.split()
    names = [
        name for name in operator_names() if not name.startswith(binary) or name.removeprefix(binary) in near
    ]
    results: dict[str, None] = {}
    for name in names:
        operator, number = get_operator(name), 0
        while not operator.arguments() and (mutated := mutate_code(source, operator(), number)) is not None:
            results[mutated] = None
            number += 1
    return list(results)


def place_of_change(source: str, mutated: str) -> str:
    """Return the position at which the token that differs begins, which identifies the place of a change."""
    length = min(len(source), len(mutated))
    first = next((n for n in range(length) if source[n] != mutated[n]), length)
    while first and (source[first - 1].isalnum() or source[first - 1] in "<>=!*/"):
        first -= 1
    return f"{first:09}"


def dump_code(source: str) -> str:
    """Dump the syntax tree without annotations, docstrings and the declarations of overloads."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return "nothing"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            node.body = drop_overloads(node.body)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.dump(tree)


def drop_overloads(body: list[ast.stmt]) -> list[ast.stmt]:
    """Drop functions that a later one of the same name replaces; the setter of a property replaces none."""
    later: set[str] = set()
    remaining = []
    for statement in reversed(body):
        if isinstance(statement, ast.FunctionDef):
            if statement.name in later:
                continue
            if not any(isinstance(decorator, ast.Attribute) for decorator in statement.decorator_list):
                later.add(statement.name)
        remaining.append(statement)
    return remaining[::-1]


def report(module: str, mutants: list[Mutant]) -> float:
    """Print the share of caught mutants and the survivors, and return the share."""
    survivors = [mutant for mutant in mutants if mutant.caught_by is None]
    share = 1 - len(survivors) / max(1, len(mutants))
    print(f"\n{module}: {len(mutants) - len(survivors)} of {len(mutants)} mutants caught ({share:.0%})")
    for mutant in survivors:
        print(f"  line {mutant.line}\n    " + mutant.diff.replace("\n", "\n    "))
    sys.stdout.flush()
    return share


if __name__ == "__main__":
    sys.exit(main())
