"""How tests are spread over processes."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling


class ByFile(LoadFileScheduling):
    """A file's tests go to one process: they share what is expensive."""

    def remove_node(self, node: Any) -> str | None:
        """A test that ended its process has failed and is not tried again; the others of its file are."""
        units = self.assigned_work[node].values()
        left = [(unit, test) for unit in units for test, done in unit.items() if not done]
        if not left:
            return super().remove_node(node)
        unit, ended = left[0]
        unit[ended] = True
        super().remove_node(node)
        return ended
