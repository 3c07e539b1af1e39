"""The command line: it reads words, asks the packages below, and prints. Nothing here decides; starts without torch."""
