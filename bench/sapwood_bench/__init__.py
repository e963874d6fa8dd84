"""Workloads, replays and reports that measure the server."""
