"""Checks on the nodes of a job, before any GPU-hour is spent on training."""
