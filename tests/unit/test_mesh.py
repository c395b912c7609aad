"""The mesh of ranks by name, and the dealing of micro-batches over it. Pure functions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeostat.config.mesh import Coordinates, Mesh
from homeostat.data.dealing import deal, in_order, one_per_group
from homeostat.errors import ConfigError

SIZES = st.integers(1, 4)
MESHES = st.builds(Mesh, SIZES, SIZES, SIZES, SIZES)
DIMENSIONS = st.sets(st.sampled_from(Coordinates._fields))


def test_ranks_are_numbered_with_the_last_dimension_running_fastest() -> None:
    mesh = Mesh(replicate=2, shard=2, cp=2, sp=2)
    assert [mesh.coordinates(rank) for rank in range(mesh.world_size)] == [
        Coordinates(*place) for place in itertools.product(range(2), repeat=4)
    ]
    assert mesh.data_groups == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert mesh.groups("shard", "cp", "sp") == [tuple(range(8)), tuple(range(8, 16))]
    assert mesh.groups("replicate") == [(rank, rank + 8) for rank in range(8)]
    assert mesh.groups("cp")[:3] == [(0, 2), (1, 3), (4, 6)]
    assert mesh.groups() == [(rank,) for rank in range(16)]


@given(MESHES)
def test_data_groups_and_shards_count_what_their_names_say(mesh: Mesh) -> None:
    assert mesh.num_data_groups == len(mesh.data_groups) == mesh.world_size // (mesh.cp * mesh.sp)
    assert {len(ranks) for ranks in mesh.groups("shard", "cp", "sp")} == {mesh.num_shards}
    assert mesh.num_shards * mesh.replicate == mesh.world_size
    for index, ranks in enumerate(mesh.data_groups):
        assert {mesh.data_group(rank) for rank in ranks} == {index}


@given(MESHES, DIMENSIONS)
def test_groups_hold_every_rank_once_and_differ_in_their_dimensions_alone(
    mesh: Mesh, dimensions: set[str]
) -> None:
    groups = mesh.groups(*dimensions)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(mesh.world_size))
    for ranks in groups:
        places = [mesh.coordinates(rank)._asdict() for rank in ranks]
        varying = {name for name in places[0] if len({place[name] for place in places}) > 1}
        assert varying <= dimensions


@given(MESHES)
def test_what_the_other_dimensions_leave_over_are_shards(mesh: Mesh) -> None:
    made = Mesh.spread(mesh.world_size, replicate=mesh.replicate, cp=mesh.cp, sp=mesh.sp)
    assert made == mesh


@pytest.mark.parametrize(
    ("sizes", "place", "message"),
    [
        (
            {"world_size": 4, "replicate": 3},
            "replicas",
            r"4 ranks \(cluster.processes\) cannot form equal .* no multiple of replicas 3\.",
        ),
        ({"world_size": 2, "replicate": 4}, "replicas", "2 ranks .* no multiple of replicas 4"),
        (
            {"world_size": 8, "replicate": 2, "cp": 3},
            "context_parallel_size",
            "no multiple of replicas 2 x context_parallel_size 3 = 6",
        ),
        (
            {"world_size": 4, "cp": 4, "sp": 2},
            "sequence_parallel_size",
            "no multiple of context_parallel_size 4 x sequence_parallel_size 2 = 8",
        ),
    ],
)
def test_ranks_that_cannot_be_arranged_are_refused_by_their_setting(
    sizes: dict[str, int], place: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Mesh.spread(**sizes)
    assert caught.value.problems[0].place == f"trainer.backend.{place}"


@given(MESHES, st.integers(0, 40))
def test_ranks_of_a_data_group_work_on_the_same_micro_batches(mesh: Mesh, count: int) -> None:
    dealt = deal(range(count), mesh)
    assert len(dealt) == mesh.world_size
    for ranks in mesh.data_groups:
        assert all(dealt[rank] == dealt[ranks[0]] for rank in ranks)
    # Every batch goes to one group, and every rank takes part in every round.
    seen = [batch for mine in one_per_group(dealt, mesh) for batch in mine if batch is not None]
    assert sorted(seen) == list(range(count))
    assert {len(mine) for mine in dealt} == {-(-count // mesh.num_data_groups)}
    assert in_order(dealt, mesh, count=count) == list(range(count))


@given(MESHES, st.integers(1, 40))
def test_a_round_has_consecutive_batches_and_only_the_last_has_none(mesh: Mesh, count: int) -> None:
    """Batches come fullest first: neighbours are of about the same size."""
    groups = mesh.num_data_groups
    rounds = list(zip(*one_per_group(deal(range(count), mesh), mesh), strict=True))
    for number, batches in enumerate(rounds):
        first = number * groups
        assert list(batches) == [b if b < count else None for b in range(first, first + groups)]
        assert None not in batches or number == len(rounds) - 1
