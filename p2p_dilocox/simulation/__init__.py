"""Many clusters in one process, on simulated time: the trainer's own code between modelled links."""

from p2p_dilocox.simulation.links import Link
from p2p_dilocox.simulation.places import Absence, Place, Point, drawn_absences
from p2p_dilocox.simulation.start import warm_start
from p2p_dilocox.simulation.together import Together, never_differ
from p2p_dilocox.simulation.world import Simulation

__all__ = [
    "Absence", "Link", "Place", "Point", "Simulation", "Together", "drawn_absences", "never_differ",
    "warm_start",
]  # fmt: skip
