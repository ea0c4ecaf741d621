"""Deferred logits: capture at the head, recorded ops, and what a fused loss reads of them."""
