"""One file holds a whole training loop, and a killed one goes on from it to the same parameters."""

from __future__ import annotations

import os
import pickletools
import random
import signal
import subprocess
import sys
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import envkit
from envkit import GymEnv, SerialEnv
from envkit.errors import ArgumentTypeError, MissingKeyError, ResumeError, WriteError
from tests.zoo.resumed import played, same
from tests.zoo.training import train

cartpole = partial(GymEnv, "CartPole-v1", max_episode_steps=9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("serial", "parallel", "mixed", "fast"),
        pytest.param("inverted_pendulum", marks=pytest.mark.sweep),
    ],
)
def test_a_killed_training_goes_on_to_the_same_parameters(kind, tmp_path):
    path = tmp_path / "run.pt"
    wanted = train(kind, None)

    killed = subprocess.run(
        [sys.executable, "-m", "tests.zoo.training", kind, str(path)], check=False
    )
    found = train(kind, path)

    assert killed.returncode == -signal.SIGKILL and path.exists()
    assert all(map(torch.equal, found, wanted))
    assert any(parameter.any() for parameter in wanted)


def test_all_kinds_of_parts_come_back(tmp_path, opened):
    env, other = opened(SerialEnv(2, cartpole)).record_for_resume(), opened(SerialEnv(2, cartpole))
    policy = torch.nn.Linear(4, 2)
    optimiser = torch.optim.Adam(policy.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1)
    policy(torch.ones(4)).sum().backward()
    optimiser.step()
    schedule.step()
    generators = {
        "mine": torch.Generator().manual_seed(3),
        "theirs": np.random.default_rng(3),
        "old": np.random.RandomState(3),
    }
    parts = {
        "policy": policy,
        "optimiser": optimiser,
        "schedule": schedule,
        **generators,
        "python": random.Random(3),
    }
    parts |= {"torch": torch, "numpy": np.random, "random": random}
    td = env.reset().set("note", NonTensorData("a", batch_size=[2]))

    envkit.save(tmp_path / "all.pt", env=env, td=td, steps=7, tags=["a", None], **parts)
    before, weight = _drawn(parts), policy.weight.detach().clone()
    policy(torch.ones(4)).sum().backward()
    optimiser.step()
    loaded = envkit.load(tmp_path / "all.pt", env=other, td=None, steps=None, tags=None, **parts)

    assert _drawn(parts) == before and policy.weight.equal(weight)
    assert optimiser.state[policy.weight]["step"] == 1 and schedule.get_last_lr() == pytest.approx(
        [0.01]
    )
    assert (loaded["steps"], loaded["tags"], loaded["env"]) == (7, ["a", None], other)
    assert loaded["td"]["note"] == "a" and loaded["td"].batch_size == td.batch_size
    actions = torch.get_rng_state()
    one = played(env, td.exclude("note"), 12)[0]
    torch.set_rng_state(actions)
    assert same((one, played(other, loaded["td"].exclude("note"), 12)[0]))


def _drawn(parts) -> list[float]:
    """Draw from all generators; those of the libraries stand where `save` found them."""
    drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
    drawn += [torch.rand(1, generator=parts["mine"]).item(), parts["theirs"].random()]
    return [*drawn, parts["old"].rand(), parts["python"].random()]


def test_parts_that_are_missing_or_left_over_are_named(tmp_path):
    path, policy = tmp_path / "a.pt", torch.nn.Linear(1, 1)
    envkit.save(path, policy=policy, steps=1)

    with pytest.raises(
        MissingKeyError, match=r"\['optimiser'\] are asked for.*\['steps'\] are there"
    ):
        envkit.load(path, policy=policy, optimiser=None)
    with pytest.raises(
        MissingKeyError, match=r"'steps'\]: \['more'\] are asked for and not there\."
    ):
        envkit.load(path, policy=policy, steps=None, more=None)
    with pytest.raises(
        MissingKeyError, match=r"'steps'\]: \['steps'\] are there and not asked for\."
    ):
        envkit.load(path, policy=policy)
    with pytest.raises(ArgumentTypeError, match=r"'steps' was given int.*steps=None"):
        envkit.load(path, policy=policy, steps=3)
    with pytest.raises(ArgumentTypeError, match=r"'policy' was saved as state_dict.*Generator"):
        envkit.load(path, policy=torch.Generator(), steps=None)


