# SPDX-License-Identifier: Apache-2.0
"""The development engine's parts that need no engine: model files, guard, ports, what is said on failure."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semkv.cli.devengine import guard
from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.model import TINY, make_model
from semkv.cli.devengine.server import EngineStartError, ServerOptions, VLLMServer, port_is_free


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_a_model_is_the_same_every_time_and_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(first)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello world"}], tokenize=False)
    assert text == "<|im_start|>user\nhello world<|im_end|>\n"
    assert tokenizer.decode(tokenizer("hello world")["input_ids"]) == "hello world"
    model = transformers.AutoModelForCausalLM.from_pretrained(first)
    assert model.config.num_hidden_layers == TINY.layers


def test_when_the_starter_is_killed_the_whole_group_ends(tmp_path):
    pids = tmp_path / "pids"
    command = f"""
import os, time, subprocess
child = subprocess.Popen(["sleep", "600"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
time.sleep(600)
"""
    guarded = [sys.executable, "-S", guard.__file__, sys.executable, "-c", command]
    starter = f"""
import subprocess, time
subprocess.Popen({guarded!r}, stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", starter])
    try:
        _wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        children = [int(pid) for pid in pids.read_text().split()]
        assert all(_alive(pid) for pid in children)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _wait_until(lambda: not any(_alive(pid) for pid in children))


def test_a_port_in_use_is_said_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        server = VLLMServer(ServerOptions(model=tmp_path, folder=tmp_path, lmcache=None, port=port))
        with pytest.raises(EngineStartError, match=f"port {port} is in use"):
            server.start()
        assert server.pid is None


def test_a_server_that_ends_at_once_is_reported_with_its_last_error(tmp_path):
    pytest.importorskip("vllm")
    options = ServerOptions(
        model=tmp_path / "no model", folder=tmp_path, lmcache=None, environment={"PYTHONHASHSEED": "x"}
    )
    server = VLLMServer(options)
    with pytest.raises(EngineStartError, match=r"ended with code \d+: .*PYTHONHASHSEED.*\(log: .*engine.log"):
        server.start()
    assert server.pid is None


def test_the_servers_environment_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMKV_TENANT", "someone")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "7")
    options = ServerOptions(
        model=tmp_path,
        folder=tmp_path,
        lmcache=LMCacheConfig(disk=tmp_path / "disk"),
        nats_url="nats://x",
        environment={"A": "b"},
    )
    variables = options.variables()
    assert "SEMKV_TENANT" not in variables and "LMCACHE_CHUNK_SIZE" not in variables
    assert variables["SEMKV_NATS_URL"] == "nats://x" and variables["A"] == "b"
    assert os.environ["SEMKV_TENANT"] == "someone"
    assert "SEMKV_NATS_URL" not in ServerOptions(model=tmp_path, folder=tmp_path, lmcache=None).variables()
