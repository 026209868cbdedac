"""What the router does with an OpenAI request besides choosing its worker.

Tenants, limits, queue, relay, retries, resumption, answers. What must not live here: the choice of
workers (kvtier_router.routing), sockets (kvtier_router.web).
"""
