"""An offline batch: many prompts through a fleet, ordered so that its cache is used well.

Reads, groups, sends, writes; every row of the input becomes exactly one row of the output, also
where the job was killed in between. Knows no cluster manager. What must not live here: Ray
(`kvtier.ray`), how a request is routed.
"""
