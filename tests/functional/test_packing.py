"""A state in two buffers: every bit comes back, every leaf has a name."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envkit.errors import KeyCollisionError, StateStructureError
from envkit.functional import BatchedEnv, StatePacking, TimeLimit, Timestep
from envkit.functional.batch import EpisodeState
from envkit_bridges.worlds.brax import BraxCore, import_brax
from tests.functional.test_batch import begin, same_bits
from tests.zoo.half import HALF
from tests.zoo.jax_envs import Countdown, NoisyWalk, Pendulum, Zoo

KEY = jax.random.PRNGKey(3)
DTYPES = [
    *(np.float32, HALF, ml_dtypes.bfloat16, np.bool_),
    *(np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32),
]


def packing_of(env):
    return BatchedEnv(TimeLimit(env, 5)).packing


def names_of(env):
    return {".".join(field.name) for field in packing_of(env).fields}


@st.composite
def trees(draw):
    """A batch shape and leaves of any dtype, size and bit pattern behind it."""
    batch = draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3))
    leaves = {}
    for index, dtype in enumerate(draw(st.lists(st.sampled_from(DTYPES), max_size=5))):
        event = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
        size = int(np.prod((*batch, *event)))
        raw = np.frombuffer(
            draw(st.binary(min_size=size * 4, max_size=size * 4)), np.uint32
        ).reshape((*batch, *event))
        leaf = raw % 2 == 1 if dtype is np.bool_ else bits_as(raw, dtype)
        leaves[f"leaf{index}"] = leaf
    return batch, leaves


def bits_as(raw, dtype):
    """Read 32 random bits as ``dtype``; a NaN of a narrow float may change its payload, so no NaN."""
    width = np.dtype(dtype).itemsize
    found = raw.astype(f"u{width}").view(dtype)
    if width < 4 and np.dtype(dtype).kind not in "iu":
        found = np.where(np.isnan(found.astype(np.float32)), np.zeros((), dtype), found)
    return found


@pytest.mark.slow  # compiles each shape
@settings(max_examples=25)
@given(trees())
def test_every_bit_survives_packing(drawn):
    batch, leaves = drawn
    template = {
        name: jax.ShapeDtypeStruct(leaf.shape[len(batch) :], leaf.dtype)
        for name, leaf in leaves.items()
    }
    packing = StatePacking(template)
    tree = jax.tree.map(jnp.asarray, leaves)

    buffers = packing.pack(tree)

    assert buffers["words"].dtype == jnp.int32
    assert not leaves or buffers["floats"].shape == (*batch, packing.float_width)
    if leaves:
        assert same_bits(packing.unpack(buffers), tree)


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_a_state_of_every_kind_of_leaf_survives_inside_jit(batch):
    env = BatchedEnv(TimeLimit(Zoo(), 5))
    state, _ = begin(env, int(np.prod(batch)))
    state = jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), state)

    again = jax.jit(lambda tree: env.packing.unpack(env.packing.pack(tree)))(state)

    assert same_bits(again, state)


def test_wide_leaves_survive_with_x64():
    with jax.enable_x64(True):
        tree = {
            "float": jnp.array([np.pi, -0.0, np.inf]),
            "int": jnp.array([2**40 + 3, -(2**63)]),
            "uint": jnp.uint64(2**64 - 1),
            "half": HALF(1.5),
            "empty": jnp.zeros((0,), jnp.int64),
        }
        packing = StatePacking(jax.eval_shape(lambda: tree))
        buffers = packing.pack(tree)

        assert buffers["floats"].dtype == jnp.float64
        assert packing.word_width == 6
        assert same_bits(packing.unpack(buffers), tree)


@pytest.mark.rounding
@pytest.mark.parametrize(
    "name", ["fast", pytest.param("inverted_pendulum", marks=pytest.mark.more)]
)
def test_a_brax_state_survives(name):
    options = {} if name == "fast" else {"backend": "spring"}
    core = BraxCore(import_brax().get_environment(name, **options))
    env = BatchedEnv(TimeLimit(core, 5))
    state, _ = jax.jit(env.init, static_argnums=1)(KEY, 3)
    buffers = env.packing.pack(state)

    assert same_bits(env.packing.unpack(buffers), state)
    assert {("elapsed",), ("key",), ("obs",)} <= {field.name for field in env.packing.fields}


@pytest.mark.parametrize(("env", "width"), [(Countdown(3), 0), (Pendulum(), 2)])
def test_a_buffer_that_holds_nothing_has_width_zero(env, width):
    rows = BatchedEnv(env)
    state, _ = rows.init(KEY, 4)

    assert rows.packing.pack(state)["floats"].shape == (4, width)


def test_a_dtype_that_fits_no_buffer_is_named():
    with pytest.raises(StateStructureError, match=r"\['wave'\].*real and imaginary"):
        StatePacking({"wave": jax.ShapeDtypeStruct((), jnp.complex64)})


def test_wrapper_fields_stand_beside_those_of_the_env():
    assert names_of(NoisyWalk()) == {"place", "moves", "elapsed", "key"}


def test_a_bare_array_is_called_inner():
    assert names_of(Pendulum()) == {"inner", "elapsed", "key"}


def test_only_the_wrappers_of_envkit_are_left_out_of_a_name():
    leaf = jax.ShapeDtypeStruct((2,), jnp.float32)
    wrapped = EpisodeState({"inner": {"inner": leaf}}, key=jax.ShapeDtypeStruct((2,), jnp.uint32))

    def names(template):
        return [field.name for field in StatePacking(template).fields]

    assert names(leaf) == [("state",)]
    assert names({"inner": leaf}) == [("inner",)]
    assert names(wrapped) == [("inner", "inner"), ("key",)]


def test_names_come_from_keys_fields_and_indices_and_none_is_skipped():
    found = names_of(Zoo())

    assert {"kit.small", "kit.flag", "list.0", "list.2", "typed"} <= found
    assert "kit.nothing" not in found


@dataclass(frozen=True)
class Keeper:
    """An env whose own state has a field that envkit adds too."""

    field: object
    action_space = Pendulum.action_space

    def reset(self, key):
        return {"key": self.field}, Timestep(0.0)

    def step(self, state, action):
        return state, Timestep(0.0)


@pytest.mark.parametrize(("field", "name"), [(0.0, "env.key"), ({"seed": 0.0}, "env.key.seed")])
def test_a_field_that_is_called_like_one_of_envkits_stands_under_env(field, name):
    assert names_of(Keeper(field)) == {name, "elapsed", "key"}


def test_a_wrapper_that_stands_around_an_env_twice_is_refused():
    with pytest.raises(KeyCollisionError, match=r"'elapsed'.*twice"):
        BatchedEnv(TimeLimit(TimeLimit(Pendulum(), 3), 5)).packing  # noqa: B018


def test_an_entry_that_is_called_like_the_node_of_others_is_refused():
    def around(inner, field):
        return EpisodeState(inner=inner, key=field)

    with pytest.raises(KeyCollisionError, match="two entries of the state are called 'key'"):
        StatePacking(around(around({"place": 0.0}, {"seed": 0.0}), 0.0))


def test_fields_describe_where_each_leaf_lies():
    env = BatchedEnv(TimeLimit(Zoo(), 5))
    state, _ = begin(env, 4)
    buffers, leaves = env.packing.pack(state), env.packing.leaves(state)

    for field in env.packing.fields:
        stored = buffers[field.buffer][:, field.offset : field.offset + field.size]
        stored = np.asarray(stored).reshape(4, *field.stored_shape)
        leaf = np.asarray(leaves[field.name])
        assert str(leaf.dtype) == field.dtype
        if field.dtype == "uint32":
            stored = stored.view(np.uint32)
        np.testing.assert_array_equal(stored, leaf.astype(stored.dtype).reshape(stored.shape))


def test_a_state_is_rebuilt_from_its_named_leaves():
    env = BatchedEnv(TimeLimit(Zoo(), 5))
    state, _ = begin(env, 4)

    assert same_bits(env.packing.from_leaves(env.packing.leaves(state)), state)


def test_a_missing_leaf_is_named():
    packing = packing_of(NoisyWalk())

    with pytest.raises(StateStructureError, match="lacks place, elapsed"):
        packing.from_leaves({("key",): jnp.zeros(2), ("moves",): jnp.zeros(())})


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 3), "float32"), ((4, 1), "float32"), ((4, 2), "int32")]
)
def test_packing_another_state_is_refused(shape, dtype):
    packing = packing_of(NoisyWalk())
    state, _ = BatchedEnv(TimeLimit(NoisyWalk(), 5)).init(KEY, 4)
    moved = jax.tree.map(lambda leaf: leaf, state)
    moved.inner.inner["place"] = jnp.zeros(shape, dtype)

    with pytest.raises(StateStructureError, match=re.escape(f"'place' is {dtype}{shape}")):
        packing.pack(moved)
    with pytest.raises(StateStructureError, match="layout was made for"):
        packing.pack({"place": jnp.zeros(2)})


def test_gradients_pass_through_packing():
    packing = StatePacking({"x": jax.ShapeDtypeStruct((2,), jnp.float32)})

    grad = jax.grad(lambda x: (packing.unpack(packing.pack({"x": x}))["x"] ** 2).sum())

    np.testing.assert_allclose(grad(jnp.array([1.0, 3.0])), [2.0, 6.0])
