"""Count and list edges by boxes of tokens."""
