"""Transforms called on data: as a module, on the way in, and in a replay buffer."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs.transforms import functional

import envkit
from tests.reference.compare import OURS, check_same, check_works_alike, differs


def actions() -> TensorDict:
    return TensorDict({"action": torch.arange(24.0).reshape(4, 2, 3)}, [4])


def flat_actions() -> TensorDict:
    return TensorDict({"flat": torch.arange(24.0).reshape(4, 6)}, [4])


def pair() -> TensorDict:
    return TensorDict({"x": torch.zeros(4, 3), "y": torch.ones(4, 3)}, [4])


def nodes() -> TensorDict:
    return TensorDict({"x": {"o": torch.zeros(4, 3)}, "y": {"o": torch.ones(4, 3)}}, [4])


def words() -> TensorDict:
    return TensorDict({"word": "hello", "list": [1, 2], "number": 3})


def sequence(ends: tuple[int, ...] | None = None) -> TensorDict:
    data = TensorDict({"action": torch.arange(10.0).reshape(2, 5, 1)}, [2, 5])
    if ends is not None:
        done = torch.zeros(2, 5, 1, dtype=torch.bool)
        done[0, list(ends)] = True
        data["next", "done"] = done
    return data


def steps(length: int = 5, begin: int = 0, ends: tuple[int, ...] = ()) -> TensorDict:
    """Two recorded sequences that count, with rewards of one."""
    place = (torch.arange(length) + begin).float().expand(2, -1)[..., None].clone()
    done = torch.zeros(2, length, 1, dtype=torch.bool)
    done[0, list(ends)] = True
    following = {"place": place + 1, "reward": torch.ones(2, length, 1), "done": done}
    following = TensorDict({**following, "terminated": done.clone()}, [2, length])
    return TensorDict({"place": place, "action": place.clone(), "next": following}, [2, length])


FORWARD = {  # a transform of either library, and data
    "ActionScaling": (lambda lib: lib.ActionScaling(loc=1.0, scale=2.0), actions),
    "ActionScaling from 0 to 1": (
        lambda lib: lib.ActionScaling(loc=1.0, scale=2.0, standard_normal=False),
        actions,
    ),
    "ActionScaling from mean and deviation": (
        lambda lib: lib.ActionScaling.from_stats(
            mean=torch.tensor([1.0, 2.0, 3.0]), std=torch.tensor([2.0, 0.0, 1.0])
        ),
        actions,
    ),
    "ActionScaling from bounds, of recorded data": (
        lambda lib: lib.ActionScaling.from_stats(
            low=torch.tensor(-1.0), high=torch.tensor(3.0), in_keys_inv=[]
        ),
        actions,
    ),
    "ActionScaling without numbers": (lambda lib: lib.ActionScaling(), actions),
    "FlattenAction": (lambda lib: lib.FlattenAction(), actions),
    "FlattenAction, renamed": (lambda lib: lib.FlattenAction(out_keys=["flat"]), actions),
    "FlattenAction of nothing": (lambda lib: lib.FlattenAction(), pair),
    "Stack": (lambda lib: lib.Stack(["x", "y"], "z", dim=-2), pair),
    "Stack, inputs kept": (lambda lib: lib.Stack(["x", "y"], "z", del_keys=False), pair),
    "Stack of nodes": (lambda lib: lib.Stack(["x", "y"], "z"), nodes),
    "Stack of what is not there": (lambda lib: lib.Stack(["x", "w"], "z"), pair),
    "MultiStepTransform": (lambda lib: lib.MultiStepTransform(3, 0.5), steps),
    "RandomTruncationTransform": (lambda lib: lib.RandomTruncationTransform(1, 2), pair),
    "RandomCropTensorDict, too long": (lambda lib: lib.RandomCropTensorDict(6), steps),
    "RandomCropTensorDict of no batch": (
        lambda lib: lib.RandomCropTensorDict(1),
        lambda: TensorDict({"a": torch.ones(3)}),
    ),
    "RandomCropTensorDict of one step": (lambda lib: lib.RandomCropTensorDict(0), steps),
    "MultiAction": (lambda lib: lib.MultiAction(), actions),
    "FiniteTensorDictCheck": (lambda lib: lib.FiniteTensorDictCheck(), pair),
    "FiniteTensorDictCheck of NaN": (
        lambda lib: lib.FiniteTensorDictCheck(),
        lambda: TensorDict({"a": {"b": torch.tensor([1.0, float("nan")])}}),
    ),
    "ExpandAs": (
        lambda lib: lib.ExpandAs("a", "b", "c"),
        lambda: TensorDict({"a": torch.ones(2), "b": torch.ones(2, 3)}),
    ),
    "ExpandAs of another shape": (
        lambda lib: lib.ExpandAs("a", "b"),
        lambda: TensorDict({"a": torch.ones(2), "b": torch.ones(3, 3)}),
    ),
    "ExpandAs of what is not there": (lambda lib: lib.ExpandAs("x", "w"), pair),
    "Timer": (lambda lib: lib.Timer(), pair),
    "UnaryTransform": (lambda lib: lib.UnaryTransform(["x"], ["z"], fn=lambda x: x + 1), pair),
    "UnaryTransform of a string": (
        lambda lib: lib.UnaryTransform(["word"], ["loud"], fn=lambda word: word + "!"),
        words,
    ),
    "UnaryTransform of raw objects": (
        lambda lib: lib.UnaryTransform(
            ["word"], ["kind"], fn=lambda word: type(word).__name__, use_raw_nontensor=True
        ),
        words,
    ),
    "UnaryTransform of what is not there": (
        lambda lib: lib.UnaryTransform(["w"], ["z"], fn=lambda x: x + 1),
        pair,
    ),
    "Hash of a string": (lambda lib: lib.Hash(["word"], ["hash"]), words),
    "Hash of a seeded string": (lambda lib: lib.Hash(["word"], ["hash"], seed="salt"), words),
    "Hash of a tensor": (lambda lib: lib.Hash(["number"], ["hash"]), words),
    "Hash by a function": (
        lambda lib: lib.Hash(["word"], ["hash"], hash_fn=lambda word: torch.tensor(len(word))),
        words,
    ),
    "Hash by a function of a seed": (
        lambda lib: lib.Hash(
            ["word"], ["hash"], hash_fn=lambda word, seed: torch.tensor(len(word) + seed), seed=2
        ),
        words,
    ),
    "ConditionalPolicySwitch": (
        lambda lib: lib.ConditionalPolicySwitch(lambda td: td, lambda td: True),
        pair,
    ),
    "SuccessReward": (
        lambda lib: lib.SuccessReward(scale=-1.0),
        lambda: TensorDict({"success": torch.tensor([[True], [False]])}, [2]),
    ),
    "SuccessReward of numbers": (
        lambda lib: lib.SuccessReward("won", "prize", scale=2.0),
        lambda: TensorDict({"won": torch.tensor([1, 0])}, [2]),
    ),
    "SuccessReward of what is not there": (lambda lib: lib.SuccessReward(), pair),
    "ActionChunkTransform": (lambda lib: lib.ActionChunkTransform(3), sequence),
    "ActionChunkTransform, longer than the data": (
        lambda lib: lib.ActionChunkTransform(7),
        sequence,
    ),
    "ActionChunkTransform over ends": (
        lambda lib: lib.ActionChunkTransform(3),
        lambda: sequence((1, 2)),
    ),
    "ActionChunkTransform past ends": (
        lambda lib: lib.ActionChunkTransform(3, chunk_key="c", pad_key="p", done_key=None),
        lambda: sequence((1, 2)),
    ),
    "ActionChunkTransform of what is not there": (lambda lib: lib.ActionChunkTransform(3), pair),
    "ActionChunkTransform of other axes": (
        lambda lib: lib.ActionChunkTransform(3, time_dim=-3),
        actions,
    ),
    "BatchSizeTransform": (
        lambda lib: lib.BatchSizeTransform(reshape_fn=lambda data: data.unflatten(0, (2, 2))),
        pair,
    ),
}
INVERSE = {
    "ActionScaling": FORWARD["ActionScaling"],
    "ActionScaling from 0 to 1": FORWARD["ActionScaling from 0 to 1"],
    "ActionScaling of recorded data": FORWARD["ActionScaling from bounds, of recorded data"],
    "ActionScaling without numbers": FORWARD["ActionScaling without numbers"],
    "FlattenAction": (
        lambda lib: lib.FlattenAction(out_keys_inv=["flat"], action_shape=(2, 3)),
        flat_actions,
    ),
    "FlattenAction of an unknown shape": (
        lambda lib: lib.FlattenAction(out_keys_inv=["flat"]),
        flat_actions,
    ),
    "FlattenAction of another shape": (
        lambda lib: lib.FlattenAction(out_keys_inv=["flat"], action_shape=(2, 2)),
        flat_actions,
    ),
    "Stack": (
        lambda lib: lib.Stack(["a", "b"], "z", in_key_inv="x", out_keys_inv=["a", "b", "c"]),
        pair,
    ),
    "Stack of what is not there": (
        lambda lib: lib.Stack(["a"], "z", in_key_inv="w", out_keys_inv=["a"]),
        pair,
    ),
    "MeanActionSelector": (
        lambda lib: lib.MeanActionSelector(),
        lambda: TensorDict({"action": {"mean": torch.ones(4, 2), "var": torch.ones(4, 2)}}, [4]),
    ),
    "DeviceCastTransform": (lambda lib: lib.DeviceCastTransform("cpu"), pair),
    "RandomCropTensorDict": (lambda lib: lib.RandomCropTensorDict(2), steps),
    "MultiStepTransform, too short": (lambda lib: lib.MultiStepTransform(3, 0.5), lambda: steps(3)),
    "MultiStepTransform over an end": (
        lambda lib: lib.MultiStepTransform(3, 0.5, done_keys=["done", "terminated", "truncated"]),
        lambda: steps(6, ends=(2,)),
    ),
    "MultiStepTransform, other flags": (
        lambda lib: lib.MultiStepTransform(2, 0.5, done_keys=["done"]),
        lambda: steps(6, ends=(2,)),
    ),
}
INVERSE |= {
    "UnaryTransform": (
        lambda lib: lib.UnaryTransform([], [], ["z"], ["x"], fn=None, inv_fn=lambda x: x - 1),
        pair,
    ),
    "UnaryTransform by one function": (
        lambda lib: lib.UnaryTransform([], [], ["z"], ["x"], fn=lambda x: x + 1),
        pair,
    ),
    "UnaryTransform outwards": (lambda lib: lib.UnaryTransform(["x"], ["z"], fn=lambda x: x), pair),
    "ActionChunkTransform": (lambda lib: lib.ActionChunkTransform(3), sequence),
    "Hash of what was not hashed": (
        lambda lib: lib.Hash([], [], ["word"], ["hash"]),
        lambda: TensorDict({"hash": torch.zeros(32, dtype=torch.uint8)}),
    ),
}


def node(*batch: int) -> TensorDict:
    return TensorDict({"x": TensorDict({"a": torch.ones(4, 1, 3)}, batch)}, [4])


for name in ("UnsqueezeTransform", "SqueezeTransform"):
    for dim, batch in ((-1, (4,)), (-1, (4, 1)), (-2, (4, 1)), (-2, (4,))):
        FORWARD[f"{name} along {dim} of a node of {batch}"] = (
            lambda lib, name=name, dim=dim: getattr(lib, name)(dim, in_keys=["x"]),
            lambda batch=batch: node(*batch),
        )
    INVERSE[f"{name} of a node"] = (
        lambda lib, name=name: getattr(lib, name)(-1, in_keys=[], in_keys_inv=["x"]),
        lambda: node(4, 1),
    )
INVERSE["RenameTransform of nothing outwards"] = (
    lambda lib: lib.RenameTransform((), (), in_keys_inv=["y"], out_keys_inv=["z"]),
    lambda: TensorDict({"z": torch.ones(())}),
)
REFUSED = {
    "ActionChunkTransform of 0": lambda lib: lib.ActionChunkTransform(0),
    "BatchSizeTransform of nothing": lambda lib: lib.BatchSizeTransform(),
    "Timer of two": lambda lib: lib.Timer(["a", "b"]),
    "UnaryTransform without a function": lambda lib: lib.UnaryTransform(["a"], ["b"]),
    "ActionScaling, half of the numbers": lambda lib: lib.ActionScaling(loc=1.0),
    "ActionScaling by zero": lambda lib: lib.ActionScaling(loc=1.0, scale=0.0),
    "ActionScaling of two": lambda lib: lib.ActionScaling(["a", "b"]),
    "ActionScaling of nothing": lambda lib: lib.ActionScaling([]),
    "ActionScaling, half of a pair": lambda lib: lib.ActionScaling.from_stats(mean=torch.ones(1)),
    "ActionScaling of no statistics": lambda lib: lib.ActionScaling.from_stats(),
    "FlattenAction, positive": lambda lib: lib.FlattenAction(0, 1),
    "FlattenAction, swapped": lambda lib: lib.FlattenAction(-1, -2),
    "RandomTruncationTransform of 0": lambda lib: lib.RandomTruncationTransform(0, 2),
    "RandomTruncationTransform, swapped": lambda lib: lib.RandomTruncationTransform(5, 2),
    "RandomTruncationTransform, no chance": lambda lib: lib.RandomTruncationTransform(1, 2, 2.0),
    "RandomTruncationTransform, not first": lambda lib: lib.RandomTruncationTransform(
        1, 2, 0.5, -1.0
    ),
    "TerminateTransform by no function": lambda lib: lib.TerminateTransform(3),
    "Stack, positive": lambda lib: lib.Stack(["a"], "z", dim=0),
    "Stack, half of a way in": lambda lib: lib.Stack(["a"], "z", in_key_inv="z"),
    "MultiStepTransform of 0": lambda lib: lib.MultiStepTransform(0, 0.5),
    "BurnInTransform of a function": lambda lib: lib.BurnInTransform([torch.nn.Linear(2, 2)], 2),
}


@pytest.mark.parametrize("case", FORWARD)
def test_a_transform_called_on_data_gives_what_the_reference_gives(case):
    make, data = FORWARD[case]

    check_same(lambda lib: make(lib)(data()))


@pytest.mark.parametrize("case", INVERSE)
def test_the_way_in_gives_what_the_reference_gives(case):
    make, data = INVERSE[case]

    check_same(lambda lib: make(lib).inv(data()))


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_reference_refuses_is_refused(case):
    check_same(REFUSED[case])


def written(lib, transform) -> ReplayBuffer:
    if lib is OURS:
        transform = envkit.for_replay_buffer(transform)
    return ReplayBuffer(storage=LazyTensorStorage(50, ndim=2), transform=transform)


def test_n_step_transitions_reach_across_writes():
    def call(lib):
        buffer = written(lib, lib.MultiStepTransform(3, 0.5))
        for begin in (0, 2, 4, 9):
            buffer.extend(steps(2 if begin < 4 else 5, begin))
        return buffer[:]

    check_same(call)


def test_targets_know_that_a_window_reaches_an_end():
    differs("ends-of-windows", lambda lib: lib.MultiStepTransform(3, 0.5).inv(steps(6, ends=(2,))))


def test_the_number_of_steps_may_change_between_writes():
    def call(lib):
        transform = lib.MultiStepTransform(3, 0.5)
        first = transform.inv(steps(4))
        transform.n_steps = 2
        return [first, transform.inv(steps(4, 4))]

    check_same(call)


def test_scaled_actions_are_stored_as_the_env_takes_them():
    def call(lib):
        buffer = written(lib, lib.ActionScaling(loc=1.0, scale=2.0))
        buffer.extend(steps())
        return [buffer.storage[:], buffer[:]]

    check_same(call)


# ----------------------------------------------------------------------------------------- sequences


class Memory(torch.nn.Module):
    """Adds up what it reads, from a hidden state on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, place, hidden):
        total = place.cumsum(-2) * self.weight + hidden[..., :1, :]
        return total, total


