"""Prefill apart from decode: one engine computes prompts, another one resumes from them and generates.

disaggregated_engine, prefill_client    the decode engine; its connection to a worker
prefill_worker, messages                the engine that computes prompts; what the two send
"""
