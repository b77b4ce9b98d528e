"""The command `mambaslots`: serve, chat, replay, doctor, run.

main, options           the command line; the options that commands share, and the model that they name
engine_setup            from options to a loaded model and an engine
serve, serve_processes  one engine behind HTTP; several processes: replicas, ranks of torchrun
chat, replay            other commands; `run` is `mcore.__main__`
doctor, doctor_checks   what is installed; what would run, and a test of it
"""
