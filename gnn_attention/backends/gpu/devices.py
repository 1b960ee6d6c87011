"""What a GPU can do, as a few constants: presets by name, or measured by ``benchmarks.gpu --calibrate``.

The presets are not measurements of this library: rates of an H200 as published or measured elsewhere, those
of other devices by their data sheets, and shares of them that kernels of each kind are known to reach.
``Device.measured`` says when and at which commit constants were measured, and is empty until then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gnn_attention._support import json_files
from gnn_attention.backends.cost_model import is_positive, path_of_costs

# classes of devices, by the words of PRESETS, and the record that stands for each
VERIFIED: dict[str, str] = {}
UNVERIFIED, UNMEASURED = 3.0, 1.25  # times as long as predicted


@dataclass(frozen=True)
class Device:
    """Rates in bytes and floating point operations a second, and the shares of them that kernels reach.

    ``copy``: memory, read and written. ``cache``, ``cache_bytes``: of the second level. ``half``, ``single``,
    ``double``: matrix products. ``launch``: seconds of a call, whatever its size. Shares: ``gather`` of
    ``copy`` or ``cache`` by rows, ``windows`` by row windows; of the products ``products`` by our tiles and
    windows, ``sdpa``, ``masked`` (SDPA with a mask), ``varlen`` and ``flex``; ``backward`` is what remains of
    such a share in a backward pass.
    """

    name: str
    copy: float
    cache: float
    cache_bytes: float
    half: float
    single: float
    double: float
    launch: float = 1e-5
    gather: float = 0.84
    windows: float = 0.63
    products: float = 0.5
    sdpa: float = 0.82
    masked: float = 0.25
    varlen: float = 0.47
    flex: float = 0.5
    backward: float = 0.8
    measured: str = ""

    def rate(self, dtype: torch.dtype) -> float:
        """Of matrix products in a dtype."""
        if dtype == torch.float64:
            return self.double
        return self.single if dtype == torch.float32 else self.half

    @property
    def verified(self) -> str:
        """The record under ``tests/records`` that verified our kernels on this class of device; "": none."""
        return next((record for name, record in VERIFIED.items() if name in _words(self.name)), "")

    @property
    def doubt(self) -> float:
        """The factor on the predicted time of our kernels up to which those of torch are taken instead."""
        if not self.verified:
            return UNVERIFIED
        return 1.0 if self.measured else UNMEASURED


CONSTANTS = [part.name for part in fields(Device) if part.type == "float"]
PRESETS = {
    "H200": Device("H200", 4.3e12, 5.5e12, 50e6, 780e12, 55e12, 55e12),
    "H100": Device("H100", 3.0e12, 5.5e12, 50e6, 780e12, 55e12, 55e12),
    "A100": Device("A100", 1.8e12, 4.0e12, 40e6, 265e12, 17e12, 17e12, sdpa=0.75, varlen=0.75, flex=0.6),
}
GENERIC = replace(PRESETS["A100"], name="a GPU")


def named(name: str) -> Device:
    """The constants of a device of this name: measured ones, else a preset's, else those of an A100.

    ValueError if the file of measured constants is damaged.
    """
    for known, constants in _measured().items():
        if name.upper() in (known.upper(), *_words(known)):
            return constants
    preset = next((PRESETS[key] for key in PRESETS if key in _words(name)), GENERIC)
    return replace(preset, name=name) if preset is GENERIC and name else preset


def _words(name: str) -> list[str]:
    return re.split(r"\W+", name.upper())


def device_of(device: torch.device) -> Device:
    """The constants of the GPU that a tensor is on; where there is none, those of an A100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return GENERIC
    return _device_number(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _device_number(index: int) -> Device:
    return named(torch.cuda.get_device_name(index))


def path_of_devices() -> Path:
    """The file of measured constants: ``gpu-costs.json``, in the folder of the constants of the CPU."""
    return path_of_costs().with_name("gpu-costs.json")


@cache
def _measured() -> dict[str, Device]:
    try:
        return read(path_of_devices())
    except (OSError, RuntimeError):  # no such file or no home
        return {}


def read(path: Path) -> dict[str, Device]:
    """The devices in a file, by name. ValueError if it is damaged, OSError where it cannot be read."""
    try:
        found = json_files.read(path).get("devices")
        if not isinstance(found, dict):
            raise ValueError("there are no devices in it")
        return {name: _device(name, constants) for name, constants in found.items()}
    except ValueError as error:
        raise ValueError(
            f"{path} does not hold the constants of gnn_attention.backends.gpu.devices ({error}); "
            "measure them again with `python -m benchmarks.gpu --calibrate`, or remove the file"
        ) from error


def _device(name: str, found: Any) -> Device:
    """The constants of a device as JSON holds them. ValueError for one that is no positive number."""
    kinds = {**dict.fromkeys(CONSTANTS, is_positive), "measured": lambda value: isinstance(value, str)}
    json_files.check_fields(found, kinds, f"the device {name[:60]!r}")
    rates = {constant: float(found[constant]) for constant in CONSTANTS}
    return Device(name=name, measured=found["measured"], **rates)
