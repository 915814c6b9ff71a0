# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-style tool-calling loop that prefetches while a tool runs, with the memory map deciding what and when.

The engine frees the request when the model asks for a tool; other requests may then push its KV cache out of memory.
The map keeps the chain from being evicted, has it loaded by the time the tool is done, and can say why it did so.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=x SEMKV_NATS_URL=nats://… python examples/tool_calling.py
"""

import asyncio
import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI

from semkv.bus import connect
from semkv.consumers.memory import MemoryMap, Store, explain

MODEL, SESSION = os.environ.get("MODEL", "tiny"), "example-tools"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "read_notes",
            "description": "Reads the notes about one topic.",
            "parameters": {
                "type": "object",
                "properties": {"topic": {"type": "string", "enum": ["billing", "garden"]}},
                "required": ["topic"],
                "additionalProperties": False,
            },
        },
    }
]


async def read_notes(topic: str) -> str:
    """The tool: it takes a while, as tools do."""
    await asyncio.sleep(0.5)
    return f"Notes on {topic}: " + f"the {topic} job runs at night and is checked in the morning. " * 20


async def main(question: str, *, choice: Any = "auto", store: str = ":memory:") -> None:
    messages: list[Any] = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": question}]
    memory_store = Store(store)
    async with AsyncOpenAI() as llm, connect() as kv, MemoryMap(kv, store=memory_store, agent="tools") as memory:
        while True:
            answer = await llm.chat.completions.create(
                model=MODEL,
                messages=messages,
                tools=TOOLS,
                tool_choice=choice,
                max_tokens=160,
                temperature=0,
                extra_body={"kv_transfer_params": {"semkv": {"session": SESSION}}},
            )
            message = answer.choices[0].message
            # The answer has the chunk hashes at once; the engine's event may still be on its way.
            known = ((answer.model_extra or {}).get("kv_transfer_params") or {}).get("chunk_hashes")
            await memory.write_back(SESSION, known, request_id=answer.id)
            await memory.note(SESSION, question, topic=question, request_id=answer.id)
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                print(message.content)
                break
            for call in message.tool_calls:
                if call.type != "function":
                    continue
                print(f"tool: {call.function.name}({call.function.arguments})")
                decisions = await memory.tool_call_started(SESSION, call.function.name, moment_id=call.id)
                try:
                    result = await read_notes(json.loads(call.function.arguments)["topic"])
                except (ValueError, KeyError, TypeError) as error:  # models get arguments wrong: tell them
                    result = f"read_notes wants {{'topic': 'billing' or 'garden'}}: {error}"
                await memory.tool_call_ended(SESSION, moment_id=call.id)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                await memory.settled()
                for decision in decisions:
                    print(explain(memory_store, decision.command_id or "") or decision.reason)
            choice = "none"
        await memory.session_ended(SESSION)
        await memory.settled()
    memory_store.close()


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:]) or "What is the state of the billing job?"))
