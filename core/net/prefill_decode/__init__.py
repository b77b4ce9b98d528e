"""Prefill apart from decode: one engine computes prompts, another one resumes from them and generates.

disaggregated_engine   the decode engine: an `AsyncEngine` that asks a worker for the prefixes of long prompts
prefill_client         its connection to the worker, which is made anew where it is lost
prefill_worker         the engine that computes prompts, and its sessions with decode engines
messages               what both send each other

May import `transfer`, `engines`, `contexts`, `cache`, and the channel of `net`.
"""
