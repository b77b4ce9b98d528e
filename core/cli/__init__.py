"""The command `mambaslots`: serve, chat, replay, doctor, run.

May import `fleet`, `serve`, `mcore`, `replay`, `net`, `models`, `engines`, `contexts`, `cache`.
"""
