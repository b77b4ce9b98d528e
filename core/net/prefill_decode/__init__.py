"""Prefill apart from decode: one engine computes prompts, another one resumes from them and generates."""
