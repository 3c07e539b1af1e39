"""The command line. Decides nothing; starts without importing torch."""
