"""64 bits inside compiled policies: numbers are those of torch, and memory has 32."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from envkit.errors import TranslationError
from envkit.functional import Box, Timestep
from envkit.specs import Unbounded
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.primer import TensorDictPrimer
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.policy.compiled import compile_policy
from tests.bridges.jax.policy.networks import Calls
from tests.bridges.jax.policy.test_networks import translated

WRITES = tuple((name,) for name in "abcdefgh")


PLACES = torch.tensor([[3000.25, -3001.5, 2999.0, 0.125], [1e6, 12345.678, -7.0, 3e4]])
BIG = torch.tensor([12_345_678_901, -5, 7, 2**40])


class Codes(nn.Module):
    """Integers that 32 bits cannot hold, and what is made of them."""

    def forward(self, x):
        code = (x * 1000).long() * 1_000_003
        return (
            code,
            (code % 7 > 3).float(),
            code.sum(-1, keepdim=True) + BIG,
            code.argmax(-1, keepdim=True),
            code.sort(-1)[0] // 3,
            (code == 3_000_259_000_750) | (code > 2**35),
            torch.where(x > 0, code, -code).cumsum(-1) & 0xFFFFFFFFF,
            torch.full_like(code, 2**40) - code.clamp(-5, 5) ** 2,
        )


class Doubles(nn.Module):
    """Numbers that float32 cannot hold, and statistics in float64."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([3000.2, 1e-9, 5.0, 1 / 3], dtype=torch.float64))
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        wide = x.double()
        centred = wide - self.mean
        return (
            (wide**20 / 1e100).float(),
            centred,
            centred.var(-1, keepdim=True).sqrt(),
            self.head(centred / 1e3).softmax(-1),
            centred.argmin(-1, keepdim=True),
            ((wide + 1e12) - 1e12).float(),
            nn.functional.layer_norm(wide, (4,)),
            wide.tanh().float(),
        )


@pytest.mark.rounding
@pytest.mark.parametrize("kind", [Codes, Doubles])
def test_a_program_computes_with_the_bits_of_torch(kind):
    torch.manual_seed(0)
    module = kind()
    wanted = module(PLACES)

    got = translated(compile_policy(module), [PLACES], writes=WRITES)

    for path, want in zip(WRITES, wanted, strict=True):
        value = np.asarray(got[path])
        if want.is_floating_point():
            tolerance = 1e-12 if want.dtype == torch.float64 else 1e-6
            np.testing.assert_allclose(value, want.detach(), rtol=tolerance, err_msg=str(path))
        else:
            np.testing.assert_array_equal(value, want, err_msg=str(path))


@pytest.mark.rounding
def test_doubles_that_an_optimiser_changes_are_read_again():
    module = nn.Sequential(Calls(torch.Tensor.double), nn.Linear(2, 3).double())
    policy, x = compile_policy(module), torch.ones(3, 2)
    translated(policy, [x])
    with torch.no_grad():
        module[1].weight += 1e-12
        wanted = module(x)

    got = translated(policy, [x])["action",]

    np.testing.assert_allclose(got, wanted, rtol=1e-15)
    assert policy.translations == 1


