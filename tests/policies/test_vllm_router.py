"""The router: rollouts are distributed evenly, and stay on their server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentfly.policies.vllm.fleet import StickyRouter

SERVERS = ("a", "b", "c", "d")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=200), st.permutations(SERVERS))
def test_loads_are_what_was_placed_and_not_forgotten_and_a_rollout_never_moves(steps, listed):
    routes, places = StickyRouter(), {}  # type: ignore[var-annotated]
    for begins, number in steps:
        rollout = f"r{number}"
        if begins:
            fewest = min(list(places.values()).count(server) for server in SERVERS)
            place = routes.route(rollout, listed)
            if rollout not in places:
                assert list(places.values()).count(place) == fewest
            assert places.setdefault(rollout, place) == place
        else:
            routes.release_rollout(rollout)
            places.pop(rollout, None)
    assert routes.loads == {server: n for server in SERVERS if (n := list(places.values()).count(server))}


@given(st.permutations(SERVERS), st.text(min_size=1))
def test_the_first_place_of_a_rollout_depends_on_names_alone(listed, rollout):
    assert StickyRouter().route(rollout, listed) == StickyRouter().route(rollout, SERVERS)


def test_only_the_rollouts_of_a_server_that_went_move():
    routes = StickyRouter()
    before = {f"r{number}": routes.route(f"r{number}", SERVERS) for number in range(20)}
    left = ("a", "b", "d")
    after = {rollout: routes.route(rollout, left) for rollout in before}
    assert {rollout for rollout in before if before[rollout] != after[rollout]} == {
        rollout for rollout, place in before.items() if place == "c"
    }
    assert routes.loads.keys() == set(left)
    assert {routes.route(rollout, SERVERS) for rollout in before} == set(left), "and none moves back"
