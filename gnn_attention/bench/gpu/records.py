"""Records of ``bench gpu`` in files: read to be carried on or shown, each part checked before anything uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from gnn_attention._support import json_files
from gnn_attention.backends.cost_model import is_positive
from gnn_attention.backends.gpu import devices
from gnn_attention.bench.gpu.machine import Ceilings

__all__ = ["read"]

Record = dict[str, Any]
Kind = Callable[[Any], bool]


def read(path: Path) -> Record:
    """A record from its file; ValueError that names the file if it is none of this benchmark."""
    try:
        record = json_files.read(path)
        if record.get("bench") != "gpu" or record.get("schema") != 1:
            raise ValueError("it is of another benchmark")
        _check(record)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no record of bench gpu ({error}); give the file that --json wrote") from error
    return record


def _check(record: Record) -> None:
    json_files.check_fields(record, _RECORD, "the record")
    constants = record["constants"]
    devices.device_from(str(constants.get("name")), constants)
    kinds: dict[str, Kind] = {part.name: _is_text if part.type == "str" else is_positive for part in fields(Ceilings)}
    json_files.check_fields(record["ceilings"], kinds, "ceilings")
    for part, needed, possible in (("workloads", _WORKLOAD, {}), ("cases", _CASE, _OF_A_CASE), ("targets", _TARGET, {})):
        for number, row in enumerate(record[part]):
            json_files.check_fields(row, needed, f"{part}[{number}]")
            json_files.check_fields(row, _there(possible, row), f"{part}[{number}]")
    for number, case in enumerate(record["cases"]):
        needed = _MEASURED if case["status"] == "measured" else {"reason": _is_text}
        json_files.check_fields(case, needed, f"cases[{number}]")


def _there(kinds: Mapping[str, Kind], row: Mapping[str, Any]) -> dict[str, Kind]:
    return {name: fits for name, fits in kinds.items() if name in row}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e308


def _is_anything(value: Any) -> bool:
    return True


_RECORD: dict[str, Kind] = {
    **dict.fromkeys(("constants", "ceilings"), _is_object),
    **dict.fromkeys(("workloads", "cases", "runs", "targets"), _is_list),
    **dict.fromkeys(("device", "torch", "triton", "cuda", "commit", "dirty", "sources", "date", "driver"), _is_anything),
    **dict.fromkeys(("quick", "measurement"), _is_flag),
    "waiting": _is_number,
}
_WORKLOAD: dict[str, Kind] = {
    **dict.fromkeys(("workload", "title", "dtype"), _is_text),
    **dict.fromkeys(("tokens", "edges", "batch", "heads", "dim"), _is_number),
}
_CASE: dict[str, Kind] = dict.fromkeys(("workload", "method", "pass", "status"), _is_text)
_MEASURED: dict[str, Kind] = dict.fromkeys(("seconds", "p10", "p90"), is_positive)
_OF_A_CASE: dict[str, Kind] = {
    **dict.fromkeys(("bytes", "share", "first_s"), lambda value: value is None or _is_number(value)),
    "predicted_s": _is_number,
    **dict.fromkeys(("takes", "reason"), _is_text),
}
_TARGET: dict[str, Kind] = {
    **dict.fromkeys(("workload", "pass", "method", "sense", "words"), _is_text),
    "bound": _is_number,
    "value": lambda value: value is None or _is_number(value),
    "met": lambda value: value is None or _is_flag(value),
}
