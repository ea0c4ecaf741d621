"""The commands of ``python -m liger_patch``. Only ``liger_patch.memory`` imports this package."""
