"""Optional libraries: what is said of one that is missing, and of one that fails at import."""

import sys

import pytest

from envkit.errors import BrokenLibraryError, MissingLibraryError
from envkit.installing import LIBRARIES
from envkit_bridges.libraries import quietly, require


@pytest.fixture
def a_module(tmp_path, monkeypatch):
    """Write a module called gymnax that stands before the installed one."""

    def write(source: str) -> None:
        (tmp_path / "gymnax.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "gymnax", raising=False)

    before = {name: module for name, module in sys.modules.items() if name.startswith("gymnax")}
    yield write
    sys.modules.pop("gymnax", None)
    sys.modules.update(before)


def test_a_library_that_fails_at_import_is_named_with_what_it_says_and_the_cure(a_module):
    a_module("raise RuntimeError('no such instruction')")

    with pytest.raises(BrokenLibraryError, match="no such instruction") as caught:
        require("gymnax")

    assert "pip install -e '.[gymnax]'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_library_that_lacks_another_is_not_called_missing_itself(a_module):
    a_module("import a_library_that_nobody_has")

    with pytest.raises(BrokenLibraryError, match="a_library_that_nobody_has"):
        require("gymnax")


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jumanji", None)  # which makes its import fail

    with pytest.raises(MissingLibraryError, match=r"pip install -e '\.\[jumanji\]'"):
        require("jumanji")


def test_every_extra_that_a_message_names_exists(pytestconfig):
    import tomllib

    project = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]

    assert {library.extra for library in LIBRARIES.values()} <= set(
        project["optional-dependencies"]
    )


def test_a_library_that_takes_the_streams_of_the_process_is_quiet_too(capsys):
    before = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__

    with quietly():
        # as jaxmarl.environments.mabrax does when it is imported
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        print("a line of the library")
    print("a line of the program")

    assert (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) == before
    assert capsys.readouterr().out == "a line of the program\n"
