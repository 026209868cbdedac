"""vLLM behind kvtier: a KV connector that reads and writes the store of its node.

    connector.py   what vLLM loads: its base class's hooks, translated
    metrics.py     what it counts, on vLLM's /metrics; with connector.py the only importer of vLLM
    tables.py      in which blocks a request lies, as each release of vLLM tells it
    facts.py       what a running engine says of itself, and whether its blocks can be shared
    terms.py       what a fleet's engines must have in common, compared through the store
    settings.py    what the operator wrote into `kv_connector_extra_config`
    scheduling.py  scheduler side, sans-I/O: what to load and to save, request by request
    worth.py       whether loading is faster than computing, as measured
    prefixes.py    what the index calls a request's blocks
    namespaces.py  tells the bridge by which name the store has the engine's blocks
    adapters.py    which weights a LoRA adapter has
    lookups.py     which blocks the store has, asked beside the scheduler
    pages.py       blocks in vLLM's per-layer caches, as the payload of one frame
    transfers.py   worker side: loads and saves on threads of their own

What must not live here: decoding of KV events (the bridge), the router's view of engines.
"""
