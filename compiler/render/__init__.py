"""Plans as rich tables."""
