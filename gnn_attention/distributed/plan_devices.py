"""How fast a rank computes and how fast ranks are linked: rates by name, or given as numbers.

Those of GPUs are the constants of ``_gpu_devices`` (measured where somebody measured them), that of a CPU is the cost model's.
Those of links are what the standards carry in one direction, with latencies that are assumed, not measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gnn_attention._support.checks import quoted
from gnn_attention.backends.cost_model import costs
from gnn_attention.backends.gpu import devices

__all__ = ["DEVICES", "LINKS", "Link", "Rates", "link_of", "rates_of"]


class Rates(NamedTuple):
    """Of a rank: floating point operations and bytes of its memory a second, seconds for a call; ``said`` tells them in words."""

    said: str
    flops: float
    copy: float
    launch: float


class Link(NamedTuple):
    """Bytes a second that a rank sends, and receives at the same time; seconds that a message takes, whatever its size."""

    name: str
    bandwidth: float
    latency: float


LINKS = {
    link.name: link
    for link in (
        Link("nvlink5", 900e9, 5e-6),  # 18 links of 50 GB/s
        Link("nvlink4", 450e9, 5e-6),  # 18 links of 25 GB/s
        Link("nvlink3", 300e9, 5e-6),  # 12 links of 25 GB/s
        Link("pcie5", 63e9, 1e-5),  # 16 lanes
        Link("pcie4", 31.5e9, 1e-5),
        Link("infiniband-xdr", 100e9, 1e-5),  # 800 Gb/s
        Link("infiniband-ndr", 50e9, 1e-5),  # 400 Gb/s
        Link("infiniband-hdr", 25e9, 1e-5),  # 200 Gb/s
        Link("ethernet-400g", 50e9, 3e-5),
        Link("ethernet-100g", 12.5e9, 3e-5),
        Link("ethernet-10g", 1.25e9, 5e-5),
        Link("loopback", 1e9, 2e-4),  # gloo between processes of one machine
    )
}
DEVICES = (*devices.PRESETS, "cpu")
UNNAMED_LATENCY = 1e-5


def link_of(link: str | float) -> Link:
    """The link of a name, or one of so many bytes a second; ValueError lists the names.

    >>> link_of("nvlink4").bandwidth, link_of(2e9)
    (450000000000.0, Link(name='a link', bandwidth=2000000000.0, latency=1e-05))
    """
    if isinstance(link, str):
        if link.lower() not in LINKS:
            raise ValueError(f"link_bandwidth must be bytes a second or one of {', '.join(LINKS)}, got {quoted(link)}")
        return LINKS[link.lower()]
    return Link("a link", _positive("link_bandwidth", link), UNNAMED_LATENCY)


def rates_of(device: str | float, dtype: torch.dtype) -> Rates:
    """The rates of a device of this name, or of one that reaches so many operations a second; ValueError lists the names.

    >>> rates_of("H200", torch.bfloat16).said, rates_of(1e12, torch.float32).flops
    ('H200, 50 % of 780 TFLOP/s', 1000000000000.0)
    """
    if not isinstance(device, str):
        reached = _positive("device", device)
        like = devices.PRESETS["H200"]
        return Rates(f"{reached / 1e12:.3g} TFLOP/s", reached, like.copy, like.launch)
    if device.lower() == "cpu":
        pairs = 1e9 / costs().cell  # a second, of a head of 64 channels
        return Rates(f"cpu, {4 * 64 * pairs / 1e9:.3g} GFLOP/s", 4 * 64 * pairs, 1e10, costs().call * 1e-9)
    known = next((name for name in devices.PRESETS if name.lower() == device.lower()), None)
    if known is None:
        raise ValueError(f"device must be operations a second or one of {', '.join(DEVICES)}, got {quoted(device)}")
    found = devices.named(known)
    said = f"{known}, {found.products:.0%} of {found.rate(dtype) / 1e12:.3g} TFLOP/s".replace("%", " %")
    return Rates(said, found.rate(dtype) * found.products, found.copy, found.launch)


def _positive(name: str, number: float) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise ValueError(f"{name} must be a positive number or a name, got {quoted(number)}")
    return float(number)
