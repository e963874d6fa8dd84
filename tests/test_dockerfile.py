"""The image for NVIDIA GPUs, without Docker: its steps are read, and those that can run here do."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from sapwood_bench.server_process import SERVE_COMMAND, server_process
from sapwood_server.config import ServerConfig
from sapwood_server.flags import config_command
from sapwood_server.formats.model_files import DEMO_REQUIREMENT
from sapwood_server.values.demo import DEMO_MODEL
from support.dockerfile import Instruction, build_context, read_dockerfile
from support.source import PACKAGES, ROOT
from support.tiny_models import make_tiny_model

STEPS = read_dockerfile(ROOT / "Dockerfile.cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = "constraints/cuda.txt"
START_SECONDS = 120.0


def steps(keyword: str) -> list[Instruction]:
    return [step for step in STEPS if step.keyword == keyword]


def last(keyword: str) -> Instruction:
    return steps(keyword)[-1]


def locked() -> dict[str, str]:
    lines = (ROOT / CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert len({name for name, _ in pins}) == len(pins), "a distribution is locked twice"
    return {str(canonicalize_name(name)): version for name, version in pins}


def copied() -> list[Path]:
    """What the COPY steps take from the build's context, as files; fails for a source that is not in it."""
    context = build_context(ROOT, ROOT / ".dockerignore")
    found: set[Path] = set()
    for step in steps("COPY"):
        if step.words[0].startswith("--from="):
            continue
        for source in step.words[:-1]:
            files = {path for path in context if path == Path(source) or path.is_relative_to(source)}
            assert files, f"COPY {source}: no such file in the build's context"
            found |= files
    return sorted(found)


def commands(program: str) -> list[list[str]]:
    """The commands in RUN steps that run this program."""
    return [command for step in steps("RUN") for command in step.commands if Path(command[0]).name == program]


def environment() -> dict[str, str]:
    """What the image sets."""
    return dict(word.split("=", 1) for word in last("ENV").words)


# Base and stages


def test_the_base_is_one_exact_cuda_image_of_torchs_own_version() -> None:
    froms = [step.words for step in steps("FROM")]
    names = [words[2] for words in froms if len(words) == 3]
    images = [words[0] for words in froms if words[0] not in names]
    assert len(froms) == 3, "multi-stage: what both need, the build, and what is shipped"
    (image,) = images
    version = re.fullmatch(r"nvidia/cuda:(\d+\.\d+\.\d+)-base-ubuntu24\.04", image)
    assert version, image
    assert version[1] == locked()["cuda-toolkit"]


def test_what_is_shipped_holds_no_more_of_the_build_than_the_environment() -> None:
    final = STEPS[max(index for index, step in enumerate(STEPS) if step.keyword == "FROM") :]
    copies = [step.words for step in final if step.keyword == "COPY"]
    assert copies == [["--from=build", "/opt/sapwood", "/opt/sapwood"]]
    programs = {Path(command[0]).name for step in final if step.keyword == "RUN" for command in step.commands}
    assert programs == {"useradd", "install"}


# The steps of the build


def test_the_context_is_what_the_steps_copy_and_no_more() -> None:
    assert copied() == build_context(ROOT, ROOT / ".dockerignore")
    assert not any("__pycache__" in path.parts for path in copied())


def test_the_wheel_can_be_built_from_what_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in copied():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheels")]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "sapwood = sapwood_server.__main__:main" in archive.read(scripts).decode()
    files = [(name, path.relative_to(folder)) for name, folder in PACKAGES.items() for path in folder.rglob("*.py")]
    sources = {f"{name}/{path}" for name, path in files}
    assert sources <= set(names)


def test_pip_installs_nothing_that_is_not_locked() -> None:
    installs = commands("pip")
    assert len(installs) == 3
    for command in installs:
        assert command[1:3] == ["install", "--no-cache-dir"]
        if command[3] == "--no-deps":
            assert command[4:] == [DEMO_REQUIREMENT]
            continue
        assert command[3:5] == ["-c", CONSTRAINTS]
        for wanted in command[5:]:
            extra = re.fullmatch(r"'\.\[(\w+)\]'", wanted)
            assert extra[1] in PROJECT["optional-dependencies"] if extra else canonicalize_name(wanted) in locked()


