"""Checks that need a checkout of another project."""