class Unreadable:
    """Holds something that no file without code can hold."""

    def state_dict(self):
        return {"deep": [object()]}

    def load_state_dict(self, state):
        raise AssertionError("never called")


def test_what_cannot_be_read_again_is_refused_and_the_old_file_stays(tmp_path):
    path = tmp_path / "a.pt"
    envkit.save(path, steps=1)

    with pytest.raises(
        ResumeError, match=r"state dict of the part 'bad'\['deep'\]\[0\] is of type object"
    ):
        envkit.save(path, bad=Unreadable())
    with pytest.raises(ResumeError, match="the part 'function' is"):
        envkit.save(path, function=print)

    assert envkit.load(path, steps=None) == {"steps": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    envkit.save(path, steps=1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))

    with pytest.raises(OSError, match="disk full"):
        envkit.save(path, steps=2)

    assert envkit.load(path, steps=None) == {"steps": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_file_of_another_kind_is_refused(tmp_path):
    torch.save({"policy": torch.zeros(1)}, tmp_path / "a.pt")

    with pytest.raises(ResumeError, match=r"not written by envkit\.save"):
        envkit.load(tmp_path / "a.pt", policy=None)


def test_a_load_that_is_not_strict_truncates_what_does_not_go_on(tmp_path, opened):
    env, other = opened(cartpole()).record_for_resume(), opened(cartpole())
    root = played(env, env.reset(), 3)[1]
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    envkit.save(tmp_path / "a.pt", env=env, optimiser=optimiser)
    other.unwrapped.gravity = 1.0

    with pytest.raises(ResumeError, match="something else came out"):
        envkit.load(tmp_path / "a.pt", env=other, optimiser=optimiser)
    envkit.load(tmp_path / "a.pt", env=other, optimiser=optimiser, strict=False)

    assert other.step(other.rand_action(root))["next", "truncated"].item()


def test_a_file_names_none_of_our_modules(tmp_path):
    """So that one that an older version wrote is read after they have moved."""
    pool = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    envkit.save(
        tmp_path / "run", env=GymEnv("CartPole-v1"), pool=pool, td=TensorDict(a=torch.zeros(2))
    )

    with zipfile.ZipFile(tmp_path / "run") as file:
        pickled = next(file.read(name) for name in file.namelist() if name.endswith("/data.pkl"))

    named = {
        str(told).split()[0]
        for code, told, _ in pickletools.genops(pickled)
        if "GLOBAL" in code.name
    }
    assert named  # torch's and Python's own
    assert not any(name.startswith("envkit") for name in named)


def test_a_tensordict_keeps_its_names(tmp_path):
    td = TensorDict(
        {"a": torch.rand(2, 3), "b": {"c": torch.zeros(2, 3, 1)}}, [2, 3], names=["row", "time"]
    )

    envkit.save(tmp_path / "a.pt", td=td)
    found = envkit.load(tmp_path / "a.pt", td=None)["td"]

    assert found.names == ["row", "time"] and (found == td).all()


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, full_disk):
    path = tmp_path / "a.pt"
    envkit.save(path, weights=torch.zeros(10))

    with full_disk(100_000), pytest.raises(WriteError, match=r"a\.pt cannot be written"):
        envkit.save(path, weights=torch.rand(1_000_000))

    assert envkit.load(path, weights=None)["weights"].shape == (10,)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_file_cut_anywhere_is_damaged(tmp_path):
    path = tmp_path / "a.pt"
    envkit.save(path, weights=torch.ones(300))
    whole = path.read_bytes()

    for left in (0, 1, 40, 600, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:left])
        with pytest.raises(ResumeError, match=r"a\.pt is damaged"):
            envkit.load(path, weights=None)


