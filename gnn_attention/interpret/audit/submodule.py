"""One part of a model, audited in its place: a layer against its own graph."""

from typing import Any

from torch import nn

from gnn_attention._support.checks import quoted
from gnn_attention._support.shapes import Float, Tensor


class PartOf(nn.Module):
    """A part of a model as a module of its own, from states to states ``[B, T, width]``.

    The model is run on ``inputs``. In the first call of the part, its states are replaced by the caller's;
    masks, positions and encoder outputs are the model's. So a leak is found that another, dense layer hides
    from an audit of the whole model.

    Args:
        model: the whole model.
        part: the name of the part in ``model.named_modules()``, such as ``"model.layers.0"``.
        inputs: of the model, one sample: tensors ``[1, ...]`` are repeated for as many samples as there are
            states, floating ones in their dtype.

    Raises ValueError for another part, and when run, if the part is not called or takes other states.

    >>> import torch
    >>> from gnn_attention import audit, patterns
    >>> model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm([5, 6]), nn.Linear(6, 2))
    >>> x, loops = torch.zeros(1, 5, 4), patterns.self_loops(5)
    >>> audit(PartOf(model, "0", input=x), loops, (5, 4)).ok
    True
    >>> len(audit(PartOf(model, "1", input=x), loops, (5, 6)).leaks)
    20
    """

    def __init__(self, model: nn.Module, part: str, **inputs: Any) -> None:
        super().__init__()
        names = [name for name, _ in model.named_modules() if name]
        if part not in names:
            expected = f"a part of {type(model).__name__}, such as {names[:3]}"
            raise ValueError(f"part must be the name of {expected}, got {quoted(part)}")
        self.model, self.part, self.inputs = model, part, inputs

    @property
    def inside(self) -> nn.Module:
        return self.model.get_submodule(self.part)

    def forward(self, states: Float[Tensor, "batch tokens width"]) -> Any:
        """The output of the part for these states."""
        calls, outputs = list[bool](), list[Any]()

        def replace_states(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls.append(True)
            return self._with(states, args, kwargs) if len(calls) == 1 else (args, kwargs)

        # before all other hooks, so that those see the replaced states
        before = self.inside.register_forward_pre_hook(replace_states, prepend=True, with_kwargs=True)
        with before, self.inside.register_forward_hook(lambda _, x, output: outputs.append(output)):
            self.model(**{name: _repeated(value, states) for name, value in self.inputs.items()})
        if not outputs:
            raise ValueError(f"part: {type(self.model).__name__} does not call {self.part!r} on these inputs")
        return outputs[0]

    def _with(self, states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = ((place, x) for place, x in values.items() if isinstance(x, Tensor))
        place = next((place for place, x in tensors if x.dim() > 2 and x.is_floating_point()), None)
        shape = None if place is None else list(values[place].shape)
        if place is None or shape != list(states.shape):
            raise ValueError(f"states must be {shape}, as {self.part!r} is given, got {list(states.shape)}")
        values[place] = states
        return tuple(values[number] for number in range(len(args))), {name: values[name] for name in kwargs}


def _repeated(value: Any, states: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.to(states.device, states.dtype if value.is_floating_point() else value.dtype)
    one_sample = value.dim() and len(value) == 1
    return value.expand(len(states), *value.shape[1:]).clone() if one_sample else value
