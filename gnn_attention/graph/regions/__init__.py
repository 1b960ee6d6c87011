"""Edges counted and listed by boxes of tokens."""
