"""Measures a machine: how fast the operations of a training step really are on it."""