def memory(key=("next", "hidden")) -> TensorDictModule:
    return TensorDictModule(Memory(), in_keys=["place", "hidden"], out_keys=["out", key])


def recorded() -> TensorDict:
    return steps().set("hidden", torch.zeros(2, 5, 1))


@pytest.mark.parametrize("burn_in", [0, 1, 4])
def test_what_follows_a_burn_in_begins_with_what_was_remembered(burn_in):
    check_same(lambda lib: lib.BurnInTransform([memory()], burn_in)(recorded()))
    check_same(lambda lib: lib.BurnInTransform(memory(), burn_in, ["hidden"])(recorded()))


def test_a_burn_in_keeps_no_gradient_owns_no_module_and_leaves_its_input():
    data, burn_in = recorded(), envkit.BurnInTransform([memory()], 2)

    rest = burn_in(data)

    assert not rest["hidden"].requires_grad and not list(burn_in.parameters())
    assert not data["hidden"].any() and data.shape == (2, 5)


def test_a_burn_in_of_all_there_is_says_so():
    with pytest.raises(ValueError, match="no step is left"):
        envkit.BurnInTransform([memory()], 5)(recorded())
    with pytest.raises(KeyError, match="gave no such entry"):
        envkit.BurnInTransform([memory()], 2, ["trace"])(recorded())


