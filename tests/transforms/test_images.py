"""Images, windows of frames, and recorded videos."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import (
    Bounded,
    Categorical,
    CatFrames,
    CenterCrop,
    Compose,
    Composite,
    Crop,
    EnvBase,
    GrayScale,
    ObservationNorm,
    ParallelEnv,
    RenameTransform,
    Resize,
    SerialEnv,
    TimeMaxPool,
    ToTensorImage,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    VideoFolder,
    VideoRecorder,
    check_env_specs,
)
from envkit.errors import (
    ArgumentError,
    KeyCollisionError,
    MissingKeyError,
    MissingLibraryError,
    ResetMaskError,
    SpecError,
    SpecFitError,
)
from tests.zoo.envs import Count
from tests.zoo.transform_envs import TwoTeams

NONSTOP = {"break_when_any_done": False}


class Canvas(EnvBase):
    """Shows a picture of 4 rows and 6 columns, all of whose bytes are the step; ends at ``n``."""

    def __init__(self, n=5):
        super().__init__()
        self.n = n
        self.observation_spec = Composite(pixels=Bounded(0, 255, (4, 6, 3), dtype=torch.uint8))
        self.action_spec = Categorical(2, shape=(1,))

    def _out(self):
        return TensorDict({"pixels": torch.full((4, 6, 3), self.count, dtype=torch.uint8)})

    def _reset(self, td, **kwargs):
        self.count = 0
        return self._out()

    def _step(self, td):
        self.count += 1
        return self._out().set("terminated", torch.tensor([self.count == self.n]))

    def _set_seed(self, seed):
        pass


def picture(rows=4, columns=6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (rows, columns, 3), dtype=torch.uint8, generator=generator)


# ------------------------------------------------------------------------------------------ images


def test_a_pipeline_of_images_is_declared():
    env = TransformedEnv(
        Canvas(),
        Compose(
            ToTensorImage(),
            GrayScale(),
            Resize(8, 10),
            CenterCrop(6),
            Crop(4, 5, 1, 1),
            UnsqueezeTransform(-4, in_keys=["pixels"]),
            CatFrames(3, -4),
            ObservationNorm(0.5, 2.0, ["pixels"], standard_normal=True),
        ),
    )

    assert env.observation_spec["pixels"].shape == (3, 1, 4, 5)
    check_env_specs(env)
    data = env.rollout(4)
    shown = (data["pixels"][:, :, 0, 0, 0] * 2 + 0.5) * 255 / 0.9999
    assert shown.round().int().tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_pictures_become_images(batch):
    given_picture = picture().expand(*batch, 4, 6, 3)
    data = TensorDict({"pixels": given_picture}, batch)

    image = ToTensorImage(out_keys=["image"])(data)["image"]

    assert image.shape == (*batch, 3, 4, 6) and image.dtype == torch.float32
    assert torch.equal(image, given_picture.movedim(-1, -3).float() / 255)


def test_pictures_are_divided_when_they_are_bytes_or_when_asked():
    bytes_, floats = TensorDict({"pixels": picture()}), TensorDict({"pixels": picture().float()})

    def largest(data, **kwargs):
        return ToTensorImage(**kwargs)(data.clone())["pixels"].max().item()

    assert largest(bytes_) <= 1 < largest(floats)
    assert largest(bytes_, from_int=False) > 1 >= largest(floats, from_int=True)
    assert ToTensorImage(dtype=torch.float64)(bytes_.clone())["pixels"].dtype == torch.float64
    assert ToTensorImage(unsqueeze=True)(bytes_.clone())["pixels"].shape == (1, 3, 4, 6)
    image = TensorDict({"pixels": picture().movedim(-1, 0)})
    assert ToTensorImage(shape_tolerant=True)(image)["pixels"].shape == (3, 4, 6)


def test_brightness_is_a_weighted_sum_of_colours():
    image = torch.zeros(2, 3, 1, 1)
    image[0, 0], image[1, 1] = 1, 1

    grey = GrayScale()(TensorDict({"pixels": image}, [2]))["pixels"]

    assert grey.shape == (2, 1, 1, 1)
    assert grey.flatten().tolist() == pytest.approx([0.2989, 0.587])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_resized_images_keep_dtype_and_colour(interpolation, dtype):
    image = torch.full((2, 3, 4, 6), 200, dtype=dtype)

    resized = Resize(5, 3, interpolation)(TensorDict({"pixels": image}, [2]))["pixels"]

    assert resized.shape == (2, 3, 5, 3) and resized.dtype == dtype
    assert torch.allclose(resized.float(), torch.tensor(200.0))
    assert Resize(7)(TensorDict({"pixels": image}, [2]))["pixels"].shape == (2, 3, 7, 7)


def test_crops_are_cut_where_they_should_be():
    image = picture().movedim(-1, 0)
    data = TensorDict({"pixels": image})

    assert CenterCrop(2, 4)(data.clone())["pixels"].equal(image[:, 1:3, 1:5])
    assert Crop(2, 3, 1, 2)(data.clone())["pixels"].equal(image[:, 1:3, 2:5])


@pytest.mark.parametrize(
    ("crop", "rows", "columns"),  # where the ones are
    [
        (CenterCrop(6, 6), range(1, 5), range(1, 5)),
        (CenterCrop(7, 2), range(1, 5), range(2)),
        (Crop(6, 3), range(4), range(3)),
        (Crop(3, 3, 2, 3), range(2), range(1)),
        (Crop(3, 3, -1, -2), range(1, 3), range(2, 3)),
        (Crop(3, 3, 9, -9), range(0), range(0)),
    ],
)
def test_what_is_cut_beyond_an_image_is_zero(crop, rows, columns):
    expected = torch.zeros(3, crop.w, crop.h)
    expected[:, rows.start : rows.stop, columns.start : columns.stop] = 1
    spec = Composite(pixels=Bounded(0.5, 1.0, (3, 4, 4)))

    shown = crop(TensorDict({"pixels": torch.ones(3, 4, 4)}))["pixels"]

    assert shown.equal(expected)
    declared = crop.transform_observation_spec(spec)["pixels"]
    assert declared.is_in(shown) and declared.is_in(shown / 2)


def test_the_middle_of_a_larger_size_is_the_whole_image():
    shown = CenterCrop(6, 6)(TensorDict({"pixels": torch.ones(3, 4, 4)}))["pixels"]

    assert shown.shape == (3, 6, 6) and shown.sum() == 48


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Resize(0), "w is 0"),
        (lambda: Resize(3, interpolation="area"), "interpolation is 'area'"),
        (lambda: CenterCrop(3, 0), "h is 0"),
    ],
)
def test_sizes_are_checked(make, error):
    with pytest.raises(ArgumentError, match=error):
        make()


@pytest.mark.parametrize(
    ("transform", "error"),
    [
        (lambda: GrayScale(), r"three channels, but.*\(4, 6, 3\)"),
    ],
)
def test_images_of_another_shape_are_refused(transform, error):
    with pytest.raises(SpecError, match=error):
        _ = TransformedEnv(Canvas(), transform()).observation_spec


def test_entries_that_are_no_images_are_refused():
    for make in (GrayScale, ToTensorImage, lambda **k: Resize(3, **k), VideoRecorder):
        with pytest.raises(SpecError, match=r"shape \(1,\)"):
            _ = TransformedEnv(Count(3), make(in_keys=["count"])).observation_spec


# ------------------------------------------------------------------------------------------- frames


def frames(env, key="count", steps=5):
    data = env.rollout(steps, **NONSTOP)
    return data[key].tolist(), data["next", key].tolist()


def test_frames_are_joined_oldest_first_and_begin_anew_with_each_episode():
    env = TransformedEnv(Count(3), CatFrames(3, -1, in_keys=["count"]))

    root, following = frames(env)

    assert root == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 0, 1]]
    assert following == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 1], [0, 1, 2]]
    check_env_specs(env)


def test_frames_before_an_episode_can_be_a_constant():
    joined = CatFrames(
        3, -1, in_keys=["count"], out_keys=["w"], padding="constant", padding_value=-7
    )
    env = TransformedEnv(Count(3), joined)

    root, following = frames(env, "w", 2)

    assert root == [[-7, -7, 0], [-7, 0, 1]] and following == [[-7, 0, 1], [0, 1, 2]]
    check_env_specs(env)


def test_the_constant_is_within_the_declared_bounds():
    constant = CatFrames(2, -3, padding="constant", padding_value=0.0)
    env = TransformedEnv(
        Canvas(), Compose(ToTensorImage(), ObservationNorm(1.0, 1.0, ["pixels"]), constant)
    )

    assert env.observation_spec["pixels"].low.min() == 0
    check_env_specs(env)


def test_the_maximum_is_that_of_the_frames_there_are():
    class Down(Count):
        def _out(self):
            out = super()._out()
            return out.set("count", -out["count"])

    env = TransformedEnv(Down(3), TimeMaxPool(["count"], ["max"], T=2))

    root, following = frames(env, "max")

    assert root == [[0], [0], [-1], [0], [0]] and following == [[0], [-1], [-2], [0], [-1]]
    check_env_specs(env)


def test_a_window_of_one_frame_is_the_frame_and_needs_no_memory():
    transforms = Compose(CatFrames(1, -1, ["count"], ["a"]), TimeMaxPool(["count"], ["b"]))
    env = TransformedEnv(Count(3), transforms)

    data = env.rollout(3)

    assert data["a"].equal(data["count"]) and data["b"].equal(data["count"])
    assert set(env.observation_keys) == {"count", "a", "b"}


def test_later_transforms_may_change_what_frames_were_joined():
    plain = TransformedEnv(Count(3), CatFrames(2, -1, ["count"]))
    halved = TransformedEnv(
        TransformedEnv(
            Count(3), Compose(CatFrames(2, -1, ["count"]), ObservationNorm(0.0, 0.5, "count"))
        ),
        RenameTransform(["count"], ["w"]),
    )

    assert frames(halved, "w")[1] == (torch.tensor(frames(plain)[1]) / 2).tolist()
    check_env_specs(halved)


def test_two_windows_of_one_entry_need_two_names():
    twice = Compose(CatFrames(2, -1, ["count"]), CatFrames(2, -1, ["count"]))
    with pytest.raises(KeyCollisionError, match="share their memory"):
        _ = TransformedEnv(Count(3), twice).observation_spec

    env = TransformedEnv(
        Count(3), Compose(CatFrames(2, -1, ["count"], ["a"]), CatFrames(2, -1, ["a"], ["b"]))
    )
    assert frames(env, "b", 3)[1] == [[0, 0, 0, 1], [0, 1, 1, 2], [1, 2, 2, 3]]


def test_frames_of_groups_obey_their_own_resets():
    joined = CatFrames(2, -1, [("a", "count"), ("b", "count")], [("a", "w"), ("b", "w")])
    env = TransformedEnv(TwoTeams((2, 3)), joined)

    data = env.rollout(5, **NONSTOP)

    assert data["a", "w"].tolist() == [[0, 0], [0, 1], [0, 0], [0, 1], [0, 0]]
    assert data["b", "w"].tolist() == [[0, 0], [0, 1], [1, 2], [0, 0], [0, 1]]
    check_env_specs(env)
    lost = CatFrames(2, -1, [("a", "count")], ["w"])
    with pytest.raises(ResetMaskError, match="reset_key="):
        TransformedEnv(TwoTeams(), lost).reset()
    given_key = CatFrames(2, -1, [("a", "count")], ["w"], reset_key=("a", "_reset"))
    data = TransformedEnv(TwoTeams((2, 3)), given_key).rollout(4, **NONSTOP)
    assert data["w"].tolist() == [[0, 0], [0, 1], [0, 0], [0, 1]]


RECORDED = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@settings(max_examples=25)
@given(lengths=RECORDED, count=st.integers(1, 4), padding=st.sampled_from(["same", "constant"]))
def test_recorded_data_is_joined_as_in_the_env(lengths, count, padding):
    total = sum(lengths)
    makers = [lambda n=n: Count(n) for n in lengths]
    given_padding = {"padding": padding, "padding_value": -3}
    env = TransformedEnv(
        SerialEnv(len(lengths), makers), CatFrames(count, -1, ["count"], **given_padding)
    )
    raw = SerialEnv(len(lengths), makers).rollout(total, **NONSTOP)

    online = env.rollout(total, **NONSTOP)
    offline = CatFrames(count, -1, ["count", ("next", "count")], **given_padding)(raw)

    assert offline["count"].equal(online["count"])
    assert offline["next", "count"].equal(online["next", "count"])


def test_recorded_data_may_look_ahead_and_say_what_is_padding():
    raw = Count(3).rollout(5, **NONSTOP)

    ahead = CatFrames(3, -1, ["count"], ["w"], future=True, mask_key="pad")(raw)

    assert ahead["w"].tolist() == [[0, 1, 2], [1, 2, 2], [2, 2, 2], [0, 1, 1], [1, 1, 1]]
    assert ahead["pad"].int().tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 0, 1], [0, 1, 1]]


def test_recorded_data_is_joined_along_time_wherever_that_is():
    raw = SerialEnv(2, [lambda: Count(2), lambda: Count(3)]).rollout(4, **NONSTOP)
    expected = CatFrames(2, -1, ["count"])(raw.clone())["count"]
    turned = raw.transpose(0, 1).contiguous()
    turned.names = ["time", None]

    assert CatFrames(2, -1, ["count"])(turned)["count"].transpose(0, 1).equal(expected)
    pooled = TimeMaxPool(["count"], T=2)(raw.clone())["count"]
    assert pooled[..., 0].equal(expected.max(-1).values)


def test_data_on_its_way_into_a_buffer_is_joined():
    raw = Count(3).rollout(3)
    inverse = CatFrames(2, -1, ["count"], as_inverse=True)

    assert inverse.inv(raw)["count"].tolist() == [[0, 0], [0, 1], [1, 2]]
    assert inverse(raw.clone())["count"].equal(raw["count"])


def test_joining_frames_says_what_is_wrong():
    for arguments, error in [
        ({"N": 0, "dim": -1}, "N is 0"),
        ({"N": 2, "dim": 1}, "dim is 1"),
        ({"N": 2, "dim": -1, "padding": "zeros"}, "padding is 'zeros'"),
    ]:
        with pytest.raises(ArgumentError, match=error):
            CatFrames(**arguments)
    with pytest.raises(ArgumentError, match="T is 0"):
        TimeMaxPool(T=0)
    with pytest.raises(SpecError, match=r"along axis -2.*shape \(1,\)"):
        _ = TransformedEnv(Count(3), CatFrames(2, -2, ["count"])).observation_spec
    with pytest.raises(MissingKeyError, match=r"reads \['pixels'\]"):
        _ = TransformedEnv(Count(3), CatFrames(2, -1)).observation_spec
    with pytest.raises(MissingKeyError, match="reads 'pixels'"):
        CatFrames(2, -1)(Count(3).rollout(3))
    with pytest.raises(ArgumentError, match="needs a time axis"):
        CatFrames(2, -1, ["count"])(Count(3).reset())
    both = ["count", ("next", "count")]
    with pytest.raises(NotImplementedError, match="look ahead from other steps"):
        CatFrames(2, -1, both, future=True)(Count(3).rollout(3))
    with pytest.raises(NotImplementedError, match="without 'next'"):
        _ = TransformedEnv(Count(3), CatFrames(2, -1, both)).observation_spec
    for wrong in ({"future": True}, {"as_inverse": True}):
        with pytest.raises(ArgumentError, match="works on recorded data"):
            _ = TransformedEnv(Count(3), CatFrames(2, -1, ["count"], **wrong)).observation_spec


# -------------------------------------------------------------------------------------------- video


class Log:
    def __init__(self):
        self.videos = []

    def log_video(self, **kwargs):
        self.videos.append(kwargs)


def test_steps_and_resets_are_recorded():
    env = TransformedEnv(Canvas(), VideoRecorder(skip=1))

    env.rollout(3)

    assert env.transform.frames.shape == (4, 3, 4, 6)
    assert env.transform.frames[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    video = env.transform.dump()
    assert video.shape == (1, 4, 3, 4, 6) and env.transform.frames is None
    assert env.transform.dump() is None
    check_env_specs(env)


def test_a_logger_is_given_each_video():
    log = Log()
    env = TransformedEnv(Canvas(), Compose(VideoRecorder(log, "eval", fps=7)))

    env.rollout(4)
    env.transform.dump()
    env.rollout(2)
    env.transform.dump(suffix="late", fps=2, codec="x")
    env.transform.dump()

    first, second = log.videos
    assert (second["fps"], second["codec"]) == (2, "x") and "codec" not in first
    assert (first["name"], first["step"], first["fps"]) == ("eval", 0, 7)
    assert first["video"].shape == (1, 2, 3, 4, 6)  # every second of five frames
    assert (second["name"], second["step"]) == ("eval_late", 1)


def test_a_batch_is_tiled_and_partial_resets_add_no_frame():
    env = TransformedEnv(SerialEnv(3, [lambda n=n: Canvas(n) for n in (2, 3, 4)]), VideoRecorder())

    env.rollout(4, **NONSTOP)

    frames_ = env.transform.frames
    assert frames_.shape == (5, 3, 8, 12)
    assert frames_[2, 0, ::4, ::6].tolist() == [[2, 2], [2, 0]]
    with pytest.raises(ArgumentError, match="make_grid=False"):
        TransformedEnv(SerialEnv(2, Canvas), VideoRecorder(make_grid=False)).reset()


def test_what_is_recorded_can_be_limited():
    few = TransformedEnv(Canvas(), VideoRecorder(max_frames=2, skip=1, center_crop=2))
    few.rollout(4)
    assert few.transform.frames.shape == (2, 3, 2, 2)

    log = Log()
    env = TransformedEnv(Canvas(2), VideoRecorder(log, "end", skip=1, dump_on_done=True))
    env.rollout(4, **NONSTOP)
    assert [video["video"].shape[1] for video in log.videos] == [3, 3]


def test_images_of_floats_and_data_are_recorded():
    recorder = VideoRecorder()
    recorder(TensorDict({"pixels": picture().movedim(-1, 0).float() / 255}))
    recorder(TensorDict({"pixels": picture().expand(2, 4, 6, 3)}, [2]))

    assert recorder.frames.shape == (3, 3, 4, 6)
    difference = recorder.frames[0].int() - recorder.frames[1].int()
    assert difference.abs().max() <= 1


def test_a_folder_keeps_videos_as_files(tmp_path):
    imageio = pytest.importorskip("imageio.v3")
    env = TransformedEnv(
        Canvas(), VideoRecorder(VideoFolder(tmp_path / "v", fps=10), "run", skip=1)
    )

    env.rollout(3)
    env.transform.dump()

    seen = imageio.imread(tmp_path / "v" / "run_0.gif", index=None)
    assert seen.shape == (4, 4, 6, 3)
    assert np.abs(seen[:, 0, 0, 0].astype(int) - [0, 1, 2, 3]).max() <= 2


def test_a_folder_says_what_is_wrong(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="format is 'avi'"):
        VideoFolder(tmp_path, format="avi")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingLibraryError, match=r"'\.\[video\]'"):
        VideoFolder(tmp_path, format="mp4")


def test_frames_of_worker_processes_are_recorded_outside():
    env = TransformedEnv(ParallelEnv(2, Canvas, num_processes=1), VideoRecorder())

    env.rollout(2)

    assert env.transform.frames[:, 0, 0, 0].tolist() == [0, 1, 2]
    env.base_env.close()


def test_recorders_check_their_arguments():
    with pytest.raises(ArgumentError, match="skip is 0"):
        VideoRecorder(skip=0)
    with pytest.raises(ArgumentError, match="records one entry"):
        VideoRecorder(in_keys=["a", "b"])
    unbounded = Unbounded((4, 6, 4))
    with pytest.raises(SpecError, match="three channels or one"):
        VideoRecorder()._leaf_after(unbounded)


class Nested(EnvBase):
    """Counts at the root, its done flag beside an agent: no flag at the root."""

    _batch_locked = False

    def __init__(self):
        super().__init__(batch_size=[2])
        self.observation_spec = Composite(count=Unbounded((2, 1)), shape=[2])
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Categorical(2, shape=(2, 1))
        flag = Categorical(2, shape=(2, 1), dtype=torch.bool)
        self.done_spec = Composite(agent=Composite(done=flag, shape=[2]), shape=[2])

    def _out(self, count):
        done = TensorDict({"done": count > 8}, count.shape[:1])
        return TensorDict({"count": count, "agent": done}, count.shape[:1])

    def _reset(self, td, **kwargs):
        return self._out(torch.zeros(2, 1))

    def _step(self, td):
        return self._out(td["count"] + 1).set("reward", torch.ones(2, 1))

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("reset_key", [None, ("agent", "_reset")])
def test_frames_at_the_root_begin_anew_only_where_the_only_flags_there_are_say_so(reset_key):
    frames = CatFrames(3, -1, in_keys=["count"], out_keys=["frames"], reset_key=reset_key)
    env = TransformedEnv(Nested(), frames)
    root = env.reset()
    for _ in range(2):
        root = env.step_mdp(env.rand_step(root))
    root["agent", "_reset"] = torch.tensor([[True], [False]])

    data = env.rand_step(env.reset(root))

    assert data["count"].tolist() == [[0], [0]]  # of the env: no level speaks for its root
    assert data["frames"].tolist() == [[0, 0, 0], [0, 1, 2]]
    assert data["next", "frames"].tolist() == [[0, 0, 1], [1, 2, 1]]


@pytest.mark.parametrize("crop", [Crop(2), CenterCrop(2)])
def test_what_has_no_rows_and_columns_is_not_cut(crop):
    with pytest.raises(SpecFitError, match=r"shape \(4,\).*unsqueeze it first"):
        crop(TensorDict({"pixels": torch.zeros(4)}))


def test_an_env_with_frames_is_refused_a_mask_of_their_padding():
    frames = CatFrames(2, -1, ["count"], mask_key="mask")

    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match=r"mask_key is 'mask'.* recorded data"):
            _ = TransformedEnv(Count(3), frames.clone()).observation_spec
