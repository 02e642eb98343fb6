"""A notebook shows what an env is, with its specs and the envs inside of it folded below."""

from __future__ import annotations

from html.parser import HTMLParser

from envkit import MixedEnv, SerialEnv, StepCounter, TransformedEnv
from tests.zoo.envs import Count, StatelessCount

VOID = {"br", "hr", "img"}


class Page(HTMLParser):
    """Reads text, and checks that every element is closed, and that none fetches or runs anything."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in {"script", "link", "iframe"} and not {"src", "href"} & {
            k for k, _ in attrs
        }
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def shown(env) -> list[str]:
    return Page(env._repr_html_()).texts


def test_an_env_shows_its_batch_device_and_specs():
    texts = shown(StatelessCount(5, batch_size=[3]))

    assert texts[:6] == ["StatelessCount", "kind", "stateless", "batch size", "(3,)", "device"]
    at = texts.index("specs")
    assert {"observation", "action", "reward", "done", "terminated"} <= set(texts[at:])
    assert "simulator with a fixed batch" in shown(Count(3))


def test_names_are_escaped():
    class Named(Count):
        def _repr_arguments(self):
            return ["'<script>alert(1)</script>'"]

    assert "'<script>alert(1)</script>'" in shown(Named(3))


def test_a_mixed_env_shows_its_members_below():
    env = MixedEnv([SerialEnv(2, lambda: Count(3)), SerialEnv(1, lambda: Count(4))])

    texts = shown(env)

    assert "2 envs side by side" in texts
    assert texts.index("rows 0 to 1: SerialEnv") < texts.index("rows 2 to 2: SerialEnv")
    env.close()


def test_a_pool_is_not_started_to_be_shown():
    pool = SerialEnv(2, lambda: Count(3))

    texts = shown(TransformedEnv(pool, StepCounter()))

    assert "2, not started" in texts and "base env: SerialEnv" in texts
    assert pool.is_closed


def test_transforms_are_shown_with_the_specs_that_they_make():
    texts = shown(TransformedEnv(Count(3), StepCounter()))

    assert "step_count" in texts and any("StepCounter" in text for text in texts)
    assert texts.count("base env: Count") == 1
