"""What every package uses, and what knows nothing of attention."""
