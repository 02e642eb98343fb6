"""When the host waits for a device, and who keeps memory that JAX and torch both use.

What holds on a card is shown there by the tests marked ``gpu``; their twins show the mechanism on the CPU.
"""

from __future__ import annotations

import gc
import pickle
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from envkit import (
    Compose,
    MixedEnv,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from envkit.env import stepping
from envkit.functional.batch import ON_CARD, ON_HOST
from envkit.specs.annotations import as_device
from envkit.transforms.core import coupled
from envkit_bridges import dlpack
from envkit_bridges.dlpack import number_to_jit, to_jax, to_jit, torch_device_of
from envkit_bridges.jax import engine, gradients, options, unrolling
from envkit_bridges.jax import jax_env as env_module
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.options import chunks_on
from envkit_bridges.jax.policy import jax_policy
from envkit_bridges.jax.policy.jax_policy import JaxPolicy
from envkit_bridges.jax.programs import RESTART, Programs
from envkit_bridges.jax.shared_programs import Program
from tests.zoo.walkers import Pendulum, Walker, unlike_any

ROWS = 4
BORDERS = (engine, gradients, jax_policy, unrolling)


def sees_cuda() -> bool:
    return torch.cuda.is_available() and jax.default_backend() in ("gpu", "cuda")


def on_gpu(value):
    skip = pytest.mark.skipif(not sees_cuda(), reason="needs a CUDA device seen by torch and JAX")
    return pytest.param(value, marks=[pytest.mark.gpu, skip])


both_devices = pytest.mark.parametrize("device", ["cpu", on_gpu("cuda")], scope="module")


@pytest.fixture(scope="module")
def walker(device):
    env = JaxEnv(Walker(), batch_size=[ROWS], device=device, episode_length=3)
    env.set_seed(0)
    return env


@pytest.fixture(scope="module")
def watched(walker):
    """The env behind transforms that are computed in its programs."""
    chain = Compose(StepCounter(), RewardSum(), RewardScaling(0.0, 2.0), VecNorm(in_keys=["place"]))
    return TransformedEnv(walker, chain)


class HostReads(TorchDispatchMode):
    """Lists operators that give a number to the host, or whose shape depends on numbers."""

    names = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item", "masked_select")

    def __init__(self):
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        moves = name == "_to_copy" and "device" in (kwargs or {})
        if name in self.names or moves:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def pushed(env, device):
    action = torch.full((ROWS, 2), 0.05, device=device)
    return lambda td: td.set("action", action)


@pytest.fixture
def waiting(monkeypatch):
    """Let reading on the CPU count as waiting, as it does on a card."""
    for module in (engine, coupled, stepping):
        monkeypatch.setattr(module, "reading_waits", lambda tensor: True)


@both_devices
@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("kind", ["walker", "watched"])
@pytest.mark.parametrize("call", ["step", "step_and_maybe_reset"])
def test_the_host_reads_nothing_in_a_step(call, kind, device, request):
    env = request.getfixturevalue(kind)
    act = pushed(env, device)
    _, td = env.step_and_maybe_reset(act(env.reset()))  # compiled, specs read

    with HostReads() as reads:
        getattr(env, call)(act(td))

    assert reads.reads == []


@both_devices
@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("kind", ["walker", "watched"])
def test_the_host_reads_once_at_the_start_of_a_rollout_and_never_while_it_steps(
    kind, device, request
):
    env = request.getfixturevalue(kind)
    act = pushed(env, device)
    _, td = env.step_and_maybe_reset(act(env.reset()))

    with HostReads() as reads:
        env.rollout(7, act, auto_reset=False, tensordict=td, break_when_any_done=False)

    assert reads.reads == ["is_nonzero"] or reads.reads == ["_local_scalar_dense"]


@both_devices
@pytest.mark.usefixtures("waiting")
def test_a_state_that_came_from_jax_goes_back_as_it_is_unless_it_was_written_to(
    walker, device, monkeypatch
):
    act = pushed(walker, device)
    walker.set_seed(0)
    _, td = walker.step_and_maybe_reset(act(walker.reset()))
    same, written = td.copy(), td.clone()
    copied = []
    monkeypatch.setattr(engine, "adopted", lambda tree: copied.append(tree) or dlpack.adopted(tree))

    expected, _ = walker.step_and_maybe_reset(act(written))
    assert len(copied) == len(written["state"].keys())
    copied.clear()
    data, root = walker.step_and_maybe_reset(act(same))
    assert not copied
    for leaf in root["state"].values():
        leaf.add_(0)
    walker.step_and_maybe_reset(act(root))
    assert len(copied) == len(root["state"].keys())
    assert (data == expected).all()


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("device", ["cpu"], scope="module")
def test_numbers_kept_for_a_card_are_those_of_the_tensors_as_they_are_now(watched):
    act = pushed(watched, "cpu")
    _, td = watched.step_and_maybe_reset(act(watched.reset()))
    scaling = watched.transform[2]

    before = watched.step(act(td.copy()))["next", "reward"]
    td["step_count"].add_(5)
    scaling.scale.mul_(2)
    after = watched.step(act(td.copy()))["next"]
    scaling.scale.div_(2)

    assert torch.equal(after["reward"], 2 * before)
    assert after["step_count"].flatten().tolist() == [7] * ROWS


BEGUN = {  # what is begun with a root and a mask of its rows
    "step": lambda env, td, mask: env.step(td),
    "step of some rows": lambda env, td, mask: env.step(td.set("_step", mask)),
    "step and reset": lambda env, td, mask: env.step_and_maybe_reset(td),
    "step and reset of some rows": lambda env, td, mask: env.step_and_maybe_reset(
        td.set("_step", mask)
    ),
    "reset": lambda env, td, mask: env.reset(),
    "reset of some rows": lambda env, td, mask: env.reset(td.set("_reset", mask)),
    "run": lambda env, td, mask: env.unroll(td, 2),
    "run until": lambda env, td, mask: env.rollout(2, auto_reset=False, tensordict=td),
    "policy in JAX": lambda env, td, mask: env.rollout(
        2, STILL, callback=lambda env, td: None, break_when_any_done=False
    ),
}
STILL = JaxPolicy(lambda params, shown, key: 0 * shown["place"])


@both_devices
@pytest.mark.parametrize("kind", ["walker", pytest.param("watched", marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", BEGUN)
def test_all_that_was_lent_is_there_when_torch_takes_results(
    call, kind, device, request, monkeypatch
):
    env = request.getfixturevalue(kind)
    mask = torch.arange(ROWS, device=device) > 1
    td = pushed(env, device)(env.reset())
    missing = watch_border(monkeypatch)

    BEGUN[call](env, td, mask)

    assert missing and not any(missing)


def watch_border(monkeypatch):
    """List, each time that torch takes results after something was lent, how much of that is gone by then."""
    lent, missing = [], []
    waits = False  # something was lent since torch last took results; on a card all of it may have been copied

    def lend(tree, **how):
        nonlocal waits
        given = to_jit(tree, **how)
        waits = waits or bool(jax.tree.leaves(given))
        lent.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(given))
        return given

    def take(tree):
        nonlocal waits
        if waits and jax.tree.leaves(tree):
            jax.block_until_ready(tree)  # jit holds on to arrays of NumPy while a program runs
            gc.collect()
            missing.append(sum(reference() is None for reference in lent))
            lent.clear()  # all that comes later is ordered behind what torch waits for now
            waits = False
        return dlpack.to_torch(tree)

    for module in BORDERS:
        monkeypatch.setattr(module, "to_jit", lend, raising=False)
        monkeypatch.setattr(module, "to_torch", take, raising=False)
    watch_copies(monkeypatch, lent)
    return missing


def watch_copies(monkeypatch, lent):
    """Take what is copied into JAX's memory out of what is lent: torch waits for the copy at once."""

    def adopt(tree):
        copies = dlpack.adopted(tree)
        if copies is not tree:
            done = set(map(id, jax.tree.leaves(tree)))
            lent[:] = [reference for reference in lent if id(reference()) not in done]
        return copies

    for module in (engine, unrolling):
        monkeypatch.setattr(module, "adopted", adopt)


@both_devices
def test_what_two_members_of_a_batch_were_lent_is_there_when_torch_takes_results(
    walker, device, monkeypatch
):
    other = JaxEnv(Walker(), batch_size=[ROWS], device=device, episode_length=3)
    env = MixedEnv([walker, other])
    env.set_seed(0)
    action = torch.full((2 * ROWS, 2), 0.05, device=device)
    td = env.reset().set("action", action)
    missing = watch_border(monkeypatch)

    env.step(td)

    assert missing and not any(missing)


@both_devices
def test_what_a_backward_pass_reads_is_there_when_torch_takes_gradients(device, monkeypatch):
    env = JaxEnv(Pendulum(), batch_size=[ROWS], device=device, requires_grad=True)
    action = torch.zeros(ROWS, 1, device=device, requires_grad=True)
    reward = env.step(env.reset().set("action", action))["next", "reward"]
    missing = watch_border(monkeypatch)

    (reward.sum() * 2).backward()

    assert missing == [0]


@both_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as it is", "converted"])
def test_what_a_program_reads_is_kept_until_torch_has_its_results(
    walker, device, dtype, monkeypatch
):
    lent = []

    def watched(tree, **how):
        given = to_jit(tree, **how)
        lent.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(given))
        return given

    td = pushed(walker, device)(walker.reset())
    td["action"] = td["action"].to(dtype)
    to_jit = engine.to_jit
    monkeypatch.setattr(engine, "to_jit", watched)
    watch_copies(monkeypatch, lent)

    step = walker._send(td, advance=True)
    gc.collect()

    assert lent and all(reference() is not None for reference in lent)
    step.recv()
    del step
    gc.collect()
    assert all(reference() is None for reference in lent)


@pytest.mark.gpu
@pytest.mark.skipif(not sees_cuda(), reason="needs a CUDA device seen by torch and JAX")
def test_a_number_is_brought_to_a_card_once():
    device = as_device("cuda")

    first, again = (number_to_jit(3, device) for _ in range(2))

    assert first is again and torch_device_of(first) == device


@pytest.mark.parametrize("number", [True, 3, -0.0, 0.0, 1e-7, float("inf"), float("nan")])
def test_a_number_on_a_card_is_the_one_on_the_host_and_decides_about_no_dtype(number, monkeypatch):
    """A CPU plays the card, and counts how often torch is waited for."""
    waited = []
    monkeypatch.setattr(dlpack, "_wait_for_torch", waited.append)
    monkeypatch.setattr(dlpack, "jax_device_of", lambda device: jax.devices("cpu")[0])
    dlpack._number_on.cache_clear()

    placed = [number_to_jit(number, torch.device("cuda:1")) for _ in range(2)]
    dlpack._number_on.cache_clear()

    assert placed[0] is placed[1] and waited == [torch.device("cuda:1")]
    assert placed[0].weak_type or isinstance(number, bool)
    assert str(placed[0].item()) == str(np.float32(number).item()) or placed[0].item() == number
    assert number_to_jit(number, torch.device("cpu")) is number


@pytest.mark.slow  # compiles each program for arrays
@both_devices
def test_every_program_takes_a_tensor_and_nothing_that_the_host_brings_to_a_card(
    walker, watched, device, monkeypatch
):
    """What the host brings waits for nothing, and may be written where a dropped tensor is still read."""
    calls = []

    def call(program, *args):
        static = program._owner._functions[program._name][1]
        calls.append(args[static:])
        return called(program, *args)

    called = Program.__call__
    monkeypatch.setattr(Program, "__call__", call)

    def lent(leaf, copy, detach):
        return leaf if isinstance(leaf, jax.Array) else to_jax(leaf, copy=copy, detach=detach)

    monkeypatch.setattr(dlpack, "_lent", lent)  # arrays, as on a card
    if device == "cpu":
        for module in (engine, unrolling):
            monkeypatch.setattr(module, "number_to_jit", lambda number, _: jnp.asarray(number))
    act = pushed(walker, device)

    for env in (walker, watched):
        env.step(act(env.step_and_maybe_reset(act(env.reset()))[1]))
        env.reset(env.reset().set("_reset", torch.arange(ROWS, device=device) > 1))
        env.rollout(3, break_when_any_done=False)
        env.rollout(3)
        env.rollout(3, act, break_when_any_done=False)
    walker.reseed(walker.reset())

    assert len(calls) > 12
    for args in calls:
        leaves = jax.tree.leaves(args)
        assert leaves and all(isinstance(leaf, jax.Array) for leaf in leaves)


@both_devices
@pytest.mark.parametrize("policy", ["random", "torch", "torch, watched"])
@pytest.mark.parametrize("stop", ["never", "any", pytest.param("all", marks=pytest.mark.slow)])
def test_a_rollout_that_records_no_state_is_the_same_without_it(walker, device, policy, stop):
    rules = {"break_when_any_done": stop == "any", "break_when_all_done": stop == "all"}
    call = {
        "random": {},
        "torch": {"policy": pushed(walker, device)},
        "torch, watched": {"policy": pushed(walker, device), "callback": lambda env, td: None},
    }[policy]
    results = []
    for record_state in (True, False):
        walker.set_seed(0)
        results.append(walker.rollout(5, **rules, **call, record_state=record_state))
    full, without = results

    wanted = full.exclude("state", ("next", "state"))
    assert set(without.keys(True, True)) == set(wanted.keys(True, True))
    assert "state" in full.keys() and (without == wanted).all()


def test_a_device_without_a_number_is_the_current_one():
    assert as_device("cuda") == as_device("cuda:0")
    assert as_device(None) == as_device("cpu") == torch.device("cpu")


@both_devices
def test_rows_of_an_env_on_a_card_begin_anew_in_large_chunks(walker, device):
    chunks = walker._engine.programs.env.chunks

    assert chunks == (ON_HOST if device == "cpu" else ON_CARD)
    assert pickle.loads(pickle.dumps(walker))._engine.programs.env.chunks == chunks


@pytest.fixture
def as_on_a_card(monkeypatch):
    """Let programs begin rows anew as on a card."""
    card = torch.device("cuda", 0)
    monkeypatch.setattr(env_module, "chunks_on", lambda device, which: chunks_on(card, which))
    monkeypatch.setattr(options, "chunks_on", lambda device, which: chunks_on(card, which))


@pytest.mark.slow  # compiles each program for a card
@pytest.mark.parametrize(
    ("rows", "reset_rows", "branches"),
    [(ROWS, "done", ["cond"]), (1100, "done", ["while"]), (ROWS, "all", []), (1100, "all", [])],
)
def test_a_program_on_a_card_asks_once_which_rows_begin_anew_or_never(
    rows, reset_rows, branches, request
):
    """XLA has no branch on a card: the host reads which way it goes."""
    action, data = torch.linspace(-1, 1, 2 * rows).reshape(rows, 2), []

    def act(td):
        return td.set("action", action)

    for fixture in ((), ("as_on_a_card",)):
        [request.getfixturevalue(name) for name in fixture]
        env = JaxEnv(Walker(), batch_size=[rows], episode_length=3, reset_rows=reset_rows)
        env.set_seed(0)
        env.rollout(2, callback=lambda env, td: None, break_when_any_done=False)
        td = env.reset()
        data.append(env.rollout(7, act, break_when_any_done=False))

    given = to_jit(env._engine.prepare(act(td)).inputs, copy=False)
    traced = jax.make_jaxpr(env._engine.programs._advance)(
        *given, env._engine.constants(td.batch_size), RESTART
    )

    assert list(branches_of(traced.jaxpr)) == branches
    for key in data[0].keys(True, True):  # resets that are fused with steps may round otherwise
        torch.testing.assert_close(data[1][key], data[0][key], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("as_on_a_card")
@pytest.mark.parametrize(("reset_rows", "branches"), [("done", ["cond"]), ("all", [])])
def test_a_run_on_a_card_asks_at_each_step_or_never(reset_rows, branches, monkeypatch):
    traced = []

    def unroll(programs, steps, policy, record_state, *args):
        own = partial(unrolled, programs, steps, policy, record_state)
        traced.append(jax.make_jaxpr(own)(*args).jaxpr)
        return unrolled(programs, steps, policy, record_state, *args)

    unrolled = Programs._unroll
    monkeypatch.setattr(Programs, "_unroll", unroll)
    env = JaxEnv(unlike_any(Walker), batch_size=[ROWS], episode_length=3, reset_rows=reset_rows)

    data = env.rollout(7, break_when_any_done=False)

    assert data["next", "done"][:, 2].all() and not data["next", "done"][:, 3].any()
    assert [list(branches_of(program)) for program in traced] == [branches]


def branches_of(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("cond", "while"):
            yield equation.primitive.name
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(part):
                yield from branches_of(getattr(part, "jaxpr", part))


def is_program(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.gpu
@pytest.mark.skipif(not sees_cuda(), reason="needs a CUDA device seen by torch and JAX")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("device", ["cuda"], scope="module")
@pytest.mark.parametrize("kind", ["walker", "watched"])
@pytest.mark.parametrize("call", ["step", "step_and_maybe_reset"])
def test_torch_sees_nothing_in_a_step_that_waits_for_a_card(call, kind, device, request):
    env = request.getfixturevalue(kind)
    act = pushed(env, device)
    _, td = env.step_and_maybe_reset(act(env.reset()))
    before = torch.cuda.get_sync_debug_mode()

    try:
        torch.cuda.set_sync_debug_mode("error")
        getattr(env, call)(act(td))
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
@pytest.mark.skipif(not sees_cuda(), reason="needs a CUDA device seen by torch and JAX")
def test_env_data_and_specs_name_the_same_card():
    env = JaxEnv(Walker(), batch_size=[ROWS], device="cuda")

    td = env.reset()

    assert env.device == td.device == env.action_spec.device == td["place"].device
