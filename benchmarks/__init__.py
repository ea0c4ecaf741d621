"""Time and memory beside plain PyTorch and peers: ``python -m benchmarks``."""
