"""Finds a function of a test file again in another process, where pytest's names for test modules mean nothing."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

Place = tuple[str, str]


def place_of(function: Callable[..., Any]) -> Place:
    """The file and the name of a function. Raises ValueError unless it stands at the top of a file."""
    file = inspect.getsourcefile(function)
    if file is None or "." in function.__qualname__ or "<" in function.__qualname__:
        raise ValueError(f"the function is {function.__qualname__}; accepted: one at the top of a file")
    return file, function.__name__


def function_at(place: Place) -> Callable[..., Any]:
    """The function at a place, its file imported as a module of its own."""
    file, name = place
    spec = importlib.util.spec_from_file_location("imported_by_path", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function
