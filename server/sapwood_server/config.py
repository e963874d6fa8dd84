"""The server's frozen configuration. Command-line flags derive from its fields: one place for each name and default."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from sapwood_server.errors import StartupError
from sapwood_server.quoting import quote
from sapwood_server.values.demo import DEMO_MODEL

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "interpreter")
PAGE_SIZES = (16, 32, 64)
LOG_LEVELS = ("debug", "info", "warning", "error")

_TRITON_INTERPRET = "TRITON_INTERPRET"

_CUBLAS_WITHOUT_SPLITS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""torch reads them when it first multiplies on a GPU: workspaces too small for products split along K, whose sums have
an order that depends on the number of rows. (vLLM's batch-invariant mode sets the same from compute capability 9.0.)"""

_DECIMAL_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = _DECIMAL_UNITS | {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str) -> int:
    """`"1073741824"`, `"1GiB"`, `"512 MB"` -> bytes. Raises StartupError that quotes the text."""
    stripped = text.strip().lower()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = stripped[len(stripped.rstrip("abcdefghijklmnopqrstuvwxyz")) :]
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise StartupError(
            f"not a size in bytes: {quote(text)} (accepted: a positive number, alone or with KiB, MiB, GiB, TiB, KB, "
            "MB, GB, TB)"
        )
    return size


def onednn_isa_limit() -> str | None:
    """oneDNN's variable `ONEDNN_MAX_CPU_ISA` in upper case, the most that it uses of the CPU; None: no limit."""
    value = os.environ.get("ONEDNN_MAX_CPU_ISA", "").strip().upper()
    return value if value not in ("", "ALL", "DEFAULT") else None


def triton_interprets() -> bool:
    """Whether Triton's variable `TRITON_INTERPRET` has this process run kernels in the interpreter. It is read when a
    kernel is defined, so it must be set before the first one is imported."""
    return os.environ.get(_TRITON_INTERPRET, "").strip().lower() in ("1", "true", "yes", "on", "y")


