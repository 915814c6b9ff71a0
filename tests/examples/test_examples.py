# SPDX-License-Identifier: Apache-2.0
"""The examples, run as programs against a real engine."""

from __future__ import annotations

import re

import pytest

from tests.examples.conftest import EXAMPLES, World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TURNS = [f"Turn {n}: " + "the conversation is about the memory of an agent and its cache. " * 8 for n in (1, 2)]


def test_the_agent_is_short_enough_to_read() -> None:
    lines = (EXAMPLES / "agent.py").read_text(encoding="utf-8").splitlines()
    body = lines[lines.index("import asyncio") :]
    assert len([line for line in body if line.strip()]) <= 40


def test_the_agent(world: World) -> None:
    output = world.run("agent.py", *TURNS)
    warmed = re.findall(r"(\d+) chunks: succeeded, \{(.+)\}", output)
    assert len(warmed) == 2, output
    for chunks, counts in warmed:
        assert sum(map(int, re.findall(r": (\d+)", counts))) == int(chunks) > 2
        assert set(re.findall(r"'(\w+)'", counts)) <= {"loaded", "already_there"}
    assert re.search(r"freed: \{.*'removed': \d+", output), output


def test_plain_http(world: World) -> None:
    output = world.run("plain_http.py", *TURNS)
    assert output.count("prefetch_started") == 2 and output.count("succeeded") == 2, output
    freed, of = map(int, re.search(r"freed (\d+) of (\d+)", output).groups())  # type: ignore[union-attr]
    # The turn's system prompt may be shared with the other example's conversation, and then stays.
    assert 0 < freed <= of


def test_the_tool_calling_loop(world: World) -> None:
    script = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1]); import tool_calling; "
        "choice = {'type': 'function', 'function': {'name': 'read_notes'}}; "
        "asyncio.run(tool_calling.main('What is the state of the billing job? ' * 12, choice=choice))"
    )
    output = world.python("-c", script, str(EXAMPLES))
    # The weights are random: the call is forced, its arguments may be nonsense, and the loop has to bear that.
    assert "tool: read_notes(" in output, output
    assert "moment    tool_call_started" in output and "outcome   succeeded" in output, output
    assert "retain moment-" in output and "prefetch moment-" in output, output
