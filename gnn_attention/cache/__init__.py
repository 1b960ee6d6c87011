"""Decoding with a cache of keys and values."""

from gnn_attention.cache.caches import KeyValueCache, PatternMessageCache

__all__ = ["KeyValueCache", "PatternMessageCache"]
