# SPDX-License-Identifier: Apache-2.0
"""The agent of the development stack: one conversation that is put away and comes back.

It asks the engine two turns in one session, follows the `finished` events, frees the session's chunks from DDR,
prefetches them again and asks on. It prints what each rank did and where the prefetch's trace is. Ends with 1 if the
prefetch did not succeed or the last turn hit nothing. Needs semkv.bus and httpx; reads ENGINE_URL, JAEGER_UI and the
bus's own variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import httpx

from semkv.bus import connect
from semkv.bus.messages import Finished
from semkv.bus.settings import BusSettings
from semkv.bus.status import State, Tier

ENGINE = os.environ.get("ENGINE_URL", "http://127.0.0.1:8000")
JAEGER = os.environ.get("JAEGER_UI", "http://localhost:16686")
SESSION = "conversation"
PATIENCE_S = 120
FACTS = " ".join(
    f"Fact {number}: the tea house on street {number} opens at {number % 24} o'clock." for number in range(24)
)


async def main() -> int:
    """The conversation. Returns the exit code."""
    async with (
        connect(BusSettings.from_env().url) as kv,
        httpx.AsyncClient(base_url=ENGINE, timeout=PATIENCE_S) as http,
    ):
        events = kv.finished(session=SESSION)
        following = aiter(events)
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        messages = [{"role": "system", "content": FACTS}]

        async def ask(text: str) -> Finished:
            messages.append({"role": "user", "content": text})
            coming = asyncio.ensure_future(anext(following))
            await asyncio.sleep(0)
            answer = await http.post(
                "/v1/chat/completions",
                json={
                    "model": model,
                    "messages": messages,
                    "max_tokens": 16,
                    "temperature": 0,
                    "kv_transfer_params": {"semkv": {"session": SESSION}},
                },
            )
            answer.raise_for_status()
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or ""})
            event = await asyncio.wait_for(coming, PATIENCE_S)
            print(
                f"finished: {event.prompt_tokens} tokens, {len(event.chunk_hashes)} chunks, "
                f"{event.lmcache_hit_tokens or 0} tokens from the cache",
                flush=True,
            )
            return event

        await ask("Where do I get tea at nine?")
        event = await ask("And at ten?")
        chain = event.chunk_hashes

        freed = await (await kv.evict(chain, tiers=[Tier.CPU], session=SESSION)).result(PATIENCE_S)
        print(f"evict from DDR: {freed.state.value} {dict(freed.counts())}")
        loaded = await (await kv.prefetch(chain, session=SESSION)).result(PATIENCE_S)
        print(f"prefetch: {loaded.state.value} {dict(loaded.counts())}")
        event = await ask("Remind me of the first answer.")

        trace_id = next((part.trace_id for part in loaded.results if part.trace_id), None)
        print(f"trace: {JAEGER}/trace/{trace_id}")
        hit = event.lmcache_hit_tokens or 0
        state = State(loaded.state)
        print(json.dumps({"trace_id": trace_id, "chunks": len(chain), "prefetch": state.value, "hit_tokens": hit}))
        return 0 if state is State.SUCCEEDED and hit else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
