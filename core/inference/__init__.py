"""Inference: `contexts` (what is cached, and one step), `engines` (which request advances), `kernels`."""
