"""Inference engines behind kvtier: models on its paged pool, connectors of foreign engines.

What must not live here: the pool and its blocks (kvtier.paged), services.
"""
