"""`kvtier demo`: the main job on real input, in phases that each name the tier they must hit.

Starts a cluster like `kvtier up`, asks it through its router as any client would, and says what was
computed and what was reused. What must not live here: how a cluster is run (`kvtier.local`).
"""
