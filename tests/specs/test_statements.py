"""The statements and examples of the behaviour reference for specs, one by one."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

import envkit
from envkit import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    make_composite_from_td,
)


@pytest.fixture
def c():
    return Composite(
        pos=Unbounded((4, 3)),
        body=Composite(leg=Categorical(3, shape=(4,)), shape=(4,)),
        shape=(4,),
    )


def test_the_family():
    assert type(Bounded(-1, 1)) is BoundedContinuous and isinstance(Bounded(-1, 1), Bounded)
    assert type(Bounded(0, 9, dtype=torch.int64)) is BoundedDiscrete
    assert type(Unbounded()) is UnboundedContinuous
    assert type(Unbounded(dtype=torch.int32)) is UnboundedDiscrete
    assert (Unbounded().shape, Unbounded().dtype) == ((1,), torch.float32)
    assert (Categorical(3).shape, Categorical(3).dtype) == ((), torch.int64)
    assert Categorical(2, dtype=torch.bool).rand().dtype == torch.bool
    assert (OneHot(4).shape, OneHot(4).dtype) == ((4,), torch.bool)
    assert (MultiCategorical([2, 3]).shape, MultiCategorical([2, 3]).dtype) == ((2,), torch.int64)
    assert (MultiOneHot([2, 3]).shape, MultiOneHot([2, 3]).dtype) == ((5,), torch.bool)
    assert (Binary(3).shape, Binary(3).dtype) == ((3,), torch.int8)
    assert (NonTensor().shape, NonTensor().dtype, NonTensor().space) == ((), None, None)
    assert Composite(batch_size=(2,)).shape == Composite(shape=(2,)).shape == (2,)
    assert Bounded(0, 1).domain == "continuous" and Categorical(2).domain == "discrete"
    assert Bounded(0, 1).device == torch.device("cpu") and Composite().device is None
    for name in ("ContinuousBox", "CategoricalBox", "DiscreteBox", "BoxList", "BinaryBox"):
        assert name in envkit.__all__
    with pytest.raises(ValueError, match="must equal n=4"):
        OneHot(4, shape=(3,))
    assert Unbounded((2,)) != Unbounded((3,))


def test_making_values():
    assert Bounded(-1, 1, shape=(4, 3)).rand((2,)).shape == (2, 4, 3)
    tail = Bounded(-1, float("inf"), (1000,)).rand()
    assert tail.min() >= -1 and 1 < tail.max() < 100  # as Gymnasium draws
    assert Bounded(1, 2, shape=(1,)).zero() == 0
    assert not OneHot(4).zero().any() and not OneHot(4).is_in(OneHot(4).zero())
    assert Categorical(3).enumerate().tolist() == [0, 1, 2]
    assert OneHot(4).enumerate().shape == (4, 4)
    assert MultiCategorical([2, 3]).enumerate().shape == (6, 2)
    with pytest.raises(NotImplementedError):
        Bounded(0, 1).enumerate()
    masked = Categorical(3, mask=torch.tensor([True, False, True]))
    assert masked.enumerate(use_mask=True).tolist() == [0, 2]
    assert Categorical(5).cardinality() == 5
    assert MultiCategorical([2, 3]).cardinality() == 6
    assert Composite(a=Categorical(5), b=OneHot(2)).cardinality() == 10
    assert Unbounded().cardinality() == float("inf")
    # a value that two members have counts once
    assert Choice([Categorical(2), Categorical(3)]).cardinality() == 3


def test_testing_and_repairing():
    spec = Bounded(-1, 1, (3,))

    assert spec.is_in(torch.zeros(7, 3)) and not spec.is_in(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(AssertionError):
        spec.assert_is_in(torch.zeros(2))
    with pytest.raises(TypeError):
        spec.type_check(torch.zeros(3, dtype=torch.int64))
    spec.type_check(torch.full((5,), 9.0))
    assert Categorical(5).project(torch.tensor(9)) == 4
    forbidden = Categorical(5, mask=torch.tensor([True, True, False, False, False]))
    assert forbidden.project(torch.tensor(3)) in forbidden


def test_shape_operations():
    assert Bounded(-1, 1, shape=(4, 3))[0].shape == (3,)
    assert Bounded(-1, 1, shape=(4, 3))[..., :1].shape == (4, 1)
    assert Bounded(-1, 1, (4, 3)).expand(2, 4, 3).shape == (2, 4, 3)
    with pytest.raises(ValueError, match="trailing"):
        Unbounded((4, 3)).expand(2, 4, 2)
    wide = Composite(a=Unbounded((4, 3)), shape=(4,)).unsqueeze(-1)
    assert wide.shape == (4, 1) and wide["a"].shape == (4, 1, 3)
    square = Composite(a=Unbounded((4, 3)), shape=(4,)).reshape(2, 2)
    assert square["a"].shape == (2, 2, 3)
    assert len(Unbounded((4, 3)).unbind()) == 4
    assert OneHot(3).index(OneHot(3).encode(1), torch.arange(3.0)) == 1
    assert Unbounded((4, 3)).make_neg_dim(0).shape == (-1, 3)
    assert Unbounded((4, 3)).make_neg_dim(0).zero().shape == (1, 3)


def test_conversion(monkeypatch):
    assert OneHot(4).encode(2).tolist() == [False, False, True, False]
    assert Unbounded((1,)).encode(3.0).shape == (1,)
    with pytest.raises(RuntimeError):
        Unbounded((3,)).encode([1, 2])
    assert Bounded(-1, 1, (1,)).encode(7) == 7
    monkeypatch.setenv("CHECK_SPEC_ENCODE", "1")
    with pytest.raises(AssertionError):
        Bounded(-1, 1, (1,)).encode(7)
    monkeypatch.delenv("CHECK_SPEC_ENCODE")
    assert OneHot(4).to_numpy(OneHot(4).encode(2)) == 2
    assert Composite(a=OneHot(4)).to_numpy(TensorDict(a=OneHot(4).encode(2))) == {"a": 2}
    assert OneHot(4).to_categorical_spec() == Categorical(4)
    assert Categorical(4).to_one_hot_spec() == OneHot(4)
    assert MultiOneHot([2, 3]).to_categorical_spec() == MultiCategorical([2, 3])
    assert not Composite(a=Unbounded()).lock_().clone().is_locked
    with pytest.raises(ValueError, match="allows no option"):
        Categorical(2, mask=torch.zeros(2, dtype=torch.bool)).rand()


def test_composite(c):
    assert c["body", "leg"] == Categorical(3, (4,))
    assert c.get(("body", "arm"), None) is None
    c.set("vel", Unbounded((4, 2)))
    c["body", "arm"] = Unbounded((4, 1))
    del c["vel"]
    del c["body", "arm"]
    assert list(c.keys()) == ["pos", "body"]
    assert list(c.keys(True)) == ["pos", ("body", "leg"), "body"]
    assert list(c.keys(True, True)) == ["pos", ("body", "leg")]
    assert list(c.keys(leaves_only=True)) == ["pos"]
    assert c.rand((2,)).batch_size == (2, 4)
    with pytest.raises(ValueError, match="begin"):
        c["bad"] = Unbounded((3,))
    with pytest.raises(KeyError):
        c["nothing"]
    c["deep", "new"] = Unbounded((4, 1))
    assert c["deep"].shape == (4,)
    c["none"] = None
    assert "none" in c.keys() and "none" not in c.zero()
    assert not c.is_in(TensorDict(pos=torch.zeros(4, 3), batch_size=[4]))
    assert c.is_in(c.rand().set("extra", torch.zeros(4)))
    moved = c.separates("deep", ("body", "leg"))
    assert list(moved.keys(True, True)) == [("deep", "new"), ("body", "leg")]
    assert c.empty().is_empty() and c.empty().shape == (4,)
    assert c.pop("none") is None
    with pytest.raises(ValueError, match="not the beginning"):
        c.shape = (4, 5)
    assert c.refine_names("env").rand().names == ["env"]


def test_locking(c):
    assert c.lock_() is c and c.is_locked and c["body"].is_locked
    for edit in (
        lambda: c.set("x", None),
        lambda: c["body"].__setitem__("x", None),
        lambda: c.__delitem__(("body", "leg")),
        lambda: c["body"].unlock_(),
    ):
        with pytest.raises(RuntimeError):
            edit()
    assert c.unlock_() is c and not c["body"].is_locked


def test_stacking():
    assert torch.stack([Bounded(-1, 1, (3,))] * 2) == Bounded(-1, 1, (2, 3))
    ragged = torch.stack([Unbounded((2,)), Unbounded((3,))])
    assert type(ragged) is Stacked and ragged.shape == (2, -1) and ragged[1] == Unbounded((3,))
    assert torch.stack([Bounded(0, 1, (3,)), Bounded(0, 2, (3,))]).rand().shape == (2, 3)
    with pytest.raises(RuntimeError):
        torch.stack([Unbounded((2,)), Bounded(0, 1, (2,))])
    envs = torch.stack([Composite(o=Unbounded(2), a=Unbounded(1)), Composite(o=Unbounded(3))])
    assert type(envs) is StackedComposite and list(envs.keys()) == ["o"]
    assert list(envs[0].keys()) == ["o", "a"]
    with pytest.raises(KeyError):
        envs["a"]
    assert isinstance(envs.rand(), LazyStackedTensorDict) and envs.is_in(envs.rand())
    whole = consolidate_spec(envs)
    assert check_no_exclusive_keys(whole) and not check_no_exclusive_keys(envs)
    assert whole[1]["a"].shape == (0,)


def test_non_tensor():
    spec = NonTensor(shape=(2,), example_data="a")

    for value in (spec.rand(), spec.zero(), spec.one()):
        assert isinstance(value, NonTensorData) and value.data == "a" and value.batch_size == (2,)
    assert spec.is_in("b") and not spec.is_in(torch.zeros(2))
    assert spec.expand(3, 2).shape == (3, 2)
    for call in (spec.cardinality, spec.enumerate):
        with pytest.raises(NotImplementedError):
            call()


def test_helpers():
    td = TensorDict(a=torch.zeros(()), n=TensorDict(b=torch.zeros(2, dtype=torch.uint8)), t="x")

    spec = make_composite_from_td(td)

    assert spec["a"] == Unbounded((1,))
    assert spec["n", "b"] == Unbounded((2,), dtype=torch.uint8)
    assert isinstance(spec["t"], NonTensor)
    assert make_composite_from_td(td, unsqueeze_null_shapes=False)["a"].shape == ()
    assert make_composite_from_td(td, dynamic_shape=True)["n", "b"].shape == (-1,)
    assert not contains_lazy_spec(spec)
    assert contains_lazy_spec(Composite(a=torch.stack([Unbounded((2,)), Unbounded((3,))])))
