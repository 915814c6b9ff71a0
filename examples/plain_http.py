# SPDX-License-Identifier: Apache-2.0
"""The same without any package: the OpenAI API and semkv's gateway over plain HTTP, with what Python brings.

LLM_URL=http://127.0.0.1:8000 GATEWAY_URL=http://127.0.0.1:6999 python examples/plain_http.py
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

LLM = os.environ.get("LLM_URL", "http://127.0.0.1:8000")
GATEWAY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:6999")
TOKEN = os.environ.get("GATEWAY_TOKEN", "")
MODEL, SESSION = os.environ.get("MODEL", "tiny"), "example-http"


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """A JSON call. The gateway says in the body what is wrong, so an error's body is worth reading too."""
    headers = {"Content-Type": "application/json"}
    if TOKEN and url.startswith(GATEWAY):
        headers["Authorization"] = f"Bearer {TOKEN}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        return dict(json.load(error))


def main(turns: list[str]) -> None:
    messages = [{"role": "system", "content": "You answer from the notes you are given."}]
    chain: list[str] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        asked = {"model": MODEL, "messages": messages, "max_tokens": 16,
                 "kv_transfer_params": {"semkv": {"session": SESSION}}}  # fmt: skip
        answer = post(f"{LLM}/v1/chat/completions", asked)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        # None, and an empty list, mean "not known": nothing may be evicted on that word.
        chain = (answer.get("kv_transfer_params") or {}).get("chunk_hashes") or chain
        if not chain:
            continue
        started = post(f"{GATEWAY}/memory/prefetch", {"chunk_hashes": chain, "lookup_id": "turn", "session": SESSION,
                                                      "expires_in_ms": 10_000})  # fmt: skip
        print(started["status"], started.get("num_chunks"), started.get("error", ""))
        time.sleep(0.2)  # a tool runs, a person thinks
        with urllib.request.urlopen(f"{GATEWAY}/memory/commands/{started['command_id']}?wait=10", timeout=30) as told:
            for rank in json.load(told)["ranks"]:
                print(f"{rank['instance']}.{rank['rank']}: {rank['state']} {rank['counts']}")
    if chain:
        freed = post(f"{GATEWAY}/memory/evict", {"chunk_hashes": chain, "session": SESSION,
                                                 "locations": ["LocalCPUBackend"]})  # fmt: skip
        print("freed", freed["num_evicted"], "of", len(chain))


if __name__ == "__main__":
    main(sys.argv[1:] or ["What did we decide about the invoice job?", "And about the ledger?"])
