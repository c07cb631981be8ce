"""Positional-encoding ablations of one GPT-2 decoder in JAX."""
