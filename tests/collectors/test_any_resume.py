"""Random runs go on from a file as if they had not been cut: any env, transforms, policy and collector."""

from __future__ import annotations

import inspect

import pytest

import envkit
from envkit import Transform
from tests.zoo.random_resumes import TRANSFORMS, Run, differs

FEW, MANY, PIECES = 8, 500, 20

OTHERWISE = {
    "RNDTransform": "its networks are made for the width of one observation, see the contract of transforms",
    "PolicyVersion": "it changes when it is called, see tests/transforms/test_policy_version.py",
    "AutoResetTransform": "needs an env that resets by itself; test_autoreset",
    "MultiStepTransform": "works on batches of a collector; test_contract",
    "Timer": "says how long things take, which differs",
    "VecGymEnvTransform": "needs an env that resets by itself; test_autoreset",
    "VideoRecorder": "keeps frames; test_loading",
}


@pytest.mark.parametrize("number", range(FEW))
@pytest.mark.filterwarnings("ignore:frames_per_batch is")
def test_a_random_run_goes_on_to_the_bit(number, tmp_path):
    run = Run.of(number, workers=False)

    assert differs(run, tmp_path) is None, run


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.filterwarnings("ignore:frames_per_batch is")
def test_random_runs_go_on_to_the_bit(piece, tmp_path):
    each = MANY // PIECES
    differences = {}
    for number in range(1000 + each * piece, 1000 + each * (piece + 1)):
        run = Run.of(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        if difference := differs(run, folder):
            differences[str(run)] = difference

    assert not differences


def test_all_transforms_that_remember_take_part():
    marks = ("_changes_with_use", "keeps_memory", "keeps_books", "learns")
    public = {name: getattr(envkit, name) for name in envkit.__all__}
    remember = {
        name
        for name, kind in public.items()
        if inspect.isclass(kind) and issubclass(kind, Transform)
        if any(getattr(kind, mark, None) for mark in marks)
    }

    assert remember <= TRANSFORMS.keys() | OTHERWISE.keys()