def test_every_distribution_that_the_project_pulls_in_is_locked() -> None:
    """Those of the runtime and of `cuda`, and what they require in turn as far as this environment knows them."""
    missing, seen = set(), set()
    waiting = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cuda"])]
    while waiting:
        requirement = waiting.pop()
        name = str(canonicalize_name(requirement.name))
        if name in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        version = locked().get(name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.add(f"{requirement}: {version}")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            waiting += [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    assert {"torch", "triton", "uvicorn", "h11"} <= seen
    assert missing == set()


def test_the_locked_set_is_that_of_the_gpu_image() -> None:
    pins = locked()
    assert pins["torch"].startswith("2.11.")
    assert pins["triton"].startswith("3.6.")
    assert tuple(map(int, pins["numpy"].split(".")[:2])) < (2, 4), "Triton 3.6's interpreter"


def test_triton_finds_a_compiler() -> None:
    """It compiles the launcher of each kernel when that first runs."""
    first = STEPS[: next(index for index, step in enumerate(STEPS) if step.keyword == "FROM" and index)]
    words = " ".join(step.argument for step in first if step.keyword == "RUN").split()
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(words)


# What runs


def test_the_server_runs_as_a_user_that_owns_its_volumes() -> None:
    (useradd,) = commands("useradd")
    user = useradd[-1]
    assert last("USER").words == [user] != ["root"]
    assert STEPS.index(last("USER")) > max(STEPS.index(step) for step in (*steps("RUN"), *steps("COPY")))
    (install,) = commands("install")
    assert install[1:-2] == ["--directory", "--owner", user, "--group", user]
    assert last("VOLUME").words == install[-2:] == ["/models", "/cache"]
    paths = environment()
    assert paths["HF_HOME"].startswith("/models/")
    assert paths["TRITON_CACHE_DIR"].startswith("/cache/")
    assert paths["PATH"] == f"{last('COPY').words[-1]}/bin:$PATH"


def test_the_labels_say_what_the_project_says() -> None:
    label = last("LABEL").argument
    assert f'org.opencontainers.image.version="{PROJECT["version"]}"' in label
    assert f'org.opencontainers.image.description="{PROJECT["description"]}"' in label
    assert f'org.opencontainers.image.licenses="{PROJECT["license"]}"' in label


def test_the_arguments_serve_the_demo_model_to_every_address() -> None:
    got: list[ServerConfig] = []
    app = typer.Typer()
    app.command()(config_command(got.append, http=True))
    program, command, *arguments = last("ENTRYPOINT").words
    assert (program, command) == ("sapwood", "serve")
    result = CliRunner(env=environment()).invoke(app, [*arguments, *last("CMD").words])
    assert result.exit_code == 0, result.output
    assert (got[0].host, got[0].model) == ("0.0.0.0", DEMO_MODEL)
    assert last("EXPOSE").words == [str(got[0].port)]


@pytest.fixture(name="url", scope="module")
def url_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image's own command, for a tiny model and on a free port."""
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    ready = re.compile(r"ready at (http://\S+): ")
    command = ["env", "SAPWOOD_PORT=0", *SERVE_COMMAND, *last("ENTRYPOINT").words[2:], str(model)]
    with server_process(command, ready, START_SECONDS) as running:
        yield running.base_url.replace("0.0.0.0", "127.0.0.1")


def is_healthy(port: int) -> bool:
    """What the image's health check says of a server on this port."""
    options, _, command = last("HEALTHCHECK").argument.partition(" CMD ")
    assert {option.partition("=")[0] for option in options.split()} == {
        "--interval",
        "--timeout",
        "--start-period",
        "--retries",
    }
    program, *arguments = Instruction("CMD", command).words
    assert program == "python"
    command_line = ["env", f"SAPWOOD_PORT={port}", sys.executable, *arguments]
    return subprocess.run(command_line, capture_output=True, check=False).returncode == 0


def test_the_command_starts_a_server_and_the_health_check_knows_it(url: str) -> None:
    assert httpx.get(f"{url}/ready").status_code == 200
    port = int(url.rpartition(":")[2])
    assert is_healthy(port)
    assert not is_healthy(1)
