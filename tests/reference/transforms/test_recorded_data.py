"""Transforms called on recorded data and in replay buffers: numbers are those of the reference library."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict

import envkit
from tests.reference.compare import OURS, THEIRS, check_same, check_works_alike, differs
from tests.reference.transforms.worlds import count, played

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import LazyTensorStorage, ReplayBuffer

pytestmark = pytest.mark.rounding

A = ["a"]
CASES = {  # name, keywords, direction
    "affine": ("ObservationNorm", {"loc": 1.0, "scale": 2.0, "in_keys": A}, "out"),
    "standardised": (
        "ObservationNorm",
        {"loc": 1.0, "scale": 2.0, "in_keys": A, "standard_normal": True},
        "out",
    ),
    "affine, inwards": (
        "ObservationNorm",
        {"loc": 1.0, "scale": 2.0, "in_keys": [], "in_keys_inv": A},
        "in",
    ),
    "constant scale": (
        "ObservationNorm",
        {"loc": 0.0, "scale": 0.0, "in_keys": A, "standard_normal": True},
        "out",
    ),
    "RewardScaling": ("RewardScaling", {"loc": 1.0, "scale": 2.0}, "out"),
    "RewardScaling, standardised": (
        "RewardScaling",
        {"loc": 1.0, "scale": 2.0, "standard_normal": True},
        "out",
    ),
    "RewardClipping": ("RewardClipping", {"clamp_min": -0.5, "clamp_max": 0.5}, "out"),
    "BinarizeReward": ("BinarizeReward", {}, "out"),
    "SignTransform": ("SignTransform", {"in_keys": A}, "out"),
    "ClipTransform": ("ClipTransform", {"in_keys": A, "low": 0.0}, "out"),
    "ClipTransform, inwards": ("ClipTransform", {"in_keys_inv": A, "high": 0.0}, "in"),
    "LineariseRewards": (
        "LineariseRewards",
        {"in_keys": A, "weights": [1.0, -2.0, 0.5, 0.0]},
        "out",
    ),
    "CatTensors": ("CatTensors", {"in_keys": ["b", "a"], "out_key": "o"}, "out"),
    "CatTensors, unsorted": (
        "CatTensors",
        {"in_keys": ["b", "a"], "out_key": "o", "sort": False, "del_keys": False},
        "out",
    ),
    "RenameTransform": ("RenameTransform", {"in_keys": A, "out_keys": ["z"]}, "out"),
    "RenameTransform, inwards": (
        "RenameTransform",
        {"in_keys": [], "out_keys": [], "in_keys_inv": ["z"], "out_keys_inv": A},
        "in",
    ),
    "RenameTransform, copied": (
        "RenameTransform",
        {"in_keys": A, "out_keys": [("n", "z")], "create_copy": True},
        "out",
    ),
    "UnsqueezeTransform": ("UnsqueezeTransform", {"dim": -2, "in_keys": A}, "out"),
    "SqueezeTransform": ("SqueezeTransform", {"dim": -1, "in_keys": ["reward"]}, "out"),
    "SqueezeTransform, inwards": ("SqueezeTransform", {"dim": -1, "in_keys_inv": A}, "in"),
    "FlattenObservation": (
        "FlattenObservation",
        {"first_dim": -3, "last_dim": -2, "in_keys": ["pixels"]},
        "out",
    ),
    "PermuteTransform": ("PermuteTransform", {"dims": (-1, -3, -2), "in_keys": ["pixels"]}, "out"),
    "PermuteTransform, inwards": (
        "PermuteTransform",
        {"dims": (-1, -3, -2), "in_keys_inv": ["pixels"]},
        "in",
    ),
    "DTypeCastTransform": (
        "DTypeCastTransform",
        {"dtype_in": torch.float32, "dtype_out": torch.float64},
        "out",
    ),
    "DoubleToFloat, inwards": ("DoubleToFloat", {"in_keys_inv": A}, "in"),
    "ToTensorImage": ("ToTensorImage", {}, "out"),
    "ToTensorImage, unscaled": ("ToTensorImage", {"from_int": False}, "out"),
    "Crop": ("Crop", {"w": 2, "h": 1, "top": 1, "left": 1, "in_keys": ["pixels"]}, "out"),
}
NEEDS_TORCHVISION = ("Crop",)


def data() -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    return TensorDict(
        {
            "a": torch.randn(5, 4, generator=generator),
            "b": torch.randn(5, 2, generator=generator),
            "reward": torch.tensor([[-1.0], [0.0], [0.25], [1.0], [3.0]]),
            "pixels": torch.randint(0, 256, (5, 3, 4, 3), dtype=torch.uint8, generator=generator),
        },
        [5],
    )


def moved(transform, td, direction):
    return transform(td) if direction == "out" else transform.inv(td)


def rounded(td: TensorDict) -> TensorDict:
    """Leave out what two orders of the same arithmetic may differ by."""
    return td.apply(lambda value: value.round(decimals=4) if value.is_floating_point() else value)


@pytest.mark.parametrize("case", CASES)
def test_data_is_changed_as_by_the_reference(case):
    name, keywords, direction = CASES[case]
    if name in NEEDS_TORCHVISION:
        pytest.importorskip("torchvision")

    def call(lib):
        return rounded(moved(getattr(lib, name)(**keywords), data(), direction))

    check_works_alike(call)


def test_running_statistics_are_those_of_the_reference():
    def call(lib):
        norm, generator = lib.VecNorm(["a"], decay=0.9), torch.Generator().manual_seed(0)
        shown = [
            norm(TensorDict({"a": torch.randn(rows, 4, generator=generator)}, [rows]))
            for rows in (3, 1, 5, 2)
        ]
        return [rounded(td) for td in (*shown, norm.loc, norm.scale)]

    check_works_alike(call)


@pytest.mark.parametrize("padding", ["same", "constant"])
def test_recorded_frames_are_joined_as_by_the_reference(padding):
    def call(lib):
        cast = lib.DTypeCastTransform(torch.int64, torch.float32, in_keys=["count"])
        raw = played(lib.TransformedEnv(count(lib, 3), cast), 8, break_when_any_done=False)
        keys = ["count", ("next", "count")]
        return lib.CatFrames(N=3, dim=-1, in_keys=keys, padding=padding)(raw)

    check_works_alike(call)


def test_rewards_to_go_are_those_of_the_reference():
    done = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]]).bool()[..., None]

    def call(lib):
        raw = TensorDict({"next": {"reward": torch.rand(2, 4, 1), "done": done}}, [2, 4])
        return rounded(lib.Reward2GoTransform(0.9, out_keys=["g"]).inv(raw))

    check_works_alike(call)


# ---------------------------------------------------------------------------------- replay buffers


def episode() -> TensorDict:
    done = torch.tensor([0, 1, 0, 0, 1]).bool()[:, None]
    following = TensorDict({"reward": torch.arange(5.0)[:, None], "done": done}, [5])
    action = torch.rand(5, 1, dtype=torch.float64)
    data = {"a": torch.arange(5.0), "action": action, "next": following}
    return TensorDict(data, [5], names=["time"])


def both_ways(module) -> list:
    """Transforms with something to do when data is written, and when it is sampled."""
    return [
        module.Reward2GoTransform(0.9, out_keys=["to_go"]),
        module.DTypeCastTransform(torch.float32, torch.float64, [], [], ["action"], ["action"]),
        module.ClipTransform(["a"], ["clipped"], low=1.0, high=2.0),
    ]


def buffer_of(way: str, transforms: list, compose, make=lambda transform: transform):
    if way == "transform=":
        transform = make(compose(*transforms))
        return ReplayBuffer(storage=LazyTensorStorage(5), transform=transform)
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    for index, transform in enumerate(transforms):
        if way == "append_transform":
            buffer.append_transform(make(transform))
        else:
            buffer.insert_transform(index, make(transform))
    return buffer


@pytest.mark.parametrize("way", ["transform=", "append_transform", "insert_transform"])
@pytest.mark.parametrize("make", [lambda transform: transform, OURS.for_replay_buffer])
def test_a_replay_buffer_runs_both_passes(way, make):
    mine = buffer_of(way, both_ways(OURS), OURS.Compose, make)
    expected = buffer_of(way, both_ways(THEIRS), THEIRS.Compose)

    for buffer in (mine, expected):
        buffer.extend(episode())

    stored, wanted = mine.storage[:], expected.storage[:]
    assert stored["action"].dtype == wanted["action"].dtype == torch.float32
    torch.testing.assert_close(stored["to_go"], wanted["to_go"])
    sample, like = mine[:], expected[:]
    assert sample["clipped"].equal(like["clipped"]) and sample["clipped"].min() == 1


def test_a_function_goes_into_a_replay_buffer_and_anything_else_is_refused():
    doubled = envkit.for_replay_buffer(lambda td: td.set("a", td["a"] * 2))

    assert doubled(episode())["a"].equal(episode()["a"] * 2)
    with pytest.raises(ValueError, match="must be a Transform or a function"):
        envkit.for_replay_buffer(3)


PASSES = {
    "returns to go": lambda lib: lib.Reward2GoTransform(0.9, out_keys=["to_go"]),
    "steps joined": lambda lib: lib.MultiStepTransform(
        n_steps=2, gamma=0.9, done_keys=["done", "terminated", "truncated"]
    ),
    "frames joined": lambda lib: lib.CatFrames(2, -1, ["action"], as_inverse=True),
    "another name": lambda lib: lib.RenameTransform([], [], ["b"], ["a"]),
}


@pytest.mark.parametrize(
    ("name", "invert"), [*((n, False) for n in PASSES), ("another name", True)]
)
def test_what_a_buffer_stores_and_samples_is_that_of_the_reference(name, invert):
    def call(lib):
        buffer = ReplayBuffer(storage=LazyTensorStorage(5))
        buffer.append_transform(PASSES[name](lib), invert=invert)
        buffer.extend(episode())
        return rounded(buffer.storage[:]), rounded(buffer[:])

    check_same(call)


PLAIN = {  # of transforms that do not look at other rows
    "another axis": lambda lib: lib.UnsqueezeTransform(-1, in_keys=["a"], in_keys_inv=["action"]),
    "an axis less": lambda lib: lib.SqueezeTransform(-1, in_keys=["action"]),
    "one axis of two": lambda lib: lib.FlattenObservation(-2, -1, in_keys=["action"]),
    "a copy": lambda lib: lib.RenameTransform(["a"], ["b"], create_copy=True),
    "other dtypes": lambda lib: lib.DTypeCastTransform(
        torch.float32, torch.float64, ["a"], ["a"], ["action"], ["action"]
    ),
    "singles": lambda lib: lib.DoubleToFloat(["action"]),
    "limits": lambda lib: lib.ClipTransform(["a"], ["c"], ["a"], ["a"], low=1.0, high=2.0),
    "affine": lambda lib: lib.ObservationNorm(1.0, 2.0, ["a"], ["n"], ["action"], ["action"]),
    "scaled": lambda lib: lib.RewardScaling(1.0, 2.0, [("next", "reward")]),
    "signs": lambda lib: lib.SignTransform(["a"]),
    "joined": lambda lib: lib.CatTensors(["action", ("next", "reward")], "o", del_keys=False),
    "stacked": lambda lib: lib.Stack(["action", ("next", "reward")], "o", del_keys=False),
    "left out": lambda lib: lib.ExcludeTransform("a"),
    "left out inwards": lambda lib: lib.ExcludeTransform("a", inverse=True),
    "chosen": lambda lib: lib.SelectTransform("a"),
    "moments": lambda lib: lib.VecNorm(["a"]),
    "a function": lambda lib: lib.UnaryTransform(["a"], ["f"], fn=torch.exp),
    "a chain": lambda lib: lib.Compose(
        lib.SignTransform(["a"], ["s"]), lib.RenameTransform(["s"], ["t"])
    ),
}


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_a_buffer_runs_plain_transforms_as_by_the_reference_inverted_or_not(name, invert):
    def call(lib):
        buffer = ReplayBuffer(storage=LazyTensorStorage(5))
        buffer.append_transform(PLAIN[name](lib), invert=invert)
        buffer.extend(episode())
        return rounded(buffer.storage[:]), rounded(buffer[:])

    check_works_alike(call)


def test_frames_are_joined_where_a_buffer_inverts_them():
    def stored(lib):
        buffer = ReplayBuffer(storage=LazyTensorStorage(5))
        buffer.append_transform(lib.CatFrames(2, -1, ["action"]), invert=True)
        buffer.extend(episode())
        return buffer.storage[:]["action"]

    differs("frames-in-the-data", stored)
    torch.manual_seed(0)
    own = stored(OURS)
    torch.manual_seed(0)
    assert own.equal(OURS.CatFrames(2, -1, ["action"])(episode())["action"])


def test_rewards_to_go_are_summed_where_a_buffer_inverts_them():
    def sampled(lib):
        buffer = ReplayBuffer(storage=LazyTensorStorage(5))
        buffer.append_transform(PASSES["returns to go"](lib), invert=True)
        buffer.extend(TensorDict.stack([episode()] * 5))
        return rounded(buffer[:]).get("to_go")

    differs("all-transforms-answer", sampled)
    assert sampled(OURS)[3].equal(rounded(PASSES["returns to go"](OURS).inv(episode()))["to_go"])


def primed(lib, shape, batch=(5,), has_entry=False, **keywords):
    data = TensorDict({"h": torch.ones(*batch, 2)} if has_entry else {}, batch)
    return lib.TensorDictPrimer(h=lib.Unbounded(shape), default_value=3.0, **keywords)(data)["h"]


def test_primers_prime_recorded_data():
    check_works_alike(lambda lib: primed(lib, (2,), batch=()))
    check_works_alike(lambda lib: primed(lib, (5, 2)))
    check_works_alike(lambda lib: primed(lib, (5, 2), has_entry=True))
    differs("all-transforms-answer", lambda lib: primed(lib, (2,)))
    assert primed(OURS, (2,)).shape == (5, 2)
    assert primed(OURS, (5, 2), expand_specs=True).shape == (5, 5, 2)


def slices(kind: str) -> TensorDict:
    """Rows of a buffer in the order in which a sampler of slices or of single steps gives them."""
    place = {"slices": [4, 5, 6, 7, 0, 1, 2, 9, 10], "steps": [7, 3, 3, 0, 10, 2, 8, 1]}[kind]
    rows = torch.tensor(place)
    done = torch.tensor([0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]).bool()[rows, None]
    shown, following = rows[:, None].float(), rows[:, None] + 1.0
    return TensorDict({"o": shown, "next": {"o": following, "done": done}}, [len(rows)])


@pytest.mark.parametrize("keys", [["o"], ["o", ("next", "o")], [("next", "o")]], ids=str)
@pytest.mark.parametrize("padding", ["same", "constant"])
def test_frames_of_sampled_slices_are_joined_as_by_the_reference(padding, keys):
    check_works_alike(
        lambda lib: [
            lib.CatFrames(n, -1, keys, padding=padding, padding_value=-1.0)(slices("slices"))
            for n in (2, 3, 5)
        ]
    )


def test_steps_in_another_order_than_that_of_time_are_not_joined():
    differs("order-of-time", lambda lib: lib.CatFrames(2, -1, ["o"])(slices("steps")))


def test_nested_frames_below_next_follow_their_root():
    def joined(lib, key):
        nested = slices("slices").rename_key_("o", key)
        nested.rename_key_(("next", "o"), ("next", *((key,) if isinstance(key, str) else key)))
        keys = [key, ("next", *((key,) if isinstance(key, str) else key))]
        return [lib.CatFrames(3, -1, keys)(nested)[key] for key in keys]

    differs("frames-in-the-data", lambda lib: joined(lib, ("a", "o")))
    assert all(
        plain.equal(nested)
        for plain, nested in zip(joined(OURS, "o"), joined(OURS, ("a", "o")), strict=True)
    )


def test_images_of_two_batch_axes_are_joined():
    def joined(lib):
        data = slices("slices").expand(2, 2, 9).clone()
        for key in ("o", ("next", "o")):
            data[key] = data[key].unsqueeze(-1).repeat(1, 1, 1, 2, 3)
        return lib.CatFrames(3, -1, ["o", ("next", "o")])(data)

    differs("all-transforms-answer", joined)
    row = OURS.CatFrames(3, -1, ["o", ("next", "o")])(slices("slices"))
    assert joined(OURS)[1, 0]["next", "o"][:, 0, ::3].equal(row["next", "o"])


def test_differences_are_of_what_a_buffer_holds():
    def recorded(lib):
        env = lib.TransformedEnv(lib.GymEnv("Pendulum-v1"), lib.NextObservationDelta())
        env.set_seed(0)
        return sorted(map(str, env.rollout(2).keys(True, True)))

    assert "'delta'" in differs("differences-in-buffers", recorded).split("torchrl:")[1]


def test_statistics_of_intrinsic_rewards_follow_without_a_training_mode():
    def counted(lib):
        nets = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        env = lib.TransformedEnv(lib.GymEnv("Pendulum-v1"), lib.RNDTransform(*nets))
        env.rollout(4)
        return round(float(env.transform.obs_rms.count))

    assert differs("statistics-follow", counted).split() == ["envkit:", "4", "torchrl:", "0"]
