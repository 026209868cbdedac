"""The cache-aware HTTP router (composition root)."""
