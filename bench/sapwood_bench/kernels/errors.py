"""What may go wrong with one case on a device, and must end no more than that case."""

from __future__ import annotations

import subprocess

from triton import TritonError

from sapwood_server.errors import SapwoodError

MEASURE_ERRORS = (
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    OSError,
    subprocess.SubprocessError,
    TritonError,
    SapwoodError,
)
"""CUDA, torch and Triton's launcher raise RuntimeError, torch the next two for shapes that a backend doesn't take, our
own checks ValueError. Triton builds its launcher with the machine's C compiler: OSError without one, SubprocessError
if it fails. TritonError covers OutOfResources, CompilationError and PTXASError, none of which is a RuntimeError, and
SapwoodError a runner that can't start. Anything else is a mistake of ours and ends the process."""
