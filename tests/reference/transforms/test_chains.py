"""Chains of transforms drawn at random, around one tiny env of both libraries."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.reference.compare import check_same, check_works_alike
from tests.reference.transforms.worlds import count, leaf_specs, played

LINKS = {
    "StepCounter": lambda lib: lib.StepCounter(),
    "StepCounter with a limit": lambda lib: lib.StepCounter(3),
    "InitTracker": lambda lib: lib.InitTracker(),
    "RewardSum": lambda lib: lib.RewardSum(),
    "TrajCounter": lambda lib: lib.TrajCounter(),
    "TargetReturn": lambda lib: lib.TargetReturn(9.0),
    "RewardScaling": lambda lib: lib.RewardScaling(1.0, 2.0),
    "SignTransform": lambda lib: lib.SignTransform(["success"], ["sign"]),
    "DTypeCastTransform": lambda lib: lib.DTypeCastTransform(
        torch.int64, torch.float32, in_keys=["count"]
    ),
    "UnsqueezeTransform": lambda lib: lib.UnsqueezeTransform(-1, in_keys=["success"]),
    "ExcludeTransform": lambda lib: lib.ExcludeTransform("success"),
    "RenameTransform": lambda lib: lib.RenameTransform(["count"], ["number"], create_copy=True),
    "TensorDictPrimer": lambda lib: lib.TensorDictPrimer({"hidden": lib.Unbounded((3,))}),
}
CHAINS = st.lists(st.sampled_from(sorted(LINKS)), min_size=2, max_size=3, unique=True)


def shapes_and_dtypes(env):
    """What specs say of the data; TorchRL keeps the class of integers in a cast to floats."""
    specs = leaf_specs(env)
    kinds = ("observation", "reward", "done", "action")
    return {kind: {key: leaf[1:] for key, leaf in specs[kind].items()} for kind in kinds}


@settings(max_examples=20)
@given(chain=CHAINS, stops=st.booleans())
def test_a_chain_shows_what_the_chain_of_the_reference_shows(chain, stops):
    def call(lib):
        env = lib.TransformedEnv(count(lib), lib.Compose(*(LINKS[name](lib) for name in chain)))
        return [shapes_and_dtypes(env), played(env, 8, break_when_any_done=stops)]

    check_same(call)


def camera(lib, shape, floats):
    """Shows an image that changes with each step, height and width first."""
    dtype = torch.float32 if floats else torch.uint8

    class Camera(lib.EnvBase):
        def __init__(self):
            super().__init__()
            self.observation_spec = lib.Composite(pixels=lib.Bounded(0, 255, shape, dtype=dtype))
            self.action_spec = lib.Categorical(2, shape=(1,))
            self.reward_spec = lib.Unbounded((1,))

        def _shown(self):
            numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
            return {"pixels": ((numbers + 40 * self.time) % 256).to(dtype)}

        def _reset(self, td, **kwargs):
            self.time = 0
            return TensorDict(self._shown())

        def _step(self, td):
            self.time += 1
            done = torch.tensor([self.time > 2])
            return TensorDict({**self._shown(), "reward": torch.ones(1), "done": done})

        def _set_seed(self, seed):
            pass

    return Camera()


TO_IMAGES = st.fixed_dictionaries(
    {},
    optional={
        "from_int": st.booleans(),
        "unsqueeze": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "out_keys": st.just(["image"]),
    },
)
AFTER_IMAGES = {  # what needs no torchvision there
    "nothing": lambda lib, key: [],
    "flat": lambda lib, key: [lib.FlattenObservation(-3, -1, in_keys=[key])],
    "turned": lambda lib, key: [lib.PermuteTransform((-1, -3, -2), in_keys=[key])],
    "joined": lambda lib, key: [lib.CatFrames(2, -3, in_keys=[key])],
    "scaled": lambda lib, key: [lib.ObservationNorm(0.5, 2.0, in_keys=[key])],
}


@settings(max_examples=20)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 3])),
    floats=st.booleans(),
    options=TO_IMAGES,
    after=st.sampled_from(sorted(AFTER_IMAGES)),
    serial=st.booleans(),
)
def test_images_become_what_they_become_in_the_reference(shape, floats, options, after, serial):
    def call(lib):
        def make():
            first = lib.ToTensorImage(in_keys=["pixels"], **options)
            key = options.get("out_keys", ["pixels"])[0]
            chain = lib.Compose(first, *AFTER_IMAGES[after](lib, key))
            return lib.TransformedEnv(camera(lib, shape, floats), chain)

        env = lib.SerialEnv(2, make) if serial else make()
        specs = shapes_and_dtypes(env)["observation"]
        shown = {key: leaf for key, leaf in specs.items() if not key.startswith("_")}
        return [
            shown,
            played(env, 5, break_when_any_done=False).exclude("terminated", ("next", "terminated")),
        ]

    check_works_alike(call)
