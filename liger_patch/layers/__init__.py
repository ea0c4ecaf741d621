"""Run layers on kernels: norms, attention, feed-forward layers."""
