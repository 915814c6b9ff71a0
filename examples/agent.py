# SPDX-License-Identifier: Apache-2.0
"""An agent anyone can read: it talks with a model, and keeps the conversation's KV cache warm while a person thinks.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=x SEMKV_NATS_URL=nats://127.0.0.1:4222 python examples/agent.py
"""

import asyncio
import os
import sys

from openai import AsyncOpenAI

from semkv.bus import connect

MODEL, SESSION = os.environ.get("MODEL", "tiny"), "example-agent"


async def main(turns: list[str]) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "You answer from the notes you are given."}]
    async with AsyncOpenAI() as llm, connect() as kv:
        chain: list[str] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answer = await llm.chat.completions.create(
                model=MODEL,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=16,
                extra_body={"kv_transfer_params": {"semkv": {"session": SESSION}}},
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            # The engine says which chunks the prompt was; without any there is nothing to keep warm.
            chain = ((answer.model_extra or {}).get("kv_transfer_params") or {}).get("chunk_hashes") or chain
            if chain:
                warm = await kv.prefetch(chain, session=SESSION, expires_in_ms=10_000)
                outcome = await warm.result(timeout=10)
                print(f"{len(chain)} chunks: {outcome.state}, {dict(outcome.counts())}")
        if chain:  # the conversation is over: free its room in memory, keep it on the SSD
            evicted = await (await kv.evict(chain, session=SESSION, tiers=["cpu"])).result(timeout=10)
            print(f"freed: {dict(evicted.counts())}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["What did we decide about the invoice job?", "And about the ledger?"]))
