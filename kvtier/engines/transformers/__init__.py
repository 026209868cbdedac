"""Models of Hugging Face transformers on kvtier's paged pool: an oracle for engine connectors.

transformers' model classes are used as they are; our attention is plugged in through its registry
of attention functions. What must not live here: model code, the pool, services.
"""
