"""The tiers below the worker's own cache: what to save, whether to load, and the store's client.

What must not live here: scheduling, the pool, models.
"""
