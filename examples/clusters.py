"""The data of ``forces``: rattled clusters of atoms, their true forces, and graphs of near atoms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import gnn_attention as ga
from gnn_attention._support.shapes import Float, Int, Tensor

CUTOFF, RATTLE = 4.8, 0.15  # Both are in angstrom.
# These are the atomic numbers and lattice constants of aluminium and copper.
NUMBERS, LATTICE_CONSTANTS = (13, 29), (4.05, 3.61)


@dataclass(frozen=True, eq=False)
class Atoms:
    """Atoms of several structures, their true forces in eV/angstrom, and the graph of near atoms."""

    element: Int[Tensor, " atoms"]
    position: Float[Tensor, "atoms three"]
    force: Float[Tensor, "atoms three"]
    graph: ga.TokenGraph

    def double(self) -> Atoms:
        """Return the atoms with positions and forces in float64."""
        return replace(self, position=self.position.double(), force=self.force.double())


def radius_graph(position: Float[Tensor, "atoms three"]) -> ga.TokenGraph:
    """Return the graph in which each atom attends to all others within the cutoff.

    >>> radius_graph(torch.tensor([[0.0, 0, 0], [4, 0, 0], [8, 0, 0]])).edge_index.tolist()
    [[1, 0, 2, 1], [0, 1, 1, 2]]
    """
    is_near = torch.cdist(position, position) < CUTOFF
    dst, src = is_near.fill_diagonal_(False).nonzero().unbind(1)
    return ga.TokenGraph.from_edges(torch.stack([src, dst]), len(position), name=f"radius({CUTOFF})")


def draw_structures(count: int, rng: torch.Generator) -> list[Atoms]:
    """Draw rattled clusters of 13 or 19 atoms, each of copper or aluminium; ImportError without ASE.

    The clusters are icosahedra, cuboctahedra and octahedra in turn, scaled to the mean lattice constant. The
    displacements of atoms are Gaussian.
    """
    try:
        import ase
        from ase.calculators.emt import EMT
        from ase.cluster import Icosahedron, Octahedron
    except ImportError as error:
        raise ImportError(f"forces needs ASE ({error}): pip install ase") from None
    shapes = [Icosahedron("Cu", 2), Octahedron("Cu", 3, cutoff=1), Octahedron("Cu", 3)]
    structures = []
    for index in range(count):
        position = torch.tensor(shapes[index % len(shapes)].positions, dtype=torch.float32)
        element = torch.randint(len(NUMBERS), (len(position),), generator=rng)
        position *= torch.tensor(LATTICE_CONSTANTS)[element].mean() / LATTICE_CONSTANTS[1]
        position += RATTLE * torch.randn(position.shape, generator=rng)
        numbers = [NUMBERS[i] for i in element]
        atoms = ase.Atoms(numbers, position.numpy(), calculator=EMT())
        force = torch.tensor(atoms.get_forces(), dtype=torch.float32)
        structures.append(Atoms(element, position, force, radius_graph(position)))
    return structures


def join(structures: Sequence[Atoms]) -> Atoms:
    """Return the atoms of all structures side by side, without edges between structures."""
    parts = zip(*((x.element, x.position, x.force) for x in structures), strict=True)
    element, position, force = map(torch.cat, parts)
    return Atoms(element, position, force, ga.algebra.disjoint_sum(*(x.graph for x in structures)))
