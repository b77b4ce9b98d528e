"""The command `mambaslots`: serve, chat, replay, doctor, run.

main, options           the command line, and the options that commands share
checks                  what is refused before torch is imported
setup                   from options to a loaded model and an engine
serve, processes        one engine behind HTTP; several processes: replicas, ranks of torchrun
chat, replay            other commands; `run` is `mcore.command`
doctor, self_test       what is installed; what would run, and a test of it
"""
