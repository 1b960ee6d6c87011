"""What every package uses and nothing of which knows attention."""
