"""HTTP/1.1 on asyncio transports: a server that defends itself, and a client that only relays.

llhttp (httptools) parses; everything else is kept as lean as a relay allows: callbacks instead of
streams, one task a request, no copies of bodies on the way. What must not live here: OpenAI,
routing, tenants.
"""