def test_a_stretch_is_drawn_from_all_that_fit():
    data = steps(4)

    starts = {int(envkit.RandomCropTensorDict(3)(data)["place"][0, 0]) for _ in range(30)}

    assert starts == {0, 1}
    assert envkit.RandomCropTensorDict(4)(data)["place"].equal(data["place"])
    differs("draws-reach-the-end", lambda lib: lib.RandomCropTensorDict(4)(steps(4)))


def test_a_stretch_is_contiguous_within_each_sequence_and_without_padding():
    data = steps(6)
    data["mask"] = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])

    for _ in range(10):
        part = envkit.RandomCropTensorDict(3, mask_key="mask")(data)
        assert part.shape == (2, 3) and part["mask"].all()
        assert (part["place"].diff(dim=1) == 1).all()
    assert envkit.RandomCropTensorDict(1, sample_dim=0)(data).shape == (1, 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: envkit.RandomCropTensorDict(2),
        lambda: envkit.BurnInTransform([memory()], 2),
        lambda: envkit.MultiStepTransform(2, 0.5),
    ],
)
def test_an_env_takes_no_transform_of_recorded_sequences(make):
    env = envkit.TransformedEnv(envkit.GymEnv("CartPole-v1"), make())

    with pytest.raises(RuntimeError, match=r"works on recorded sequences.*replay buffer"):
        env.rollout(2)


