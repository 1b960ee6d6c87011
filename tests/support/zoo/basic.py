"""Theorems of ``patterns.basic``."""

ROWS = """
full(n): True
    degree=n; layers=once(n); symmetric=True
causal(n): j <= i
    degree=i + 1; layers=once(n)
strict_causal(n): j < i
    degree=i; layers=once(n)
no_self(n): i != j
    degree=n - 1; layers=once(n); symmetric=True
cross(n, n): True
    degree=n; layers=once(n); symmetric=True
self_loops(n): not i - j
    degree=1; layers=never(n); symmetric=True; causal=True
anti_causal(n): j in range(i, n)
    degree=n - i; layers=never(n); causal=False; acyclic=True
causal_aligned(n, n + 3, "upper_left"): j in range(i + 1)
    degree=i + 1; nodes=n, n + 3
causal_aligned(n, n + 3, "lower_right"): n - 1 - i <= n + 2 - j
    degree=i + 4; nodes=n, n + 3; causal=False
causal_aligned(n + 3, n, "lower_right"): n + 2 - i <= n - 1 - j
    degree=max(0, i - 2); nodes=n + 3, n
encoder_decoder(3, n): (i < 3 and j < 3) or (i >= 3 and j <= i)
    degree=3 if i < 3 else i + 1; layers=None if n else 1; nodes=n + 3; causal=False
"""
