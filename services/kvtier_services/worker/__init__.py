"""The reference worker as a service: a real model behind an OpenAI endpoint, on a paged cache that
publishes what it holds. From below: `requests` (the seam between endpoint and engine), `http`.

What must not live here: the paged cache and the model (`kvtier.paged`, `kvtier.engines`).
"""