INTEGERS = torch.tensor([[-100, 3, 0, 7], [5, -1, 99, -128], [127, 1, -2, 64]], dtype=torch.int8)
HUGE = 1_000_003_001
OPERATIONS = {
    "add": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: torch.sub(x, y, alpha=-3),
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "sign": lambda x, y: x.sign(),
    "relu": lambda x, y: x.relu(),
    "floor": lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, -(y.abs()) - 1, rounding_mode="trunc"),
    "remainder": lambda x, y: x % -5 + x % 9,
    "fmod": lambda x, y: torch.fmod(x, -5) - torch.fmod(y.abs(), 9),
    "pow": lambda x, y: x**3 + y**2 + x**0,
    "clamp": lambda x, y: x.clamp(-3, 9) + x.clamp(max=2) + x.clamp(min=-4),
    "maximum": lambda x, y: torch.maximum(x, y) - torch.minimum(x, y),
    "and": lambda x, y: (x & y) + (x & 12),
    "or": lambda x, y: (x | y) - (x.abs() | 12),
    "xor": lambda x, y: (x ^ y) + ~x,
    "where": lambda x, y: torch.where(x > 0, x * 2, y),
    "sum": lambda x, y: x.sum(-1, keepdim=True) + (y > 0).sum(-1, keepdim=True),
    "cumsum": lambda x, y: x.cumsum(-1),
    "prod": lambda x, y: x.prod(-1, keepdim=True),
    "cat": lambda x, y: torch.cat([x, y * 3], -1),
    "pad": lambda x, y: nn.functional.pad(x, (1, 2), value=-999),
    "places": lambda x, y: x.argmax(-1) + x.sort(-1)[1][:, 0] + x.max(-1)[1],
    "values": lambda x, y: x.max(-1)[0] + x.sort(-1)[0][:, 1] - x.amin(-1),
    "scatter": lambda x, y: x.scatter(-1, y.abs() % 4, 500),
    "scatter_add": lambda x, y: x.scatter_add(-1, y.abs() % 4, y),
    "pieces": lambda x, y: x.split([1, 3], -1)[1] * y.gather(-1, x.abs() % 4)[:, :1],
    "made": lambda x, y: x + torch.arange(-3, 9, 3) * torch.full_like(x, -12),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_huge_integers_gives_the_numbers_of_torch(name):
    module = Calls(lambda x: OPERATIONS[name](x.long() * HUGE, x.flip(0, 1).long() * HUGE))

    got = translated(compile_policy(module), [INTEGERS])["action",]

    np.testing.assert_array_equal(got, module(INTEGERS))


# ------------------------------------------------------------------------------ in programs


class Line:
    """The place on four lines grows by 1 a step; a reward is the first action."""

    action_space = Box(-1e9, 1e9, (4,))

    def reset(self, key):
        place = 3000.0 + jnp.arange(4)
        return place, Timestep(place)

    def step(self, place, action):
        return place + 1, Timestep(place + 1, action[0], place[0] > 3003)


@pytest.fixture(scope="module")
def line():
    return JaxEnv(Line(), batch_size=[2])


@pytest.fixture(scope="module")
def counted(line):
    count = Unbounded((1,), dtype=torch.int32)
    return TransformedEnv(line, TensorDictPrimer(count=count, expand_specs=True))


class Recorded(nn.Module):
    def forward(self, x):
        return x.double().tanh(), (x * 1000).long() * 1_000_003, x.double() / 7


@pytest.mark.parametrize("stops", [{"break_when_any_done": False}, {"break_when_all_done": True}])
def test_a_rollout_records_64_bits(line, stops):
    policy = TensorDictModule(Recorded(), ["observation"], ["action", "code", "part"])

    data = line.rollout(7, compile_policy(policy), **stops)

    action, code, part = Recorded()(data["observation"])
    assert torch.equal(data["code"], code)
    torch.testing.assert_close(data["part"], part, rtol=1e-14, atol=0)
    torch.testing.assert_close(data["next", "reward"], action[..., :1].float())


def remembering(following):
    class Counts(nn.Module):
        def forward(self, x, count):
            return x * 0 + count, following(count)

    return compile_policy(
        TensorDictModule(Counts(), ["observation", "count"], ["action", ("next", "count")])
    )


def test_a_counter_of_32_bits_is_carried_from_step_to_step(counted):
    data = counted.rollout(4, remembering(lambda count: (count * 1_000_003 + 7).remainder(97)))

    wanted, count = [], 0
    for _ in range(4):
        count = (count * 1_000_003 + 7) % 97
        wanted.append(count)
    assert data["next", "count"][0, :, 0].tolist() == wanted
    assert data["next", "count"].dtype == torch.int32


@pytest.mark.parametrize("following", [lambda n: n.long() + 1, lambda n: (n + 0.5).double()])
def test_memory_of_64_bits_is_refused(counted, following):
    with pytest.raises(TranslationError, match=r"carries 32 bits to the next step.*torch.int32"):
        counted.rollout(4, remembering(following))
