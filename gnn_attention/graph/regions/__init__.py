"""Count and list the edges of a graph box by box."""
