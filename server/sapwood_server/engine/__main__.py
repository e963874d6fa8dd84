"""`python -m sapwood_server.engine ENDPOINT`: the engine process, started and watched by the server."""

from __future__ import annotations

import sys

from sapwood_server.engine.build import build_engine
from sapwood_server.engine.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv, build_engine))
