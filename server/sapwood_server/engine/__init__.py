"""Scheduler, step loop, the engine process and its client."""
