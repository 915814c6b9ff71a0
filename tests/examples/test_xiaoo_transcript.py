# SPDX-License-Identifier: Apache-2.0
"""A transcript of what the xiaoO agent sends over HTTP, replayed against the gateway and a real engine.

The agent side is written after that agent's published behaviour, mistakes included: an unordered map, constant lookup
ids, an evict after every model call, of everything when the write-back was empty, and no word of a session.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from semkv.consumers.memory.chains import common_prefix
from tests.examples.conftest import CHUNK, World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TRANSCRIPT = json.loads((Path(__file__).parent / "xiaoo_transcript.json").read_text(encoding="utf-8"))


@dataclass
class Agent:
    """One session of that agent: its messages and its unordered map of hashes."""

    world: World
    messages: list[dict[str, str]] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    chain: list[str] = field(default_factory=list)
    answers: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(3))

    def llm(self, text: str, *, write_back: bool = True) -> None:
        self.messages.append({"role": "user", "content": text})
        answer = self.world.chat(self.messages)
        said = answer["choices"][0]["message"]["content"] or ""
        self.messages.append({"role": "assistant", "content": said})
        chain = answer["kv_transfer_params"]["chunk_hashes"]
        if write_back:
            self.chain = chain
        new = chain if write_back else []
        self.evict(self._shuffled(set(self.known) - set(new)))
        self.known = dict.fromkeys(new, said)

    def prefetch(self, lookup_id: str) -> None:
        body = {"chunk_hashes": self._shuffled(self.known), "lookup_id": lookup_id}
        self.answers.append(("prefetch", *self.world.rest("/memory/prefetch", body)))

    def evict(self, hashes: list[str]) -> None:
        if hashes:
            self.answers.append(("evict", *self.world.rest("/memory/evict", {"chunk_hashes": hashes})))

    def _shuffled(self, hashes: Any) -> list[str]:
        found = sorted(hashes)
        self.dice.shuffle(found)
        return found


def places(world: World, chain: list[str]) -> list[list[str]]:
    status, body = world.rest("/memory/locate", {"chunk_hashes": chain})
    assert status == 200, body
    return list(body["chunk_tiers"])


def test_several_sessions_share_a_system_prompt_and_nobodys_prefix_is_lost(world: World) -> None:
    system = {"role": "system", "content": TRANSCRIPT["system"] * 2}
    agents = {name: Agent(world, [system]) for name in "ABC"}
    shared = 0
    for step in TRANSCRIPT["steps"]:
        agent = agents[step["session"]]
        if step["call"] == "llm":
            agent.llm(step["text"])
        elif step["call"] == "prefetch":
            agent.prefetch(step["lookup_id"])
        elif step["call"] == "compact":
            agent.messages = [system]
            agent.llm(step["text"])
        else:
            agent.llm(step["text"], write_back=False)
            shared = common_prefix(agent.chain, agents["B"].chain)
        # After every step everybody else's whole chain is still somewhere.
        for name, other in agents.items():
            if other is not agent and other.chain:
                assert all(places(world, other.chain)), (step, name, places(world, other.chain))
    assert shared >= 2, "the sessions share whole chunks of their system prompt"

    for kind, status, body in [answer for agent in agents.values() for answer in agent.answers]:
        assert status == 200, body
        if kind == "prefetch":
            assert body["status"] == "prefetch_started" and body["lookup_id"] in {"turn_prefetch", "snapshot_prefetch"}
        else:
            assert body["status"] == "success" and body["num_evicted"] >= 0
    # A's compaction freed what its new prompt dropped.
    (freed,) = [body for kind, _, body in agents["A"].answers if kind == "evict"]
    assert freed["num_evicted"] >= 1, freed
    # C's evict of everything, after an empty write-back, took nothing: its own newest prompt still reads it all.
    (spared,) = [body for kind, _, body in agents["C"].answers if kind == "evict"]
    assert spared["num_evicted"] == 0 and spared["ranks"][0]["counts"] == {"shared": len(agents["C"].chain)}
    assert all(places(world, agents["C"].chain))
    # B goes on as if nothing had happened: the same text again, and all of its chain from the cache.
    b = agents["B"]
    again = world.chat([*b.messages, {"role": "user", "content": "Go on."}])
    params = again["kv_transfer_params"]
    assert params["num_lmcache_cached_tokens"] >= len(b.chain) * CHUNK
    once_more = world.chat([*b.messages, {"role": "user", "content": "Go on."}])
    assert once_more["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
