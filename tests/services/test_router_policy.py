from __future__ import annotations

import numpy as np
import pytest
from gem.router.v1.route_table_pb2 import Arm, RouteTable, SurfaceRoutes
from hypothesis import given
from hypothesis import strategies as st

from feature_store.errors import InvalidInput
from services.router import policy

KEYS = st.integers(-(2**63), 2**63 - 1)
SPACE = "0123456789abcdef"


def four_arms(
    weights: tuple[int, ...] = (2500, 2500, 2500, 2500), salt: str = "s"
) -> SurfaceRoutes:
    arms = [Arm(name=f"A{n}", model=f"m{n}", weight=weight) for n, weight in enumerate(weights)]
    return SurfaceRoutes(salt=salt, arms=arms, value_weights={"click": 1.0})


# Assignment


@given(KEYS)
def test_a_user_stays_in_an_arm(key: int) -> None:
    assert policy.choose(four_arms(), key) == policy.choose(four_arms(), key)
    assert 0 <= policy.bucket_of(key, salt="s") < 10_000


def test_a_bucket_is_a_fixed_number_that_other_languages_can_reproduce() -> None:
    # xxhash64 of the salt's UTF-8 followed by the key as 8 little-endian bytes, modulo 10 000.
    assert policy.bucket_of(42, salt="feed-2026") == 6586
    assert policy.bucket_of(-1, salt="feed-2026") == 1190


@given(st.permutations([0, 1500, 3500, 5000]), KEYS)
def test_arms_take_exactly_their_buckets(weights: list[int], key: int) -> None:
    routes = four_arms(tuple(weights))
    route = policy.choose(routes, key)
    number = int(route.arm.name[1])
    below = sum(weights[:number])
    assert below <= route.bucket < below + weights[number]


def test_observed_shares_are_within_three_standard_deviations_of_the_weights() -> None:
    weights = (500, 1500, 3000, 5000)
    arms = [policy.choose(four_arms(weights), key).arm.name for key in range(10_000)]
    for number, weight in enumerate(weights):
        share = weight / 10_000
        spread = 3 * (share * (1 - share) * 10_000) ** 0.5
        assert abs(arms.count(f"A{number}") - share * 10_000) < spread


def test_moving_weight_between_two_arms_moves_only_users_of_the_first() -> None:
    before, after = four_arms((5000, 2500, 2000, 500)), four_arms((5000, 2500, 1000, 1500))
    moved = {
        (policy.choose(before, key).arm.name, policy.choose(after, key).arm.name)
        for key in range(20_000)
        if policy.choose(before, key).arm.name != policy.choose(after, key).arm.name
    }
    assert moved == {("A2", "A3")}


def chi_square(table: np.ndarray) -> float:
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


def test_layers_with_different_salts_are_orthogonal_and_with_the_same_salt_are_not() -> None:
    def table(salt: str) -> np.ndarray:
        counts = np.zeros((4, 4))
        for key in range(20_000):
            one = policy.choose(four_arms(salt="layer-1"), key).arm.name
            two = policy.choose(four_arms(salt=salt), key).arm.name
            counts[int(one[1]), int(two[1])] += 1
        return counts

    limit = 27.88  # χ² with 9 degrees of freedom exceeds it once in a thousand
    assert chi_square(table("layer-2")) < limit < chi_square(table("layer-1"))


def test_the_first_served_arm_stands_in_for_the_others_but_not_for_itself() -> None:
    routes = four_arms((5000, 5000, 0, 0))
    routes.arms.insert(0, Arm(name="shadow", model="next", shadow=True))
    for key in range(50):
        route = policy.choose(routes, key)
        stand_in = None if route.fallback is None else route.fallback.name
        assert (route.arm.name, stand_in) in {("A0", None), ("A1", "A0")}
        assert [arm.name for arm in route.shadows] == ["shadow"]


# Value

CHAINS = policy.chains({"click": "", "cart": "click", "buy": "cart", "like": ""})


def p(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_the_chain_of_a_post_click_objective_reaches_its_root() -> None:
    assert CHAINS["buy"] == ("buy", "cart", "click")
    assert CHAINS["like"] == ("like",)


def test_value_is_weight_times_the_product_of_the_chain_times_bid_summed_over_objectives() -> None:
    probabilities = {
        "click": p(0.5, 0.25),
        "cart": p(0.5, 1.0),
        "buy": p(0.5, 0.5),
        "like": p(1, 0),
    }
    ranking = policy.rank(
        probabilities,
        ad_ids=["x", "y"],
        bids=np.array([2.0, 10.0]),
        weights={"buy": 8.0, "like": -0.5},
        chains=CHAINS,
    )
    assert ranking.values.tolist() == [2 * (8 * 0.125 - 0.5), 10 * 8 * 0.125]
    assert ranking.order.tolist() == [1, 0]
    assert not ranking.fallback.any()


def test_equal_values_are_ordered_by_ad_id() -> None:
    ids = ["b", "a", "é", "10", "9"]
    ranking = policy.rank(
        {"click": p(*[0.5] * 5)}, ad_ids=ids, bids=np.ones(5), weights={"click": 1}, chains=CHAINS
    )
    assert [ids[index] for index in ranking.order] == ["10", "9", "a", "b", "é"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1, 1.5])
