"""Pages of the API: one for each module that says in ``__all__`` what it gives, filled from docstrings by Sphinx."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import gnn_attention

# commands have pages of their own; kernels are no Python
LEFT_OUT = ("cli", "gpu")


def modules() -> Iterator[ModuleType]:
    """The package and its public modules that have ``__all__``, but those whose package has all of it."""
    yield gnn_attention
    for found in pkgutil.walk_packages(gnn_attention.__path__, "gnn_attention."):
        parts = found.name.split(".")
        if any(part.startswith("_") or part in LEFT_OUT for part in parts):
            continue
        module = importlib.import_module(found.name)
        if hasattr(module, "__all__") and not _given_by_its_package(module):
            yield module


def _given_by_its_package(module: ModuleType) -> bool:
    package = importlib.import_module(module.__name__.rpartition(".")[0])
    return set(module.__all__) <= set(getattr(package, "__all__", ())) and package is not gnn_attention


def own_names(module: ModuleType) -> list[str]:
    """Names of ``__all__`` that no module of an earlier page shows: classes and functions, not modules."""
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    if module is gnn_attention:
        return names
    return [name for name in names if getattr(gnn_attention, name, None) is not getattr(module, name)]


def page(module: ModuleType) -> str:
    """The page of a module."""
    name = module.__name__
    # a function of that name is the one that is looked up
    index = "   :no-index:\n" if name == "gnn_attention.attend" else ""
    parts = [f"# {name}", f"```{{eval-rst}}\n.. automodule:: {name}\n   :no-members:\n{index}```"]
    names = own_names(module)
    if name == "gnn_attention.patterns":
        parts += ["Every builder has a page in the [zoo](../zoo/index.md)."]
    elif names:
        parts += ["```{eval-rst}\n" + "\n".join(directive(module, one) for one in names) + "\n```"]
    return "\n\n".join(parts) + "\n"


def directive(module: ModuleType, name: str) -> str:
    """What tells Sphinx to write out a name."""
    thing = getattr(module, name)
    if not callable(thing):
        return f".. py:data:: {module.__name__}.{name}\n   :type: {type(thing).__name__}\n"
    kind = "class" if inspect.isclass(thing) else "function"
    kind = "exception" if inspect.isclass(thing) and issubclass(thing, Exception) else kind
    members = "   :members:\n" if kind in ("class", "exception") else ""
    return f".. auto{kind}:: {module.__name__}.{name}\n{members}"


def files() -> Iterator[tuple[str, str]]:
    """(name, text) of every page."""
    found = list(modules())
    names = "\n".join(module.__name__ for module in found)
    lines = "\n".join(f"- [`{one.__name__}`]({one.__name__}.md): {first_line(one)}" for one in found)
    yield "api/index.md", f"# API\n\n{lines}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    for module in found:
        yield f"api/{module.__name__}.md", page(module)


def first_line(module: ModuleType) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((inspect.getdoc(module) or "").split("\n\n")[0].split())
    return text.replace("``", "`")
