"""The store of a node as a service. From below: `config`, `arena` (clients of shared memory, under
the planner), `tiers` (what is built of the configuration), `publishing`, `leases`, `reservations`,
`chunks`, `metrics`, `health`, `service` (the RPCs), `main`.

What must not live here: what moves between tiers (`kvtier.store`), the tiers themselves.
"""
