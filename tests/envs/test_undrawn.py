"""Envs of our own that draw no picture say so, and what to look at instead."""

import pytest

from envkit import FinancialRegimeEnv, LLMHashingEnv, PendulumEnv, TicTacToeEnv, record
from envkit.errors import UnsupportedError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (PendulumEnv, r"PendulumEnv\(.* cannot be drawn.*Plot what it observes"),
        (TicTacToeEnv, "plot_rollout"),
        (FinancialRegimeEnv, "no method `render\\(\\) -> frame`"),
        (lambda: LLMHashingEnv(5), "Print its text"),
    ],
)
def test_an_env_without_a_picture_says_what_to_look_at(make, message):
    with pytest.raises(UnsupportedError, match=message):
        make().render()


def test_a_video_of_an_env_without_a_picture_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UnsupportedError, match="cannot be drawn"):
        record(PendulumEnv(), None, tmp_path / "pendulum.mp4")

    assert not list(tmp_path.iterdir())
