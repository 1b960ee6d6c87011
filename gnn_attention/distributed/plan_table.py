"""A plan for ranks as text, of at most 100 columns."""

from __future__ import annotations

import textwrap
from typing import Any

__all__ = ["text"]

WIDTH = 100
MOST_RANKS = 16  # of which all are printed; of more the first and the last eight


def text(plan: Any) -> str:
    """The tables of a plan (``_rank_plan.Plan``): what was assumed, the ways of exchanging, the ranks, the balance."""
    return "\n".join([*_head(plan), "", *_exchanges(plan), "", *_ranks(plan), "", *_foot(plan)])


def _head(plan: Any) -> list[str]:
    setting, partition = plan.setting, plan.partition
    values = "" if setting.value_dim == setting.dim else f" (values of {setting.value_dim})"
    dtype = str(setting.dtype).removeprefix("torch.")
    lines = [
        f"{plan.graph} on {partition.world_size} {'rank' if partition.world_size == 1 else 'ranks'}, {partition.name}",
        f"{setting.heads} heads of {setting.dim}{values}, {setting.kv_heads} for keys and values, batch {setting.batch}, "
        f"{dtype}, {setting.row_bytes:,} bytes a sender; {setting.rates.said}; {setting.link.name} of "
        f"{setting.link.bandwidth / 1e9:.3g} GB/s and {setting.link.latency * 1e6:.3g} us",
        f"exchange: {plan.exchange}, {plan.reason}",
    ]
    return [line for each in lines for line in textwrap.wrap(each, WIDTH)]


def _exchanges(plan: Any) -> list[str]:
    lines = [f"{'exchange':<12}{'bytes received':>24}{'most by one rank':>22}{'most held':>22}{'ms':>18}"]
    for each in plan.exchanges:
        name = f"{each.name} <-" if each.name == plan.exchange else each.name
        lines.append(f"{name:<12}{each.received:>24,}{each.most_received:>22,}{each.most_held:>22,}{each.seconds * 1e3:>18.3f}")
    return lines


def _ranks(plan: Any) -> list[str]:
    head = f"{'rank':>5}{'receivers':>11}{'edges':>18}{'halo':>10}{'MB in':>10}{'MB out':>10}"
    lines = [f"{head}{'compute ms':>12}{'exchange ms':>12}{'ms':>12}"]
    loads = list(plan.ranks)
    hidden = len(loads) - MOST_RANKS
    shown = loads if hidden <= 0 else loads[: MOST_RANKS // 2] + loads[-MOST_RANKS // 2 :]
    lines += [_load(load) for load in shown]
    if hidden > 0:
        lines.insert(1 + MOST_RANKS // 2, f"{'...':>5}  {hidden} more")
    return lines


def _load(load: Any) -> str:
    counts = f"{load.rank:>5}{load.receivers:>11,}{load.edges:>18,}{load.halo:>10,}"
    traffic = f"{load.received / 1e6:>10.2f}{load.sent / 1e6:>10.2f}"
    return f"{counts}{traffic}{load.compute * 1e3:>12.3f}{load.communication * 1e3:>12.3f}{load.seconds * 1e3:>12.3f}"


def _foot(plan: Any) -> list[str]:
    faster = plan.alone / plan.seconds if plan.seconds else 1.0
    lines = [
        f"balance (most / mean): edges {plan.balance:.3f}, receivers {plan.token_balance:.3f}",
        f"forward {plan.seconds * 1e3:.3f} ms, {faster:.1f} times faster than one rank ({plan.alone * 1e3:.3f} ms)",
        "exact: receivers, edges, halo, bytes (of the forward pass); estimated: all times, from the rates above",
    ]
    return [line for each in lines for line in textwrap.wrap(each, WIDTH)]
