"""The command `mambaslots`: serve, chat, doctor, run.

May import `fleet`, `serve`, `mcore`, `replay`, `net`, `models`, `engines`, `contexts`, `cache`.
"""
