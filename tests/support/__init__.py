"""Functions and data that tests share."""
