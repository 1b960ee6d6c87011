"""Compile real launches for GPUs that are not there, and read what came of them in the machine code.

``with compiled_for("sm_90") as built: launch()`` runs a launcher as it is, on CPU tensors; every kernel that
it launches is compiled for that GPU, with the types, alignments, constants and pinned configuration of that
very launch, and none is started. ``built`` then holds one :class:`Built` for each. Triton's wheel brings the
assembler and the reader (``cuobjdump``).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver

READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
Each = Callable[[Any], None]
SPARE = 16  # bytes of stack that are no spill: some number saved from before a loop until after it
# KiB for a program: CUDA C++ programming guide, technical specifications per compute capability
SHARED_LIMIT = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
INSTRUCTIONS = {
    "wide loads": r"\b(?:LDG|LDGSTS)\.E\.[\w.]*128|\bUTMALDG",
    "HGMMA": r"\bHGMMA",
    "HMMA": r"\bHMMA",
    "tcgen05": r"\bUTC\w*MMA",
    "local loads": r"\bLDL\b",
    "local stores": r"\bSTL\b",
    "words ahead": r"\bLDGSTS\.E\.64",
    "powers of small numbers": r"@!?P\d FMUL R\d+, R\d+, 0\.5\b",
    "atomics": r"\b(?:ATOMG|ATOM|RED)\.",
}


@dataclass(frozen=True)
class Built:
    """One kernel as it was launched, compiled for one GPU."""

    kernel: str
    gpu: str
    warps: int
    registers: int
    stack: int
    shared: int
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def spills(self) -> bool:
        """True if registers are spilled to memory."""
        return self.stack > SPARE or max(self.counts["local loads"], self.counts["local stores"]) > SPARE // 4

    def faults(self) -> list[str]:
        """What no kernel may do: spill, use atomics, or ask for more than there is."""
        found = []
        if self.spills:
            found.append(f"spills: {self.stack} bytes of stack, {self.counts['local loads']} local loads")
        if self.counts["atomics"]:
            found.append(f"{self.counts['atomics']} atomics")
        if self.registers * self.warps * 32 > 65536:
            found.append(f"{self.registers} registers in {self.warps} warps are more than 65536")
        if self.shared > (most := SHARED_LIMIT[self.gpu] * 1024):
            found.append(f"{self.shared} bytes of shared memory, there are {most}")
        return found


class _NoDriver:
    """Stands where the driver of a GPU would: it names the GPU and starts nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"sm_{self._target.arch}"  # the key under which Triton keeps what it compiled

    def get_current_stream(self, device: object) -> int:
        return 0


class _IdleDriver(_NoDriver):
    """Stands where the driver of a GPU would, takes machine code, and tells ``each`` what it is to launch."""

    def __init__(self, capability: int, each: Callable[..., None]) -> None:
        super().__init__(capability)
        self.utils, self._each = self, each

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *given: self._each(*given)

    def get_device_properties(self, device: object) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, code: bytes, *given: object) -> tuple[object, str, int, int, int]:
        return object(), name, 0, 0, 1024  # module, function, registers, spills, most threads


@contextlib.contextmanager
def launched_for(gpu: str, each: Callable[..., None] = lambda *given: None) -> Iterator[None]:
    """Launches go all the way to the driver, which starts none; there ``each`` gets what it would start."""
    from gnn_attention.backends.gpu.kernels import _common

    active, before = driver._active, dict(_common._COMPILED)
    driver.set_active(_IdleDriver(int(gpu.removeprefix("sm_")), each))
    _common._COMPILED.clear()
    try:
        yield
    finally:
        driver._active = active
        _common._COMPILED.clear()
        _common._COMPILED.update(before)


@contextlib.contextmanager
def compiled_for(gpu: str, only: Container[str] | None = None) -> Iterator[list[Built]]:
    """Compile the launches inside for a GPU such as "sm_90", and list what came of each that differs.

    ``only``: the names of the kernels that are compiled.
    """
    built: dict[str, Built] = {}
    found: list[Built] = []

    def add(kernel: Any) -> None:
        if kernel.hash not in built:
            built[kernel.hash] = _read(kernel, gpu)

    try:
        with without_gpu(gpu, add, only):
            yield found
    finally:
        found.extend(built.values())


@contextlib.contextmanager
def without_gpu(
    gpu: str, each: Each = lambda kernel: None, only: Container[str] | None = None
) -> Iterator[None]:
    """Launches compile their kernels, or ``only`` some, for that GPU; none starts. Then ``each(kernel)``."""
    launch, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if only is not None and self.__name__ not in only:
            return None
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        each(kernel)
        return kernel

    driver.set_active(_NoDriver(int(gpu.removeprefix("sm_"))))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run, driver._active = launch, active


def _read(kernel: Any, gpu: str) -> Built:
    said = _disassembled(kernel.asm["cubin"])
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert usage is not None, f"cuobjdump says nothing about {kernel.metadata.name}: {said[:400]}"
    counts = {name: len(re.findall(pattern, said)) for name, pattern in INSTRUCTIONS.items()}
    about, (registers, stack) = kernel.metadata, map(int, usage.groups())
    return Built(about.name, gpu, about.num_warps, registers, stack, about.shared, counts)


def _disassembled(machine_code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [str(READER), "-res-usage", "-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
