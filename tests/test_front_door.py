"""`import envkit` is quiet and light, and every public name is found through it."""

from __future__ import annotations

import ast
import importlib
import pydoc
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import envkit

STUB = Path(envkit.__file__).with_suffix(".pyi")


def run(code: str) -> subprocess.CompletedProcess:
    """Run code in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=90
    )


def run_without(*libraries: str, code: str) -> subprocess.CompletedProcess:
    """Run code in an interpreter that does not find these libraries."""
    hide = f"""
    import sys
    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {libraries!r}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    sys.meta_path.insert(0, Hidden())
    """
    return run(textwrap.dedent(hide) + textwrap.dedent(code))


def test_import_envkit_loads_neither_torch_nor_jax_and_says_nothing():
    done = run("""
        import sys
        import envkit
        heavy = {"torch", "tensordict", "jax", "numpy", "gymnasium", "brax"}
        print(sorted(heavy & set(sys.modules)))
    """)

    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("name", sorted(envkit._HOME_OF))
def test_every_public_name_resolves_to_the_object_of_that_name(name):
    value = getattr(envkit, name)

    assert value is not None
    assert getattr(value, "__name__", name) in (name, *ALIASES.get(name, ()))


ALIASES = {  # names the field knows for things that tensordict or envkit call otherwise
    "BaseCollector": ("Collector",),
    "DiscreteBox": ("CategoricalBox",),
    "ExplorationType": ("InteractionType",),
    "MujocoPlaygroundEnv": ("PlaygroundEnv",),
    "MujocoPlaygroundWrapper": ("PlaygroundWrapper",),
    "MultiAsyncCollector": ("MultiaSyncDataCollector",),
    "MultiSyncCollector": ("MultiSyncDataCollector",),
    "exploration_type": ("interaction_type",),
    "set_exploration_type": ("set_interaction_type",),
}


def test_the_front_door_reads_each_name_and_its_place_in_the_stub():
    stated = {
        alias.asname: statement.module
        for statement in ast.parse(STUB.read_text()).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    assert stated == envkit._HOME_OF
    assert sorted(stated) == envkit.__all__


def test_private_and_earlier_names_of_torchrl_are_found():
    from envkit import BoundedTensorSpec, CompositeSpec, DiscreteTensorSpec

    assert envkit._apply_to_composite is envkit.apply_to_composite
    assert envkit._apply_to_composite_inv is envkit.apply_to_composite_inv
    assert envkit.aSyncDataCollector is envkit.AsyncCollector
    assert envkit.DataCollectorBase is envkit.BaseCollector
    spec = CompositeSpec(a=BoundedTensorSpec(-1, 1, (3,)), b=DiscreteTensorSpec(2))
    assert spec == envkit.Composite(a=envkit.Bounded(-1, 1, (3,)), b=envkit.Categorical(2))
    assert envkit.BinaryDiscreteTensorSpec(3).rand().shape == (3,)
    assert envkit.OneHotDiscreteTensorSpec(3).rand().sum() == 1
    assert envkit.MultiDiscreteTensorSpec([2, 3]).rand().shape == (2,)
    assert envkit.MultiOneHotDiscreteTensorSpec([2, 3]).rand().shape == (5,)
    assert envkit.UnboundedContinuousTensorSpec(2).rand().is_floating_point()
    assert not envkit.UnboundedDiscreteTensorSpec(2).rand().is_floating_point()
    assert envkit.NonTensorSpec(()).shape == ()
    assert envkit.LazyStackedTensorSpec(spec["b"], spec["b"], dim=0).shape == (2,)
    assert envkit.LazyStackedCompositeSpec(spec, spec, dim=0)["b"].shape == (2,)
    assert not envkit._OTHER_NAMES.keys() & envkit._HOME_OF.keys()


def test_dir_lists_every_public_name():
    assert set(envkit._HOME_OF) <= set(dir(envkit))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(
        AttributeError,
        match=r"'envkit' has no attribute 'ParalelEnv'. Did you mean 'ParallelEnv'\?",
    ):
        envkit.ParalelEnv  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'unheard_of'\.$"):
        envkit.unheard_of  # noqa: B018


@pytest.mark.slow
def test_a_star_import_brings_all_names_and_leaves_the_process_as_it_is():
    done = run("""
        import multiprocessing, sys
        from envkit import *
        import envkit
        print(set(envkit._HOME_OF) <= set(globals()), "torchrl" in sys.modules)
        print(multiprocessing.get_start_method(allow_none=True))
    """)

    assert (done.returncode, done.stdout) == (0, "True False\nNone\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("libraries", "missing", "there"),
    [
        (("jax", "jaxlib", "brax"), {"BraxEnv", "JaxEnv", "Box"}, {"GymEnv", "ParallelEnv"}),
        (("torchrl", "gymnasium"), set(), {"GymEnv", "for_replay_buffer", "Box"}),
    ],
)
def test_a_star_import_brings_what_is_installed(libraries, missing, there):
    done = run_without(
        *libraries,
        code=f"""
        from envkit import *
        print(sorted({missing | there!r} & set(globals())))
        """,
    )

    assert (done.returncode, done.stdout) == (0, f"{sorted(there)}\n"), done.stderr


def test_a_private_name_is_not_looked_up_in_other_modules():
    assert not hasattr(envkit, "__path_of_nothing__")


@pytest.mark.parametrize(
    ("library", "uses", "extra"),
    [
        pytest.param(
            "brax", ["envkit.BraxEnv('fast', device='cpu')"], "brax", marks=pytest.mark.slow
        ),
        ("jax", ["envkit.BraxEnv", "envkit.Box"], "jax"),
        pytest.param("gymnasium", ["envkit.GymEnv('CartPole-v1')"], "gym", marks=pytest.mark.slow),
    ],
)
def test_a_missing_library_is_an_import_error_that_names_the_extra(library, uses, extra):
    done = run_without(
        library,
        code=f"""
        import envkit
        from envkit.errors import MissingLibraryError
        for use in {uses!r}:
            try:
                eval(use)
            except MissingLibraryError as error:
                assert isinstance(error, ImportError)
                assert error.name == {library!r}
                print(error)
        """,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(uses)
    for line in lines:
        assert f"'{library}' is not installed" in line
        assert f"pip install -e '.[{extra}]'" in line


@pytest.mark.slow  # starts a process without the libraries
def test_envkit_works_without_what_an_env_does_not_need():
    done = run_without(
        *("jax", "brax", "gymnasium", "matplotlib"),
        code="""
        from envkit import SerialEnv, get_available_libraries
        from tests.zoo.envs import Count
        print(SerialEnv(2, Count).rollout(3).shape)
        """,
    )

    assert (done.returncode, done.stdout) == (0, "torch.Size([2, 3])\n"), done.stderr


@pytest.mark.slow
def test_a_broken_library_is_not_called_missing(tmp_path):
    (tmp_path / "brax").mkdir()
    (tmp_path / "brax" / "__init__.py").write_text("import something_it_needs")

    done = run(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from envkit import BraxEnv
        BraxEnv("fast", device="cpu")
    """)

    assert "ModuleNotFoundError: No module named 'something_it_needs'" in done.stderr
    assert "is not installed" not in done.stderr


def test_available_libraries_are_listed_without_importing_them():
    done = run("""
        import sys
        from envkit import get_available_libraries
        print(get_available_libraries()["gymnasium"], "gymnasium" in sys.modules)
    """)

    assert done.stdout == "True False\n"


@pytest.mark.parametrize("package", ["envs", "transforms", "collectors"])
def test_what_is_looked_for_in_a_package_is_said_to_be_in_envkit(package):
    with pytest.raises(ImportError, match=r"Write: from envkit import GymEnv$"):
        exec(f"from envkit.{package} import GymEnv")
    with pytest.raises(ImportError, match="cannot import name 'NoSuchEnv'"):
        exec(f"from envkit.{package} import NoSuchEnv")
    assert not hasattr(importlib.import_module(f"envkit.{package}"), "no_such_thing")


def test_tables_of_keywords_that_pages_name_can_be_looked_up():
    named = set()
    for name in envkit._HOME_OF:
        text = getattr(envkit, name).__doc__ or ""
        named |= set(re.findall(r"`([\w.]*(?:Options|Settings))`", text))

    assert named
    assert not {name for name in named if pydoc.locate(name) is None}, "write the whole path"
