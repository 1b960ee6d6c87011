"""One part of a model, audited in its place: a layer against its own graph, with the mask that the model gives it."""

from __future__ import annotations

from typing import Any

from torch import nn

from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Tensor

__all__ = ["PartOf"]


class PartOf(nn.Module):
    """A part of a model as a module of its own, from states to states ``[B, T, width]``, with all else as the model has it.

    The model is run on ``inputs``. When it calls the part for the first time, the states that it gives it are replaced by the
    caller's; masks, positions and what an encoder said are the model's. Of a whole model an audit sees the paths through all
    layers: where one layer hears everything, a leak in another stays in its shadow.

    Args:
        model: the whole model.
        part: the name of the part in ``model.named_modules()``, such as ``"model.layers.0"``.
        inputs: what the model is called with, of one sample: tensors ``[1, ...]`` are repeated for as many samples as there
            are states, floating ones in their dtype.

    Raises ValueError if the model has no such part, and when run, if the part is not called or is given other states.

    >>> import torch
    >>> from gnn_attention import audit, patterns
    >>> model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm([5, 6]), nn.Linear(6, 2))  # a norm over all tokens at once
    >>> x = torch.zeros(1, 5, 4)
    >>> [audit(PartOf(model, name, input=x), patterns.self_loops(5), (5, width)).ok for name, width in [("0", 4), ("2", 6)]]
    [True, True]
    >>> len(audit(PartOf(model, "1", input=x), patterns.self_loops(5), (5, 6)).leaks)
    20
    """

    def __init__(self, model: nn.Module, part: str, **inputs: Any) -> None:
        super().__init__()
        names = [name for name, _ in model.named_modules() if name]
        if part not in names:
            raise ValueError(
                f"part must be the name of a part of {type(model).__name__}, such as {names[:3]}, got {quoted(part)}"
            )
        self.model, self.part, self.inputs = model, part, inputs

    @property
    def inside(self) -> nn.Module:
        """The part itself."""
        return self.model.get_submodule(self.part)

    def forward(self, states: Float[Tensor, "batch tokens width"]) -> Any:
        """What the part makes of the states, as it returns it."""
        met, said = list[bool](), list[Any]()

        def swapped(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            met.append(True)
            return self._with(states, given, named) if len(met) == 1 else (given, named)

        handles = [  # before all other hooks, so that those see the states that the part gets
            self.inside.register_forward_pre_hook(swapped, prepend=True, with_kwargs=True),
            self.inside.register_forward_hook(lambda _, given, output: said.append(output)),
        ]
        try:
            self.model(**{name: _repeated(value, states) for name, value in self.inputs.items()})
        finally:
            for handle in handles:
                handle.remove()
        if not said:
            raise ValueError(f"part: {type(self.model).__name__} does not call {self.part!r} on these inputs")
        return said[0]

    def _with(self, states: Tensor, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, where the first states among them are the caller's."""
        values: dict[Any, Any] = {**dict(enumerate(given)), **named}
        place = next((place for place, value in values.items() if _are_states(value)), None)
        found = None if place is None else list(values[place].shape)
        if place is None or found != list(states.shape):
            raise ValueError(f"states must be as {self.part!r} is given them, {found}, got {list(states.shape)}")
        values[place] = states
        return tuple(values[number] for number in range(len(given))), {name: values[name] for name in named}


def _are_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 2 and value.is_floating_point()


def _repeated(value: Any, states: Tensor) -> Any:
    """An input of one sample, for as many samples as there are states."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(states.device, states.dtype if value.is_floating_point() else value.dtype)
    return value.expand(len(states), *value.shape[1:]).clone() if value.dim() and len(value) == 1 else value
