"""One forward pass of a patched model: its settings, its loss, packed rows, verification."""
