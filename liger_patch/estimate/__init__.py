"""What a training step needs of a GPU's memory, traced on the meta device. Only
``liger_patch.memory`` and the commands (``__main__``, ``cli``) import this package.
"""
