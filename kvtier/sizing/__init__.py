"""`kvtier size`: what a fleet will need, from a model's shape and measured costs a unit.

What must not live here: measuring (`kvtier bench` does), anything that a running service uses.
"""

from kvtier.sizing.command import command
from kvtier.sizing.demand import Demand, Terms, demand
from kvtier.sizing.kv_bytes import ModelShape, shape_of
from kvtier.sizing.unit_costs import UnitCosts, measured

__all__ = [
    "Demand",
    "ModelShape",
    "Terms",
    "UnitCosts",
    "command",
    "demand",
    "measured",
    "shape_of",
]