@pytest.mark.parametrize("objective", ["click", "buy"])
def test_a_candidate_without_a_probability_comes_last_and_is_flagged(
    bad: float, objective: str
) -> None:
    probabilities = {"click": p(0.1, 0.2, 0.3), "cart": p(1, 1, 1), "buy": p(1, 1, 1)}
    probabilities[objective] = p(0.1, bad, 0.3)
    ranking = policy.rank(
        probabilities,
        ad_ids=["a", "b", "c"],
        bids=np.array([1.0, 100.0, 1.0]),
        weights={"buy": -1.0, "click": 0.5},
        chains=CHAINS,
    )
    assert ranking.fallback.tolist() == [False, True, False]
    assert ranking.order[-1] == 1
    assert np.isfinite(ranking.values).all()
    assert ranking.values[1] <= ranking.values.min()


def test_a_bad_probability_of_an_objective_without_weight_changes_nothing() -> None:
    ranking = policy.rank(
        {"click": p(0.5), "like": p(float("nan"))},
        ad_ids=["a"],
        bids=np.ones(1),
        weights={"click": 1.0},
        chains=CHAINS,
    )
    assert (ranking.values.tolist(), ranking.fallback.tolist()) == ([0.5], [False])


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=3), st.floats(0, 1, width=32), st.floats(0, 100)),
        max_size=30,
        unique_by=lambda each: each[0],
    ),
    st.randoms(),
)
def test_the_order_does_not_depend_on_the_order_asked(
    ads: list[tuple[str, float, float]], random: object
) -> None:
    def ranked(rows: list[tuple[str, float, float]]) -> list[str]:
        ids = [ad for ad, _, _ in rows]
        ranking = policy.rank(
            {"click": p(*[chance for _, chance, _ in rows])},
            ad_ids=ids,
            bids=np.array([bid for _, _, bid in rows]),
            weights={"click": 1.0},
            chains=CHAINS,
        )
        values = ranking.values[ranking.order]
        assert (np.diff(values) <= 0).all()
        return [ids[index] for index in ranking.order]

    shuffled = list(ads)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranked(ads) == ranked(shuffled)


def test_a_bid_of_zero_is_one_and_a_bad_bid_is_refused_by_ad() -> None:
    assert policy.bids_of(["a", "b"], [0.0, 2.5]).tolist() == [1.0, 2.5]
    assert policy.bids_of([], []).tolist() == []
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="bid of ad 'b'"):
            policy.bids_of(["a", "b"], [1.0, bad])


# Route tables


def problems(table: RouteTable) -> list[str]:
    return list(policy.problems_of(table, surfaces=["feed", "reels"], objectives=["click"]))


def test_a_good_table_has_no_problems() -> None:
    table = RouteTable(version=3, surfaces={"feed": four_arms()})
    arms = table.surfaces["feed"].arms
    arms.add(name="S", model="m", shadow=True, solaris=True, solaris_space_id=SPACE, solaris_dim=8)
    arms.add(name="L", model="m", shadow=True, loopfm=True, loopfm_space_id=SPACE, loopfm_dim=32)
    assert problems(table) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.arms[0].ClearField("weight"), "add up to 7500; they must add up to 10000"),
        (lambda r: setattr(r.arms[1], "name", "A0"), "arm 'A0' is there twice"),
        (lambda r: setattr(r.arms[1], "model", ""), "needs a name and a model"),
        (lambda r: r.arms.add(name="S", model="m", shadow=True, weight=1), "a shadow arm has 0"),
        (lambda r: setattr(r.arms[0], "loopfm", True), "loopfm_space_id ''; write 8 bytes"),
        (lambda r: setattr(r.arms[0], "loopfm", True), "loopfm_dim 0; it must be even"),
        (lambda r: setattr(r.arms[0], "solaris", True), "solaris_dim 0; it must be at least 1"),
        (lambda r: r.value_weights.clear(), "value_weights is empty"),
        (lambda r: r.value_weights.update({"sale": 1}), "no objective 'sale'; the spec has click"),
        (lambda r: r.value_weights.update({"click": float("nan")}), "weight of 'click' is nan"),
    ],
)
def test_a_bad_table_is_refused_by_what_is_wrong_with_it(change, message: str) -> None:  # type: ignore[no-untyped-def]
    table = RouteTable(version=3, surfaces={"feed": four_arms()})
    change(table.surfaces["feed"])
    assert any(
        problem.startswith("surfaces.feed: ") and message in problem for problem in problems(table)
    )


def test_a_table_of_an_unknown_surface_or_of_none_is_refused() -> None:
    (problem,) = problems(RouteTable(surfaces={"shop": four_arms()}))
    assert problem == "surfaces.shop: no such surface; the spec has feed, reels"
    assert problems(RouteTable()) == ["surfaces: is empty; route at least one"]
