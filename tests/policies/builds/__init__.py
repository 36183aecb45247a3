"""Tiny builds of every host policy and trainable reward model, made offline."""
