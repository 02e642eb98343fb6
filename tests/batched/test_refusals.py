"""What batched envs refuse, and with which way out."""

from __future__ import annotations

from functools import cache, partial

import gymnasium
import torch
from tensordict import TensorDict

import envkit
from envkit import (
    AsyncEnvPool,
    EnvCreator,
    GymEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    ThreadingAsyncEnvPool,
    Unbounded,
)
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    BusyEnvError,
    EnvkitError,
    MissingKeyError,
    NotResetError,
    NotSelectableError,
    OptionError,
    ReadOnlyError,
    RowIndexError,
    SpecError,
    StartedError,
    UnsupportedError,
    WorkerError,
)
from envkit.specs import Categorical, Composite
from tests.zoo.envs import Chaos, Count
from tests.zoo.refusals import assert_refused, each_row
from tests.zoo.shaped_envs import Quiet, Several


class Apart(Count):
    """Its done flags stand in a node of their own."""

    def __init__(self, node: str):
        super().__init__()
        self.done_spec = Composite({node: {"done": Categorical(2, shape=(1,), dtype=torch.bool)}})


T, F = True, False


class Custom(Quiet):
    """An env that says and declares what a test gives; ``specs`` by kind."""

    def __init__(self, answer=None, *, specs=None, **kwargs):
        super().__init__(**kwargs)
        bs = self.batch_size
        self.observation_spec = Composite(x=Unbounded((*bs, 1)), shape=bs)
        self.action_spec = Unbounded((*bs, 1))
        for kind, spec in (specs or {}).items():
            setattr(self, f"{kind}_spec", spec)
        self.answer = answer

    def _out(self):
        if self.answer is not None:
            return self.answer
        return TensorDict({"x": torch.zeros(*self.batch_size, 1)}, self.batch_size)


def td_of(batch=(), **leaves) -> TensorDict:
    return TensorDict({name: torch.tensor(value) for name, value in leaves.items()}, batch)


def after(first, then):
    """Do one thing in preparation of another."""

    def call():
        given = first()
        return then(given)

    return call


def serial(**options):
    return SerialEnv(2, Count, **options)


BATCHES = {
    # arguments, keywords, class and message of what cannot be built
    "an unknown keyword": (
        (2, Count),
        {"num_proceses": 3},
        TypeError,
        r"no keyword 'num_proceses'\. Did you mean 'num_processes'\?.*create_env_kwargs=",
    ),
    "a maker that is a number": ((2, 3), {}, TypeError, "create_env_fn is 3, of type int.*Pass a"),
    "a maker that is a name": (
        (2, "CartPole-v1"),
        {},
        TypeError,
        "create_env_fn is 'CartPole-v1', of type str.*lambda: GymEnv",
    ),
    "makers that are numbers": ((2, [Count, 3]), {}, TypeError, "create_env_fn holds 3.*Pass a"),
    "a text of sub-envs": (("2", Count), {}, TypeError, "num_workers is '2'.*int.*Pass the number"),
    **{
        f"{what} that is {value!r}": (
            (2, Count),
            {what: value},
            kind,
            rf"{what}.*{value!r}.*{cure}",
        )
        for what, value, kind, cure in [
            ("create_env_kwargs", "n=3", TypeError, "Pass one dict for all of them, or a list"),
            ("create_env_kwargs", 3, TypeError, "Pass one dict for all of them, or a list"),
            ("timeout", "x", TypeError, "positive number of seconds, or None"),
            ("num_threads", -1, ValueError, "at least 1.*leave it out"),
            ("num_threads", 1.5, TypeError, "at least 1.*leave it out"),
            ("num_sub_threads", 0, ValueError, "at least 1.*Pass the torch threads"),
            ("num_processes", 1.5, TypeError, "at least 1.*leave it out"),
            ("num_processes", 0, ValueError, "at least 1.*leave it out"),
            ("num_processes", 3, ValueError, r"between 1 and num_workers \(2\).*leave it out"),
            ("max_restarts", "x", TypeError, "at least 0.*Pass the most restarts"),
            ("use_buffers", "yes", TypeError, "True, False or None.*leave it out"),
            ("share_individual_td", 3, TypeError, "True, False or None.*leave it out"),
        ]
    },
}


@cache
def rows() -> SerialEnv:
    env = SerialEnv(2, Count)
    env.reset()
    return env


@cache
def pool() -> AsyncEnvPool:
    env = AsyncEnvPool([Count] * 2, backend="threading")
    env.reset()
    return env


