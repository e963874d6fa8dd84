"""The embedded demo model's name, as `--model` and the make targets spell it."""

from __future__ import annotations

DEMO_MODEL = "smollm2-135m"
