"""Values between JAX and torch: every dtype, layout and size, and who may write where."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envkit.errors import HandoffError
from envkit_bridges import dlpack
from envkit_bridges.dlpack import (
    adopted,
    jax_device_of,
    to_jax,
    to_jit,
    to_torch,
    torch_device_of,
)

INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
FLOATS = ["float16", "bfloat16", "float32"]
DTYPES = ["bool", *INTEGERS, *FLOATS, "complex64"]
SHAPES = [(), (0,), (3, 0), (5,), (1, 1), (2, 3)]
WAYS = {
    "copied": to_jax,
    "lent": lambda tensor: to_jax(tensor, copy=False),
    "argument": lambda tensor: jax.jit(lambda x: x)(to_jit(tensor)),
    "lent argument": lambda tensor: jax.jit(lambda x: x)(to_jit(tensor, copy=False)),
}
LAYOUTS = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.mT,
    "strided": lambda tensor: tensor[..., ::2],
    "expanded": lambda tensor: tensor[:1].expand(4, -1),
    "misaligned": lambda tensor: tensor.flatten()[1:],
    "slice": lambda tensor: tensor[1:, 1:],
}

every_way = pytest.mark.parametrize("hand", WAYS.values(), ids=WAYS)


def sample(dtype, shape=(2, 3)):
    values = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    return (values % 2).bool() if dtype == "bool" else values.to(getattr(torch, dtype))


def same(array, tensor):
    """Equal in dtype, shape and value, compared in a dtype that holds both."""
    assert array.dtype.name == str(tensor.dtype).removeprefix("torch.")
    assert array.shape == tuple(tensor.shape)
    wide = np.complex128 if tensor.is_complex() else np.float64
    tensor = tensor.detach().resolve_conj()
    expected = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()
    np.testing.assert_array_equal(np.asarray(array).astype(wide), expected)
    return True


# --------------------------------------------------------------------------- what crosses


@every_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_size_crosses_to_jax(hand, shape, dtype):
    tensor = sample(dtype, shape)

    assert same(hand(tensor), tensor)


@every_way
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float32", "uint32"])
def test_every_layout_crosses_to_jax(hand, layout, dtype):
    tensor = layout(sample(dtype, (4, 6)))

    assert same(hand(tensor), tensor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_size_crosses_to_torch(shape, dtype):
    numbers = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    array = jnp.asarray(numbers.astype(jnp.dtype(dtype)))  # not every CPU converts float16

    assert same(array, to_torch(array))


def test_a_lazily_conjugated_tensor_crosses_by_value():
    tensor = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj()

    assert to_jax(tensor).tolist() == [1 - 2j, 3 + 1j]
    assert tensor.imag.is_neg()
    assert to_jax(tensor.imag).tolist() == [-2, 1]


def test_a_narrow_float_that_numpy_lacks_crosses_bit_by_bit():
    tensor = torch.tensor([1.0, -0.5, 448.0]).to(torch.float8_e4m3fn)

    array = to_jax(tensor)

    assert array.dtype == jnp.float8_e4m3fn
    assert array.astype(jnp.float32).tolist() == [1.0, -0.5, 448.0]


@every_way
def test_read_only_numpy_crosses(hand):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False

    np.testing.assert_array_equal(hand(array), array)


@every_way
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32)[::-1],
        np.arange(6, dtype=np.int8)[::-1],
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        np.frombuffer(bytes(range(17)), np.uint8)[1:].view(np.float32),
        np.broadcast_to(np.float32(3), (2, 2)),
        np.array([1.5, -2], jnp.bfloat16),
    ],
    ids=["reversed", "reversed bytes", "fortran", "misaligned", "broadcast", "bfloat16"],
)
def test_numpy_of_any_layout_crosses(hand, array):
    result = hand(array)

    assert result.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(result, np.float64), array.astype(np.float64))


def test_trees_keep_their_structure():
    tree = {"a": torch.ones(2), "b": (torch.zeros(3, dtype=torch.int32), None)}

    across = to_torch(to_jax(tree))

    assert torch.equal(across["a"], tree["a"])
    assert torch.equal(across["b"][0], tree["b"][0])
    assert across["b"][1] is None


def test_typed_keys_cross_as_their_words():
    keys = jax.random.split(jax.random.key(1), 3)

    words = to_torch(keys)

    assert words.dtype == torch.uint32
    np.testing.assert_array_equal(words.numpy(), jax.random.key_data(keys))


@settings(max_examples=60)
@given(
    hnp.arrays(
        st.sampled_from([np.dtype(name) for name in ("bool", *INTEGERS, "float16", "float32")]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_a_round_trip_keeps_every_bit(array):
    tensor = torch.from_numpy(array)

    again = to_torch(to_jax(tensor))

    assert again.numpy().tobytes() == array.tobytes()
    assert again.shape == tensor.shape


# ------------------------------------------------------------------------- 64 bits, conversion


@pytest.mark.parametrize("hand", [to_jax, to_jit])
@pytest.mark.parametrize(
    ("wide", "narrow"), [("int64", "int32"), ("uint64", "uint32"), ("float64", "float32")]
)
def test_64_bits_become_32_without_x64(hand, wide, narrow):
    tensor = torch.arange(3).to(getattr(torch, wide))

    result = hand(tensor)

    assert result.dtype.name == narrow
    assert result.tolist() == [0, 1, 2]


@pytest.mark.parametrize("hand", [to_jax, to_jit])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0, 2**40 + 3]),
        torch.tensor([-(2**31) - 1]),
        torch.tensor([2**63 + 1], dtype=torch.uint64),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        torch.tensor([2**32], dtype=torch.uint64),
        torch.tensor([1e300], dtype=torch.float64),
        torch.tensor([1e300j], dtype=torch.complex128),
    ],
    ids=["large", "small", "unsigned", "largest", "above", "float", "complex"],
)
def test_a_value_that_32_bits_cannot_hold_is_an_error(hand, tensor):
    with pytest.raises(HandoffError, match="Scale or clamp it"):
        hand(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([2**31 - 1, -(2**31)]),
        torch.tensor([0, 2**32 - 1], dtype=torch.uint64),
        torch.tensor([1 - 2j], dtype=torch.complex128),
        torch.zeros(0, dtype=torch.uint64),
    ],
    ids=["signed", "unsigned", "complex", "empty"],
)
def test_the_extremes_of_32_bits_cross(tensor):
    assert to_jax(tensor).tolist() == tensor.tolist()


def test_infinities_and_nan_are_not_out_of_range():
    result = to_jax(torch.tensor([np.inf, -np.inf, np.nan], dtype=torch.float64))

    np.testing.assert_array_equal(result, [np.inf, -np.inf, np.nan])


def test_64_bits_stay_with_x64():
    with jax.enable_x64(True):
        result = to_jax({"i": torch.tensor([2**40 + 3]), "f": torch.tensor([np.pi]).double()})

        assert result["i"].dtype == jnp.int64
        assert result["i"].item() == 2**40 + 3
        assert same(result["f"], torch.tensor([np.pi]).double())
        assert to_torch(result["i"]).item() == 2**40 + 3


def test_a_dtype_can_be_asked_for():
    assert to_jax(torch.tensor([1, 2]), dtype=jnp.float32).dtype == jnp.float32
    assert to_jax(torch.tensor([0.0, 2.0]), dtype=jnp.bool_).tolist() == [False, True]


@pytest.mark.parametrize(
    "value", [300, 128, -129, 0.5, 128.0, -129.0, np.nan, 1j], ids=lambda value: f"{value}"
)
def test_a_value_that_the_asked_dtype_cannot_hold_is_an_error(value):
    with pytest.raises(HandoffError, match="int8 cannot"):
        to_jax(torch.tensor([0, value]), dtype=jnp.int8)


def test_what_the_asked_dtype_holds_exactly_crosses():
    for extremes in ([-128, 127], [-128.0, 127.0]):
        assert to_jax(torch.tensor(extremes), dtype=jnp.int8).tolist() == [-128, 127]
    assert to_jax(torch.tensor([2 + 0j]), dtype=jnp.float32).tolist() == [2.0]
    assert to_jax(torch.tensor([2 + 0j]), dtype=jnp.int8).tolist() == [2]
    assert to_jax(torch.tensor([2.5]), dtype=jnp.complex64).tolist() == [2.5 + 0j]
    assert to_jax(torch.tensor([2], dtype=torch.uint64), dtype=jnp.float32).tolist() == [2.0]
    assert to_jax(torch.tensor([True]), dtype=jnp.int32).tolist() == [1]


def test_no_imaginary_part_and_no_large_float_is_lost():
    for value in (1 + 1j, 1 - 1j):
        with pytest.raises(HandoffError, match="float32 cannot"):
            to_jax(torch.tensor([value]), dtype=jnp.float32)
    with pytest.raises(HandoffError, match="float16 cannot"):
        to_jax(torch.tensor([1e6]), dtype=jnp.float16)


def test_a_negative_number_is_no_uint64():
    with jax.enable_x64(True):
        assert to_jax(torch.tensor([0, 3]), dtype=jnp.uint64).tolist() == [0, 3]
        with pytest.raises(HandoffError, match="uint64 cannot"):
            to_jax(torch.tensor([-1]), dtype=jnp.uint64)


def test_options_of_a_handoff_are_named():
    for hand in (to_jax, to_jit):
        with pytest.raises(TypeError, match="positional"):
            hand(torch.ones(2), False)


# ---------------------------------------------------------------------------------- what does not


@pytest.mark.parametrize("hand", [to_jax, to_jit])
def test_a_tensor_that_requires_grad_must_be_detached_on_purpose(hand):
    tensor = torch.ones(2, requires_grad=True)

    with pytest.raises(HandoffError, match="detach=True"):
        hand(tensor)
    assert hand(tensor, detach=True).tolist() == [1, 1]


@pytest.mark.parametrize(
    "value",
    [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), 3.0, "text"],
    ids=["sparse", "meta", "number", "text"],
)
def test_what_is_no_dense_tensor_is_refused(value):
    with pytest.raises(HandoffError, match="only dense tensors"):
        to_jax(value)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.bits8], ids=str)
def test_a_dtype_that_jax_lacks_is_refused(dtype):
    tensor = torch.zeros(8, dtype=torch.uint8).view(dtype)

    for hand in WAYS.values():
        with pytest.raises(HandoffError, match=r"Cast"):
            hand(tensor)


@pytest.mark.parametrize(
    "array", [jnp.arange(6.0).reshape(2, 3), jnp.zeros((0, 2)), jnp.ones(3) > 0]
)
def test_without_the_function_inside_of_jax_arrays_go_by_dlpack_alone(array, monkeypatch):
    quick = to_torch({"of": array, "both": (array, None)})
    monkeypatch.setattr(dlpack, "_PlainArray", None)
    promised = to_torch({"of": array, "both": (array, None)})

    for tensor in (quick["of"], quick["both"][0], promised["of"], promised["both"][0]):
        assert tensor.data_ptr() == quick["of"].data_ptr()
        assert np.array_equal(tensor.numpy(), np.asarray(array))


def test_a_deleted_array_is_refused():
    array = jnp.ones(2)
    array.delete()

    with pytest.raises(HandoffError, match="deleted"):
        to_torch(array)


FAILING = """
import jax, jax.numpy as jnp
from envkit_bridges.dlpack import to_torch