def test_a_hash_leads_back_to_what_it_was_made_of():
    def call(lib):
        known = {}
        there = lib.Hash(["word"], ["hash"], repertoire=known)
        back = lib.Hash([], [], ["word"], ["hash"], repertoire=known)
        hashed = there(words())
        return [
            back.inv(hashed.select("hash")),
            there.get_input_from_hash(hashed["hash"]),
            lib.Hash.hash_to_repertoire_key(torch.tensor([[1, 2], [3, 4]])),
        ]

    check_same(call)
    check_same(lambda lib: lib.Hash(["a"], ["b"]).get_input_from_hash(torch.zeros(32)))
    check_same(
        lambda lib: (
            [lib.Hash.reproducible_hash(given) for given in ("hello", None, 3, "")]
            + [lib.Hash.reproducible_hash("hello", "salt")]
        )
    )


def test_a_users_transform_of_observations_is_written_as_in_the_reference():
    def call(lib):
        class Doubled(lib.ObservationTransform):
            def _apply_transform(self, value):
                return value * 2

            def _reset(self, td, td_reset):
                return self._call(td_reset)

        env = lib.TransformedEnv(
            lib.GymEnv("CartPole-v1"), Doubled(["observation"], ["observation"])
        )
        env.set_seed(0)
        return [lib.ObservationTransform().in_keys, env.reset()]

    check_same(call)


