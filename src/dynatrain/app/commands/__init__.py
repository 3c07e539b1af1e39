"""One file, one command. Each has ``run(words) -> exit code``; its function's docstring is the command's help."""
