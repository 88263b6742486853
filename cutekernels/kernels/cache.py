"""What results a kernel asks the L2 cache to keep, whichever language it is in.

What few tokens make is small, read by the next kernel and written over by the next layer's. In between all of a layer's
weights pass through the cache and would drive it out to memory, and those writes delay the reading of weights.
"""

# H200, 50 MiB of cache, 64 tokens, us: 3584 columns, 0.45 MiB of results, 8.08 -> 7.78, the same with 4 and with 72
# weights and results in turn (1.8 GB, 33 MB); 18944 columns, 2.3 MiB, 33.4 -> 32.8; 16 tokens x 3584 7.66 -> 7.49
# (2026-11-22).
KEPT_BYTES = 4 << 20  # of a result, at most
