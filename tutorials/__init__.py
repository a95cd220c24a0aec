"""Fifteen chapters that take a serving engine apart. ``python -m tutorials`` lists them."""
