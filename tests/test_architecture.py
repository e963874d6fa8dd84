"""The rules of the house that no other tool checks. Who may import whom is in pyproject.toml, for `lint-imports`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.source import PACKAGES, ROOT, Module, imported_names, modules

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 7
KERNEL_IMPORTS = {"torch", "triton", "numpy", "sapwood_kernels"} | set(sys.stdlib_module_names)
OURS = tuple(PACKAGES)
TENSOR_LIBRARIES = ("torch", "triton", "transformers")

# The modules of the process that answers HTTP, and of the command line. Their rooms are held torch-free by
# `lint-imports`; here they are really imported, with everything that their libraries import in turn.
API_PROCESS = ("sapwood_server.__main__", "sapwood_server.api.app", "sapwood_server.chat", "sapwood_bench.commands")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Module) -> Iterator[Function]:
    """Those held to a size. Not Triton's kernels: they take pointers and strides one by one, and are one body."""
    return (node for node in ast.walk(module.tree) if isinstance(node, Function) and not is_triton_kernel(node))


def is_triton_kernel(function: Function) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(ast.unparse(decorator) == "triton.jit" for decorator in decorators)


def test_no_init_that_would_shadow_another_package() -> None:
    """With `kernels/__init__.py`, transformers would import our folder in place of the package of that name."""
    roots = [folder.parent / "__init__.py" for folder in PACKAGES.values()]
    found = [*filter(Path.exists, roots), *(ROOT / "tests").rglob("__init__.py")]
    assert [str(path.relative_to(ROOT)) for path in found] == []


def test_every_package_is_marked_as_typed() -> None:
    assert [name for name, folder in PACKAGES.items() if not (folder / "py.typed").exists()] == []


def test_files_are_about_one_noun() -> None:
    lengths = {module.where: len(module.text.splitlines()) for module in modules()}
    long = {where: length for where, length in lengths.items() if length > MAX_FILE_LINES}
    assert long == {}, f"over {MAX_FILE_LINES} lines"


def test_functions_fit_a_screen() -> None:
    long = [
        f"{module.where}:{function.lineno} {function.name}"
        for module in modules()
        for function in functions(module)
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == [], f"over {MAX_FUNCTION_LINES} lines"


def test_functions_take_few_parameters() -> None:
    def count(function: Function) -> int:
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return len([name for name in names if name not in ("self", "cls")])

    wide = [
        f"{module.where}:{function.lineno} {function.name}"
        for module in modules()
        for function in functions(module)
        if count(function) > MAX_PARAMETERS
    ]
    assert wide == [], f"over {MAX_PARAMETERS} parameters"


def test_the_environment_is_read_in_config_modules_only() -> None:
    readers = [
        f"{module.where}:{node.lineno}"
        for module in modules()
        if module.path.name != "config.py"
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
    ]
    assert readers == []


def test_messages_that_outsiders_read_quote_values_short() -> None:
    """Those come from clients, files and command lines: `sapwood_server.quoting` bounds what is shown of them."""
    errors = next(module for module in modules() if module.name == "sapwood_server.errors")
    public = {node.name for node in errors.tree.body if isinstance(node, ast.ClassDef)}
    unbounded = [
        f"{module.where}:{node.lineno}"
        for module in modules()
        for call in ast.walk(module.tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in public
        for node in ast.walk(call)
        if (isinstance(node, ast.FormattedValue) and node.conversion == ord("r"))
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "repr")
    ]
    assert unbounded == []


def test_our_own_modules_are_imported_at_the_top() -> None:
    """An import inside a function, or for type checking only, hides an edge from the import rules."""
    hidden = [
        f"{module.where}:{line} {name}"
        for module in modules()
        for scope in ast.walk(module.tree)
        if isinstance(scope, Function | ast.If | ast.Try)
        for line, name in imported_names(scope)
        if name.split(".")[0] in OURS
    ]
    assert hidden == []


def test_kernels_import_torch_triton_and_numpy_only() -> None:
    strangers = [
        f"{module.where}:{line} {name}"
        for module in modules()
        if module.name.split(".")[0] == "sapwood_kernels"
        for line, name in imported_names(module.tree)
        if name.split(".")[0] not in KERNEL_IMPORTS
    ]
    assert strangers == []


def test_a_room_imports_only_public_names() -> None:
    """A name with a leading underscore belongs to its module."""
    private = [
        f"{module.where}:{node.lineno} {alias.name}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert private == []


_IMPORT_ALL = """
import contextlib, importlib, io, json, os, sys, threading
names = json.loads(sys.argv[1])
before = dict(os.environ)
output = io.StringIO()
with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
    for name in names:
        importlib.import_module(name)
print(json.dumps({
    "printed": output.getvalue(),
    "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    "environment": sorted(k for k in os.environ.keys() | before.keys() if os.environ.get(k) != before.get(k)),
    "files": sorted(os.listdir(".")),
    "loaded": sorted(sys.modules),
}))
"""


def import_in_a_new_process(names: list[str], folder: Path) -> dict[str, list[str] | str]:
    """What importing `names` changed, in a process of its own whose working directory is `folder`."""
    command = [sys.executable, "-c", _IMPORT_ALL, json.dumps(names)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    effects: dict[str, list[str] | str] = json.loads(done.stdout)
    return effects


def test_importing_has_no_effect(tmp_path: Path) -> None:
    """`__main__` modules run when imported by name only if they forget their guard, so they are imported as well."""
    importable = [module.name for module in modules() if not module.name.startswith("sapwood_kernels.triton")]
    effects = import_in_a_new_process(importable, tmp_path)
    assert effects["printed"] == ""
    assert effects["threads"] == []
    assert effects["files"] == []
    # torch and its libraries set variables of their own when they are loaded; none of ours may.
    assert [name for name in effects["environment"] if "SAPWOOD" in name] == []


@pytest.mark.parametrize("name", API_PROCESS)
def test_the_api_process_never_loads_a_tensor_library(tmp_path: Path, name: str) -> None:
    loaded = import_in_a_new_process([name], tmp_path)["loaded"]
    assert [library for library in TENSOR_LIBRARIES if library in loaded] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
