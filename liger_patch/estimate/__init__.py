"""What a training step needs of a GPU's memory, traced on the meta device. Only
``liger_patch.memory`` and ``liger_patch.cli`` import this package.
"""
