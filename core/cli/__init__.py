"""The command `mambaslots`: serve, chat, doctor, run."""
