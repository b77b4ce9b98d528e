"""The command `mambaslots`: serve, chat, replay, doctor, run.

main, options           the command line, and the options that commands share
setup                   from options to a loaded model and an engine
serve, processes        one engine behind HTTP; several processes: replicas, ranks of torchrun
chat, replay, doctor    the other commands; `run` is `mcore.run_script`
"""