# -------------------------------------------------------------------------------------------- frames


def cat_frames(lib):
    return lib.cat_frames if lib is OURS else functional.cat_frames


def past_ends() -> torch.Tensor:
    """Which frames of windows of 3 belong to another episode, where the third of five steps ends one."""
    mask = torch.zeros(5, 3, dtype=torch.bool)
    mask[0, :2] = mask[1, :1] = mask[3, :2] = mask[4, :1] = True
    return mask


JOINED = {
    "first repeated": lambda join: join(torch.arange(10).view(5, 2), 3, -1, time_dim=-2),
    "constant": lambda join: join(
        torch.arange(10).view(5, 2), 3, -1, time_dim=-2, padding="constant", padding_value=7
    ),
    "more frames than steps": lambda join: join(torch.arange(4.0).view(2, 2), 3, -1, time_dim=-2),
    "images": lambda join: join(torch.arange(48.0).view(2, 3, 2, 4, 1), 2, -3, time_dim=-4),
    "without features": lambda join: join(torch.arange(3.0)[:, None, None], 2, -1, time_dim=-2),
    "within episodes": lambda join: join(
        torch.arange(5.0)[None, :, None],
        *(3, -1),
        time_dim=-2,
        padding="constant",
        padding_value=-1.0,
        done_mask=past_ends()[None],
    ),
    "before the first, whatever a mask says": lambda join: join(
        torch.arange(5.0)[:, None],
        *(3, -1),
        time_dim=-2,
        padding="constant",
        done_mask=torch.zeros(5, 3, dtype=torch.bool),
    ),
    "axis of the batch": lambda join: join(torch.ones(3, 1), 2, 0, time_dim=-2),
    "time of the batch": lambda join: join(torch.ones(3, 1), 2, -1, time_dim=0),
    "unknown padding": lambda join: join(torch.ones(3, 1), 2, -1, time_dim=-2, padding="none"),
}


@pytest.mark.parametrize("case", JOINED)
def test_frames_of_a_tensor_are_joined_as_in_the_reference(case):
    check_same(lambda lib: JOINED[case](cat_frames(lib)))


def test_padding_repeats_the_first_frame_of_each_episode():
    frames = torch.arange(5.0)[None, :, None]

    joined = envkit.cat_frames(frames, 3, -1, time_dim=-2, done_mask=past_ends()[None])

    expected = [[0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 3, 3], [3, 3, 4]]
    assert joined.tolist() == [expected]


@pytest.mark.parametrize("keywords", [{}, {"keep_dones": False}, {"keep_rewards": False}])
def test_selecting_by_hand_keeps_rewards_and_the_flag_done(keywords):
    def selected(lib):
        entries = ("seen", "other", "reward", "done", "terminated")
        data = TensorDict({key: torch.zeros(3, 1) for key in entries}, [3])
        return lib.SelectTransform("seen", **keywords)(data)

    check_works_alike(selected)
