"""Counters, metrics and what is remembered of evicted paths."""

from __future__ import annotations

import re

import numpy as np

from skippy.history import Tombstones
from skippy.metrics import prometheus_text
from tests.test_cache_model import World, path


def samples(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_prometheus_text_says_what_happened() -> None:
    world = World()
    world.run(path((1, 100)))
    world.cache.space.evict_resident("test")
    world.run(path((1, 100), (2, 10)))
    text = prometheus_text(world.cache.stats(), model='a "b"')
    found = samples(text)

    def value(name: str, labels: str = "") -> float:
        return found[f'{name}{{model="a \\"b\\""{labels}}}']

    assert value("skippy_prompt_tokens_total") == 210
    assert value("skippy_evaluated_tokens_total") == 110
    assert value("skippy_cached_tokens_total", ',tier="ram"') == 100
    assert value("skippy_cached_tokens_total", ',tier="resident"') == 0
    assert value("skippy_requests_total", ',reason="never_seen"') == 1
    assert value("skippy_requests_total", ',reason="hit"') == 1
    assert value("skippy_evictions_total", ',tier="resident",kind="resident",reason="test"') == 1
    assert value("skippy_saves_total") == value("skippy_restores_total") == 1
    assert value("skippy_cells", ',state="resident"') == 110
    assert value("skippy_entries", ',kind="segment"') == 1
    assert value("skippy_seconds_total", ',on="restore"') > 0
    names = {re.split(r"[{ ]", key)[0] for key in found}
    families = set(re.findall(r"# TYPE (\S+) (?:counter|gauge)", text))
    assert families - names == {"skippy_failures_total"}  # nothing failed
    assert names < families
    assert len(re.findall(r"# HELP ", text)) == len(families)


def test_an_evicted_path_is_remembered() -> None:
    world = World(payload="resident-kv")
    world.run(path((1, 100)))
    world.run(path((2, 100)))
    assert world.cache.space.evict_resident("test")
    tokens = path((1, 100), (3, 10))
    explained = world.cache.explain("n", np.array(tokens, np.int32), str)
    assert (explained.reason, explained.cached_tokens, explained.evaluated_tokens) == ("evicted_recently", 0, 110)
    lease = world.run(tokens)
    assert (lease.reason, lease.restored) == ("evicted_recently", 0)
    assert world.cache.stats()["tokens"]["lost"] == 100
    assert world.run(path((4, 100))).reason == "never_seen"
    assert world.run([*tokens, 1]).reason == "hit"
    assert world.cache.stats()["tokens"]["lost"] == 100


def test_what_can_be_brought_back_is_not_mourned() -> None:
    world = World()
    world.run(path((1, 100)))
    assert world.cache.space.evict_resident("test")  # it is in RAM
    assert world.run(path((1, 100), (2, 1))).reason == "hit"
    assert world.cache.stats()["tokens"]["lost"] == 0


def test_tombstones_are_bounded_and_find_the_longest() -> None:
    graves = Tombstones(capacity=3)
    tokens = np.arange(100, dtype=np.int32)
    for n in (10, 40, 70):
        graves.add("n", tokens[:n])
    assert graves.longest("n", tokens) == 70
    assert graves.longest("n", tokens[:69]) == 40
    assert graves.longest("m", tokens) == 0
    assert graves.longest("n", tokens + 1) == 0
    graves.add("n", tokens[:20])  # the oldest goes
    assert graves.longest("n", tokens[:15]) == 0
    assert graves.longest("n", tokens[:25]) == 20


def test_explaining_says_what_it_would_cost() -> None:
    world = World()
    world.run(path((1, 100)))
    tokens = np.array(path((1, 100), (2, 50)), np.int32)
    assert world.cache.explain("n", tokens, str).seconds is None
    world.cache.speeds.prefilled(1000, 2.0)
    explained = world.cache.explain("n", tokens, str)
    assert (explained.evaluated_tokens, explained.seconds) == (50, 0.1)
