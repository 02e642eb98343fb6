"""The demo: its arithmetic by hand, and (slow) the whole job."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
from tensordict import TensorDict

from bench.demo_matrix import train_once
from envkit import demo
from envkit.cli.app import main
from envkit.demo import job
from envkit.demo.display import TrainingBar, announcements_said, curves_figure
from envkit.specs.annotations import as_device


def test_the_command_line_asks_for_a_command(capsys):
    with pytest.raises(SystemExit):
        main([])

    assert "demo" in "".join(capsys.readouterr())


def test_a_missing_library_is_told_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "envkit.demo", raising=False)
    for module in ("job", "display"):
        monkeypatch.delitem(sys.modules, f"envkit.demo.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)

    with pytest.raises(SystemExit, match=r"'\.\[demo\]'"):
        main(["demo"])


def test_a_missed_goal_is_told_in_a_line_and_ends_with_status_1(monkeypatch):
    def misses(**options):
        raise demo.GoalMissedError("the policy balances for 612 steps in Brax")

    monkeypatch.setattr(demo, "run", misses)

    with pytest.raises(SystemExit, match=r"goal was not reached: .* 612 steps") as ended:
        main(["demo"])

    assert isinstance(ended.value.code, str)  # Python prints it and exits with 1


def test_without_a_terminal_training_prints_a_line_for_each_evaluation_and_no_bar(capsys):
    bar = TrainingBar(100)
    bar.advance(50)
    bar.evaluated(50, {"Brax": 612.4, "MuJoCo": 600.0})
    bar.advance(50)
    bar.close()

    shown = capsys.readouterr()
    assert shown.out.split() == ["50", "steps:", "Brax", "612,", "MuJoCo", "600"]
    assert shown.err == ""


def test_what_envkit_announces_is_said_once_and_passes_no_other_handler(capsys, caplog):
    logger = logging.getLogger("envkit")

    with announcements_said():
        logger.warning("compiling it ...")
    logger.warning("later")

    assert capsys.readouterr().out.split("\n") == ["  compiling it ...", ""]
    assert caplog.messages == ["later"]


@pytest.mark.parametrize(("ends_at", "word"), [(1000.0, "reached"), (940.0, "NOT reached")])
def test_the_picture_says_whether_the_goal_was_reached(tmp_path, ends_at, word):
    lengths = {"Brax": [100.0, 990.0], "MuJoCo": [90.0, ends_at]}

    figure = curves_figure([10, 20], lengths, goal=950.0, longest=1000.0)

    axes = figure.axes[0]
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert axes.get_title().endswith("NOT reached") == (word == "NOT reached")
    assert [text for text in shown if "at the end" in text] == [
        "Brax: 990 at the end",
        f"MuJoCo: {ends_at:.0f} at the end",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_job_balances_and_leaves_its_results(tmp_path, capsys):
    main(["demo", "--out", str(tmp_path), "--no-cache"])

    assert matplotlib.image.imread(tmp_path / "learning_curve.png").std() > 0
    rollout = TensorDict.load_memmap(tmp_path / "rollout")
    assert rollout["next", "observation"].shape == (256, 32, 4)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("trained with") for line in lines)
    assert any("steps/s by unroll" in line for line in lines)
    assert len(lines) < 60  # no bar, a line an evaluation, two a compilation


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.sweep
def test_training_reaches_the_goal_on_a_cpu_of_another_instruction_set():
    outcome = train_once(seed=3, caps="sse4_2")

    assert outcome["reached"], outcome


def test_both_simulators_are_told_where_the_job_computes(monkeypatch):
    """Of envs that are built on a card, which there is none of here, the device alone is looked at."""
    devices = []

    def built(*args, device=None, **kwargs):
        devices.append(device)
        return SimpleNamespace(set_seed=lambda seed: None)

    monkeypatch.setattr(job, "BraxEnv", built)
    monkeypatch.setattr(job, "ParallelEnv", built)

    job.make_envs("cuda:1", seed=0)

    assert devices == ["cuda:1", "cuda:1"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_both_simulators_deliver_to_the_card(opened):
    brax, gym = map(opened, job.make_envs("cuda", seed=0))

    assert brax.device == gym.device == as_device("cuda")
    assert gym.reset()["observation"].device == gym.device
