"""Layers on kernels: norms, attention, feed-forward layers."""
