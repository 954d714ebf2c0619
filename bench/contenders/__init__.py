"""Models trained side by side on one device: Shipway's own builds, and peers of the same dimensions."""
