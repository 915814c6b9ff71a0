# SPDX-License-Identifier: Apache-2.0
"""`semkv demo`: the main job, end to end, on a real engine.

`stack` starts NATS and two engines, `texts` has the conversation, `agent` speaks to the engine and the bus, `claims`
keeps what must be true, `play` is the story, `report` prints what happened.
"""
