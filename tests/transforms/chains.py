"""Chains of transforms whose arithmetic runs on leaves, for envs that observe ``place`` and ``sight``.

Conventions
    place  float (2,); sight: ``lamps``, three of bool or int, and ``level``, uint8.
"""

from __future__ import annotations

import torch

from envkit import (
    BinarizeReward,
    CatFrames,
    CatTensors,
    ClipTransform,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    FlattenObservation,
    InitTracker,
    LineariseRewards,
    ObservationNorm,
    PermuteTransform,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    TargetReturn,
    TimeMaxPool,
    Transform,
    UnsqueezeTransform,
)


class Opaque(Transform):
    """Does nothing, in a way no program can know of: what follows it is not fused, nor stacked."""

    only_adds_done = True

    def _call(self, next_td):
        return next_td

    def _reset(self, td, td_reset):
        return td_reset


def episodes():
    return [StepCounter(4), RewardSum(), InitTracker(), TargetReturn(3.0)]


def values(half: torch.dtype):
    return [
        RewardScaling(0.5, 2.0),
        RewardClipping(-1.0, 0.5),
        RewardSum(),
        BinarizeReward(["reward"], ["is_good"]),
        LineariseRewards(["reward"], ["sum"], weights=[-1.5]),
        SignTransform(["place", "reward"], ["side", "sign"]),
        ClipTransform(["place"], ["near"], low=-0.25),
        ObservationNorm(torch.tensor([0.5, -1.0]), 2.0, ["place"], standard_normal=True),
        ObservationNorm(0.1, 0.5, [("sight", "level")], ["light"]),
        DTypeCastTransform(torch.float32, half, ["near"], ["coarse"]),
        DTypeCastTransform(torch.uint8, torch.int64, [("sight", "level")]),
        DoubleToFloat(),
    ]


def frames():
    return [
        CatFrames(3, -1, ["place"], ["places"]),
        CatFrames(2, -1, ["place"], padding="constant", padding_value=7.0),
        TimeMaxPool(["place"], ["now"], T=1),
        TimeMaxPool(["place"], ["farthest"], 2),
        UnsqueezeTransform(0, in_keys=["places"], allow_positive_dim=True),
        PermuteTransform((-1, -2), in_keys=["places"]),
        FlattenObservation(0, -1, in_keys=["places"], allow_positive_dim=True),
        UnsqueezeTransform(-1, in_keys=["reward"]),
        SqueezeTransform(-1, in_keys=["reward"]),
    ]


def names():
    return [
        CatTensors(["place", ("sight", "lamps")], "seen", del_keys=False),
        RenameTransform(["place", "sight", "reward"], [("body", "place"), "eyes", "gain"]),
        RewardSum(["gain"], ["total"]),
        RenameTransform(["total"], ["copy"], create_copy=True),
        ExcludeTransform(("eyes", "lamps")),
        StepCounter(step_count_key="count"),
        SelectTransform("seen", "body", "copy", "is_init"),
    ]
