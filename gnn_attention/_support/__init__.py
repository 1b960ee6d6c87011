"""General helpers that the other packages share."""
