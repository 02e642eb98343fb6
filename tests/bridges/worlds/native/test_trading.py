"""`FinancialRegimeEnv`: every trade worked by hand, the law of its prices, its end."""

from __future__ import annotations

import math

import pytest
import torch

from envkit import FinancialRegimeEnv, SerialEnv, check_env_specs
from envkit.errors import ArgumentError, InputError

HOLD, BUY, SELL = 0, 1, 2


def market(**params):
    """Give an env without noise, so that prices are known, and its first root."""
    env = FinancialRegimeEnv(window_size=4)
    given = {"window_size": 4, "volatility": 0.0, "drift": 252 * math.log(1.1), **params}
    return env, env.reset(env.gen_params(**given))


def acted(env, root, *actions):
    """Take steps, and give what each made."""
    outcomes = []
    for action in actions:
        td = env.step(root.clone().set("action", torch.tensor([action])))
        outcomes.append(td["next"])
        root = env.step_mdp(td)
    return outcomes


@pytest.mark.parametrize("options", [{}, {"batch_size": [3], "window_size": 5}], ids=str)
def test_a_market_does_what_its_specs_say(options):
    check_env_specs(FinancialRegimeEnv(**options), seed=0)


def test_parameters_after_a_step_are_apart_from_those_before():
    env, root = market()
    td = env.step(root.set("action", torch.tensor([HOLD])))

    td["next", "params", "max_steps"].fill_(3)

    assert td["params", "max_steps"] == 252


def test_a_trade_earns_the_gain_and_pays_for_both_orders():
    env, root = market()

    bought, kept, sold, out = acted(env, root, BUY, HOLD, SELL, HOLD)

    assert bought["reward"].item() == pytest.approx(-0.001 * 100 + 0.1 * 0.1)
    assert bought["current_holdings"].item() and bought["entry_price"].item() == 100
    assert kept["reward"].item() == pytest.approx(0.1 * 0.1)
    assert sold["reward"].item() == pytest.approx(0.21 - 0.001 * 121, abs=1e-6)
    assert not sold["current_holdings"].item() and sold["entry_price"].item() == 0
    assert out["reward"].item() == 0
    assert out["price_history"].tolist() == pytest.approx([110, 121, 133.1, 146.41], rel=1e-5)
    assert [td["step_count"].item() for td in (bought, kept, sold, out)] == [1, 2, 3, 4]


def test_selling_nothing_and_buying_twice_do_nothing():
    env, root = market()

    nothing, _, twice = acted(env, root, SELL, BUY, BUY)

    assert nothing["reward"].item() == 0 and not nothing["current_holdings"].item()
    assert twice["reward"].item() == pytest.approx(0.01)
    assert twice["entry_price"].item() == pytest.approx(110)


def test_an_episode_is_truncated_after_its_days_in_each_row_by_itself():
    env = FinancialRegimeEnv(seed=0, window_size=3)
    start = env.gen_params(window_size=3, batch_size=[2])
    start["params", "max_steps"] = torch.tensor([2, 3])

    data = env.rollout(6, tensordict=start, break_when_any_done=False)

    ends = data["next", "truncated"].squeeze(-1)
    assert ends.tolist() == [[False, True] * 3, [False, False, True] * 2]
    assert ends.equal(data["next", "done"].squeeze(-1)) and not data["next", "terminated"].any()
    assert (data["params", "max_steps"] == torch.tensor([[2], [3]])).all()


def test_prices_are_a_geometric_random_walk_of_the_given_volatility():
    env = FinancialRegimeEnv(seed=0)
    start = env.gen_params(batch_size=[2000], volatility=0.4, drift=5.0)

    root = env.reset(start)
    step = env.step(root.set("action", torch.zeros(2000, 1, dtype=torch.int64)))["next"]

    shown = (root["price_history"] / 100).log().diff(dim=-1)
    last = (step["price_history"][:, -1] / step["price_history"][:, -2]).log()
    daily = 0.4 / math.sqrt(252)
    assert shown.std().item() == pytest.approx(daily, rel=0.02)
    assert shown.mean().abs().item() < 4 * daily / math.sqrt(2000 * 49)
    assert last.mean().item() == pytest.approx(5 / 252, abs=4 * daily / math.sqrt(2000))


def test_prices_come_from_the_seed_or_from_torchs_generator():
    def prices(seed):
        torch.manual_seed(1)
        return FinancialRegimeEnv(seed=seed).rollout(3)["next", "price_history"]

    assert prices(0).equal(prices(0)) and not prices(0).equal(prices(2))
    assert prices(None).equal(prices(None))


def test_rows_of_another_window_are_refused():
    env = FinancialRegimeEnv()

    with pytest.raises(
        InputError, match=r"is 7, but .* 50 days .* FinancialRegimeEnv\(window_size=7\)"
    ):
        env.reset(env.gen_params(window_size=7))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"window_size": 0}, "window_size is 0"),
        ({"max_steps": 2.5}, "max_steps is 2.5"),
        ({"volatility": "high"}, "volatility is 'high', but must be a finite number"),
        ({"drift": float("inf")}, "drift is inf"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(params, message):
    with pytest.raises(ArgumentError, match=message):
        FinancialRegimeEnv.gen_params(**params)


def test_markets_work_as_rows():
    check_env_specs(SerialEnv(2, FinancialRegimeEnv), seed=0)
