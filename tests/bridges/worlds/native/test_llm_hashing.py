"""`LLMHashingEnv`: text grows by tokens, histories have hashes, prompts come from the data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from envkit import LLMHashingEnv, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    InputError,
    OptionError,
    StepMaskError,
    UnknownStateError,
)


class Letters:
    """A tokenizer whose tokens are characters."""

    vocab_size = 128

    def __call__(self, text):
        if isinstance(text, str):
            return torch.tensor([ord(letter) for letter in text])
        return {"input_ids": [[ord(letter) for letter in line] for line in text]}

    def decode(self, tokens):
        return "".join(map(chr, tokens.tolist()))

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows]


def letters(text):
    return torch.tensor([[ord(letter)] for letter in text])


@pytest.mark.parametrize("text", ["hello", ["hello", "world"]], ids=str)
def test_writing_does_what_the_specs_say(text):
    env = LLMHashingEnv(tokenizer=Letters())

    check_env_specs(env, tensordict=env.make_tensordict(text), seed=0)


def test_a_step_appends_a_token_to_each_row():
    env = LLMHashingEnv(tokenizer=Letters())
    root = env.make_tensordict(["hell", "worl"])

    following = env.step(root.set("action", letters("od")))["next"]

    assert following.get("text").tolist() == ["hello", "world"]
    assert following["observation"][:, -1].tolist() == [ord("o"), ord("d")]
    assert not following["done"].any() and "reward" not in following.keys()


def test_equal_histories_have_equal_hashes_and_others_do_not():
    env = LLMHashingEnv(26)
    prompts = torch.tensor([[1, 2], [1, 2], [2, 1], [1, 3]])
    root = env.reset(TensorDict({"observation": prompts}, [4]))

    paths = torch.tensor([[5, 6], [5, 6], [5, 6], [5, 6]])
    for token in paths.unbind(1):
        root = env.step_mdp(env.step(root.set("action", token[:, None])))
    swapped = env.reset(TensorDict({"observation": prompts[0]}))
    for token in (6, 5):
        swapped = env.step_mdp(env.step(swapped.set("action", torch.tensor([token]))))

    first, same, *others = root["hashing"].flatten().tolist()
    assert first == same
    assert len({first, *others, swapped["hashing"].item()}) == 4


def test_hashes_are_the_same_in_every_process():
    token = 0x0706050403020100
    root = LLMHashingEnv(token + 1).reset(TensorDict({"observation": torch.tensor([token])}))

    assert root["hashing"].item() % 2**64 == 0x93F5F5799A932462  # of the authors' test vectors


def test_another_hash_and_other_keys_may_be_given():
    env = LLMHashingEnv(
        10, hashing_module=lambda tokens: tokens.sum(-1), observation_key=("tokens", "ids")
    )
    root = env.reset(TensorDict({"tokens": {"ids": torch.tensor([1, 2])}}))

    following = env.step(root.set("action", torch.tensor([4])))["next"]

    assert root["hashing"].item() == 3 and following["hashing"].item() == 7
    assert following["tokens", "ids"].tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, ["hashing", "observation", "text"]),
        ({"text_output": False}, ["hashing", "observation"]),
        ({"text_key": ("said", "words")}, ["hashing", "observation", "said"]),
        ({"text_key": None}, ["hashing", "observation"]),
    ],
    ids=str,
)
def test_text_is_shown_where_it_is_asked_for(options, keys):
    env = LLMHashingEnv(tokenizer=Letters(), **options)

    assert sorted(env.observation_spec.keys()) == keys
    assert set(keys) <= set(env.make_tensordict("a").keys())


class Spelling:
    """A tokenizer that does not say how many tokens it has."""

    def __init__(self):
        letters = Letters()
        self.decode, self.batch_decode, self.call = letters.decode, letters.batch_decode, letters

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)


def test_a_tokenizer_needs_no_size_where_it_is_given():
    env = LLMHashingEnv(5, tokenizer=Spelling())

    assert env.action_spec.n == 5
    with pytest.raises(ArgumentTypeError, match="no vocab_size"):
        LLMHashingEnv(tokenizer=Spelling())


def Sized(text):
    """Give tokens, and have no way back."""
    return [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": 3}, "no vocab_size, no decode, no batch_decode"),
        (
            {"tokenizer": SimpleNamespace(vocab_size=9, decode=str, batch_decode=list)},
            "no __call__",
        ),
        (
            {"tokenizer": Sized, "vocab_size": 9},
            r"no decode, no batch_decode.*text, and has decode and",
        ),
        ({"vocab_size": 9, "hashing_module": 3}, "hashing_module is 3.*cannot be called"),
    ],
)
def test_what_is_no_tokenizer_and_no_hash_is_refused(options, message):
    with pytest.raises(ArgumentTypeError, match=message):
        LLMHashingEnv(**options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([1, 10], "holds 10, but tokens go from 0 to 9"), ([-1], "-1"), ([1.5], "prompt.long")],
)
def test_a_prompt_that_is_no_tokens_is_refused(prompt, message):
    with pytest.raises(InputError, match=message):
        LLMHashingEnv(10).reset(TensorDict(observation=torch.tensor(prompt)))


def test_what_is_not_known_is_told():
    env = LLMHashingEnv(10)
    with pytest.raises(OptionError, match="Pass vocab_size=, or a tokenizer"):
        LLMHashingEnv()
    with pytest.raises(UnknownStateError, match="the data has no 'observation'"):
        env.reset()
    with pytest.raises(UnknownStateError, match="there is no tokenizer"):
        env.make_tensordict("a")
    with pytest.raises(ArgumentError, match="must have equally many"):
        LLMHashingEnv(tokenizer=Letters()).make_tensordict(["a", "bc"])


def test_rows_of_a_batch_grow_together():
    env = LLMHashingEnv(10)
    root = env.reset(TensorDict({"observation": torch.zeros(2, 3, dtype=torch.int64)}, [2]))
    root = env.rand_action(root)

    with pytest.raises(StepMaskError, match="leaves out 1 of 2 rows"):
        env.step(root.clone().set("_step", torch.tensor([True, False])))
    skipped = env.step(root.clone().set("_step", torch.tensor([False, False])))["next"]
    assert skipped["observation"].shape == (2, 3)


def test_texts_work_as_rows_and_under_transforms():
    env = TransformedEnv(SerialEnv(2, lambda: LLMHashingEnv(tokenizer=Letters())), StepCounter(3))
    prompt = LLMHashingEnv(tokenizer=Letters()).make_tensordict(["ab", "cd"])

    data = env.rollout(5, tensordict=prompt)

    assert data.shape == (2, 3)
    assert [len(text) for text in data[0].get(("next", "text")).tolist()] == [3, 4, 5]
