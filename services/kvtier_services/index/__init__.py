"""The global index as a service: KVEvents in, matches out (composition root).

`state` decides with the core, `feed` fans changes out, `service` speaks gRPC, `main` composes.
"""
