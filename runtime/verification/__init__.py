"""Runs a few steps of a build and reads what a plan states: memory by rank and category, time by phase."""
