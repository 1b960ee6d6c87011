"""What a record says: growth, crossover, targets judged, and both tables, from made-up figures."""

import pytest
from support.extras import needs

from benchmarks import plots, summary, table, targets
from benchmarks.workloads import FLEX, MASKED, PYG, WORKLOADS
from gnn_attention.verify.measure import EXACT

pytestmark = pytest.mark.slow  # the measuring of speed is tested, not what is measured

LIMITS = {"gemm_gflops": 200.0, "copy_gb_s": 60.0}


def workload(name, edges=1000, allocator="default"):
    known = WORKLOADS[name]
    sizes = {"tokens": known.tokens, "edges": edges, "heads": 8, "dim": 64}
    return {"workload": name, "title": known.title, "allocator": allocator, "limits": LIMITS, **sizes}


def measured(name, method, which, seconds, ratio=None, memory=1.0, ours=False, roofline=0.5):
    figures = {"seconds": seconds, "ratio": ratio, "memory_mb": memory, "roofline": roofline}
    figures |= {"samples": 9, "noisy": 1}
    return {**place(name, method, which, ours), "status": "measured", **figures}


def left_out(name, method, which, status, reason="because"):
    return {**place(name, method, which, False), "status": status, "reason": reason}


def place(name, method, which, ours):
    return {"workload": name, "allocator": "default", "method": method, "pass": which, "ours": ours}


def record(workloads, cases):
    made = {"workloads": workloads, "cases": cases, "threads": 2}
    made |= {"versions": {"torch": "2.13.0", "transformers": None}}
    made |= {"processor": "a processor", "memory_gib": 24, "date": "2026-11-20", "took_s": 12.0}
    return {**made, **summary.summary(made), "targets": targets.judged(made)}


AUTO = "auto"
WINDOW = record(
    [workload("b2048", 491_000), workload("b8192", 2_064_512)],
    [
        measured("b2048", AUTO, "forward", 0.010, 1.0, 8.0, True, 0.48),
        measured("b2048", AUTO, "both", 0.034, 1.0, 57.0, True, 0.46),
        measured("b2048", PYG, "forward", 1.3, 130.0, 3900.0),
        measured("b2048", PYG, "both", 1.7, 50.0, 5800.0),
        measured("b8192", AUTO, "forward", 0.040, 1.0, 21.0, True, 0.60),
        measured("b8192", AUTO, "both", 0.136, 1.0, 156.0, True, 0.50),
        measured("b8192", "tiles", "forward", 0.020, 0.5, 21.0, True, 0.9),
        measured("b8192", MASKED, "forward", 0.95, 24.0, 274.0),
        left_out("b8192", MASKED, "both", "too slow by estimate"),
        measured("b8192", FLEX, "forward", 0.054, 1.35, 16.0),
        left_out("b8192", FLEX, "both", "refused"),
        left_out("b8192", PYG, "forward", "out of memory by estimate", "15.8 GiB, the limit is 14.0"),
        left_out("b8192", PYG, "both", "out of memory by estimate", "23.6 GiB, the limit is 14.0"),
    ],
)


def target(name, which, measure, against=""):
    wanted = {"workload": name, "pass": which, "measure": measure, "against": against}
    (row,) = [row for row in WINDOW["targets"] if all(row[key] == value for key, value in wanted.items())]
    return row["value"], row["met"]


class TestTargets:
    @pytest.mark.parametrize(
        ("wanted", "value", "met"),
        [
            (("b2048", "forward", "faster", PYG), 130.0, True),
            (("b2048", "both", "faster", PYG), 50.0, False),
            (("b2048", "forward", "smaller", PYG), 3900 / 8, True),
            (("b8192", "both", "faster", MASKED), None, None),
            (("b8192", "both", "roofline"), 0.50, False),
            (("b8192", "forward", "best"), 2.0, False),
            (("b8192", "both", "best"), 1.0, True),
        ],
    )
    def test_each_is_judged(self, wanted, value, met):
        assert target(*wanted) == (value, met)

    def test_growth_outputs_and_running_alone(self):
        made = record(
            [workload("b8192"), workload("b131072"), workload("e65536")],
            [
                measured("b8192", AUTO, "forward", 0.04, 1.0, ours=True),
                measured("b131072", AUTO, "forward", 0.64, 1.0, 256.0, ours=True),
                measured("b131072", AUTO, "both", 2.6, 1.0, 2048.0, ours=True),
                measured("e65536", AUTO, "forward", 0.15, 1.0, 240.0, ours=True),
                left_out("e65536", PYG, "forward", "out of memory by estimate"),
                left_out("e65536", AUTO, "both", "failed"),
                left_out("e65536", PYG, "both", "out of memory by estimate"),
            ],
        )
        found = {
            (row["workload"], row["pass"], row["measure"]): (row["value"], row["met"])
            for row in made["targets"]
        }
        assert found["b131072", "forward", "growth"] == (pytest.approx(16.0, rel=EXACT), True)
        assert found["b131072", "both", "growth"] == (None, None)
        assert found["b131072", "forward", "outputs"] == (1.0, True)
        assert found["b131072", "both", "outputs"] == (2.0, False)
        assert found["e65536", "forward", "seconds"] == (0.15, True)
        assert found["e65536", "forward", "megabytes"] == (240.0, True)
        assert found["e65536", "forward", "alone"] == (1.0, True)
        assert found["e65536", "both", "alone"] == (0.0, False)


class TestSummary:
    def test_growth_is_the_exponent(self):
        """4 times the tokens in 4 times the time, and in 21 / 8 of the memory."""
        (time,) = [
            row for row in WINDOW["growth"] if row["quantity"] == "seconds" and row["pass"] == "forward"
        ]
        assert (time["family"], time["by"], time["points"]) == ("b", "tokens", [(2048, 0.010), (8192, 0.040)])
        assert time["exponent"] == pytest.approx(1.0, rel=EXACT)

    def test_crossover_lies_where_the_times_are_equal(self):
        cases = []
        for one_in, ratio in ((16, 8.0), (8, 4.0), (4, 2.0), (2, 0.5)):
            cases.append(measured(f"x-edges-{one_in}", AUTO, "forward", 1.0, 1.0, ours=True))
            cases.append(measured(f"x-edges-{one_in}", MASKED, "forward", ratio, ratio))
        made = record([workload(f"x-edges-{n}", 2048 * 2048 // n) for n in (16, 8, 4, 2)], cases)
        (row,) = made["crossover"]
        assert (row["kind"], row["pass"], row["method"]) == ("edges", "forward", AUTO)
        assert row["density"] == round(2**-1.5, 6)  # half way between 1/4 and 1/2, on both logarithms
        needs("matplotlib")
        assert plots.crossover(made) is not None


class TestTable:
    def test_markdown_has_a_row_for_each_workload(self):
        lines = table.table(WINDOW).splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        names = [f"{name}: time, memory" for name in (MASKED, FLEX, PYG)]
        assert cells[0] == ["workload", "edges", "ours, ms", "MB", "roofline", *names]
        own = ["window 256, T=8192", "2,064,512", "40 / 136", "21 / 156", "60 % / 50 %"]
        assert cells[2][:5] == ["window 256, T=2048", "491,000", "10 / 34", "8 / 57", "48 % / 46 %"]
        assert cells[2][5:] == ["-", "-", "130x / 50x, 488x / 102x"]
        assert cells[3] == [*own, "24x / too slow, 13x / -", "1.4x / refused, 0.76x / -", "out of memory"]
        assert len({len(line) for line in lines}) == 1
