"""The commands of ``python -m liger_patch``. Nothing else imports this package."""
