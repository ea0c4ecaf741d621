"""The commands of ``python -m liger_patch``, whose ``__main__`` imports them."""
