"""From a record to the constants that ``auto`` chooses by: measured ceilings, and the shares that kernels reached.

A share is what a kernel reached of the measured ceiling that limits it, the median over its cases. A constant
without a case stays as it was.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gnn_attention._support import atomic_files
from gnn_attention.backends.gpu import devices
from gnn_attention.backends.gpu.devices import Device

# rates of a device, by the ceiling that measures them
RATES = {"copy": "copy", "half": "products", "cache": "cache_rows"}
GATHERS, PRODUCTS = ("gather", "windows"), ("products", "sdpa", "masked", "varlen", "flex")


def calibrated(record: dict[str, Any]) -> Device:
    """The constants of the record's device. ValueError for a trial, which measured nothing.

    >>> calibrated({"measurement": False})
    Traceback (most recent call last):
    ValueError: this record is a trial on a CPU: constants of a GPU are measured on a GPU
    """
    if not record["measurement"]:
        raise ValueError("this record is a trial on a CPU: constants of a GPU are measured on a GPU")
    before, ceilings = Device(**record["constants"]), record["ceilings"]
    rates = {constant: float(ceilings[name]) for constant, name in RATES.items()}
    commit = f", commit {record['commit'][:10]}" if record["commit"] else ""
    fresh = replace(
        before,
        name=record["device"],
        measured=f"{record['date'][:10]}{commit}",
        cache_bytes=float(record["cache"] or before.cache_bytes),
        copy=rates["copy"],
        half=rates["half"],
        cache=rates["cache"],
    )
    for name, shares in _reached(record, fresh).items():
        fresh = replace(fresh, **{name: min(1.0, statistics.median(shares))})  # type: ignore[arg-type]
    return fresh


def save_device(device: Device) -> Path:
    """Write measured constants for the next processes into the file, whole or not at all."""
    path, known = devices.path_of_devices(), devices._measured() | {device.name: device}
    path.parent.mkdir(parents=True, exist_ok=True)
    every = {name: asdict(constants) for name, constants in known.items()}
    atomic_files.write(path, json.dumps({"devices": every}, indent=1) + "\n")
    devices._measured.cache_clear()
    devices._device_number.cache_clear()
    return path


def _reached(record: dict[str, Any], device: Device) -> dict[str, list[float]]:
    """For each share what every forward pass that it limits reached of the device's rates."""
    found = defaultdict(list)
    for case in record["cases"]:
        if (
            case["status"] == "measured"
            and case["pass"] == "forward"
            and case.get("limit") in (*GATHERS, *PRODUCTS)
        ):
            work, seconds = case["visited"], case["seconds"] - device.launch
            gathered = max(work["misses"] / device.copy, work["passed"] / device.cache)
            bound = gathered if case["limit"] in GATHERS else work["flops"] / device.half
            if seconds > 0:
                found[case["limit"]].append(bound / seconds)
    return found