@pytest.mark.parametrize("checks", [True, False])
def test_a_flipped_bit_is_noticed_or_changes_nothing(tmp_path, checks):
    path, generator = tmp_path / "a.pt", random.Random(4)
    torch.serialization.set_crc32_options(checks)
    try:
        envkit.save(path, weights=torch.arange(50.0), steps=3)
        assert torch.serialization.get_crc32_options() is checks
    finally:
        torch.serialization.set_crc32_options(True)
    whole, noticed = path.read_bytes(), 0

    for _ in range(100):
        harmed = bytearray(whole)
        harmed[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(harmed)
        try:
            loaded = envkit.load(path, weights=None, steps=None)
        except ResumeError:
            noticed += 1
        else:
            assert loaded["weights"].equal(torch.arange(50.0)) and loaded["steps"] == 3

    assert noticed > 20


@pytest.mark.parametrize(
    "contents",
    [
        {"envkit": 1},
        {"envkit": 1, "parts": [3]},
        {"envkit": 1, "parts": {"w": 3}},
        {"envkit": 1, "parts": {"w": {"kind": "cake", "state": 1}}},
        {"envkit": 1, "parts": {"w": {"kind": "value", "state": {"__kind__": "cake"}}}},
        {"envkit": 1, "parts": {"w": {"kind": "value", "state": {"__kind__": "array"}}}},
    ],
)
def test_a_malformed_file_is_damaged(contents, tmp_path):
    torch.save(contents, tmp_path / "a.pt")

    with pytest.raises(ResumeError, match=r"a\.pt is damaged, or "):
        envkit.load(tmp_path / "a.pt", w=None)


class Stubborn:
    """Takes a state dict in two parts, and refuses the second."""

    def __init__(self, *, says: bool = True):
        self.says, self.first = says, 0

    def state_dict(self):
        if not self.says:
            raise ResumeError("lost")
        return {"first": self.first}

    def load_state_dict(self, state):
        self.first = state["first"]
        if self.first == 1:
            raise KeyError("second")


def test_no_part_changes_where_one_does_not_fit(tmp_path, opened):
    path = tmp_path / "a.pt"
    names = ("env", "policy", "optimiser", "mine")
    env = opened(SerialEnv(2, cartpole)).record_for_resume()
    played(env, env.reset(), 5)
    good = torch.nn.Linear(4, 2)
    held = (env, good, torch.optim.Adam(good.parameters()), torch.Generator().manual_seed(8))
    envkit.save(path, **dict(zip(names, held, strict=True)), torch=torch)
    other = opened(SerialEnv(2, cartpole)).record_for_resume()
    other.set_seed(5)
    start = other.reset()["observation"].clone()
    other.set_seed(5)
    bad = torch.nn.Sequential(torch.nn.Linear(4, 2))
    before = {key: value.clone() for key, value in bad.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(1, generator=generator)
    generator.manual_seed(3)
    torch.manual_seed(21)
    wanted = torch.rand(1)
    torch.manual_seed(21)

    optimiser = torch.optim.Adam(bad.parameters())
    with pytest.raises(ResumeError, match=r"part 'policy' of .*a\.pt .*Sequential") as told:
        envkit.load(path, env=other, policy=bad, optimiser=optimiser, mine=generator, torch=torch)

    assert "All parts are as they were." in str(told.value)
    assert other.reset()["observation"].equal(start)
    assert all(value.equal(before[key]) for key, value in bad.state_dict().items())
    assert torch.rand(1, generator=generator).equal(drawn)
    assert torch.rand(1).equal(wanted)


def test_a_part_that_cannot_say_where_it_was_is_loaded_first_and_named(tmp_path):
    path, policy = tmp_path / "a.pt", torch.nn.Linear(1, 1)
    saved = Stubborn()
    saved.first = 1
    envkit.save(path, policy=torch.nn.Linear(1, 1), odd=saved)
    before = policy.weight.clone()

    with pytest.raises(ResumeError, match=r"part 'odd'.* \['odd'\] could not be put back"):
        envkit.load(path, policy=policy, odd=Stubborn(says=False))

    assert policy.weight.equal(before)


def test_ctrl_c_while_parts_are_loaded_puts_them_back(tmp_path):
    class Interrupted(Stubborn):
        def load_state_dict(self, state):
            self.first += 1
            if self.first == 1:
                raise KeyboardInterrupt

    path, policy = tmp_path / "a.pt", torch.nn.Linear(1, 1)
    envkit.save(path, policy=torch.nn.Linear(1, 1), odd=Stubborn())
    before = policy.weight.clone()

    with pytest.raises(KeyboardInterrupt):
        envkit.load(path, policy=policy, odd=Interrupted())

    assert policy.weight.equal(before)
