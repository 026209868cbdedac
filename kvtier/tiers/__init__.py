"""Places that keep blocks, one file (or package) a backend, all behind `kvtier.ports.BlockTier`.

Import a backend by its own module: each foreign library is needed only by the tier that uses it.
What must not live here: write policies, promotion, quotas and anything else that knows two tiers.
"""