REFUSALS = [
    # -- construction
    (
        "data of another batch size for a batch",
        after(serial, lambda env: env.reset(TensorDict(batch_size=[3]))),
        RuntimeError,
        r"batch size \(3,\).*2 sub-envs.*pass batch size \(2,\)",
    ),
    # -- keys and done flags
    (
        "truncated keys of a mix",
        lambda: MixedEnv([serial()]).add_truncated_keys(),
        RuntimeError,
        r"mixed env.*Add them to each: MixedEnv\(\[member",
    ),
    # -- reset
    (
        "a part before the whole",
        lambda: MixedEnv([serial()]).reset(td_of([2], _reset=[[T], [F]])),
        RuntimeError,
        r"partial reset came before the first full one.*reset\(\) once without a mask",
    ),
    # -- steps
    (
        "an action that a batch misses",
        after(serial, lambda env: env.step(env.reset())),
        KeyError,
        r"no 'action'.*rand_action\(td\)",
    ),
    # -- batches
    *(
        (name, *row)
        for name, row in {
            f"{what}, {batched.__name__}": (partial(batched, *given, **options), kind, message)
            for batched in (SerialEnv, ParallelEnv)
            for what, (given, options, kind, message) in BATCHES.items()
        }.items()
    ),
    (
        "a start method without processes",
        lambda: serial(mp_start_method="spawn"),
        TypeError,
        "mp_start_method is 'spawn', but a SerialEnv starts no processes.*use ParallelEnv",
    ),
    ("no member", lambda: MixedEnv([]), ValueError, "empty list.*at least one env.*Pass envs"),
    (
        "a member without a batch",
        lambda: MixedEnv([Count()]),
        ValueError,
        r"member 0 has batch size \(\).*one batch axis.*SerialEnv\(1",
    ),
    (
        "members that differ",
        lambda: MixedEnv([serial(), SerialEnv(1, Several)]),
        ValueError,
        "action 'action': member 0 has Categorical.*member 1 has absent.*Put transforms around members",
    ),
    (
        "members on two devices",
        lambda: MixedEnv([Custom(batch_size=[1], device=name) for name in ("cpu", "meta")]),
        ValueError,
        r"\['cpu', 'meta'\].*delivers to one.*device='cpu'",
    ),
    (
        "a state of members that is None",
        lambda: MixedEnv([serial()]).load_state_dict(None),
        TypeError,
        r"state dict is of type NoneType.*Pass what state_dict\(\) gave",
    ),
    (
        "the state of other members",
        lambda: MixedEnv([serial()]).load_state_dict({}),
        KeyError,
        r"entries \[\].*\['member0'\].*as many members",
    ),
    # -- many at once
    (
        "EnvCreator: create_env_fn is 3",
        lambda: EnvCreator(3),
        ArgumentTypeError,
        "create_env_fn is 3",
    ),
    (
        "EnvCreator: is 3, of type int",
        lambda: EnvCreator(lambda: 3),
        ArgumentTypeError,
        "is 3, of type int",
    ),
    (
        "EnvCreator: create_env_kwargs is 3",
        lambda: EnvCreator(Count, 3),
        ArgumentTypeError,
        "create_env_kwargs is 3",
    ),
    (
        "get_env_metadata: env_or_creator is 3",
        lambda: envkit.get_env_metadata(3),
        ArgumentTypeError,
        "env_or_creator is 3",
    ),
    (
        "SerialEnv: 3 entries for 2",
        lambda: SerialEnv(2, [Count] * 3),
        ArgumentCountError,
        "3 entries for 2",
    ),
    ("SerialEnv: num_workers is 0", lambda: SerialEnv(0, Count), ArgumentError, "num_workers is 0"),
    (
        "SerialEnv: 3 entries",
        lambda: SerialEnv(2, Count, create_env_kwargs=[{}] * 3),
        ArgumentCountError,
        "3 entries",
    ),
    (
        "SerialEnv: 'size'",
        lambda: SerialEnv(2, Count, create_env_kwargs={"size": 3}).reset(),
        WorkerError,
        "'size'",
    ),
    (
        "SerialEnv: metadata_from_workers is True",
        lambda: SerialEnv(2, Count, metadata_from_workers=True),
        OptionError,
        "metadata_from_workers is True",
    ),
    (
        "ParallelEnv: backend is 'cloud'",
        lambda: ParallelEnv(2, Count, backend="cloud"),
        ArgumentError,
        "backend is 'cloud'",
    ),
    (
        "ParallelEnv: on_worker_failure is 'wait'",
        lambda: ParallelEnv(2, Count, on_worker_failure="wait"),
        ArgumentError,
        "on_worker_failure is 'wait'",
    ),
    (
        "SerialEnv: pin_memory is True",
        lambda: SerialEnv(2, Count, pin_memory=True),
        ArgumentError,
        "pin_memory is True",
    ),
    (
        "SerialEnv: allow_step_when_done is True",
        lambda: SerialEnv(2, Count, allow_step_when_done=True),
        ArgumentError,
        "allow_step_when_done is True",
    ),
    (
        "ParallelEnv: use_buffers=True",
        lambda: ParallelEnv(2, Count, use_buffers=True, shared_memory=False, memmap=False),
        ArgumentError,
        "use_buffers=True",
    ),
    (
        "rows: batch size (3,)",
        lambda: rows().step(TensorDict({"action": torch.zeros(3, 1, dtype=torch.int64)}, [3])),
        BatchSizeError,
        r"batch size \(3,\)",
    ),
    ("rows: index is True", lambda: rows()[True], NotSelectableError, "index is True"),
    ("rows: 7", lambda: rows()[7], RowIndexError, "7"),
    ("rows: chooses none", lambda: rows()[0:0], RowIndexError, "chooses none"),
    ("rows: [0, 0]", lambda: rows()[[0, 0]], ArgumentError, r"\[0, 0\]"),
    ("rows: running", lambda: rows().configure_parallel(num_threads=2), StartedError, "running"),
    ("rows: truncated keys", lambda: rows().add_truncated_keys(), ReadOnlyError, "truncated keys"),
    (
        "SerialEnv: before its first reset",
        lambda: SerialEnv(2, Count).step(
            TensorDict({"action": torch.zeros(2, 1, dtype=torch.int64)}, [2])
        ),
        NotResetError,
        "before its first reset",
    ),
    (
        "SerialEnv: shape ()",
        lambda: SerialEnv(2, [Count, lambda: Count(batch_size=[3])]).reset(),
        WorkerError,
        r"shape \(\)",
    ),
    ("MixedEnv: member 0 is 3", lambda: MixedEnv([3]), ArgumentTypeError, "member 0 is 3"),
    (
        "AsyncEnvPool: backend is 'cloud'",
        lambda: AsyncEnvPool([Count], backend="cloud"),
        UnsupportedError,
        "backend is 'cloud'",
    ),
    (
        "AsyncEnvPool: stack is 'pile'",
        lambda: AsyncEnvPool([Count], stack="pile"),
        UnsupportedError,
        "stack is 'pile'",
    ),
    (
        "AsyncEnvPool: exchange is 'mail'",
        lambda: AsyncEnvPool([Count], exchange="mail"),
        ArgumentError,
        "exchange is 'mail'",
    ),
    (
        "AsyncEnvPool: exchange is 'shm'",
        lambda: AsyncEnvPool([Count], backend="threading", exchange="shm"),
        ArgumentError,
        "exchange is 'shm'",
    ),
    (
        "pool: env_index",
        lambda: pool().async_step_send(TensorDict({"action": torch.zeros(1, 1)}, [1])),
        MissingKeyError,
        "env_index",
    ),
    ("pool: min_get", lambda: pool().async_step_recv(min_get=5), BusyEnvError, "min_get"),
    (
        "pool: [9]",
        lambda: pool().async_reset_send(TensorDict({}, [1]), env_index=[9]),
        ArgumentError,
        r"\[9\]",
    ),
    (
        "new keywords for another number of envs",
        lambda: SerialEnv(2, Count).update_kwargs([{}]),
        RuntimeError,
        "kwargs has 1 entries",
    ),
    # -- others
    (
        "a budget below 0",
        lambda: SerialEnv(2, Count, max_restarts=-1),
        ValueError,
        "max_restarts is -1",
    ),
    (
        "an env of another library as a member",
        lambda: MixedEnv([gymnasium.make("CartPole-v1")]),
        TypeError,
        r"SerialEnv\(1, lambda: GymWrapper\(env\)\)",
    ),
    (
        "a function as a member",
        lambda: MixedEnv([Count]),
        TypeError,
        r"member 0 is .*Count.*Build it first",
    ),
    (
        "a class with a backend takes no other",
        lambda: ThreadingAsyncEnvPool([Count], backend="multiprocessing"),
        ArgumentError,
        "ThreadingAsyncEnvPool has another",
    ),
    (
        "exchange and use buffers may not contradict each other",
        lambda: AsyncEnvPool([Count], backend="multiprocessing", exchange="shm", use_buffers=False),
        ValueError,
        "means use_buffers=True, but use_buffers is False",
    ),
    (
        "done flags in different places need one at the root",
        lambda: SerialEnv(2, [partial(Apart, "left"), partial(Apart, "right")]).start(),
        SpecError,
        r"\('left',\).*\('right',\).*at the root to each",
    ),
    (
        "a pool that steps asynchronously looks at keywords too",
        lambda: AsyncEnvPool([partial(GymEnv, "CartPole-v1", foo=1)] * 2),
        OptionError,
        "'foo'",
    ),
    (
        "truncated keys device and layout errors are classes of envkit 1",
        lambda: SerialEnv(0, Count),
        EnvkitError,
        "num_workers is 0, but must be an int of at least 1",
    ),
    (
        "truncated keys device and layout errors are classes of envkit 2",
        lambda: SerialEnv(1, Count, memmap=True),
        EnvkitError,
        "both True",
    ),
    (
        "truncated keys device and layout errors are classes of envkit 3",
        lambda: SerialEnv(1, Count).add_truncated_keys(),
        EnvkitError,
        "Add them to the sub-envs",
    ),
    (
        "truncated keys device and layout errors are classes of envkit 4",
        lambda: SerialEnv(2, [Count, Chaos], share_individual_td=False).start(),
        ArgumentError,
        "asks for dense results",
    ),
]


@each_row(REFUSALS)
def test_it_is_refused_with_a_way_out(call, error, words):
    assert_refused(call, error, words)
