"""Who starts, watches and ends ranks: the agent, its fork server, the board on which ranks and agent agree."""
