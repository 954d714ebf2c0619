"""Packed token streams that resume exactly, at any change of the data-parallel degree."""