def fail(x):
    raise OSError("the disk is gone")

shape = jax.ShapeDtypeStruct((2,), jnp.float32)
failing = jax.jit(lambda x: jax.pure_callback(fail, shape, x)).lower(shape).compile()
result = failing(jax.jit(lambda x: jnp.linalg.matrix_power(x / 800, 200)[0, :2])(jnp.ones((800, 800))))
try:
    to_torch(result)
except Exception as error:
    print(type(error).__name__, "disk is gone" in str(error))
"""


@pytest.mark.slow
def test_a_program_that_fails_while_torch_waits_raises_its_own_error():
    # in a process of its own, since JAX reports the failure again when the process ends
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True)

    assert done.stdout.split() == ["JaxRuntimeError", "True"]


# ------------------------------------------------------------------------------------- devices


def test_devices_match_both_ways():
    array = jnp.ones(2)

    assert torch_device_of(array) == torch.device("cpu")
    assert torch_device_of(array.device) == torch.device("cpu")
    assert jax_device_of("cpu") == array.device


@pytest.mark.parametrize(
    ("platform", "number", "expected"),
    [("cpu", 0, "cpu"), ("gpu", 0, "cuda:0"), ("cuda", None, "cuda:0"), ("rocm", 1, "cuda:1")],
)
def test_a_device_of_jax_is_named_by_platform_and_number(platform, number, expected):
    device = SimpleNamespace(platform=platform, local_hardware_id=number)

    assert torch_device_of(device) == torch.device(expected)


@pytest.mark.parametrize("platform", ["tpu", "METAL"])
def test_a_platform_that_torch_lacks_is_refused(platform):
    with pytest.raises(HandoffError, match=f"{platform}.*Use JAX on CPU or CUDA"):
        torch_device_of(SimpleNamespace(platform=platform, local_hardware_id=0))


# ----------------------------------------------------------------------------------- ownership


def slow(x, y):
    """A computation that is still running when the call returns, and reads ``x`` last."""
    for _ in range(8):
        y = y @ y / 800
    return x + 0 * y[0, 0]


jit_slow = jax.jit(slow)


def aligned(size):
    """A tensor at a multiple of 64 bytes, which JAX could take as it is."""
    room = torch.zeros(size + 16)
    start = -room.data_ptr() % 64 // 4
    return room[start : start + size]


def test_to_torch_shares_the_memory():
    array = jnp.arange(5.0)

    assert to_torch(array).data_ptr() == array.unsafe_buffer_pointer()


@pytest.mark.parametrize("hand", [to_jax, to_jit])
@pytest.mark.parametrize("size", [1, 64, 100_000])
def test_a_copy_shares_no_memory(hand, size):
    tensor = aligned(size)
    result = hand(tensor)

    tensor.fill_(7)

    assert (np.asarray(result) == 0).all()


@pytest.mark.parametrize("size", [64, 100_000])
def test_lent_memory_is_not_copied(size):
    tensor = aligned(size)

    assert to_jax(tensor, copy=False).unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_jit(tensor, copy=False).ctypes.data == tensor.data_ptr()


def test_beside_a_card_each_argument_says_where_a_program_runs(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    tree = {name: aligned(64) + number for number, name in enumerate("abc")}

    lent, copied = to_jit(tree, copy=False), to_jit(tree)
    tree["b"].fill_(7)

    for leaf in (*lent.values(), *copied.values()):
        assert isinstance(leaf, jax.Array) and leaf.committed
        assert leaf.devices() == {jax.devices("cpu")[0]}
    assert (lent["b"] == 7).all() and (copied["b"] == 1).all()
    result = jax.jit(lambda tree: tree["c"] + 1)(copied)  # the others are left out of the program
    assert result.committed and (result == 3).all()


@pytest.mark.parametrize("leaf", [None, jnp.ones(2), np.ones(2)], ids=["empty", "jax", "numpy"])
def test_what_lies_on_the_host_is_adopted_as_it_is(leaf):
    assert adopted({"leaf": leaf})["leaf"] is leaf


@pytest.mark.parametrize("array", [np.float32([1, 2]), np.array(3.0)], ids=["row", "number"])
def test_lent_numpy_memory_is_not_copied(array):
    with jax.enable_x64(True):
        assert to_jit(array, copy=False).ctypes.data == array.ctypes.data


@pytest.mark.parametrize("hand", [to_jax, to_jit])
def test_refilling_a_buffer_after_the_handoff_changes_no_running_computation(hand):
    work = jnp.eye(800)
    action = aligned(1000)
    jit_slow(hand(action), work).block_until_ready()

    for round_ in range(5):
        action.fill_(round_)
        result = jit_slow(hand(action), work)
        action.fill_(-1)
        assert (np.asarray(result) == round_).all()


def test_a_value_is_complete_when_torch_sees_it():
    result = to_torch(jit_slow(jnp.full(1000, 3.0), jnp.eye(800)))

    assert (result == 3).all()


def test_writing_what_torch_received_changes_nothing_jax_computes_later():
    step = jax.jit(lambda state: {"state": state["state"] * 2 + 1, "seen": state["state"] + 0})

    def run(meddle):
        tensors, seen = {"state": torch.arange(64.0)}, []
        for _ in range(5):
            state = to_jit({"state": tensors["state"].clone()}, copy=False)
            tensors = to_torch(step(state))
            seen.append(tensors["seen"].clone())
            if meddle:
                tensors["seen"].fill_(-5)
        return torch.stack(seen)

    assert torch.equal(run(meddle=True), run(meddle=False))


def test_outputs_of_one_call_share_no_memory_with_each_other_or_with_lent_arguments():
    twice = jax.jit(lambda x: (x, x, x + 1, x + 1, x.reshape(8, 8), jnp.zeros(64)))
    tensor = aligned(64)

    results = to_torch(twice(to_jit(tensor, copy=False)))

    places = [tensor.data_ptr(), *(result.data_ptr() for result in results)]
    assert len(set(places)) == len(places)