def _option(default: Any, text: str, *, is_secret: bool = False, **metadata: Any) -> Any:
    return field(default=default, repr=not is_secret, metadata={"help": text, **metadata})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything a server can be told. Checked on construction; a bad value raises StartupError.

    Flag of a field: `--` and its name with dashes; `metadata["flag"]` where the field's traditional flag differs.
    `metadata["http"]`: the field is about answering HTTP, so commands that don't have no such flag.
    `metadata["variable"]`: an environment variable that stands in for the flag: for keys, since every user of the
    machine can read a command line; for the port, so that a container's health check can know it. Several values are
    parted by spaces.
    """

    model: str = _option(DEMO_MODEL, "A folder, a .gguf file, a hub id, or smollm2-135m (the embedded demo model).")
    host: str = _option("127.0.0.1", "Address to listen on.", http=True)
    port: int = _option(8000, "Port to listen on; 0 takes a free one.", http=True, variable="SAPWOOD_PORT")
    dtype: str = _option("auto", "auto, float32, bfloat16 or float16 for weights, activations and KV.")
    device: str = _option("auto", "auto, cpu, cuda, or interpreter (CUDA's kernels on the CPU, very slow).")
    max_model_len: int | None = _option(None, "Longest prompt + completion, in tokens; default: the model's own.")
    max_num_seqs: int = _option(64, "Most sequences that run at once; never more than a step has tokens.")
    max_batched_tokens: int | None = _option(None, "Most tokens computed in one step; default: by device and model.")
    page_size: int = _option(16, "Tokens per KV page: 16, 32 or 64.")
    kv_memory: str | None = _option(None, "Memory for KV pages: bytes, or with a unit as in 2GiB; default: by device.")
    gpu_memory_utilization: float = _option(0.9, "On a GPU without --kv-memory: share of its memory to use in all.")
    api_key: tuple[str, ...] = _option(
        (),
        "Key that clients must send as a Bearer token; may be given several times.",
        is_secret=True,
        http=True,
        variable="SAPWOOD_API_KEY",
    )
    served_model_name: tuple[str, ...] = _option(
        (), "Name(s) that requests may use for the model; several allowed.", http=True
    )
    prefix_cache: bool = _option(True, "Reuse the KV of earlier tokens.", flag="--prefix-cache/--no-prefix-cache")
    deterministic: bool = _option(
        False,
        "Give a request the same bits cold, cached, in chunks and in any batch; slower.",
        flag="--deterministic/--no-deterministic",
    )
    strict_max_tokens: bool = _option(False, "Refuse prompt + max_tokens over the context instead of lowering it.")
    enable_test_hooks: bool = _option(
        False, "Accept forced_tokens in requests. Never on a server that others use.", http=True
    )
    seed: int = _option(0, "Base seed for requests that bring none; 0 draws one at start.")
    log_level: str = _option("info", "debug, info, warning or error.")

    def __post_init__(self) -> None:
        self._one_of("dtype", self.dtype, DTYPES)
        self._one_of("device", self.device, DEVICES)
        self._one_of("page-size", self.page_size, PAGE_SIZES)
        self._one_of("log-level", self.log_level, LOG_LEVELS)
        self._in_range("port", self.port, 0, 65535)
        self._in_range("max-num-seqs", self.max_num_seqs, 1, 4096)
        self._in_range("seed", self.seed, 0, 2**64 - 1)
        if self.max_model_len is not None:
            self._in_range("max-model-len", self.max_model_len, 2, 2**31 - 1, ": a token of a prompt and its answer")
        if self.max_batched_tokens is not None:
            self._in_range("max-batched-tokens", self.max_batched_tokens, 1, 2**31 - 1)
        if not 0.05 <= self.gpu_memory_utilization <= 1.0:
            raise StartupError(f"--gpu-memory-utilization is {self.gpu_memory_utilization}; accepted: 0.05 to 1.0")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)
        if not self.host:
            raise StartupError("--host is empty; accepted: an address, such as 127.0.0.1, or 0.0.0.0 for all")
        if any(not key or key != key.strip() for key in self.api_key):  # not quoted: it is a secret
            raise StartupError("--api-key is empty or has white space around it, which no header can carry")
        if any(not name.strip() for name in self.served_model_name):
            raise StartupError("--served-model-name is empty; accepted: a non-empty string")

    @property
    def kv_memory_bytes(self) -> int | None:
        """`kv_memory` in bytes; None where the device's default is meant."""
        return None if self.kv_memory is None else parse_bytes(self.kv_memory)

    @staticmethod
    def _one_of(name: str, value: object, accepted: tuple[object, ...]) -> None:
        if value not in accepted:
            raise StartupError(f"--{name} is {quote(value)}; accepted: {', '.join(map(str, accepted))}")

    @staticmethod
    def _in_range(name: str, value: int, low: int, high: int, why: str = "") -> None:
        if not low <= value <= high:
            raise StartupError(f"--{name} is {value}; accepted: {low} to {high}{why}")


_SHAPE_CACHES = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""What oneDNN, and torch's layer over it, keep per shape of a bfloat16 product: a megabyte for each number of rows of
each matrix. With a thousand entries, their default, an engine grew by 0.4 to 0.8 GB as prompts of all lengths came in.
A step uses some five. A shape that was dropped costs 0.3 ms when it comes again, once a step; prefill and decode took
as much CPU time with 64 as with 1,024 (SmolLM2, least of several: 0.44 and 0.43 s for 512 tokens, 21 and 22 ms each)"""


def engine_environment(config: ServerConfig) -> dict[str, str]:
    """This process's environment, with what an engine of `config` needs to find in its own.

    Triton interprets kernels iff the device is `interpreter`: a variable left from other work must not slow a GPU down.
    For `deterministic`, cuBLAS gets no workspace to split products in. The caches of shapes are bounded unless the user
    has said how large they may be.
    """
    environment = _SHAPE_CACHES | os.environ
    environment.pop(_TRITON_INTERPRET, None)
    if config.device == "interpreter":
        environment[_TRITON_INTERPRET] = "1"
    if config.deterministic:
        environment |= _CUBLAS_WITHOUT_SPLITS
    return environment


def cublas_may_split() -> bool:
    """Whether this process lacks what `engine_environment` sets for `deterministic`."""
    return any(os.environ.get(name) != value for name, value in _CUBLAS_WITHOUT_SPLITS.items())
