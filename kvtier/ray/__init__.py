"""kvtier on a Ray cluster: a fleet of actors, and batches that go on when one is killed.

`python -m kvtier.ray up|status|down|batch`. Ray places, watches and restarts; what is run are the
services of `kvtier` and `kvtier.batch`. What must not live here: anything that works without Ray.
"""
