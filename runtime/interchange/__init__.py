"""Weights to and from the names, shapes and files that published models use."""
