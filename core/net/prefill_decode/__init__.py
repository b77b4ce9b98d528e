"""Prefill apart from decode: one engine computes prompts, another one resumes from them and generates.

disaggregated_engine, prefill_client, prefill_worker, prefill_messages: the two engines, and what they send
"""
