# SPDX-License-Identifier: Apache-2.0
"""A development engine: a real vLLM server with a real LMCache, on a CPU, serving a model made on the spot.

`model` writes the model, `lmcache_config` the LMCache configuration, `server` starts and ends `vllm serve`,
`requirements` says in one line what this machine lacks for it.
"""
