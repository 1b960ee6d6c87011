"""``python -m benchmarks calibrate`` measures the constants of the cost model, and ``auto`` reads them."""

from benchmarks import calibrate
from benchmarks.__main__ import main
from gnn_attention import patterns
from gnn_attention.backends import cost_model


def test_calibrate_saves_constants_that_are_read(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(cost_model.PATH_VARIABLE, str(tmp_path / "costs.json"))
    monkeypatch.setattr(calibrate, "CASES", {"few edges": ("rows", lambda: patterns.random_senders(64, 4))})
    assert main(["calibrate"]) == 0
    assert f"saved in {tmp_path / 'costs.json'}" in capsys.readouterr().out
    costs, default = cost_model.read(tmp_path / "costs.json"), cost_model.Costs()
    assert costs.edge != default.edge


def test_a_read_only_home_is_reported_before_anything_is_measured(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.delenv("GNN_ATTENTION_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["calibrate"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    message = "costs.json cannot be written (Not a directory): set GNN_ATTENTION_COSTS to a file that can\n"
    assert message in output.err
