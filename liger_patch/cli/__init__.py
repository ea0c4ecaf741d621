"""The commands of ``python -m liger_patch``. No other module imports this package."""
