"""vLLM as the engine of a worker (`--engine vllm`).

Router, ingress and links are those of our own engine: `worker.py` answers the same messages, and
`engine.py` runs them on vLLM's `AsyncLLM`, by its public interfaces only. docs/engines.md says
which guarantees hold.
"""
